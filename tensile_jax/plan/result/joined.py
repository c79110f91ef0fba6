"""Joins the segments of a plan into as few executables as its copies allow: what `launch="program"` launches.

Between two launches the host acts: it begins copies, and waits for them. So a boundary at which a copy begins or is waited for
lies between two launches, and all segments between two such boundaries are one *program* (`exec/compiling/program_code.py`). A
copy out and back of a tensor that a program makes itself is part of that program. A plan that copies nothing else is one program.

The joined plan has one segment for each program, and the copies between programs. The executor carries it out, and the peak and
the time of the step are those of the joined plan. A program needs what XLA says of its executable.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

from tensile_jax.ir import Graph, OperatorId, TensorId
from tensile_jax.plan.analysis.device_profile import DeviceProfile
from tensile_jax.plan.result.build import timed
from tensile_jax.plan.result.memory_curve import resident_bytes, with_ends
from tensile_jax.plan_format import Event, Plan, Segment, ranges, unranged

_COPIES = ("swap_out", "swap_in")


def can_be_joined(plan: Plan, graph: Graph) -> bool:
    """Whether the plan has fewer programs than segments. A loop that runs under a plan of its own is part of no program."""
    if plan.whole or any(operator.alone for operator in graph.operators):
        return False
    return len(programs_of(plan)) < len(plan.segments)


class Program(NamedTuple):
    """The segments `[first, end)` of a plan as one executable. `inner` are the tensors that it copies to the host and back."""

    first: int
    end: int
    inner: frozenset[TensorId]


def programs_of(plan: Plan) -> tuple[Program, ...]:
    """The programs of a plan: as few as possible, in their order."""
    copies: dict[TensorId, list[Event]] = {}
    for event in plan.events:
        if event.kind in _COPIES:
            copies.setdefault(event.tensor, []).append(event)
    made_in: dict[TensorId, list[int]] = {t: [] for t in copies}
    for index, segment in enumerate(plan.segments):
        for t in segment.outputs:
            if t in copies:
                made_in[t].append(index)
    cuts = {0, len(plan.segments)}
    while True:  # a boundary more may leave a tensor that was copied inside a program between two
        spans = list(pairwise(sorted(cuts)))
        inner = [frozenset(t for t in copies if _is_inside(copies[t], made_in[t], *span)) for span in spans]
        outer = copies.keys() - frozenset[TensorId]().union(*inner)
        more = {b for t in outer for event in copies[t] for b in (event.trigger + 1, event.until)} - cuts
        if not more:
            return tuple(Program(first, end, those) for (first, end), those in zip(spans, inner, strict=True))
        cuts |= more


def _is_inside(copies: Sequence[Event], made_in: Sequence[int], first: int, end: int) -> bool:
    """Whether the segments `[first, end)` make a tensor once, and do all of its copies, of which the last one is back."""
    ordered = sorted(copies, key=lambda event: event.trigger)
    return (
        len(made_in) == 1
        and first <= made_in[0] < end
        and ordered[0].kind == "swap_out"
        and ordered[-1].kind == "swap_in"
        and all(made_in[0] < event.trigger + 1 < end and event.until < end for event in copies)
    )


def joined(
    plan: Plan, programs: Sequence[Program], graph: Graph, profile: DeviceProfile, workspaces: Sequence[int] | None = None
) -> Plan:
    """The plan with one segment for each program.

    Args:
        workspaces: of each program, in bytes; if they are not known, the most that one of its segments is expected to need.
    """
    there = _Contents(plan, graph)
    segments: list[Segment] = []
    for number, program in enumerate(programs):
        parts = plan.segments[program.first : program.end]
        most = max(s.device_bytes for s in parts)
        segment = _joined(parts, *there(program))
        segments.append(replace(segment, workspace_bytes=0 if workspaces is None else workspaces[number], device_bytes=most))
    place = {program.first: number for number, program in enumerate(programs)} | {len(plan.segments): len(programs)}
    inner = frozenset[TensorId]().union(*(program.inner for program in programs))
    events = [
        replace(event, trigger=place[event.trigger + 1] - 1, until=place[event.until])
        for event in plan.events
        if event.kind in _COPIES and event.tensor not in inner
    ]
    at_begin, *resident, at_end = resident_bytes(graph, segments, events)
    if workspaces is None:
        sized = [
            replace(s, resident_bytes=held, workspace_bytes=max(0, s.device_bytes - held), device_bytes=max(s.device_bytes, held))
            for s, held in zip(segments, resident, strict=True)
        ]
    else:
        sized = [
            replace(s, resident_bytes=held, device_bytes=held + s.workspace_bytes)
            for s, held in zip(segments, resident, strict=True)
        ]
    sized = with_ends(sized, at_begin, at_end)
    peak = max(range(len(sized)), key=lambda i: (sized[i].device_bytes, -i))
    found = replace(
        plan,
        segments=tuple(sized),
        events=tuple(events),
        peak_bytes=sized[peak].device_bytes,
        peak_segment=peak,
        launch="segments",
        launches=None,
        barriers=None,
    )
    return timed(found, profile)


class _Contents:
    """The tensors on the device before each segment of a plan and after it."""

    def __init__(self, plan: Plan, graph: Graph) -> None:
        arriving: set[TensorId] = set()
        seen: set[TensorId] = set()
        for event in sorted((e for e in plan.events if e.kind in _COPIES), key=lambda e: e.trigger):
            if event.tensor not in seen and event.kind == "swap_in":
                arriving.add(event.tensor)
            seen.add(event.tensor)
        now = {t.id for t in graph.tensors if t.producer is None} - arriving
        self._before: list[frozenset[TensorId]] = []
        self._after: list[frozenset[TensorId]] = []
        for index, segment in enumerate(plan.segments):
            now -= {e.tensor for e in plan.events if e.kind == "swap_out" and e.until == index}
            now |= {e.tensor for e in plan.events if e.kind == "swap_in" and e.trigger + 1 == index}
            self._before.append(frozenset(now))
            now = (now | set(segment.outputs)) - {*segment.frees, *segment.donated}
            self._after.append(frozenset(now))

    def __call__(self, program: Program) -> tuple[frozenset[TensorId], frozenset[TensorId]]:
        return self._before[program.first], self._after[program.end - 1]


def _joined(parts: Sequence[Segment], before: frozenset[TensorId], after: frozenset[TensorId]) -> Segment:
    """The segments as one, before which and after which these tensors are on the device. Its sizes are not known."""
    operators = [o for s in parts for o in unranged(s.operators)]
    own = set(operators)
    again: dict[OperatorId, None] = dict.fromkeys(o for s in parts for o in unranged(s.recomputes) if o not in own)
    updates = {old: new for s in parts for old, new in zip(s.donated, s.outputs, strict=False)}
    donated = {old: new for old, new in sorted(updates.items()) if old in before and new in after and new not in before}
    made = dict.fromkeys(t for s in parts for t in s.outputs if t in after and t not in before)
    read = {t for s in parts for t in (*s.inputs, *s.donated) if t in before}
    return Segment(
        name=parts[0].name if len(parts) == 1 else f"{parts[0].name} to {parts[-1].name}",
        operators=ranges(operators),
        recomputes=ranges(list(again)),
        inputs=tuple(sorted(read | set(donated))),
        outputs=(*donated.values(), *(t for t in made if t not in set(donated.values()))),
        donated=tuple(donated),
        frees=tuple(sorted(before - after - set(donated))),
        resident_bytes=0,
        workspace_bytes=0,
        device_bytes=0,
        begin_us=0.0,
        latency_us=round(sum(s.latency_us for s in parts), 3),
        recomputed_us=round(sum(s.recomputed_us for s in parts), 3),
        stall_us=0.0,
    )
