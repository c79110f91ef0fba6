"""Replays the instructions of a plan on a model of the device's allocator (`best_fit_allocator.py`), and counts what is in use.

The allocator rounds sizes up and hands out some free chunks whole, so it has more in use than a plan asks for. How much more
depends on the order of all allocations, and on where earlier iterations have left free memory. So a plan is replayed for three
iterations:

    arguments     are allocated before the first iteration: the batch, then the state, the largest tensor first. The arrays that
                  the step captures follow. State that the plan keeps on the host between iterations is also on the device at
                  first, and then leaves.
    launch        allocates the results of the segment, the largest first, then all its temporaries as one chunk. A result that
                  takes over the memory of a donated input gets the chunk of this input. The temporaries are freed at once, then
                  the tensors whose memory the plan frees when the segment has ended.
    copy          A tensor that comes in gets a chunk when its copy starts. The chunk of a tensor that goes out is freed when its
                  copy has ended.
    iteration     When the next iteration begins, results that become arguments keep their chunks. All other results are freed,
                  since the caller has read them. Arguments that no result replaces are allocated again if they were donated,
                  and keep their chunks otherwise.

XLA sorts the buffers of an executable by size and puts all temporaries in one, the last (`BufferAssigner` and
`CombineTempAllocations` in `xla/service/buffer_assignment.cc` of https://github.com/openxla/xla). On a GPU, memory is allocated
in the order of launches, however late the device runs them, so a replay in that order is exact.

A replay does not count what no plan knows: arrays of the caller that are not arguments, what XLA allocates while it compiles, and
8 bytes for each result of an executable (a table of addresses). It never runs out of memory.

Sizes in bytes.
"""

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from tensile_jax.ir import Graph, TensorId
from tensile_jax.plan.result.best_fit_allocator import BestFit, Chunk
from tensile_jax.plan.result.instructions import Instruction, Launch, change_of, on_host_between_iterations

ITERATIONS = 3  # of a replay: what the allocator has in use may still rise in the second and third; more take longer, not tuned


class InUse(NamedTuple):
    """What the allocator has in use, the most of all iterations.

    Attributes:
        segments: while each segment runs.
        at_begin: when an iteration begins.
        at_end: when an iteration ends, and after its last launch.
        arguments: before the first iteration, when all its arguments are on the device.
        held: the tensors that are on the device after the last iteration.
    """

    segments: tuple[int, ...]
    at_begin: int
    at_end: int
    arguments: int
    held: frozenset[TensorId]


def in_use(
    code: Sequence[Instruction], graph: Graph, workspaces: Sequence[int], *, grows: bool, iterations: int = ITERATIONS
) -> InUse:
    """What the allocator has in use while a plan runs.

    Args:
        code: the plan's instructions.
        workspaces: of each segment.
        grows: whether the allocator takes memory as it needs it, instead of all at the beginning.
    """
    device = _Device(graph, grows=grows)
    allocator = device.allocator
    arriving, _ = on_host_between_iterations(code)
    state = {pair.input for pair in graph.carried}
    device.bring(t for t in graph.inputs if t not in state)
    device.bring_largest_first(graph.inputs)
    arguments = allocator.in_use
    device.drop(arriving)
    device.bring(t.id for t in graph.tensors if t.producer is None and t.role == "constant")
    segments = [0] * len(workspaces)
    at_begin = at_end = 0
    for iteration in range(iterations):
        if iteration:
            device.begin_next(arriving)
        at_begin = max(at_begin, allocator.in_use)
        end = 0
        for instruction in code:
            if isinstance(instruction, Launch):
                launched = device.launch(instruction, workspaces[instruction.index])
                segments[instruction.index] = max(segments[instruction.index], launched)
                end = allocator.in_use
            else:
                added, freed = change_of(instruction)
                device.drop(freed)
                device.bring(added)
                end = max(end, allocator.in_use)
        at_end = max(at_end, end)
    return InUse(tuple(segments), at_begin, at_end, arguments, frozenset(device.chunks))


def whole_in_use(graph: Graph, peak_bytes: int, *, grows: bool) -> int:
    """What the allocator has in use at most if the step runs as one executable, of which XLA says that it needs `peak_bytes`.

    It is at least `peak_bytes`.
    """
    size = [t.nbytes for t in graph.tensors]
    given = tuple(dict.fromkeys(graph.inputs))
    new = dict.fromkeys(t for t in graph.outputs if t not in given)
    updates = {p.output: p.input for p in graph.carried if p.input in graph.donated and p.output in new}
    updates = {t: old for t, old in updates.items() if size[t] == size[old]}
    made = (*updates, *(t for t in new if t not in updates))
    donated = tuple(updates.values())
    drops = tuple(t for t in given if t in graph.donated and t not in donated and t not in graph.outputs)
    launch = Launch(0, graph.inputs, made, donated, drops)
    resident = sum(size[t] for t in given) + sum(size[t] for t in made[len(updates) :])
    found = in_use((launch,), graph, [max(peak_bytes - resident, 0)], grows=grows)
    return max(peak_bytes, found.segments[0])


class _Device:
    """The allocator, and the chunk of each tensor on the device. Tensors without bytes have none."""

    def __init__(self, graph: Graph, *, grows: bool) -> None:
        self.allocator = BestFit(grows=grows)
        self.chunks: dict[TensorId, Chunk] = {}
        self._size = [t.nbytes for t in graph.tensors]
        self._inputs = graph.inputs
        captured = {t.id: t.id for t in graph.tensors if t.producer is None and t.role == "constant"}
        self._next = captured | {t: t for t in graph.inputs} | {pair.input: pair.output for pair in graph.carried}

    def bring(self, tensors: Iterable[TensorId]) -> None:
        """Allocate those of the tensors that are not on the device, one after another."""
        for t in tensors:
            if self._size[t] and t not in self.chunks:
                self.chunks[t] = self._chunk(self._size[t])

    def bring_largest_first(self, tensors: Iterable[TensorId]) -> None:
        """Allocate those of the tensors that are not on the device, the largest first, ties in their order."""
        self.bring(sorted(tensors, key=lambda t: -self._size[t]))

    def drop(self, tensors: Iterable[TensorId]) -> None:
        """Free those of the tensors that are on the device."""
        for t in tensors:
            chunk = self.chunks.pop(t, None)
            if chunk is not None:
                self.allocator.free(chunk)

    def launch(self, launch: Launch, workspace: int) -> int:
        """Run a segment that has this workspace. The result is what is in use while it runs."""
        size, chunks = self._size, self.chunks
        for old, new in zip(launch.donated, launch.outputs, strict=False):
            if size[old] == size[new] and old in chunks:
                chunks[new] = chunks.pop(old)
        self.bring_largest_first(launch.outputs)
        temporary = self._chunk(workspace) if workspace else None
        running = self.allocator.in_use
        if temporary is not None:
            self.allocator.free(temporary)
        self.drop((*launch.donated, *launch.drops))
        return running

    def begin_next(self, arriving: Collection[TensorId]) -> None:
        """Give the results, and the arguments that are kept, to the next iteration, which has those in `arriving` on the host."""
        before, self.chunks = self.chunks, {}
        for t, result in self._next.items():
            if t not in arriving and result in before:
                self.chunks[t] = before.pop(result)
        for chunk in before.values():
            self.allocator.free(chunk)
        self.bring(t for t in self._inputs if t not in arriving)

    def _chunk(self, nbytes: int) -> Chunk:
        chunk = self.allocator.allocate(nbytes)
        assert chunk is not None  # this allocator has no limit
        return chunk
