"""Joins the segments of a plan into as few executables as its copies allow: what `launch="program"` launches.

A *segment* is a stretch of operators that would otherwise be one executable. The host can begin copies and wait for them only
between two launches. So if a copy begins or is waited for at a boundary, the boundary must lie between two launches. All segments
between two such boundaries become one *program* (`exec/compiling/program_code.py`). If a program makes a tensor itself, and the
tensor is copied out and back within the program, these copies are part of the program. A plan that copies nothing else is one
program.

The joined plan has one segment for each program, and the copies between programs. The executor carries it out, and the peak and
the time of the step are those of the joined plan. The memory of a program is what XLA reports for its executable.

A program takes over the memory of all donated state whose update it makes, also where the segment that makes the update is not
the last one that reads the old state. XLA orders the operators of a program, and copies the old state where it must. State that
a program does not take over would be in memory twice for the whole step.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

from tensile_jax.ir import Carried, Graph, OperatorId, TensorId
from tensile_jax.plan.analysis.device_profile import DeviceProfile
from tensile_jax.plan.result.build import timed
from tensile_jax.plan.result.instructions import (
    FinishSwapIn,
    FinishSwapOut,
    Free,
    Instruction,
    Launch,
    StartSwapIn,
    StartSwapOut,
    change_of,
    decode,
    on_host_between_iterations,
)
from tensile_jax.plan.result.memory_curve import resident_bytes, with_ends
from tensile_jax.plan_format import Plan, Segment, ranges, unranged


def can_be_joined(plan: Plan, graph: Graph) -> bool:
    """Whether the plan has fewer programs than segments. A loop that runs under a plan of its own is part of no program."""
    if plan.whole or any(operator.alone for operator in graph.operators):
        return False
    return len(programs_of(plan, graph)) < len(plan.segments)


class JoinedProgram(NamedTuple):
    """The segments `[first, end)` of a plan as one executable.

    `inner` are the tensors that it copies to the host and back. `code` are the plan's instructions from the launch of segment
    `first` to that of segment `end - 1`; all copies among them are of `inner`.
    """

    first: int
    end: int
    inner: frozenset[TensorId]
    code: tuple[Instruction, ...]


def programs_of(plan: Plan, graph: Graph) -> tuple[JoinedProgram, ...]:
    """The programs of a plan: as few as possible, in their order."""
    code = decode(plan, graph)
    copies = _copies(code)
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
        more = {boundary for t in outer for copy in copies[t] for boundary in (copy.start, copy.finish)} - cuts
        if not more:
            break
        cuts |= more
    launch = [place for place, instruction in enumerate(code) if isinstance(instruction, Launch)]
    return tuple(
        JoinedProgram(first, end, those, code[launch[first] : launch[end - 1] + 1])
        for (first, end), those in zip(spans, inner, strict=True)
    )


class _Copy(NamedTuple):
    """The copy of event `event`. It starts at boundary `start`, and boundary `finish` waits for it; if none does, the last."""

    event: int
    outwards: bool
    start: int
    finish: int


def _copies(code: Sequence[Instruction]) -> dict[TensorId, list[_Copy]]:
    """The copies of each tensor, in the order in which they start."""
    started: list[tuple[TensorId, int, bool, int]] = []
    latest: dict[TensorId, int] = {}  # the event of its latest copy
    finish: dict[int, int] = {}
    boundary = 0
    for instruction in code:
        match instruction:
            case StartSwapOut(tensors, events) | StartSwapIn(tensors, events):
                outwards = isinstance(instruction, StartSwapOut)
                for t, event in zip(tensors, events, strict=True):
                    started.append((t, event, outwards, boundary))
                    latest[t] = event
            case FinishSwapOut(tensors) | FinishSwapIn(tensors):
                finish.update((latest[t], boundary) for t in tensors)
            case Launch():
                boundary += 1
            case Free():
                pass
    found: dict[TensorId, list[_Copy]] = {}
    for t, event, outwards, start in started:
        found.setdefault(t, []).append(_Copy(event, outwards, start, finish.get(event, boundary)))
    return found


def _is_inside(copies: Sequence[_Copy], made_in: Sequence[int], first: int, end: int) -> bool:
    """Whether the segments `[first, end)` make a tensor once, and do all of its copies, of which the last one is back."""
    return (
        len(made_in) == 1
        and first <= made_in[0] < end
        and copies[0].outwards
        and not copies[-1].outwards
        and all(made_in[0] < copy.start < end and copy.finish < end for copy in copies)
    )


def joined(
    plan: Plan, programs: Sequence[JoinedProgram], graph: Graph, profile: DeviceProfile, workspaces: Sequence[int] | None = None
) -> Plan:
    """The plan with one segment for each program.

    Args:
        workspaces: of each program, in bytes; if they are not known, the most that one of its segments is expected to need.
    """
    code = decode(plan, graph)
    before, after = _contents(code, graph)
    segments: list[Segment] = []
    for number, program in enumerate(programs):
        parts = plan.segments[program.first : program.end]
        most = max(s.device_bytes for s in parts)
        segment = _joined(parts, before[program.first], after[program.end - 1], graph)
        segments.append(replace(segment, workspace_bytes=0 if workspaces is None else workspaces[number], device_bytes=most))
    place = {program.first: number for number, program in enumerate(programs)} | {len(plan.segments): len(programs)}
    inner = frozenset[TensorId]().union(*(program.inner for program in programs))
    outer = sorted(copy for t, several in _copies(code).items() if t not in inner for copy in several)
    events = [replace(plan.events[c.event], trigger=place[c.start] - 1, until=place[c.finish]) for c in outer]
    found = replace(plan, segments=tuple(segments), events=tuple(events), launch="segments", launches=None, barriers=None)
    code = decode(found, graph)
    at_begin, *resident, at_end = resident_bytes(code, graph)
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
    found = replace(found, segments=tuple(sized), peak_bytes=sized[peak].device_bytes, peak_segment=peak)
    return timed(found, code, profile)


def _contents(code: Sequence[Instruction], graph: Graph) -> tuple[list[frozenset[TensorId]], list[frozenset[TensorId]]]:
    """The tensors on the device before each segment of a plan, and those there after it."""
    arriving, _ = on_host_between_iterations(code)
    now = frozenset(t.id for t in graph.tensors if t.producer is None) - arriving
    before: list[frozenset[TensorId]] = []
    after: list[frozenset[TensorId]] = []
    for instruction in code:
        if isinstance(instruction, Launch):
            before.append(now)
            after.append(now)
        added, freed = change_of(instruction)
        now = now.union(added).difference(freed)
        if isinstance(instruction, Launch | Free):
            after[-1] = now
    return before, after


def _joined(parts: Sequence[Segment], before: frozenset[TensorId], after: frozenset[TensorId], graph: Graph) -> Segment:
    """The segments as one, before which and after which these tensors are on the device. Its sizes are not known."""
    operators = [o for s in parts for o in unranged(s.operators)]
    own = set(operators)
    again: dict[OperatorId, None] = dict.fromkeys(o for s in parts for o in unranged(s.recomputes) if o not in own)
    gone, new = before - after, after - before
    taken: dict[TensorId, TensorId] = {}  # by the new state, the old one; a step may return one tensor as two states
    for pair in sorted(graph.carried, key=lambda pair: pair.input):
        if pair.input in gone and pair.output in new and _can_take_over(pair, graph):
            taken.setdefault(pair.output, pair.input)
    donated = {old: output for output, old in taken.items()}
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


def _can_take_over(pair: Carried, graph: Graph) -> bool:
    """Whether the new state can have the memory of the old one, which is donated."""
    old, new = graph.tensors[pair.input], graph.tensors[pair.output]
    alike = (old.nbytes, old.host_bytes, old.dtype, old.shape) == (new.nbytes, new.host_bytes, new.dtype, new.shape)
    return alike and old.id in graph.donated and old.id != new.id
