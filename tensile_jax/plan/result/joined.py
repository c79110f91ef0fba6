"""Joins the segments of a plan into as few executables as its copies allow: what `launch="program"` launches.

A *segment* is a stretch of operators that would otherwise be one executable. The host can begin copies and wait for them only
between two launches. So a boundary at which a copy begins or is waited for stays a boundary between launches. All segments
between two such boundaries become one *program* (`exec/compiling/program_code.py`). A plan that copies nothing is one program.

With `launch="one_program"`, the copies are part of the program, so each plan is one program. State that stays in host memory
between two iterations is then an argument and a result of the program in host memory. XLA's rules for arguments and results have
two consequences:

    - A program holds its arguments in device memory until it ends, or until results take over their memory. It also holds the
      memory of its results all the time. So a copy to the host in the middle of the program frees nothing if it copies an
      argument that begins on the device, or a result that must be on the device at the end. The program leaves out such copies.
    - A copy to the host that the last segment triggers ends within the program, so it cannot overlap with the next iteration.

The joined plan has one segment for each program, and the copies between programs. The executor carries it out, and the peak and
the time of the step are those of the joined plan. The memory of a program is what XLA reports for its executable.

A program takes over the memory of donated state whenever it makes the state's update, even if a later operator reads the old
state: XLA orders the operators, and copies the old state if it must. Otherwise that state would be in memory twice for the whole
step.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import msgspec

from tensile_jax.ir import Carried, Graph, OperatorId, TensorId
from tensile_jax.plan.analysis.device_profile import DeviceProfile
from tensile_jax.plan.result.build import sized, timed
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
from tensile_jax.plan.result.memory_curve import resident_bytes
from tensile_jax.plan.result.segment_sizes import with_peak, with_sizes
from tensile_jax.plan.result.simulate import simulate
from tensile_jax.plan_format import Barriers, Event, Plan, Segment, ranges, unranged


def can_be_joined(plan: Plan, graph: Graph, form: Barriers) -> bool:
    """Whether the plan has fewer programs than segments.

    A loop that runs under a plan of its own is part of no program. No program takes state in host memory that the step also
    returns unchanged in device memory.
    """
    if plan.whole or any(operator.alone for operator in graph.operators):
        return False
    if form == "chain":
        arriving, left = _on_host_at_ends(plan, graph)
        if not arriving.isdisjoint(frozenset(graph.outputs) - left):
            return False
    return len(programs_of(replace(plan, barriers=form), graph)) < len(plan.segments)


class JoinedProgram(NamedTuple):
    """The segments `[first, end)` of a plan as one executable.

    `code` are the plan's instructions from the launch of segment `first` to that of segment `end - 1`; with barriers of the form
    `chain`, all instructions of the plan, copies among them.
    """

    first: int
    end: int
    code: tuple[Instruction, ...]


def programs_of(plan: Plan, graph: Graph) -> tuple[JoinedProgram, ...]:
    """The programs of a plan: as few as possible, in their order."""
    code = decode(plan, graph)
    if plan.barriers == "chain":
        return (JoinedProgram(0, len(plan.segments), code),)
    cuts = {0, len(plan.segments)} | {boundary for copy in _copies(code) for boundary in (copy.start, copy.finish)}
    launch = [place for place, instruction in enumerate(code) if isinstance(instruction, Launch)]
    return tuple(JoinedProgram(first, end, code[launch[first] : launch[end - 1] + 1]) for first, end in pairwise(sorted(cuts)))


class _Copy(NamedTuple):
    """The copy of event `event`. It starts at boundary `start`, and boundary `finish` waits for it: the last boundary if nothing
    else waits.
    """

    event: int
    start: int
    finish: int


def _copies(code: Sequence[Instruction]) -> list[_Copy]:
    """The copies, in the order of their events."""
    started: dict[int, int] = {}
    latest: dict[TensorId, int] = {}  # the event of its latest copy
    finish: dict[int, int] = {}
    boundary = 0
    for instruction in code:
        match instruction:
            case StartSwapOut(tensors, events) | StartSwapIn(tensors, events):
                for t, event in zip(tensors, events, strict=True):
                    started[event] = boundary
                    latest[t] = event
            case FinishSwapOut(tensors) | FinishSwapIn(tensors):
                finish.update((latest[t], boundary) for t in tensors)
            case Launch():
                boundary += 1
            case Free():
                pass
    return [_Copy(event, start, finish.get(event, boundary)) for event, start in sorted(started.items())]


def as_programs(plan: Plan, graph: Graph, form: Barriers, profile: DeviceProfile) -> Plan:
    """The plan with its segments joined into programs with barriers of this form.

    The sizes of its segments are what is expected while the operators of a segment run. A program holds the device memory of its
    arguments until it ends, or until results take over that memory, also where the plan would free it sooner. It asks the
    device's allocator once for all that its segments need beside that, so what the allocator hands out unasked is that of the
    program.
    """
    plan = replace(plan, launch="program", launches=1, barriers=form)
    if form == "chain":
        plan = _without_idle_copies(plan, graph, profile)
    programs = programs_of(plan, graph)
    before, after = _contents(decode(plan, graph), graph)
    successor = {pair.input: pair.output for pair in graph.carried if _can_take_over(pair, graph)}
    segments = list(plan.segments)
    launched = joined(plan, programs, graph, profile).segments
    copied = _on_host_at_ends(plan, graph)[0] if form == "chain" else frozenset[TensorId]()
    for program, alone in zip(programs, launched, strict=True):
        arguments = {t for t in before[program.first] - copied if graph.tensors[t].nbytes}
        for index in range(program.first, program.end):
            there = before[index] | after[index]
            held = sum(graph.tensors[t].nbytes for t in arguments - there if successor.get(t) not in there)
            segment = segments[index]
            unasked = alone.allocator_bytes - segment.allocator_bytes
            segments[index] = replace(
                segment,
                resident_bytes=segment.resident_bytes + held,
                allocator_bytes=alone.allocator_bytes,
                device_bytes=segment.device_bytes + held + unasked,
            )
    return with_peak(replace(plan, launches=len(programs)), segments, profile)


def _without_idle_copies(plan: Plan, graph: Graph, profile: DeviceProfile) -> Plan:
    """The plan without the copies that free no memory in one program.

    These are the copies of arguments that are in device memory when the iteration begins, and of results that are there when it
    ends.
    """
    arriving, left = _on_host_at_ends(plan, graph)
    ends = {t.id for t in graph.tensors if t.producer is None} | set(graph.outputs)
    idle = {e.tensor for e in plan.events if e.kind in ("swap_out", "swap_in")} & ends - arriving - left
    if not idle:
        return plan
    back = {e.tensor: e.trigger for e in sorted(plan.events, key=lambda e: e.trigger) if e.kind == "swap_in"}

    def returns(t: TensorId, index: int) -> bool:
        """Whether the tensor leaves after this segment without a copy, and returns later."""
        return t in idle and back.get(t, -1) >= index

    def stays(event: Event) -> bool:
        if event.kind in ("swap_out", "swap_in"):
            return event.tensor not in idle
        return event.kind != "release" or not returns(event.tensor, event.until)

    segments = (
        replace(segment, frees=tuple(t for t in segment.frees if not returns(t, index)))
        for index, segment in enumerate(plan.segments)
    )
    return sized(replace(plan, segments=tuple(segments), events=tuple(filter(stays, plan.events))), graph, profile)


def _on_host_at_ends(plan: Plan, graph: Graph) -> tuple[frozenset[TensorId], frozenset[TensorId]]:
    """The arguments that are in host memory when an iteration begins, and the results that are in host memory only when
    it ends.
    """
    code = decode(plan, graph)
    arriving, there = on_host_between_iterations(code)
    *_, on_device = _contents(code, graph)[1]
    for instruction in code[::-1]:  # what happens after the last segment
        if isinstance(instruction, Launch):
            break
        added, freed = change_of(instruction)
        on_device = on_device.union(added).difference(freed)
    return frozenset(arriving), there & frozenset(graph.outputs) - on_device


def graph_of_programs(plan: Plan, graph: Graph) -> Graph:
    """The graph as the programs of the plan see it.

    If copies are part of the program, state that rests in host memory between two iterations is always there.
    """
    if plan.barriers != "chain":
        return graph
    there = frozenset[TensorId]().union(*_on_host_at_ends(plan, graph))
    moved = tuple(replace(t, nbytes=0, host_bytes=t.nbytes) if t.id in there else t for t in graph.tensors)
    return replace(graph, tensors=moved)


def joined(
    plan: Plan, programs: Sequence[JoinedProgram], graph: Graph, profile: DeviceProfile, workspaces: Sequence[int] | None = None
) -> Plan:
    """The plan with one segment for each program. It is a plan for `graph_of_programs`.

    Args:
        workspaces: of each program, in bytes; if they are not known, the most that one of its segments is expected to need.
    """
    has_copies = plan.barriers == "chain"
    before, after = _contents(decode(plan, graph), graph)
    arriving, left = _on_host_at_ends(plan, graph) if has_copies else (frozenset[TensorId](), frozenset[TensorId]())
    graph = graph_of_programs(plan, graph)
    segments: list[Segment] = []
    for program in programs:
        parts = plan.segments[program.first : program.end]
        at_end = after[program.end - 1] - left  # what the program leaves on the device
        segment = _joined(parts, before[program.first] | arriving, at_end | left, graph)
        segments.append(replace(segment, inputs=tuple(sorted({*segment.inputs, *arriving}))))
    place = {program.first: number for number, program in enumerate(programs)} | {len(plan.segments): len(programs)}
    between = () if has_copies else _copies(decode(plan, graph))
    moved = ((plan.events[c.event], place[c.start] - 1, place[c.finish]) for c in between)
    events = [msgspec.structs.replace(event, trigger=trigger, until=until) for event, trigger, until in moved]
    sizes = {t.id: t for t in graph.tensors}
    tensors = tuple(replace(t, nbytes=sizes[t.id].nbytes, host_bytes=sizes[t.id].host_bytes) for t in plan.tensors)
    found = replace(
        plan, tensors=tensors, segments=tuple(segments), events=tuple(events), launch="segments", launches=None, barriers=None,
        state_layout="row_major", layouts=None,
    )  # fmt: skip
    code = decode(found, graph)
    if workspaces is None:
        _, *resident, _ = resident_bytes(code, graph)
        workspaces = [
            max(0, max(s.device_bytes - s.allocator_bytes for s in plan.segments[p.first : p.end]) - held)
            for p, held in zip(programs, resident, strict=True)
        ]
    found = timed(with_sizes(found, code, graph, workspaces, profile), code, profile)
    if not has_copies:
        return found
    # the copies run beside the segments that they are planned to run beside
    inside = simulate(replace(plan, launch_us=0.0), decode(plan, graph), profile)
    return replace(found, step_us=round(inside.step_us + profile.launch_us, 3), stall_us=round(inside.stall_us, 3))


def _contents(code: Sequence[Instruction], graph: Graph) -> tuple[list[frozenset[TensorId]], list[frozenset[TensorId]]]:
    """The tensors on the device before each segment of a plan, and those there after it."""
    arriving, _ = on_host_between_iterations(code)
    now = frozenset(t.id for t in graph.tensors if t.producer is None and t.id not in arriving)
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
