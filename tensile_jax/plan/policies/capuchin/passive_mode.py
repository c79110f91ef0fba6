"""Simulates Capuchin's first iteration, which copies tensors to the host only when an allocation fails.

Capuchin (Peng et al., "Capuchin: Tensor-based GPU Memory Management for Deep Learning", ASPLOS 2020, section 4.2) knows nothing
about a step before it has run once. It runs the first iteration in *passive mode*: when an allocation fails, it copies tensors
to the host, the least recently accessed ones first, until there is room. When an operator accesses an evicted tensor, the
tensor is copied back. Computation waits for both copies. The TENSILE paper compares its own first iteration with this one. The
time of the iteration is

    step_us = sum of latencies + (bytes out) / device_to_host_bytes_per_us + (bytes in) / host_to_device_bytes_per_us

A *kernel* here is one heavy operator, such as a matrix product, with the light ones that XLA fuses with it. A kernel begins
where a plan may cut the step (`StepModel.boundaries`). If there are several such places between two heavy operators, kernels
begin at the last one, at the first one, or at all of them, whichever has the least peak. A kernel accesses the tensors that it
reads from memory and the results that it writes to memory. As in Capuchin, the times of accesses do not include the copies, so
the times also hold for later iterations.

Differences from the paper:

    - A planner runs nothing on the device, so the iteration is simulated with the latencies that the device profile predicts.
    - A tensor is copied to the host only once. It does not change, so evicting it again needs no copy.
    - Four kinds of tensors are never evicted: arguments that the caller did not donate, constants, PRNG keys, very small tensors.
    - The results are back on the device when the iteration ends.
    - Updated state takes over the memory of the state that it updates.
    - If a kernel has no room even after everything else is evicted, it still runs, and the peak exceeds the limit.

Sizes in bytes, times in microseconds.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

import numpy as np

from tensile_jax.ir import TensorId
from tensile_jax.plan.analysis.copy_time import copy_in_us, copy_out_us
from tensile_jax.plan.analysis.device_profile import DeviceProfile
from tensile_jax.plan.analysis.retention import Retention, segment_contents
from tensile_jax.plan.policies.segments import RetainedSegments
from tensile_jax.plan.search.step_model import StepModel
from tensile_jax.plan.search.swaps import may_leave


@dataclass(frozen=True, slots=True)
class Kernel:
    """The operators at `[begin, end)`, what they access, and when they run if nothing waits for copies.

    `nbytes` is what is in memory while the kernel runs if nothing is evicted. `workspace` is the part of it that is free again
    when the kernel ends.
    """

    begin: int
    end: int
    inputs: tuple[TensorId, ...]
    outputs: tuple[TensorId, ...]
    begin_us: float
    end_us: float
    nbytes: int
    workspace: int


@dataclass(frozen=True, slots=True)
class PassiveIteration:
    """How long the first iteration takes, what it copies, and the most that is in memory."""

    step_us: float
    swapped_out_bytes: int
    swapped_in_bytes: int
    peak_bytes: int


def passive_iteration(model: StepModel, limit: float) -> PassiveIteration:
    """The first iteration of the step under the limit."""
    memory = _Memory(model.base, model.profile, limit)
    kernels = observe(model)
    for kernel in kernels:
        memory.run(kernel)
    memory.bring_back(model.graph.outputs)
    step_us = (kernels[-1].end_us if kernels else 0.0) + memory.stalled_us
    return PassiveIteration(step_us, memory.bytes_out, memory.bytes_in, memory.peak)


def observe(model: StepModel) -> tuple[Kernel, ...]:
    """The kernels of the step in the order in which they run: the tensor access sequence."""
    if not model.graph.operators:
        return ()
    segments = RetainedSegments(model, model.base)
    ends: list[float] = model.elapsed_us.tolist()
    found: list[Kernel] = []
    for first, last in pairwise(_edges(model, segments)):
        begin, end = model.boundaries[first], model.boundaries[last]
        contents = segment_contents(model.base, begin, end)
        held, workspace = segments.sizes(first, last)
        nbytes = held + workspace
        found.append(Kernel(begin, end, contents.inputs, contents.outputs, ends[begin], ends[end], nbytes, workspace))
    return tuple(found)


def _edges(model: StepModel, segments: RetainedSegments) -> list[int]:
    """The boundaries between kernels, as indices of `StepModel.boundaries`.

    Between two heavy operators there may be several boundaries. The last one, the first one, or all of them are taken,
    whichever has the least peak on both sides; ties go in this order. All are not always best: an optimizer that is cut into
    many pieces may take more memory than one that runs at once.
    """
    last = len(model.boundaries) - 1
    heavy = np.cumsum([0, *(model.liveness.kinds == "heavy")])[list(model.boundaries)]
    windows = [list(some) for _, some in groupby(range(1, last), key=lambda i: heavy[i])]
    edges = [0]
    for window, following in zip(windows, [*windows[1:], [last]], strict=False):
        choices = [[window[-1]], [window[0]], window]
        edges += min(
            choices, key=lambda some: max(sum(segments.sizes(*pair)) for pair in pairwise([edges[-1], *some, following[0]]))
        )
    return [*edges, last]


class _Memory:
    """The simulated device memory: the tensors in it, the least recently accessed first, and those copied to the host."""

    def __init__(self, retention: Retention, profile: DeviceProfile, limit: float) -> None:
        self._retention = retention
        self._profile = profile
        self._limit = limit
        self._tensors = retention.liveness.graph.tensors
        self._old = {alias: old for old, alias in retention.aliases.items()}
        self._here = {t.id: None for t in self._tensors if t.producer is None}  # the least recently accessed first
        self._copied: set[TensorId] = set()  # to the host
        self.used = sum(self._tensors[t].nbytes for t in self._here)
        self.peak = self.used
        self.stalled_us = 0.0
        self.bytes_out = 0
        self.bytes_in = 0

    def run(self, kernel: Kernel) -> None:
        """Make room, copy in what the kernel reads, run the kernel, and release what is not needed any more."""
        there = {*self._here, *kernel.inputs}  # what the kernel reads comes back for it, if it was evicted
        replaced = {self._old[t]: t for t in kernel.outputs if self._old.get(t) in there}
        made = sum(self._tensors[t].nbytes for t in kernel.outputs if self._old.get(t) not in replaced)
        self._bring(kernel.inputs, beside=made + kernel.workspace, keep={*kernel.inputs, *replaced})
        for t in replaced:
            del self._here[t]
        self.used += made
        self._touch((*kernel.inputs, *kernel.outputs), absent=set(replaced))
        for t in [t for t in self._here if not self._retention.stored(t, kernel.end)]:
            del self._here[t]
            self.used -= self._tensors[t].nbytes

    def bring_back(self, results: Sequence[TensorId]) -> None:
        """Copy back the results of the step, which must be on the device when it ends."""
        self._bring(results, beside=0, keep=set(results))

    def _bring(self, wanted: Sequence[TensorId], *, beside: int, keep: set[TensorId]) -> None:
        missing = [t for t in dict.fromkeys(wanted) if t not in self._here and t in self._copied]
        coming = sum(self._tensors[t].nbytes for t in missing)
        self._make_room(coming + beside, keep)
        self.bytes_in += coming
        self.stalled_us += copy_in_us(coming, self._profile)
        self._here |= dict.fromkeys(missing)
        self.used += coming
        self.peak = max(self.peak, self.used + beside)

    def _make_room(self, nbytes: int, keep: set[TensorId]) -> None:
        for t in [t for t in self._here if t not in keep and may_leave(self._retention, t)]:
            if self.used + nbytes <= self._limit:
                return
            if t not in self._copied:
                self._copied.add(t)
                self.bytes_out += self._tensors[t].nbytes
                self.stalled_us += copy_out_us(self._tensors[t].nbytes, self._profile)
            del self._here[t]
            self.used -= self._tensors[t].nbytes

    def _touch(self, accessed: Sequence[TensorId], *, absent: set[TensorId]) -> None:
        for t in accessed:
            if t not in absent:
                self._here.pop(t, None)
                self._here[t] = None
