"""Holds the state and compiled plan of a job in this process, and carries out the moves (launches, copies) of its iterations.

`LocalActor` implements `Actor` (`actor.py`).
"""

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding
from jax.tree_util import keystr, tree_flatten, tree_flatten_with_path, tree_leaves, tree_unflatten

from tensile_jax.errors import TraceError
from tensile_jax.exec.actor.actor import StateSnapshot, Wait
from tensile_jax.exec.actor.plans import OffloadState, PlanId, PlanRequest, PlanSummary
from tensile_jax.exec.actor.profiled_plan import ProfiledPlan, make_plan
from tensile_jax.exec.actor.pure_job import PutBack
from tensile_jax.exec.call.devices import on_mesh
from tensile_jax.exec.checkpoint.checkpoints import Checkpoints
from tensile_jax.exec.checkpoint.leaves import host_copy
from tensile_jax.exec.compiling.compiler import Compiler
from tensile_jax.exec.compiling.step import Options, Step, step_of
from tensile_jax.exec.fitting.find_plan import jit_peak_bytes
from tensile_jax.exec.running.executor import Executor, Iteration, Observation
from tensile_jax.exec.running.instructions import (
    FinishSwapIn,
    FinishSwapOut,
    Instruction,
    Launch,
    StartSwapIn,
    StartSwapOut,
)
from tensile_jax.exec.running.runner import executor_of
from tensile_jax.exec.transfer import (
    Transfer,
    device_bytes,
    in_device_memory,
    is_divided,
    nbytes_on_a_device,
    on_host,
    places_on_host,
)
from tensile_jax.plan.analysis.access import AccessSequence
from tensile_jax.plan.multi_job.memory_profile import LAUNCH, WAIT
from tensile_jax.runtime_records import LaneName
from tensile_jax.trace import (
    TracedStep,
    shape_struct,
    shard_of,
    size_of,
    trace_step,
    trace_where_arguments_are,
    type_on_host,
)


@dataclass(frozen=True, slots=True, eq=False)
class LocalState:
    """A state in this process; see `StateSnapshot`.

    If the state belongs to objects of the user, `write_to_objects` writes it there, and `fetch` returns these objects.
    """

    tree: Any
    write_to_objects: PutBack | None = None

    def save(self, checkpoints: Checkpoints, step: int) -> str:
        return checkpoints.save(step, self.tree)

    def fetch(self) -> Any:
        return self.tree if self.write_to_objects is None else self.write_to_objects(self.tree)

    def release(self) -> None:
        pass  # it is freed when nobody refers to it


class LocalActor:
    """A job in this process; see `Actor`.

    Args:
        given_on_host: the positions of the arrays of the state that the user has put in host memory; by default, of those that
            are there. A state from a checkpoint may be anywhere.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        state: Any,
        transfer: Transfer,
        *,
        write_to_objects: PutBack | None = None,
        given_on_host: frozenset[int] | None = None,
    ) -> None:
        self._function = getattr(function, "__wrapped__", function)
        self._put_back = write_to_objects
        self._transfer = transfer
        self._leaves, self._tree = tree_flatten(state)
        meshes = dict.fromkeys(leaf.sharding.mesh for leaf in self._leaves if is_divided(leaf))
        self._meshes: tuple[Any, ...] = tuple(meshes)  # of the devices among which the state is divided; none on one device
        self._shapes = [shape_struct(leaf, self._sharding_of(leaf)) for leaf in self._leaves]
        self._given_on_host = places_on_host(self._leaves) if given_on_host is None else given_on_host
        self._batch_shardings: list[Any] = []  # on several devices, as of the batch for which the step was traced
        self._traced: Step | None = None
        self._made: dict[PlanId, ProfiledPlan] = {}  # a thread that plans adds to it, and the one that calls `use` takes away
        self._ids = itertools.count()
        self._base = PlanId(0)  # the latest plan that was not made by `OffloadState`
        self._in_use: ProfiledPlan | None = None
        self._executor: Executor | None = None
        self._iteration: Iteration | None = None
        self._going: list[Any] = []  # arrays on the device that are being copied to the host
        self._watch: Observation | None = None
        self._metrics: Any = None
        self._passive_swap_ins = self._out_of_memory = 0
        # Only with the lock may a thread begin or end to carry out moves, or note that everything is to be dropped.
        self._lock = threading.Lock()
        self._carrying_out = self._dropping = False

    # -- before it is admitted --------------------------------------------------------------------------------------------------

    @property
    def state_bytes(self) -> int:
        return sum(size_of(shard_of(shape, shape.sharding)) for shape in self._shapes)

    @property
    def stays_on_host(self) -> frozenset[int]:
        return self._given_on_host if self._traced is None else self._traced.traced.on_host

    @property
    def traced(self) -> Step:
        """The job's step, after `trace`."""
        assert self._traced is not None
        return self._traced

    def own(self) -> None:
        # arrays of NumPy are copied: the user may write into them again
        self._leaves = [np.array(leaf) if isinstance(leaf, np.ndarray) else leaf for leaf in self._leaves]
        if self._meshes:
            self._leaves = [
                leaf if is_divided(leaf) else jax.device_put(leaf, shape.sharding)
                for leaf, shape in zip(self._leaves, self._shapes, strict=True)
            ]
        self.park()()
        if self._put_back is not None:  # so that the user's objects do not hold deleted arrays
            self._put_back(tree_unflatten(self._tree, self._leaves))

    def trace(self, batch: Any, options: Options, compiler: Compiler) -> AccessSequence | None:
        with jax.default_device(self._transfer.device):
            step = self._trace_in_memories(batch, self._given_on_host)
            step.refuse_crossed_donations()
            if self._meshes:
                shapes = self._arguments(batch, step.on_host)
                step = on_mesh(step, self._meshes, tree_leaves(shapes), None, self._divided(shapes[0]))
                self._batch_shardings = [shape.sharding for shape in tree_leaves(shapes[1])]
        self._traced = step_of(step, options, compiler)
        return self._traced.swapping_accesses()

    def _trace_in_memories(self, batch: Any, on_host: frozenset[int]) -> TracedStep:
        """Trace the step so that it takes each array of the state from the memory in which it returns the array.

        `on_host` are the positions of the arrays that were given in host memory. While the job waits, the others are there, too.
        """

        def trace(there: frozenset[int]) -> TracedStep:
            shapes = self._arguments(batch, there)
            jitted = jax.jit(self._function, donate_argnums=0)
            seen = jitted.trace(*shapes).out_info  # look before lowering, in which JAX warns of unusable donated arguments
            self._refuse_other_state(jax.tree.structure(seen), jax.tree.leaves(seen))
            if self._meshes:  # the state stays divided as it was given
                jitted = jax.jit(self._function, donate_argnums=0, out_shardings=self._divided(shapes[0]))
            return trace_step(jitted, self._function, shapes, {})

        step = trace_where_arguments_are(trace, on_host)
        if not step.moved:
            return step
        settled = trace(step.on_host ^ {i for i, _ in step.moved})
        if settled.moved:
            names = [keystr(path) for path, _ in tree_flatten_with_path(tree_unflatten(self._tree, self._shapes))[0]]
            raise TraceError(
                f"state{names[settled.moved[0][0]]} is returned in host memory if it is given in device memory, and the other "
                "way round. A job's state must be returned in the memory from which the next step takes it."
            )
        return settled

    def _arguments(self, batch: Any, on_host: frozenset[int]) -> tuple[Any, Any]:
        """The state and a batch for tracing, with the arrays of the state at these positions in host memory."""
        shapes = [
            self._there(leaf, shape) if i in on_host else shape
            for i, (leaf, shape) in enumerate(zip(self._leaves, self._shapes, strict=True))
        ]
        batch_shapes = jax.tree.map(lambda leaf: shape_struct(leaf, self._sharding_of(leaf)), batch)
        return tree_unflatten(self._tree, shapes), batch_shapes

    def _there(self, leaf: Any, shape: Any) -> Any:
        """What stands for an array in host memory when the step is traced (`planned_calls.py`)."""
        if on_host(leaf):
            return leaf
        return type_on_host(shape) if isinstance(leaf, jax.ShapeDtypeStruct) else self._transfer.out(leaf)

    @staticmethod
    def _divided(state: Any) -> tuple[Any, None]:
        """The shardings of the results of a step on several devices: the state's, and any for the metrics."""
        return jax.tree.map(lambda leaf: leaf.sharding, state), None

    def _sharding_of(self, leaf: Any) -> Any:
        """Where a step of the job reads an array of the state or of a batch.

        In a job on several devices, an array that is not divided is whole on each.
        """
        if not self._meshes:
            return SingleDeviceSharding(self._transfer.device)
        return in_device_memory(leaf.sharding) if is_divided(leaf) else NamedSharding(self._meshes[0], PartitionSpec())

    def jit_peak_bytes(self) -> int:
        with jax.default_device(self._transfer.device):
            return jit_peak_bytes(self.traced)

    def plan(self, request: PlanRequest) -> PlanSummary:
        with jax.default_device(self._transfer.device):  # a step that runs whole is compiled for the default device
            made = make_plan(request, self.traced, self._made)
        id = PlanId(next(self._ids))
        self._made[id] = made
        if not isinstance(request, OffloadState):
            self._base = id
        return made.summary(id)

    def _refuse_other_state(self, out_tree: Any, out_avals: Sequence[Any]) -> None:
        template = tree_unflatten(out_tree, list(out_avals))
        if not isinstance(template, tuple) or len(template) != 2:
            raise TraceError(
                f"step must return (state, metrics), a pair: got {type(template).__name__}"
                f"{f' of {len(template)}' if isinstance(template, tuple | list) else ''}. Return the new state first."
            )
        given = tree_unflatten(self._tree, self._shapes)
        if jax.tree.structure(template[0]) != jax.tree.structure(given):
            raise TraceError(
                "step must return the state with the structure in which it was given: the first result is "
                f"{jax.tree.structure(template[0])}, the state {jax.tree.structure(given)}. Return (state, metrics)."
            )
        for (path, before), after in zip(tree_flatten_with_path(given)[0], tree_leaves(template[0]), strict=True):
            if before.shape != after.shape or before.dtype != after.dtype:
                raise TraceError(
                    f"step must return the state as it was given: state{keystr(path)} is {before.dtype}{list(before.shape)} "
                    f"when it is given and {after.dtype}{list(after.shape)} when it is returned."
                )

    # -- what the dispatcher asks -----------------------------------------------------------------------------------------------

    def use(self, plan: PlanId) -> None:
        self._count()
        self._in_use = found = self._made[plan]
        # `issue` waits for a launch where that is needed, so the executor itself waits for nothing
        self._executor = executor_of(found.compiled, self._transfer, run_ahead=True)
        for other in list(self._made):
            if other < plan and other != self._base:
                del self._made[other]

    def begin(self, batch: Any, *, watch: bool) -> None:
        assert self._executor is not None
        self._watch = Observation(timed=False) if watch else None
        given = self._brought_here(tree_leaves(batch))  # if this raises, the state is still complete
        try:
            self._iteration = self._executor.begin([*self._leaves, *given], self._watch)
        finally:
            self._leaves = []  # not before, since another thread may read live bytes

    def _brought_here(self, batch: list[Any]) -> list[Any]:
        """The leaves of a batch; those that are not committed to a device are copied to the job's device, as `jax.jit` does."""
        here = set(self._meshes[0].devices.flat) if self._meshes else {self._transfer.device}
        for leaf in batch:
            if isinstance(leaf, jax.Array) and leaf.is_deleted():
                raise ValueError("the batch has an array that was deleted, or donated to a step, after it was given.")
            if isinstance(leaf, jax.Array) and leaf.committed and leaf.devices() != here:
                raise ValueError(
                    f"the batch has an array on {', '.join(map(str, sorted(leaf.devices(), key=str)))}, and the job runs on "
                    f"{', '.join(sorted(map(str, here)))}. Give NumPy arrays, or bring it there with jax.device_put(batch, "
                    "device)."
                )
        if self._meshes:
            return [jax.device_put(leaf, sharding) for leaf, sharding in zip(batch, self._batch_shardings, strict=True)]
        return [self._transfer.into(v) if isinstance(v, jax.Array) and v.devices() != here else v for v in batch]

    def issue(self, begin: int, end: int) -> Wait | None:
        executor, iteration = self._executor, self._iteration
        assert executor is not None and iteration is not None and self._in_use is not None
        if begin > len(executor.code):
            self._end(executor, iteration)
            return None
        instructions, kinds = executor.code[begin - 1 : end - 1], self._in_use.memory.kinds[begin:end]
        if kinds[0] == WAIT:
            if _is_over(iteration, instructions[0]):
                self._carry_out(iteration, instructions)
                return None
            return lambda: iteration.perform(instructions[0])
        if LAUNCH not in kinds:
            self._carry_out(iteration, instructions)
            return _copies(iteration, instructions[0]) if self._watch is not None else None
        if not self._in_order:
            return lambda: self._carry_out(iteration, instructions, one_by_one=True)
        self._carry_out(iteration, instructions)
        latest = iteration.latest
        return lambda: _wait_for(latest)

    @property
    def _in_order(self) -> bool:
        """Whether the device allocates memory in the order of launches. On a CPU a launch takes its memory when it is issued."""
        return self._transfer.device.platform != "cpu"

    def _carry_out(
        self,
        iteration: Iteration,
        instructions: Sequence[Instruction],
        *,
        one_by_one: bool = False,
    ) -> float:
        """Perform instructions, in any thread, until all are performed or the job is dropped.

        If `one_by_one`, each instruction is performed when the launch before it is over. Returns the microseconds for which
        copies were waited for.
        """
        stall_us = 0.0
        with self._lock:
            if self._dropping:
                return stall_us
            self._carrying_out = True
        try:
            for instruction in instructions:
                if self._dropping:
                    break
                began = time.perf_counter()
                iteration.perform(instruction)
                if isinstance(instruction, FinishSwapOut | FinishSwapIn):
                    stall_us += (time.perf_counter() - began) * 1e6
                elif one_by_one and isinstance(instruction, Launch):
                    _wait_for(iteration.latest)
        finally:
            with self._lock:
                self._carrying_out, dropping = False, self._dropping
            if dropping:
                self._drop()
        return stall_us

    def _end(self, executor: Executor, iteration: Iteration) -> None:
        results = executor.end(iteration)
        count = len(self._shapes)
        assert self._in_use is not None
        self._metrics = tree_unflatten(self._in_use.step.traced.out_tree, results)[1]
        self._leaves, self._iteration = results[:count], None

    def take_metrics(self) -> Wait:
        metrics, self._metrics = self._metrics, None
        return lambda: jax.tree.map(host_copy, metrics)  # on a CPU, a view would keep the device's memory in use

    def park(self) -> Wait:
        leaves: list[Any] = self._leaves
        there = {self._transfer.device}
        here = [
            i
            for i, leaf in enumerate(leaves)
            if isinstance(leaf, jax.Array) and not (on_host(leaf) and (is_divided(leaf) or leaf.devices() == there))
        ]
        copies = self._transfer.out([leaves[i] for i in here])
        self._leaves = list(leaves)
        for i, copy in zip(here, copies, strict=True):
            self._leaves[i] = copy
        self._going = [leaves[i] for i in here]

        def wait() -> None:
            _wait_for_all(copies)  # before any of the originals is deleted
            for i in here:
                if not leaves[i].is_deleted():  # the same array may be several leaves
                    leaves[i].delete()
            self._going = []

        return wait

    def unpark(self) -> Wait:
        executor = self._executor
        assert executor is not None
        stay = executor.rest_on_host  # the iteration itself copies these in, or the step has them there
        here = [i for i in range(len(self._leaves)) if i not in stay]
        copies = self._transfer.into([self._leaves[i] for i in here])
        self._leaves = list(self._leaves)
        for i, copy in zip(here, copies, strict=True):
            self._leaves[i] = copy
        return lambda: _wait_for_all(copies)

    def live_bytes(self) -> Wait:
        iteration = self._iteration
        nbytes = device_bytes([*self._leaves, *self._going] if iteration is None else iteration.env)
        return lambda: nbytes

    def watched_bytes(self) -> Wait:
        watch = self._watch
        found = None if watch is None or self._iteration is None else (watch.live_bytes, watch.peak_bytes)
        return lambda: found

    def state(self) -> StateSnapshot:
        return LocalState(tree_unflatten(self._tree, self._leaves), self._put_back)

    def counts(self) -> tuple[int, int]:
        now = self._executor
        return (
            self._passive_swap_ins + (now.passive_swap_ins if now is not None else 0),
            self._out_of_memory + (now.out_of_memory if now is not None else 0),
        )

    def free_device_arrays(self) -> None:
        self.drop()

    def drop(self) -> None:
        with self._lock:
            self._dropping = True
            if self._carrying_out:
                return  # the thread that carries out a run calls `_drop` at its end
        self._drop()

    def _drop(self) -> None:
        self._count()
        if self._iteration is not None:
            for leaf in self._iteration.owned():
                if isinstance(leaf, jax.Array) and not leaf.is_deleted() and not on_host(leaf):
                    leaf.delete()
        self._iteration = self._executor = self._metrics = None
        self._leaves, self._watch = [], None

    def save_before_dropping(self) -> tuple[StateSnapshot, Wait] | None:
        if self._iteration is not None or not self._is_whole():
            return None
        wait = self.park()
        return self.state(), wait

    def _is_whole(self) -> bool:
        leaves = self._leaves
        return len(leaves) == len(self._shapes) and not any(isinstance(v, jax.Array) and v.is_deleted() for v in leaves)

    def close(self) -> None:
        pass  # what it holds is freed when nobody refers to it

    def join(self) -> None:
        pass

    def _count(self) -> None:
        """Add the counts of the present executor to the totals, and drop the executor."""
        self._passive_swap_ins, self._out_of_memory = self.counts()
        self._executor = None


def _copies(iteration: Iteration, instruction: Instruction) -> Wait | None:
    """A function that waits for the copies that `instruction` has started, so that their time can be recorded, or None."""
    if not isinstance(instruction, StartSwapOut | StartSwapIn):
        return None
    lane: LaneName = "out" if isinstance(instruction, StartSwapOut) else "into"
    held = iteration.host if lane == "out" else iteration.env
    arrays = [held[slot] for slot in instruction.slots]

    def wait() -> tuple[LaneName, int]:
        _wait_for_all(arrays)
        return lane, sum(map(nbytes_on_a_device, arrays))

    return wait


def _is_over(iteration: Iteration, instruction: Instruction) -> bool:
    """Whether the copies for which `instruction` waits have ended."""
    if not isinstance(instruction, FinishSwapOut | FinishSwapIn):
        return False
    held = iteration.host if isinstance(instruction, FinishSwapOut) else iteration.env
    return all(held[slot].is_ready() for slot in instruction.slots)


def _wait_for(result: Any) -> None:
    """Wait until the launch that made `result` is over. If `result` was donated to a later launch, do not wait."""
    if result is None:
        return
    try:
        result.block_until_ready()
    except RuntimeError:
        if not result.is_deleted():
            raise


def _wait_for_all(arrays: Sequence[Any]) -> None:
    for array in arrays:
        array.block_until_ready()
