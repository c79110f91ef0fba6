"""Emits several segments of a plan as one function, which becomes one executable, a *program*.

A segment is a stretch of operators that is otherwise an executable of its own. A program needs one launch for all its segments.
`plan/result/joined.py` says which segments a program joins.

    segment 0 | barrier | segment 1 | barrier | ...

A barrier, `jax.lax.optimization_barrier`, stands for each boundary between segments. XLA does not move an operator past a barrier
through which its values pass, so it neither undoes a recomputation nor begins it early. Otherwise XLA is free to schedule, fuse
and overlap operators. The program's *form* says which values pass through the barriers:

    live      all tensors that are needed later
    inputs    the inputs of the segment after the barrier
    chain     the same as `inputs`; in a program with copies, also what the segment before the barrier has made
    lag       the same as `inputs`, and what the segment before the barrier has made, with two exceptions. A gradient, new state
              or a result passes through the second barrier after the segment that makes it instead of the first, unless the
              next segment reads it. An argument of the step passes through the barrier before the segment that precedes its
              reader, instead of the barrier right before its reader

The form `lag` is for several devices, which exchange data to sum gradients and to gather sharded parameters. With `lag`, each
exchange can overlap with the kernels of one more segment. But XLA may then also compute a gradient one segment later, and its
operands stay in memory longer.

No form is the best for every step, and only XLA's compiler shows the peak. `exec/fitting/next_program.py` looks at that peak and
decides what is compiled next.

A copy is a call of `jax.device_put`, which XLA for GPUs turns into an asynchronous copy. Barriers say when it begins and ends:

    copy in     The value in host memory passes through the barrier at which the copy begins, and the value on the device through
                the barrier before the first segment that reads it.
    copy out    The value on the device passes through the barrier at which the copy begins, and the value in host memory through
                the barrier that waits for the copy.

Zeros that are written into are made from a number that has crossed the barrier too (`trace/own_zeros.py`), or XLA would make the
zeros of all segments before the first one is needed.

Without a barrier between them, XLA would delete a copy out and a copy back. State that stays in host memory between two
iterations is there when the program begins and ends (`plan/result/joined.py`). `async_copies.py` checks in the compiled program
that copies run beside kernels. XLA for CPUs drops the barriers, and with them the plan, so this module is used for GPUs only.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

import jax
import jax.numpy as jnp

from tensile_jax.exec.compiling.segment_code import LaidOut, SegmentBuilder, SegmentCode
from tensile_jax.ir import Graph, Tensor, TensorId
from tensile_jax.plan import DeviceProfile
from tensile_jax.plan.result.instructions import FinishSwapIn, FinishSwapOut, Free, Launch, StartSwapIn, StartSwapOut
from tensile_jax.plan.result.joined import JoinedProgram, graph_of_programs, joined, programs_of
from tensile_jax.plan_format import Barriers, Plan, Segment, StateLayout, unranged
from tensile_jax.trace.avals import is_extended

_Values = dict[TensorId, Any]
_LAID_OUT_FROM = 4
"""Dimensions of state whose memory layout XLA may choose: kernels of convolutions, which it would transpose in each step. With
fewer, kernels of dense layers are among them, which libraries for products read in any order."""
_LAID_OUT_TYPES = ("float64", "float32", "bfloat16", "float16")
"""Of such state: layouts of keys and of narrow types, with several numbers in a byte, say more than an order of dimensions."""
_LATE = ("gradient", "parameter", "optimizer_state", "output", "state")
"""The roles of tensors that cross one boundary later in form `lag`."""


def program_code(
    plan: Plan, program: JoinedProgram, joined: Segment, form: Barriers, builder: SegmentBuilder, graph: Graph
) -> SegmentCode:
    """The code of a program, with barriers at the boundaries of the plan that lie in it.

    Args:
        joined: the program as one segment, which says what is given to it, what it returns and what is donated.
        graph: the graph as the program sees it (`graph_of_programs`), which says what it takes and leaves in host memory.
    """
    parts = plan.segments[program.first : program.end]
    codes = [builder.code(unranged((*s.recomputes, *s.operators)), s.inputs, s.outputs, ()) for s in parts]
    boundaries = _boundaries(program, parts, joined, form, graph)
    owned = {o for s in parts for o in unranged(s.operators)}
    effectful = any(operator.effectful for operator in graph.operators if operator.id in owned)
    rests = frozenset(t.id for t in graph.tensors if t.in_host_memory)

    def function(*given: Any) -> tuple[Any, ...]:
        values: _Values = dict(zip(joined.inputs, given, strict=True))
        on_host: _Values = {t: values[t] for t in joined.inputs if t in rests}
        early: _Values = {}  # arguments of the step that have crossed the boundary before the segment that reads them
        for boundary, part, code in zip_longest(boundaries, parts, codes):
            arrived = early
            early, zero = boundary.cross(values, on_host)
            if part is None:
                break
            made = code.function(*(arrived.get(t, values[t]) for t in part.inputs), zero=zero)
            values.update(zip(part.outputs, made, strict=False))  # with effects, it returns one number more
        at_the_end = (jnp.zeros((), bool),) if effectful else ()
        return (*(on_host[t] if t in on_host and t in rests else values[t] for t in joined.outputs), *at_the_end)

    around = builder.code([], joined.inputs, (), joined.donated, rests=rests)
    laid_out = _laid_out(plan, joined, graph)
    wiring = _wiring(plan, program, joined)
    content = ("program", form, around.content, wiring, laid_out, tuple(code.content for code in codes))
    out_shardings = builder.out_shardings(joined.outputs, effectful=effectful, rests=rests)
    on_host = builder.on_host(joined.inputs, joined.outputs, effectful=effectful, rests=rests)
    if laid_out and on_host is None:
        on_host = (False,) * (len(joined.outputs) + effectful)
    copies = any(isinstance(i, StartSwapIn | StartSwapOut) for i in program.code)
    return SegmentCode(
        function,
        around.avals,
        around.donated,
        content,
        out_shardings,
        on_host,
        sum(c.operators for c in codes),
        copies,
        laid_out,
    )


def _laid_out(plan: Plan, joined: Segment, graph: Graph) -> tuple[LaidOut, ...]:
    """The state whose memory layout XLA chooses or, once it is known, has chosen; what it has left row-major is left out then.

    It is donated, and stays on the device.
    """
    if plan.state_layout != "auto":
        return ()
    place = {t: i for i, t in enumerate(joined.inputs)}
    pairs = [
        (old, place[old], result)
        for result, old in enumerate(joined.donated)  # their results come first, in the same order
        if _may_be_laid_out(graph.tensors[old])
    ]
    if plan.layouts is None:
        return tuple(LaidOut(argument, result, None) for _, argument, result in pairs)
    chosen = {layout.tensor: layout.major_to_minor for layout in plan.layouts}
    return tuple(LaidOut(argument, result, chosen[old]) for old, argument, result in pairs if old in chosen)


def bytes_laid_out(plan: Plan, graph: Graph, profile: DeviceProfile) -> int:
    """The bytes of the state whose memory layout XLA may choose, if the segments of the plan are one program."""
    seen, programs = graph_of_programs(plan, graph), programs_of(plan, graph)
    donated = joined(plan, programs, graph, profile).segments[0].donated
    return sum(seen.tensors[t].nbytes for t in donated if _may_be_laid_out(seen.tensors[t]))


def _may_be_laid_out(tensor: Tensor) -> bool:
    on_device = tensor.nbytes > 0
    return on_device and len(tensor.shape) >= _LAID_OUT_FROM and tensor.dtype in _LAID_OUT_TYPES


def chosen_layouts(
    plan: Plan, joined: Segment, graph: Graph, found: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]
) -> tuple[StateLayout, ...]:
    """The memory layouts of arguments that XLA has chosen for the program of a plan, where they are not row-major.

    Args:
        found: the layouts of the program's arguments and results, as its executable has them (`Executable.layouts`).
    """
    arguments = (joined.inputs[one.argument] for one in _laid_out(plan, joined, graph))
    several = (StateLayout(t, given) for t, (given, _) in zip(arguments, found, strict=True))
    return tuple(one for one in several if list(one.major_to_minor) != sorted(one.major_to_minor))


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
            case StartSwapOut(tensors) | FinishSwapOut(tensors) | StartSwapIn(tensors) | FinishSwapIn(tensors):
                found.append((type(instruction).__name__, of(tensors)))
            case Free():
                pass
    return (*found, of(joined.outputs))


@dataclass(frozen=True, slots=True)
class _Boundary:
    """What happens at a boundary of the plan within a program, or at its beginning or end.

    Attributes:
        crossing: the tensors that cross the barrier, if they exist then; none at the beginning and at the end.
        ahead: the arguments of the step that cross the barrier for the segment after the next one.
        starts_out, ends_out, starts_in, ends_in: the tensors whose copies begin or end here.
    """

    crossing: tuple[TensorId, ...] = ()
    ahead: tuple[TensorId, ...] = ()
    starts_out: tuple[TensorId, ...] = ()
    ends_out: tuple[TensorId, ...] = ()
    starts_in: tuple[TensorId, ...] = ()
    ends_in: tuple[TensorId, ...] = ()

    @property
    def has_copies(self) -> bool:
        """Whether copies begin or end here."""
        return bool(self.starts_out or self.ends_out or self.starts_in or self.ends_in)

    def cross(self, values: _Values, on_host: _Values) -> tuple[_Values, Any]:
        """Update the values on the device and on the host. Returns those of `ahead`, and a zero that has crossed the barrier."""
        early: _Values = {}
        zero = jnp.zeros((), jnp.float32)
        if self.crossing:
            there = _that_can_cross(values, (*self.crossing, *self.ends_in))
            others = _that_can_cross(values, self.ahead)
            hosts = _that_can_cross(on_host, (*self.starts_in, *self.ends_out))
            if there or hosts:
                there, early, hosts, zero = jax.lax.optimization_barrier((there, others, hosts, zero))
                values.update(there)
                on_host.update(hosts)
        on_host.update((t, jax.device_put(values[t], jax.memory.Space.Host)) for t in self.starts_out)
        for t in self.ends_out:
            del values[t]
        values.update((t, jax.device_put(on_host[t], jax.memory.Space.Device)) for t in self.starts_in)
        return early, zero


def _boundaries(
    program: JoinedProgram, parts: Sequence[Segment], joined: Segment, form: Barriers, graph: Graph
) -> list[_Boundary]:
    """The beginning of the program, the boundaries in it, and its end."""
    found = [_Boundary()]
    for instruction in program.code:
        match instruction:
            case StartSwapOut(tensors):
                found[-1] = replace(found[-1], starts_out=tensors)
            case FinishSwapOut(tensors):
                found[-1] = replace(found[-1], ends_out=tensors)
            case StartSwapIn(tensors):
                found[-1] = replace(found[-1], starts_in=tensors)
            case FinishSwapIn(tensors):
                found[-1] = replace(found[-1], ends_in=tensors)
            case Launch(index):
                place = index + 1 - program.first
                if place < len(parts):
                    crossing, ahead = _crossing(parts, place, joined, form, graph), _ahead(parts, place, form, graph)
                    found.append(_Boundary(tuple(crossing), tuple(ahead)))
                else:
                    found.append(_Boundary())
            case Free():
                pass
    copies = form == "chain" and any(one.has_copies for one in found)
    # XLA then starts a copy where the plan does, and no operator of the segment before it comes late (`make bench-launches`)
    return [
        replace(one, crossing=(*one.crossing, *parts[place - 1].outputs)) if one.crossing and copies else one
        for place, one in enumerate(found)
    ]


def _crossing(parts: Sequence[Segment], index: int, joined: Segment, form: Barriers, graph: Graph) -> list[TensorId]:
    """The tensors that cross the barrier before segment `index`, if they exist then."""
    segment = parts[index]
    match form:
        case "live":
            later = {t for s in parts[index:] for t in s.inputs} | set(joined.outputs)
            made = [t for s in parts[:index] for t in s.outputs]
            return [t for t in dict.fromkeys((*segment.inputs, *made, *joined.inputs)) if t in later]
        case "inputs" | "chain":
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


def _that_can_cross(values: _Values, tensors: Sequence[TensorId]) -> _Values:
    """Those of the tensors that exist and that a barrier takes; it takes no random keys and no tokens."""
    return {t: values[t] for t in tensors if t in values and _is_plain(values[t])}


def _is_plain(value: Any) -> bool:
    return hasattr(value, "dtype") and not is_extended(value.dtype)
