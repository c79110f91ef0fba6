"""Builds a plan from a choice: its segments and events, their sizes, and their times.

The plan of an iteration goes through its segments in order:

    boundary    The swap-outs of tensors whose last need before their absence is over are issued. Swap-ins are issued at the last
                boundary before their copies are to begin. Copies that must have ended before the next segment are waited for.
    segment     It runs for the latency of its operators and of what it computes again.
    afterwards  What nothing needs any more is released.

    device_bytes(segment) = resident bytes (`memory_curve.py`) + workspace, and no less than what the policy counted

`simulate.py` computes when segments and events happen.

Donated state is donated to the segment that makes its update even if that segment does not read it. The update then takes over
the memory, as every policy counts it. If that segment only released the old state when it ends, the old and the new state would
both be counted while it runs.

Sizes in bytes, times in microseconds.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from tensile_jax.ir import Graph, TensorId
from tensile_jax.plan.analysis.device_profile import DeviceProfile
from tensile_jax.plan.analysis.latency import StepCosts
from tensile_jax.plan.analysis.residency import Absence, Absences
from tensile_jax.plan.analysis.retention import Retention, SegmentContents, segment_contents
from tensile_jax.plan.result.memory_curve import resident_bytes
from tensile_jax.plan.result.segment_names import segment_names
from tensile_jax.plan.result.simulate import simulate
from tensile_jax.plan_format import SCHEMA_VERSION, Event, EventKind, Plan, PlannedTensor, Segment, ranges


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """What a policy decides: what is dropped, what is absent, where to cut, and the workspace of each segment.

    `least_bytes` is what the policy counted for each segment. It may be more than the sum that is computed here; the plan then
    states what the policy counted. `compiled` says for which segments XLA has reported the workspace. Those workspaces stay as
    they are. The others are raised until the sum is at least what the policy counted.
    """

    retention: Retention
    absences: Absences
    boundaries: tuple[int, ...]
    workspaces: tuple[int, ...]
    least_bytes: tuple[int, ...] | None = None
    compiled: tuple[bool, ...] | None = None


def build_plan(layout: Layout, costs: StepCosts, header: Plan) -> Plan:
    """The plan of `layout`; `header` is a plan with the fields that do not depend on the layout."""
    retention = layout.retention
    liveness = retention.liveness
    graph = liveness.graph
    bounds = layout.boundaries
    absences = _absences_over_boundaries(layout.absences, bounds)
    aliases = retention.aliases
    all_contents = [
        _aliases_first(_with_donated_state(segment_contents(retention, a, b), retention), aliases) for a, b in pairwise(bounds)
    ]
    outgoing, incoming = _copies(retention, absences, bounds)
    frees = _frees(retention, all_contents, aliases)
    let_go = _freed_after_segment(retention, absences, bounds)
    names = segment_names(liveness, bounds)
    elapsed = np.concatenate([[0.0], np.cumsum(np.array(costs.latencies, dtype=float))])

    segments: list[Segment] = []
    events: list[Event] = []
    for index, contents in enumerate(all_contents):
        events += [_copy("swap_out", graph, t, index, until) for t, until in outgoing.get(index, ())]
        events += [_copy("swap_in", graph, t, index, until) for t, until in incoming.get(index, ())]
        again_us = sum(costs.rerun_us[p] for p in contents.again)
        own_us = float(elapsed[contents.end] - elapsed[contents.begin])
        segments.append(
            Segment(
                name=names[index],
                operators=ranges([graph.operators[p].id for p in range(contents.begin, contents.end)]),
                recomputes=ranges([graph.operators[p].id for p in contents.again]),
                inputs=contents.inputs,
                outputs=contents.outputs,
                donated=_donated(contents, aliases),
                frees=(*frees.get(index, ()), *let_go.get(index, ())),
                resident_bytes=0,  # the sizes and times that are 0 here are filled in by `_sized` and `_timed`
                workspace_bytes=layout.workspaces[index],
                device_bytes=0,
                begin_us=0.0,
                latency_us=round(own_us + again_us, 3),
                recomputed_us=round(again_us, 3),
                stall_us=0.0,
            )
        )
        events += _recomputed(graph, contents, index)
        events += [_release(graph, t, index, "last use") for t in frees.get(index, ())]
        events += [_release(graph, t, index, "the host has it still") for t in let_go.get(index, ())]
    last = len(all_contents)
    events += [_copy("swap_out", graph, t, last, until) for t, until in outgoing.get(last, ())]
    segments = _sized(layout, segments, resident_bytes(graph, segments, events))

    named = {t for s in segments for t in (*s.inputs, *s.outputs)} | {e.tensor for e in events} | set(graph.inputs)
    peak = max(range(last), key=lambda i: (segments[i].device_bytes, -i))
    plan = replace(
        header,
        whole=False,
        peak_bytes=segments[peak].device_bytes,
        peak_segment=peak,
        recomputed_us=round(sum(s.recomputed_us for s in segments), 3),
        swapped_out_bytes=sum(e.nbytes for e in events if e.kind == "swap_out"),
        swapped_in_bytes=sum(e.nbytes for e in events if e.kind == "swap_in"),
        tensors=tuple(_planned(graph, t) for t in sorted(named)),
        segments=tuple(segments),
        events=tuple(events),
    )
    return _timed(plan, costs.profile)


def _sized(layout: Layout, segments: Sequence[Segment], resident: Sequence[int]) -> list[Segment]:
    """The segments with their sizes; `resident` are the resident bytes of each."""
    found: list[Segment] = []
    for index, (segment, held) in enumerate(zip(segments, resident, strict=True)):
        workspace = segment.workspace_bytes
        least = 0 if layout.least_bytes is None else layout.least_bytes[index]
        if layout.compiled is None or not layout.compiled[index]:
            workspace = max(workspace, least - held)
        nbytes = max(held + workspace, least)
        found.append(replace(segment, resident_bytes=held, workspace_bytes=workspace, device_bytes=nbytes))
    return found


def _timed(plan: Plan, profile: DeviceProfile) -> Plan:
    """The plan with its times, from a simulation of one iteration of it alone."""
    seen = simulate((plan,), profile)
    ends = [0.0, *(span.end_us for span in seen.segments)]
    segments = [
        replace(s, begin_us=round(span.begin_us, 3), stall_us=round(span.begin_us - before, 3))
        for s, span, before in zip(plan.segments, seen.segments, ends, strict=False)
    ]
    copies = {span.index: (span.begin_us, span.end_us) for span in (*seen.copies_out, *seen.copies_in)}
    events: list[Event] = []
    for place, e in enumerate(plan.events):
        triggered = ends[e.trigger + 1]
        if e.kind == "recompute":
            begin = seen.segments[e.until].begin_us
            end = begin + plan.segments[e.until].recomputed_us
        else:
            begin, end = copies.get(place, (triggered, triggered))
        delta = begin - triggered if place in copies else 0.0
        events.append(replace(e, delta_us=round(delta, 3), begin_us=round(begin, 3), end_us=round(end, 3)))
    return replace(
        plan,
        segments=tuple(segments),
        events=tuple(events),
        step_us=round(seen.step_us[0][0], 3),
        stall_us=round(seen.stall_us[0][0], 3),
    )


def empty_plan(graph: Graph) -> Plan:
    """A plan for `header` in which only the fields that name the graph have their values."""
    return Plan(
        schema_version=SCHEMA_VERSION, tensile_version="", program=graph.name, fingerprint=graph.fingerprint, policy="auto",
        device_profile="", state_memory="device", whole=False, workspaces="predicted", budget_bytes=None, peak_bytes=0,
        peak_segment=0, jit_peak_bytes=None, unplanned_peak_bytes=0, floor_bytes=0, floor_tensors=(), step_us=0.0, stall_us=0.0,
        recomputed_us=0.0, swapped_out_bytes=0, swapped_in_bytes=0, tensors=(), segments=(), events=(),
    )  # fmt: skip


def build_whole_plan(graph: Graph, header: Plan, profile: DeviceProfile, *, peak_bytes: int, latency_us: float) -> Plan:
    """The plan that runs the step as one executable."""
    resident = sum(graph.tensors[t].nbytes for t in graph.inputs)
    segment = Segment(
        name=f"{graph.name}_whole",
        operators=((0, len(graph.operators)),),
        recomputes=(),
        inputs=graph.inputs,
        outputs=graph.outputs,
        donated=(),
        frees=(),
        resident_bytes=resident,
        workspace_bytes=max(0, peak_bytes - resident),
        device_bytes=peak_bytes,
        begin_us=0.0,
        latency_us=round(latency_us, 3),
        recomputed_us=0.0,
        stall_us=0.0,
    )
    tensors = tuple(_planned(graph, t) for t in sorted({*graph.inputs, *graph.outputs}))
    step_us = round(profile.launch_us + latency_us, 3)
    return replace(
        header, whole=True, peak_bytes=peak_bytes, peak_segment=0, step_us=step_us, stall_us=0.0, recomputed_us=0.0,
        swapped_out_bytes=0, swapped_in_bytes=0, tensors=tensors, segments=(segment,), events=(),
    )  # fmt: skip


def _copies(
    retention: Retention, absences: Absences, bounds: tuple[int, ...]
) -> tuple[dict[int, list[tuple[TensorId, int]]], dict[int, list[tuple[TensorId, int]]]]:
    """Copies out and copies in, each by the segment right before whose launch they are issued.

    A copy is a pair of the tensor and the segment before whose launch it must have ended.
    """
    liveness = retention.liveness
    count = len(liveness.graph.operators)
    outgoing: dict[int, list[tuple[TensorId, int]]] = {}
    incoming: dict[int, list[tuple[TensorId, int]]] = {}
    edges = np.array(bounds)
    for t, several in sorted(absences.items()):
        leave = several[0].leave
        if leave >= 0:
            issued = int(np.searchsorted(edges, retention.last_need(t, leave), side="right"))
            gone_by = int(np.searchsorted(edges, leave, side="right"))
            outgoing.setdefault(issued, []).append((t, max(gone_by, issued)))
        for away in several:
            if away.back < count:
                issued = max(int(np.searchsorted(edges, away.back, side="right")) - 1, 0)
                used_by = int(np.searchsorted(edges, retention.next_need(t, away.leave), side="right")) - 1
                incoming.setdefault(issued, []).append((t, used_by))
    for copies in incoming.values():
        copies.sort(key=lambda copy: (copy[1], copy[0]))
    for copies in outgoing.values():
        copies.sort(key=lambda copy: (copy[1], copy[0]))
    return outgoing, incoming


def _freed_after_segment(retention: Retention, absences: Absences, bounds: tuple[int, ...]) -> dict[int, list[TensorId]]:
    """For each segment, the tensors that are released when it ends and need no copy, since the host has one already."""
    edges = np.array(bounds)
    found: dict[int, list[TensorId]] = {}
    for t, several in sorted(absences.items()):
        for away in several[1:]:
            index = int(np.searchsorted(edges, retention.last_need(t, away.leave), side="right")) - 1
            found.setdefault(index, []).append(t)
    return found


def _absences_over_boundaries(absences: Absences, bounds: tuple[int, ...]) -> dict[TensorId, tuple[Absence, ...]]:
    """The absences that contain a boundary, since a tensor cannot leave in the middle of a segment."""
    found: dict[TensorId, tuple[Absence, ...]] = {}
    for t, several in absences.items():
        apart = tuple(a for a in several if bisect_right(bounds, a.back) > bisect_right(bounds, a.leave))
        if apart:
            found[t] = apart
    return found


def _with_donated_state(contents: SegmentContents, retention: Retention) -> SegmentContents:
    """The contents, with the donated state of every update that the segment makes among its inputs, even if it is not read."""
    made = set(contents.outputs)
    first, end = contents.begin, contents.end
    unread = (old for old, new in retention.aliases.items() if new in made and first <= max(retention.end[old], 0) < end)
    return replace(contents, inputs=tuple(sorted({*contents.inputs, *unread})))


def _donated(contents: SegmentContents, aliases: Mapping[TensorId, TensorId]) -> tuple[TensorId, ...]:
    made = set(contents.outputs)
    return tuple(t for t in contents.inputs if t in aliases and aliases[t] in made)


def _aliases_first(contents: SegmentContents, aliases: Mapping[TensorId, TensorId]) -> SegmentContents:
    """The contents with its outputs reordered: first those that take over donated memory, in the order of the donated inputs.

    JAX gives a donated buffer to the first output of its shape. If that is not the update of the donated state, XLA makes a copy
    of what it would overwrite.
    """
    first = [aliases[t] for t in _donated(contents, aliases)]
    taken = set(first)
    return replace(contents, outputs=(*first, *(t for t in contents.outputs if t not in taken)))


def _frees(
    retention: Retention,
    all_contents: Sequence[SegmentContents],
    aliases: Mapping[TensorId, TensorId],
) -> dict[int, list[TensorId]]:
    """For each segment, the tensors on the device that nothing after it needs."""
    liveness = retention.liveness
    count = len(liveness.graph.operators)
    edges = np.array([e.begin for e in all_contents])
    donated = [set(_donated(e, aliases)) for e in all_contents]
    frees: dict[int, list[TensorId]] = {}
    for tensor in liveness.graph.tensors:
        t = tensor.id
        end = retention.end[t]
        if end >= count or t in liveness.kept_by_caller:
            continue
        index = int(np.searchsorted(edges, max(end, 0), side="right")) - 1
        crosses = liveness.begin[t] < all_contents[index].begin or (liveness.begin[t] < 0 and index == 0)
        if crosses and t not in donated[index]:
            frees.setdefault(index, []).append(t)
    return frees


def _copy(kind: EventKind, graph: Graph, t: TensorId, index: int, until: int) -> Event:
    reason = "nothing needs it for a while" if kind == "swap_out" else f"needed by segment {until}"
    return _event(kind, graph, t, index - 1, until, reason)


def _recomputed(graph: Graph, contents: SegmentContents, index: int) -> list[Event]:
    """One event for each tensor that the segment computes again and reads itself."""
    read = {t for p in range(contents.begin, contents.end) for t in graph.operators[p].inputs}
    reason = f"computed again inside segment {index}; keeping it would cost its bytes"
    again = (t for p in contents.again for t in graph.operators[p].outputs)
    return [_event("recompute", graph, t, index - 1, index, reason) for t in again if t in read]


def _release(graph: Graph, t: TensorId, index: int, reason: str) -> Event:
    return _event("release", graph, t, index, index, reason)


def _event(kind: EventKind, graph: Graph, t: TensorId, trigger: int, until: int, reason: str) -> Event:
    """An event that has no time yet."""
    tensor = graph.tensors[t]
    return Event(kind, t, tensor.name, tensor.nbytes, trigger, until, 0.0, 0.0, 0.0, reason)


def _planned(graph: Graph, t: TensorId) -> PlannedTensor:
    tensor = graph.tensors[t]
    return PlannedTensor(tensor.id, tensor.name, tensor.role, tensor.nbytes, tensor.shape, tensor.dtype)
