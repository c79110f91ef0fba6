"""Runs a driven loop: a long loop, each iteration of which runs under a plan of the loop's body (`trace/plannable_loops.py`).

In the plan of the surrounding step, the loop is a *segment* (a part with its own executable) by itself, and a `_DrivenLoop` is
called instead of that executable. Each iteration takes its elements from the stacked arrays, runs the plan of the body, and
writes its results into the stacks of results, in place. The values carried from one iteration to the next are the state of the
body's plan. They are donated, and may stay in host memory between two iterations if the user allows it. They are on the device
when the loop begins and when it ends.

    device bytes = inputs of the loop + stacks of results + copies of initial carried values
                 + peak of the body's plan - constants of that plan - carried values

An initial carried value is copied if the surrounding plan does not donate it to the loop, or if it is also another input of the
loop, because the first iteration may overwrite it. The constants and the carried values are subtracted because they would count
twice: in the first three terms, and in the peak of the body's plan.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tensile_jax.errors import OutOfMemory
from tensile_jax.exec.compiling.compiler import Compiler, Executable, Sizes
from tensile_jax.exec.compiling.segment_code import SegmentCode
from tensile_jax.exec.compiling.step import CompiledPlan, ForLess, bytes_beside
from tensile_jax.exec.out_of_memory_errors import is_out_of_memory
from tensile_jax.exec.running.executor import Observation
from tensile_jax.exec.running.runner import Runner
from tensile_jax.exec.transfer import Transfer, on_host
from tensile_jax.ir import Graph, TensorId
from tensile_jax.plan.drift import WATCHED_FIRST
from tensile_jax.plan_format import Segment
from tensile_jax.trace import Immediate, shape_struct
from tensile_jax.trace.plannable_loops import PlannableLoop


def driven_segment(loop: PlannableLoop, body: CompiledPlan, segment: Segment, graph: Graph, for_less: ForLess) -> Executable:
    """The executable of a segment that is a driven loop, with the bytes that it needs.

    Args:
        body: the plan of the loop's body.
        segment: the loop's segment in the plan of the step around it, whose graph is `graph`.
        for_less: makes a plan of the body that needs less than a given one.
    """
    return _DrivenLoop(loop, body, segment, for_less).executable(graph)


class _DrivenLoop:
    """A loop that runs under the plan of its body, called like the executable of the segment that it is."""

    def __init__(self, loop: PlannableLoop, body: CompiledPlan, segment: Segment, for_less: ForLess) -> None:
        self._runner = Runner(body, for_less)
        self._loop = loop
        self._segment = segment
        compiler = body.step.compiler
        self._transfer = Transfer(compiler.device, committed=compiler.committed)
        times = Counter(t for t in loop.inputs if not isinstance(t, Immediate))
        self._waits = compiler.device.platform == "cpu"
        self._taken = {t for t in segment.donated if times[t] == 1}
        self._numbers = {
            i: self._transfer.into(jnp.asarray(given.value, given.aval.dtype))
            for i, given in enumerate(loop.inputs)
            if isinstance(given, Immediate)
        }
        code, carried = loop.loop.body, loop.loop.carried
        stacked = [shape_struct(v.aval) for v in code.invars[loop.loop.constants + carried :]]
        parts = [shape_struct(v.aval) for v in code.outvars[carried:]]
        self._take, self._begin, self._put = _stack_access(compiler, loop.loop.length, stacked, parts)

    def executable(self, graph: Graph) -> Executable:
        """This loop as the executable of its segment, with the bytes that it needs."""
        loop, segment = self._loop, self._segment
        size = [t.nbytes for t in graph.tensors]
        inputs = sum(size[t] for t in {t for t in loop.inputs if not isinstance(t, Immediate)})
        stacks = sum(size[t] for t in loop.outputs[loop.loop.carried :])
        first = loop.loop.constants
        carried = loop.inputs[first : first + loop.loop.carried]
        copies = sum(size[new] for t, new in zip(carried, loop.outputs, strict=False) if t not in self._taken)
        body = bytes_beside(loop, self._runner.compiled.step.graph, self._runner.compiled.plan.peak_bytes)
        needed = inputs + stacks + copies + body
        outputs, donated = sum(size[t] for t in segment.outputs), sum(size[t] for t in segment.donated)
        held = sum(size[t] for t in segment.inputs) + outputs - donated
        return Executable(self, Sizes(max(0, needed - held), outputs, donated))

    def __call__(self, *values: Any) -> tuple[Any, ...]:
        given = dict(zip(self._segment.inputs, values, strict=True))
        try:
            results = self._run(given)
        except Exception as error:
            if not is_out_of_memory(error, effectful=False):
                raise
            raise OutOfMemory(
                f"The device is out of memory in a loop, {self._loop.name}, of which some iterations have run. Lower budget=, "
                "or free memory on the device. The step did not finish; donated arguments are gone, as after any such failure."
            ) from error
        return tuple(results[t] for t in self._segment.outputs)

    def _run(self, given: dict[TensorId, Any]) -> dict[TensorId, Any]:
        loop = self._loop.loop
        values = [self._numbers[i] if isinstance(t, Immediate) else given[t] for i, t in enumerate(self._loop.inputs)]
        first, last = loop.constants, loop.constants + loop.carried
        constants, stacked = values[:first], values[last:]
        carried = [
            value if t in self._taken else self._transfer.copy_into(value)
            for t, value in zip(self._loop.inputs[first:last], values[first:last], strict=True)
        ]
        del values
        given.clear()
        stacks: Sequence[Any] = ()
        count = 0
        for i in loop.order:
            index = np.int32(i)
            elements = self._take(index, *stacked) if stacked else ()
            results = self._iterate([*constants, *carried, *elements], watched=count < WATCHED_FIRST)
            carried, parts = results[: loop.carried], results[loop.carried :]
            del results, elements
            if parts:
                stacks = self._begin(index, *parts) if count == 0 else self._put(index, *stacks, *parts)
            del parts
            if self._waits:  # as in `executor.py`
                jax.block_until_ready((carried, stacks))
            count += 1
        carried = [self._transfer.into(value) if on_host(value) else value for value in carried]
        return dict(zip(self._loop.outputs, (*carried, *stacks), strict=True))

    def _iterate(self, arguments: list[Any], *, watched: bool) -> list[Any]:
        """The results of one iteration, under the plan of the body."""
        runner = self._runner
        runner.begin()
        watch = Observation() if watched and len(runner.observations) < WATCHED_FIRST else None
        results = runner.run(arguments, watch)
        if runner.needs_less:
            runner.use_less()
        return results


def _stack_access(
    compiler: Compiler, length: int, elements: Sequence[Any], parts: Sequence[Any]
) -> tuple[Callable[..., Sequence[Any]], Callable[..., Sequence[Any]], Callable[..., Sequence[Any]]]:
    """Three executables: one takes an element of each stacked array, one begins stacks of parts, and one puts parts into them.

    An array that is stacked has one axis more, the first, of `length`. Taking and putting have the index as their first argument;
    putting then takes the stacks, whose memory it takes over, and the parts.
    """

    def take(index: Any, *stacks: Any) -> tuple[Any, ...]:
        return tuple(_element(stack, index) for stack in stacks)

    def begin(index: Any, *first: Any) -> tuple[Any, ...]:
        return tuple(jnp.broadcast_to(part[None], (length, *part.shape)) for part in first)

    def put(index: Any, *several: Any) -> tuple[Any, ...]:
        count = len(several) // 2
        pairs = zip(several[:count], several[count:], strict=True)
        return tuple(jax.lax.dynamic_update_index_in_dim(stack, part, index, 0) for stack, part in pairs)

    def code(name: str, function: Callable[..., Any], avals: Sequence[Any], donated: Sequence[int] = ()) -> SegmentCode:
        content = (name, length, tuple((a.shape, a.dtype, a.weak_type) for a in avals), tuple(donated))
        return SegmentCode(function, (shape_struct(np.int32(0)), *avals), tuple(donated), content)

    def stacks_of(several: Sequence[Any]) -> list[Any]:
        return [jax.ShapeDtypeStruct((length, *a.shape), a.dtype, weak_type=a.weak_type) for a in several]

    codes = [
        code("take an element", take, stacks_of(elements)),
        code("begin a stack", begin, parts),
        code("put a part", put, [*stacks_of(parts), *parts], range(1, len(parts) + 1)),
    ]
    take_, begin_, put_ = (executable.call for executable in compiler.compile(codes))
    return take_, begin_, put_


def _element(stack: Any, index: Any) -> Any:
    return jax.lax.dynamic_index_in_dim(stack, index, 0, keepdims=False, allow_negative_indices=False)
