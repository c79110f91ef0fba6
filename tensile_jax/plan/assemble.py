"""From a choice of what to keep and where to cut, to the plan: segments, events, and their predicted times.

One pass over the segments in launch order, with three clocks: compute, and the link in each direction.

    boundary b   swap-outs whose last need is over are issued; swap-ins whose time has come are issued;
                 copies that must have ended by b are waited for (a stall, if they have not)
    segment      runs for the latency of its operators and of what it computes again
    afterwards   what nothing needs any more is released

A copy runs when its lane is free and not before it is issued, and overlaps whatever is launched after it.

    device_bytes(segment) = stored at its begin + made by it + workspace
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tensile_jax.ir import Graph, OperatorId, TensorId
from tensile_jax.plan.cut import rerun_latency
from tensile_jax.plan.latency import DeviceProfile
from tensile_jax.plan.retention import Emission, Retention, emit
from tensile_jax.plan.stays import Absence, Absences, find_stays, inherited, stored_bytes
from tensile_jax.plan.traffic import Traffic
from tensile_jax.schedule import Event, Plan, PlannedTensor, Segment, ranges


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """What a policy decides: what is dropped, what is away, where to cut, and the workspace of each segment."""

    retention: Retention
    absences: Absences
    boundaries: tuple[int, ...]
    workspaces: tuple[int, ...]


def assemble(layout: Layout, traffic: Traffic, profile: DeviceProfile, latencies: Sequence[float], header: Plan) -> Plan:
    """The plan of `layout`; `header` gives the fields that do not depend on it."""
    retention = layout.retention
    activity = retention.activity
    graph = activity.graph
    count = len(graph.operators)
    bounds = layout.boundaries
    absences = _effective(layout.absences, bounds)
    stored = stored_bytes(find_stays(retention, absences), count)
    heirs = inherited(retention)
    emissions = [_aligned(emit(retention, a, b), heirs) for a, b in zip(bounds, bounds[1:], strict=False)]
    outgoing, incoming = _copies(retention, absences, bounds)
    frees = _frees(retention, emissions, heirs)
    let_go = _let_go(retention, absences, bounds)
    elapsed = np.concatenate([[0.0], np.cumsum(np.array(latencies, dtype=float))])

    clock = lane_out = lane_in = stalled = 0.0
    ready: dict[TensorId, float] = {}
    gone: dict[TensorId, float] = {}
    segments: list[Segment] = []
    events: list[Event] = []
    for index, emission in enumerate(emissions):
        began = clock
        for t, until in outgoing.get(index, ()):
            start = max(lane_out, clock)
            lane_out = gone[t] = start + graph.tensors[t].nbytes / profile.device_to_host_bytes_per_us
            events.append(_copy("swap_out", graph, t, index, until, clock, start, lane_out))
        for t, until in incoming.get(index, ()):
            start = max(lane_in, clock, gone.get(t, 0.0))
            lane_in = ready[t] = start + graph.tensors[t].nbytes / profile.host_to_device_bytes_per_us
            events.append(_copy("swap_in", graph, t, index, until, clock, start, lane_in))
        for e in events:
            if e.kind in ("swap_out", "swap_in") and e.until == index:
                clock = max(clock, e.end_us)
        clock = max([clock, *(ready.get(t, 0.0) for t in emission.inputs)])
        waited = clock - began
        again_us = sum(rerun_latency(p, retention, traffic, profile) for p in emission.again)
        own_us = float(elapsed[emission.end] - elapsed[emission.begin])
        coming = sum(
            graph.tensors[t].nbytes for t, several in absences.items() for a in several if emission.begin <= a.back < emission.end
        )
        segments.append(
            Segment(
                name=f"segment_{index:03d}",
                operators=ranges([graph.operators[p].id for p in range(emission.begin, emission.end)]),
                recomputes=ranges([graph.operators[p].id for p in emission.again]),
                inputs=emission.inputs,
                outputs=emission.outputs,
                donated=_donated(emission, heirs),
                frees=(*frees.get(index, ()), *let_go.get(index, ())),
                resident_bytes=(resident := int(stored[emission.begin]) + coming + _made(graph, emission, heirs)),
                workspace_bytes=layout.workspaces[index],
                device_bytes=resident + layout.workspaces[index],
                begin_us=round(clock, 3),
                latency_us=round(own_us + again_us, 3),
                recomputed_us=round(again_us, 3),
                stall_us=round(waited, 3),
            )
        )
        clock += profile.launch_us + own_us + again_us
        stalled += waited
        events += _recomputed(graph, retention, emission, index, clock)
        events += [_release(graph, t, index, clock, "last use") for t in frees.get(index, ())]
        events += [_release(graph, t, index, clock, "the host has it still") for t in let_go.get(index, ())]
    last = len(emissions)
    for t, until in outgoing.get(last, ()):
        start = max(lane_out, clock)
        lane_out = start + graph.tensors[t].nbytes / profile.device_to_host_bytes_per_us
        events.append(_copy("swap_out", graph, t, last, until, clock, start, lane_out))
    finish = max([clock, *(e.end_us for e in events if e.kind in ("swap_out", "swap_in"))])
    stalled += finish - clock

    named = {t for s in segments for t in (*s.inputs, *s.outputs)} | {e.tensor for e in events} | set(graph.inputs)
    peak = max(range(last), key=lambda i: (segments[i].device_bytes, -i))
    return replace(
        header,
        whole=False,
        peak_bytes=segments[peak].device_bytes,
        peak_segment=peak,
        step_us=round(finish, 3),
        stall_us=round(stalled, 3),
        recomputed_us=round(sum(s.recomputed_us for s in segments), 3),
        swapped_out_bytes=sum(e.nbytes for e in events if e.kind == "swap_out"),
        swapped_in_bytes=sum(e.nbytes for e in events if e.kind == "swap_in"),
        tensors=tuple(_planned(graph, t) for t in sorted(named)),
        segments=tuple(segments),
        events=tuple(events),
    )


def planned_whole(graph: Graph, header: Plan, *, peak_bytes: int, step_us: float) -> Plan:
    """The plan that runs the step as one executable."""
    segment = Segment(
        name=f"{graph.name}_whole",
        operators=((0, len(graph.operators)),),
        recomputes=(),
        inputs=graph.inputs,
        outputs=graph.outputs,
        donated=(),
        frees=(),
        resident_bytes=sum(graph.tensors[t].nbytes for t in graph.inputs),
        workspace_bytes=max(0, peak_bytes - sum(graph.tensors[t].nbytes for t in graph.inputs)),
        device_bytes=peak_bytes,
        begin_us=0.0,
        latency_us=step_us,
        recomputed_us=0.0,
        stall_us=0.0,
    )
    tensors = tuple(_planned(graph, t) for t in sorted({*graph.inputs, *graph.outputs}))
    return replace(
        header, whole=True, peak_bytes=peak_bytes, peak_segment=0, step_us=round(step_us, 3), stall_us=0.0,
        recomputed_us=0.0, swapped_out_bytes=0, swapped_in_bytes=0, tensors=tensors, segments=(segment,), events=(),
    )  # fmt: skip


def _copies(
    retention: Retention, absences: Absences, bounds: tuple[int, ...]
) -> tuple[dict[int, list[tuple[TensorId, int]]], dict[int, list[tuple[TensorId, int]]]]:
    """For each segment index, the copies issued right before its launch: (tensor, index of the segment to end before)."""
    activity = retention.activity
    count = len(activity.graph.operators)
    outgoing: dict[int, list[tuple[TensorId, int]]] = {}
    incoming: dict[int, list[tuple[TensorId, int]]] = {}
    edges = np.array(bounds)
    for t, several in sorted(absences.items()):
        leave = several[0].leave
        if leave >= 0:
            issued = int(np.searchsorted(edges, _last_need(retention, t, leave), side="right"))
            gone_by = int(np.searchsorted(edges, leave, side="right"))
            outgoing.setdefault(issued, []).append((t, max(gone_by, issued)))
        for away in several:
            if away.back < count:
                issued = max(int(np.searchsorted(edges, away.back, side="right")) - 1, 0)
                needs = retention.needs[t]
                later = bisect_right(needs, away.leave)
                need = needs[later] if later < len(needs) else count
                used_by = int(np.searchsorted(edges, need, side="right")) - 1
                incoming.setdefault(issued, []).append((t, used_by))
    for copies in incoming.values():
        copies.sort(key=lambda copy: (copy[1], copy[0]))
    for copies in outgoing.values():
        copies.sort(key=lambda copy: (copy[1], copy[0]))
    return outgoing, incoming


def _last_need(retention: Retention, t: TensorId, leave: int) -> int:
    """The last place that needs the tensor before it leaves, or where it is made; -1 for inputs that nothing needed yet."""
    needs = retention.needs[t]
    before = bisect_right(needs, leave)
    return max(retention.activity.begin[t], needs[before - 1] if before else -1)


def _let_go(retention: Retention, absences: Absences, bounds: tuple[int, ...]) -> dict[int, list[TensorId]]:
    """For each segment, the tensors whose copy on the device goes when it ends, since the host has had one since before."""
    edges = np.array(bounds)
    found: dict[int, list[TensorId]] = {}
    for t, several in sorted(absences.items()):
        for away in several[1:]:
            index = int(np.searchsorted(edges, _last_need(retention, t, away.leave), side="right")) - 1
            found.setdefault(index, []).append(t)
    return found


def _effective(absences: Absences, bounds: tuple[int, ...]) -> dict[TensorId, tuple[Absence, ...]]:
    """The absences in which there is a boundary: a tensor cannot leave in the middle of a segment."""
    found: dict[TensorId, tuple[Absence, ...]] = {}
    for t, several in absences.items():
        apart = tuple(a for a in several if bisect_right(bounds, a.back) > bisect_right(bounds, a.leave))
        if apart:
            found[t] = apart
    return found


def _donated(emission: Emission, heirs: Mapping[TensorId, TensorId]) -> tuple[TensorId, ...]:
    made = set(emission.outputs)
    return tuple(t for t in emission.inputs if t in heirs and heirs[t] in made)


def _aligned(emission: Emission, heirs: Mapping[TensorId, TensorId]) -> Emission:
    """The same with heirs first, in the order of what is donated to them.

    JAX gives a donated buffer to the first output of its shape. Unless that is the heir, XLA copies what it would overwrite.
    """
    first = [heirs[t] for t in _donated(emission, heirs)]
    taken = set(first)
    return replace(emission, outputs=(*first, *(t for t in emission.outputs if t not in taken)))


def _made(graph: Graph, emission: Emission, heirs: Mapping[TensorId, TensorId]) -> int:
    """Bytes that the segment adds: its outputs, but for those that take over memory which is counted already."""
    inheriting = set(heirs.values())
    return sum(graph.tensors[t].nbytes for t in emission.outputs if t not in inheriting)


def _frees(
    retention: Retention,
    emissions: Sequence[Emission],
    heirs: Mapping[TensorId, TensorId],
) -> dict[int, list[TensorId]]:
    """For each segment, the tensors on the device that nothing after it needs."""
    activity = retention.activity
    count = len(activity.graph.operators)
    edges = np.array([e.begin for e in emissions])
    donated = [set(_donated(e, heirs)) for e in emissions]
    frees: dict[int, list[TensorId]] = {}
    for tensor in activity.graph.tensors:
        t = tensor.id
        end = retention.end[t]
        if end >= count or t in activity.kept_by_caller:
            continue
        index = int(np.searchsorted(edges, max(end, 0), side="right")) - 1
        crosses = activity.begin[t] < emissions[index].begin or (activity.begin[t] < 0 and index == 0)
        if crosses and t not in donated[index]:
            frees.setdefault(index, []).append(t)
    return frees


def _copy(kind: str, graph: Graph, t: TensorId, index: int, until: int, issued: float, begin: float, end: float) -> Event:
    tensor = graph.tensors[t]
    reason = {
        "swap_out": "nothing needs it for a while, and the link is free",
        "swap_in": f"needed by segment {until}",
    }[kind]
    return Event(
        kind="swap_out" if kind == "swap_out" else "swap_in",
        tensor=t,
        name=tensor.name,
        nbytes=tensor.nbytes,
        trigger=index - 1,
        until=until,
        delta_us=round(begin - issued, 3),
        begin_us=round(begin, 3),
        end_us=round(end, 3),
        reason=reason,
    )


def _recomputed(graph: Graph, retention: Retention, emission: Emission, index: int, now: float) -> list[Event]:
    """One event for each tensor that the segment computes again and reads itself."""
    read = {t for p in range(emission.begin, emission.end) for t in graph.operators[p].inputs}
    return [
        Event(
            kind="recompute",
            tensor=t,
            name=graph.tensors[t].name,
            nbytes=graph.tensors[t].nbytes,
            trigger=index - 1,
            until=index,
            delta_us=0.0,
            begin_us=round(now, 3),
            end_us=round(now, 3),
            reason=f"computed again inside segment {index}; keeping it would cost its bytes",
        )
        for p in emission.again
        for t in graph.operators[p].outputs
        if t in read
    ]


def _release(graph: Graph, t: TensorId, index: int, now: float, reason: str) -> Event:
    tensor = graph.tensors[t]
    return Event("release", t, tensor.name, tensor.nbytes, index, index, 0.0, round(now, 3), round(now, 3), reason)


def _planned(graph: Graph, t: TensorId) -> PlannedTensor:
    tensor = graph.tensors[t]
    return PlannedTensor(tensor.id, tensor.name, tensor.role, tensor.nbytes, tensor.shape, tensor.dtype)


def segment_operators(graph: Graph, segment: Segment) -> list[OperatorId]:
    """The ids of everything that the segment runs, what it computes again first."""
    return [OperatorId(i) for a, b in (*segment.recomputes, *segment.operators) for i in range(a, b)]
