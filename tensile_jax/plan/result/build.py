"""Builds a plan from a layout: its segments and events, their sizes, and their times.

A *segment* is a stretch of operators that is compiled as one executable. A *layout* says where the step is cut into segments,
and gives each tensor its *residencies*, the intervals in which it is on the device (`layout.py`). A plan goes through the
segments of an iteration in order:

    boundary    A swap-out is issued right after the last segment that needs the tensor before it leaves. A swap-in is issued
                where the tensor's next residency begins. The plan waits for the copies that the next segment needs.
    segment     The segment runs for the latency of its operators and of what it computes again.
    afterwards  Tensors that nothing needs any more are released.

The *workspace* of a segment is the memory that the segment needs beside its inputs and results. `segment_sizes.py` computes the
memory in use while each segment runs. `simulate.py` computes the times at which segments run and copies begin and end.

If the caller has donated a state tensor, the new value takes over the memory of the old one: the segment that makes the new
value gets the old one donated. This is not possible if a later segment needs the old value.

Sizes in bytes, times in microseconds.
"""

from collections.abc import Sequence
from dataclasses import replace

import msgspec
import numpy as np

from tensile_jax.ir import Graph, TensorId
from tensile_jax.plan.analysis.device_profile import DeviceProfile
from tensile_jax.plan.analysis.latency import StepCosts
from tensile_jax.plan.analysis.liveness import Liveness
from tensile_jax.plan.result.instructions import Instruction, decode
from tensile_jax.plan.result.layout import Contents, Copy, Layout, contents_of, copies_of, on_device
from tensile_jax.plan.result.memory_curve import waiting_bytes
from tensile_jax.plan.result.segment_names import segment_names
from tensile_jax.plan.result.segment_sizes import whole_peak_bytes, with_sizes
from tensile_jax.plan.result.simulate import simulate
from tensile_jax.plan_format import (
    MEMORIES,
    SCHEMA_VERSION,
    Event,
    EventKind,
    Memory,
    Plan,
    PlannedTensor,
    Segment,
    ranges,
    with_peaks,
)


def build_plan(layout: Layout, liveness: Liveness, workspaces: Sequence[int], costs: StepCosts, header: Plan) -> Plan:
    """The plan of `layout`; `header` is a plan with the fields that do not depend on the layout.

    Args:
        workspaces: of each segment, in bytes.

    Raises:
        KeyError: a segment needs an input of the step that is not on the device.
    """
    graph = liveness.graph
    bounds = layout.boundaries
    last = len(bounds) - 1
    at, after = on_device(layout)
    all_contents = [contents_of(liveness, bounds[j], bounds[j + 1], at[j], sorted(after[j] - at[j])) for j in range(last)]
    donations = [_donations(liveness, contents, at[j] - after[j]) for j, contents in enumerate(all_contents)]
    outgoing, incoming, let_go = copies_of(layout, all_contents)
    names = segment_names(liveness, bounds)
    elapsed = np.concatenate([[0.0], np.cumsum(np.array(costs.latencies, dtype=float))])
    caller = liveness.kept_by_caller

    segments: list[Segment] = []
    events: list[Event] = []
    for index, contents in enumerate(all_contents):
        donated = donations[index]
        taken = set(donated.values())
        frees = tuple(sorted(at[index] - after[index] - set(donated) - caller - let_go.get(index, set())))
        events += [_copied("swap_out", graph, copy, index) for copy in outgoing.get(index, ())]
        events += [_copied("swap_in", graph, copy, index) for copy in incoming.get(index, ())]
        again_us = sum(costs.rerun_us[p] for p in contents.again)
        own_us = float(elapsed[contents.end] - elapsed[contents.begin])
        segments.append(
            Segment(
                name=names[index],
                operators=ranges([graph.operators[p].id for p in range(contents.begin, contents.end)]),
                recomputes=ranges([graph.operators[p].id for p in contents.again]),
                inputs=tuple(sorted({*contents.inputs, *donated})),
                # JAX gives a donated buffer to the first output of its shape. If that is not the update of the donated state,
                # XLA makes a copy of what it would overwrite.
                outputs=(*donated.values(), *(t for t in contents.outputs if t not in taken)),
                donated=tuple(donated),
                frees=(*frees, *sorted(let_go.get(index, ()))),
                resident_bytes=0,  # the sizes and times that are 0 here are filled in by `with_sizes` and `timed`
                workspace_bytes=workspaces[index],
                device_bytes=0,
                begin_us=0.0,
                latency_us=round(own_us + again_us, 3),
                recomputed_us=round(again_us, 3),
                stall_us=0.0,
            )
        )
        events += _recomputed(graph, contents, index)
        events += [_release(graph, t, index, "last use") for t in frees]
        events += [_release(graph, t, index, "the host has it still") for t in sorted(let_go.get(index, ()))]
    events += [_copied("swap_out", graph, copy, last) for copy in outgoing.get(last, ())]
    events += [_copied("swap_in", graph, copy, last) for copy in incoming.get(last, ())]
    named = {t for s in segments for t in (*s.inputs, *s.outputs)} | {e.tensor for e in events} | set(graph.inputs)
    tensors = tuple(_planned(graph, t) for t in sorted(named))
    plan = replace(header, whole=False, tensors=tensors, segments=tuple(segments), events=tuple(events))
    return sized(plan, graph, costs.profile)


def sized(plan: Plan, graph: Graph, profile: DeviceProfile) -> Plan:
    """The plan with the sizes and times that follow from its segments, their workspaces, and its events."""
    code = decode(plan, graph)
    workspaces = [segment.workspace_bytes for segment in plan.segments]
    plan = replace(
        with_sizes(plan, code, graph, workspaces, profile),
        recomputed_us=round(sum(s.recomputed_us for s in plan.segments), 3),
        swapped_out_bytes=sum(e.nbytes for e in plan.events if e.kind == "swap_out"),
        swapped_in_bytes=sum(e.nbytes for e in plan.events if e.kind == "swap_in"),
    )
    plan = with_peaks(plan, {memory: max(waiting_bytes(code, graph, memory)) for memory in MEMORIES})
    return timed(plan, code, profile)


def _donations(liveness: Liveness, contents: Contents, released: set[TensorId]) -> dict[TensorId, TensorId]:
    """The state that the segment releases and whose update it makes, ascending, each with that update."""
    made = set(contents.outputs)
    return {old: new for old, new in sorted(liveness.aliases) if old in released and new in made}


def timed(plan: Plan, code: Sequence[Instruction], profile: DeviceProfile) -> Plan:
    """The plan, of which `code` are the instructions, with its times, from a simulation of one iteration."""
    plan = replace(plan, launch_us=profile.launch_us)
    seen = simulate(plan, code, profile)
    ends = [0.0, *(end for _, end in seen.segments)]
    segments = [
        replace(s, begin_us=round(begin, 3), stall_us=round(begin - before, 3))
        for s, (begin, _), before in zip(plan.segments, seen.segments, ends, strict=False)
    ]
    events: list[Event] = []
    for place, e in enumerate(plan.events):
        triggered = ends[e.trigger + 1]
        if e.kind == "recompute":
            begin, _ = seen.segments[e.until]
            end = begin + plan.segments[e.until].recomputed_us
        else:
            begin, end = seen.copies.get(place, (triggered, triggered))
        delta = begin - triggered if place in seen.copies else 0.0
        times = {"delta_us": round(delta, 3), "begin_us": round(begin, 3), "end_us": round(end, 3)}
        events.append(msgspec.structs.replace(e, **times))
    return replace(
        plan,
        segments=tuple(segments),
        events=tuple(events),
        step_us=round(seen.step_us, 3),
        stall_us=round(seen.stall_us, 3),
    )


def empty_plan(graph: Graph) -> Plan:
    """A plan for `header` in which only the fields that name the graph have their values."""
    return Plan(
        schema_version=SCHEMA_VERSION, tensile_version="", program=graph.name, fingerprint=graph.fingerprint, policy="auto",
        device_profile="", state_memory="device", whole=False, workspaces="predicted", budget_bytes=None, peak_bytes=0,
        peak_segment=0, jit_peak_bytes=None, unplanned_peak_bytes=0, floor_bytes=0, floor_tensors=(), step_us=0.0, stall_us=0.0,
        recomputed_us=0.0, swapped_out_bytes=0, swapped_in_bytes=0, tensors=(), segments=(), events=(),
        donated=tuple(sorted(graph.donated)),
    )  # fmt: skip


def build_whole_plan(graph: Graph, header: Plan, profile: DeviceProfile, *, needed_bytes: int, latency_us: float) -> Plan:
    """The plan that runs the step as one executable, of which XLA says that it needs so many bytes."""
    peak_bytes = whole_peak_bytes(needed_bytes, graph, profile)
    unasked_bytes = peak_bytes - needed_bytes
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
        workspace_bytes=max(0, needed_bytes - resident),
        allocator_bytes=unasked_bytes,
        device_bytes=peak_bytes,
        begin_us=0.0,
        latency_us=round(latency_us, 3),
        recomputed_us=0.0,
        stall_us=0.0,
    )
    tensors = tuple(_planned(graph, t) for t in sorted({*graph.inputs, *graph.outputs}))
    step_us = round(profile.launch_us + latency_us, 3)
    return replace(
        header, whole=True, launch_us=profile.launch_us, peak_bytes=peak_bytes, peak_segment=0, step_us=step_us, stall_us=0.0,
        recomputed_us=0.0, swapped_out_bytes=0, swapped_in_bytes=0, host_peak_bytes=0, tensors=tensors, segments=(segment,),
        events=(), allocator_bytes=None if profile.allocator == "exact" else unasked_bytes,
    )  # fmt: skip


def _copied(kind: EventKind, graph: Graph, copy: Copy, index: int) -> Event:
    reason = "nothing needs it for a while" if kind == "swap_out" else f"needed by segment {copy.until}"
    return _event(kind, graph, copy.tensor, index - 1, copy.until, reason, copy.memory)


def _recomputed(graph: Graph, contents: Contents, index: int) -> list[Event]:
    """One event for each tensor that the segment computes again and reads itself."""
    read = {t for p in range(contents.begin, contents.end) for t in graph.operators[p].inputs} | set(contents.outputs)
    reason = f"computed again inside segment {index}; keeping it would cost its bytes"
    again = (t for p in contents.again for t in graph.operators[p].outputs)
    return [_event("recompute", graph, t, index - 1, index, reason) for t in again if t in read]


def _release(graph: Graph, t: TensorId, index: int, reason: str) -> Event:
    return _event("release", graph, t, index, index, reason)


def _event(kind: EventKind, graph: Graph, t: TensorId, trigger: int, until: int, reason: str, memory: Memory = "host") -> Event:
    """An event that has no time yet."""
    tensor = graph.tensors[t]
    return Event(kind, t, tensor.name, tensor.nbytes, trigger, until, 0.0, 0.0, 0.0, reason, memory)


def _planned(graph: Graph, t: TensorId) -> PlannedTensor:
    tensor = graph.tensors[t]
    return PlannedTensor(tensor.id, tensor.name, tensor.role, tensor.nbytes, tensor.shape, tensor.dtype, tensor.host_bytes)
