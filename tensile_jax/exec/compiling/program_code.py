"""Emits several segments of a plan, which are stretches of operators, as one function. The function becomes one executable, a
*program*, and needs one launch.

    segment 0 | barrier | segment 1 | barrier | ...

A barrier, `jax.lax.optimization_barrier`, stands for each boundary between segments. XLA moves no operator across a barrier that
the operator's values cross. So XLA neither undoes a recomputation nor begins it early. Otherwise XLA is free to schedule, fuse
and overlap operators. Which values cross the barriers is the program's *form*:

    live      all tensors that are needed later
    inputs    the inputs of the segment after the barrier
    lag       the same, and what the segment before the barrier has made; but gradients, new state and results cross one boundary
              later, and arguments of the step one boundary earlier

The form `lag` is for several devices. They exchange data twice: they sum gradients (an all-reduce or a reduce-scatter), and they
collect the parameters of the next segment, which are divided among devices (an all-gather). With `lag`, each exchange can overlap
with the kernels of one more segment. But XLA may also compute a gradient one segment later. The operands of that gradient then
stay in memory longer.

No form is the best for every step, and only XLA's compiler shows the peak. `exec/fitting/next_program.py` looks at that peak and
decides what is compiled next.

If a tensor is copied to the host and back within the program, the copies are calls of `jax.device_put`. XLA for GPUs makes them
asynchronous. Other copies, of state for instance, lie between two programs (`plan/result/joined.py`): XLA would read an argument
in host memory where it is, synchronously. XLA for CPUs drops the barriers, and with them the plan. So this module is used for
GPUs only.
"""

from collections.abc import Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from tensile_jax.exec.compiling.segment_code import SegmentBuilder, SegmentCode
from tensile_jax.ir import Graph, TensorId
from tensile_jax.plan.result.instructions import FinishSwapIn, FinishSwapOut, Free, Launch, StartSwapIn, StartSwapOut
from tensile_jax.plan.result.joined import JoinedProgram
from tensile_jax.plan_format import Barriers, Plan, Segment, unranged

_Values = dict[TensorId, Any]
_LATE = ("gradient", "parameter", "optimizer_state", "output", "state")
"""The roles of tensors that cross one boundary later in form `lag`."""


def program_code(
    plan: Plan, program: JoinedProgram, joined: Segment, form: Barriers, builder: SegmentBuilder, graph: Graph
) -> SegmentCode:
    """The code of a program, with barriers at the boundaries of the plan that lie in it.

    Args:
        joined: the program as one segment, which says what is given to it, what it returns and what is donated.
    """
    parts = plan.segments[program.first : program.end]
    codes = [builder.code(unranged((*s.recomputes, *s.operators)), s.inputs, s.outputs, ()) for s in parts]
    crossing = [_crossing(parts, index, joined, form, graph) for index in range(len(parts))]
    ahead = [_ahead(parts, index, form, graph) for index in range(len(parts))]
    owned = {o for s in parts for o in unranged(s.operators)}
    effectful = any(operator.effectful for operator in graph.operators if operator.id in owned)

    def function(*given: Any) -> tuple[Any, ...]:
        values: _Values = dict(zip(joined.inputs, given, strict=True))
        on_host: _Values = {}
        early: _Values = {}  # arguments of the step that have crossed the boundary before the segment that reads them
        for instruction in program.code:
            match instruction:
                case StartSwapOut(tensors):
                    on_host.update((t, jax.device_put(values[t], jax.memory.Space.Host)) for t in tensors)
                case FinishSwapOut(tensors):
                    for t in tensors:
                        del values[t]
                case StartSwapIn(tensors):
                    values.update((t, jax.device_put(on_host[t], jax.memory.Space.Device)) for t in tensors)
                case Launch(index, inputs, outputs):
                    place = index - program.first
                    arrived = early
                    early = _hold_back(values, crossing[place], ahead[place]) if place else {}
                    made = codes[place].function(*(arrived.get(t, values[t]) for t in inputs))
                    values.update(zip(outputs, made, strict=False))  # with effects, it returns one number more
                case FinishSwapIn() | Free():
                    pass
        at_the_end = (jnp.zeros((), bool),) if effectful else ()
        return (*(values[t] for t in joined.outputs), *at_the_end)

    around = builder.code([], joined.inputs, (), joined.donated)
    content = ("program", form, around.content, _wiring(plan, program, joined), tuple(code.content for code in codes))
    out_shardings = builder.out_shardings(joined.outputs, effectful=effectful)
    on_host = builder.on_host(joined.inputs, joined.outputs, effectful=effectful)
    return SegmentCode(function, around.avals, around.donated, content, out_shardings, on_host)


def _wiring(plan: Plan, program: JoinedProgram, joined: Segment) -> Hashable:
    """Which results of segments are which inputs of others, and where copies happen; with numbers that equal programs share."""
    number: dict[TensorId, int] = {}

    def of(tensors: Sequence[TensorId]) -> tuple[int, ...]:
        return tuple(number.setdefault(t, len(number)) for t in tensors)

    found: list[Hashable] = [of(joined.inputs)]
    for instruction in program.code:
        match instruction:
            case Launch(index, inputs, outputs):
                found.append((of(inputs), of(outputs), len(unranged(plan.segments[index].recomputes))))
            case StartSwapOut(tensors) | FinishSwapOut(tensors) | StartSwapIn(tensors):
                found.append((type(instruction).__name__, of(tensors)))
            case FinishSwapIn() | Free():
                pass
    return (*found, of(joined.outputs))


def _crossing(parts: Sequence[Segment], index: int, joined: Segment, form: Barriers, graph: Graph) -> list[TensorId]:
    """The tensors that cross the barrier before segment `index`, if they exist then."""
    segment = parts[index]
    match form:
        case "live":
            later = {t for s in parts[index:] for t in s.inputs} | set(joined.outputs)
            made = [t for s in parts[:index] for t in s.outputs]
            return [t for t in dict.fromkeys((*segment.inputs, *made, *joined.inputs)) if t in later]
        case "inputs":
            return list(segment.inputs)
        case "lag":
            later = {t for s in parts[index:] for t in s.inputs} | set(joined.outputs)
            before, twice_before = (parts[i].outputs if i >= 0 else () for i in (index - 1, index - 2))
            made = [t for t in segment.inputs if graph.tensors[t].producer is not None]
            made += [t for t in before if graph.tensors[t].role not in _LATE]
            made += [t for t in twice_before if graph.tensors[t].role in _LATE and t in later]
            return list(dict.fromkeys(made))


def _ahead(parts: Sequence[Segment], index: int, form: Barriers, graph: Graph) -> list[TensorId]:
    """The arguments of the step that cross the barrier before segment `index` for the segment after it."""
    if form != "lag" or index + 1 >= len(parts):
        return []
    return [t for t in parts[index + 1].inputs if graph.tensors[t].producer is None]


def _hold_back(values: _Values, crossing: Sequence[TensorId], ahead: Sequence[TensorId]) -> _Values:
    """Let what comes after this wait until all these values exist. Returns those of `ahead` for who is to wait for them."""
    several = [t for t in crossing if t in values and _can_cross(values[t])]
    others = [t for t in ahead if t in values and _can_cross(values[t])]
    if not several:
        return {}
    after = jax.lax.optimization_barrier(tuple(values[t] for t in (*several, *others)))
    values.update(zip(several, after, strict=False))
    return dict(zip(others, after[len(several) :], strict=True))


def _can_cross(value: Any) -> bool:
    """Whether a barrier takes the value; it takes no random keys and no tokens."""
    return hasattr(value, "dtype") and not jnp.issubdtype(value.dtype, jax.dtypes.extended)
