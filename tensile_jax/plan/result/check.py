"""Checks a plan by replaying it, independently of how it was made, and refuses the plan if anything is wrong.

A *segment* is a stretch of operators that is usually compiled as one executable. To *replay* a plan is to go through its segments
in the order of their launches, without running them, and to keep two sets of tensors: those on the device and those on the host.
The replay knows only the graph and the plan. It checks that

    - a segment's inputs are on the device, and its operators can run from these inputs in the given order
    - every operator of the step runs, and what runs twice is listed as recomputed
    - no tensor that belongs to the caller is freed
    - operators with effects run once, in the order in which the step has them
    - a tensor that is swapped in is in host memory: an earlier swap-out or the last iteration has put it there, and nothing has
      freed it there
    - a tensor that is swapped out is on the device
    - each copy starts after the end of the segment that triggers it, and ends before the segment that waits for it begins
    - no two swap-outs overlap, and no two swap-ins
    - no tensor is copied that the step itself keeps in host memory
    - a tensor that is donated to a segment is an input of the segment, and an output of the segment takes over its memory
    - for each segment, the bytes of the tensors on the device and of the workspace (the memory that the segment needs beside
      them) add up to at most the segment's `device_bytes`
    - a segment's `device_bytes` are at most the plan's peak. If several segments are compiled into one executable, this is not
      checked: XLA orders the operators, and the peak is that of the executable
    - what is on the device when the iteration begins is at most the `device_bytes` of the first segment, and what is there when
      the iteration ends is at most those of the last segment
    - if the plan states a peak of host memory, the bytes of tensors there never exceed it or the budget of host memory
    - at the end, every result of the step is on the device, or on the host if it is state that may stay on the host

A plan that leaves the step whole, without segments, has nothing to check.
"""

from collections.abc import Mapping, Sequence

from tensile_jax.errors import InvalidPlan
from tensile_jax.ir import Graph, Operator, OperatorId, TensorId
from tensile_jax.plan_format import MEMORIES, Event, Memory, Plan, Segment, budgets_of, peaks_of, unranged

_CLOCK_SLACK = 0.01  # microseconds; times in plans are rounded to a thousandth


def check(plan: Plan, graph: Graph) -> None:
    """Replay `plan` on `graph`.

    Raises:
        InvalidPlan: something is wrong; it names the segment, the tensor and what is wrong.
    """
    operator_of = {op.id: op for op in graph.operators}
    if plan.whole:
        return
    _check_ids(plan, graph, operator_of)
    owned_by_caller = {t.id for t in graph.tensors if t.producer is None and t.id not in graph.donated}
    successor = {pair.input: pair.output for pair in graph.carried}
    device = {t.id for t in graph.tensors if t.producer is None}
    arriving = _arrives_on_host(plan, graph)
    device -= arriving.keys()
    host = dict(arriving)  # in which memory each tensor waits, usually the host's
    at_begin = sum(graph.tensors[t].nbytes for t in device)
    if at_begin > plan.segments[0].device_bytes:
        raise InvalidPlan(f"begins with {at_begin} bytes; it says {plan.segments[0].device_bytes}", segment=0)
    moving_in: dict[TensorId, Event] = {}
    leaving: dict[TensorId, Event] = {}
    ran: set[OperatorId] = set()
    given: set[TensorId] = set()
    copied = {event.tensor for event in plan.events if event.kind in ("swap_out", "swap_in")}
    latest_effect: OperatorId | None = None
    may_rest = set(successor.values()) if plan.state_memory == "any" else set[TensorId]()
    returns: dict[TensorId, list[int]] = {}  # before which segments the tensor is swapped in
    for event in plan.events:
        if event.kind == "swap_in":
            returns.setdefault(event.tensor, []).append(event.trigger + 1)
    for index, segment in enumerate(plan.segments):
        for event in _issued(plan.events, index):
            _issue(event, index, device, host, moving_in, leaving, owned_by_caller)
        for event in [e for e in leaving.values() if e.until <= index]:
            device.discard(event.tensor)
            host[event.tensor] = event.memory
            del leaving[event.tensor]
        for t in segment.inputs:
            if t not in device:
                raise InvalidPlan(f"reads {graph.tensors[t].name}, which is not there", segment=index)
            moving_in.pop(t, None)
        alone = [o for o in unranged((*segment.recomputes, *segment.operators)) if operator_of[o].alone]
        if alone and unranged((*segment.recomputes, *segment.operators)) != alone[:1]:
            raise InvalidPlan(f"runs {operator_of[alone[0]].name} with others, and it is a segment by itself", segment=index)
        made = _run(segment, index, operator_of, graph)
        again = set(unranged(segment.recomputes))
        for o in unranged(segment.operators):
            if o in ran:
                raise InvalidPlan(f"runs {operator_of[o].name} a second time", segment=index)
            ran.add(o)
            if operator_of[o].effectful:
                if latest_effect is not None and o < latest_effect:
                    before = operator_of[latest_effect].name
                    raise InvalidPlan(f"runs {operator_of[o].name} after {before}, whose effect comes later", segment=index)
                latest_effect = o
        for o in again:
            if operator_of[o].effectful:
                raise InvalidPlan(f"recomputes {operator_of[o].name}, which has an effect", segment=index)
        if not again <= ran:
            raise InvalidPlan("recomputes an operator that has not run yet", segment=index)
        footprint = sum(graph.tensors[t].nbytes for t in device | set(segment.outputs))
        footprint -= sum(graph.tensors[t].nbytes for t in segment.donated)
        above = plan.launch == "segments" and segment.device_bytes > plan.peak_bytes
        if footprint + segment.workspace_bytes > segment.device_bytes or above:
            raise InvalidPlan(
                f"needs {footprint + segment.workspace_bytes} bytes; it says {segment.device_bytes}, the plan {plan.peak_bytes}",
                segment=index,
            )
        for t in segment.donated:
            if t not in segment.inputs:
                raise InvalidPlan(f"donates {graph.tensors[t].name}, which it does not read", segment=index)
            if successor.get(t) not in segment.outputs:
                raise InvalidPlan(f"donates {graph.tensors[t].name}, whose memory no output takes over", segment=index)
        for t in (*segment.frees, *segment.donated):
            if t not in device or t in owned_by_caller or t in leaving:
                raise InvalidPlan(f"frees {graph.tensors[t].name}, which it may not", segment=index)
            device.discard(t)
            if t not in may_rest and not any(again > index for again in returns.get(t, ())):
                host.pop(t, None)
        if not set(segment.outputs) <= made:
            raise InvalidPlan("gives an output that it does not make", segment=index)
        if len(set(segment.outputs)) != len(segment.outputs) or not device.isdisjoint(segment.outputs):
            raise InvalidPlan("gives an output that is there already", segment=index)
        swapped = [t for t in segment.outputs if t in copied and (t in given or t in host)]
        if swapped:
            raise InvalidPlan(f"makes {graph.tensors[swapped[0]].name} again, which the host has", segment=index)
        given.update(segment.outputs)
        device |= set(segment.outputs)
    last = len(plan.segments)
    for event in _issued(plan.events, last):
        _issue(event, last, device, host, moving_in, leaving, owned_by_caller)
    for event in leaving.values():
        device.discard(event.tensor)
        host[event.tensor] = event.memory
    at_end = sum(graph.tensors[t].nbytes for t in device)
    if at_end > plan.segments[-1].device_bytes:
        raise InvalidPlan(f"holds {at_end} bytes in the end; it says {plan.segments[-1].device_bytes}", segment=last)
    _check_results(plan, graph, device, host)
    for memory in MEMORIES:
        there = {t for t, where in arriving.items() if where == memory}
        _check_memory(memory, plan, graph, there, resting=set(graph.outputs) - device)
    if len(ran) != len(graph.operators):
        raise InvalidPlan(f"{len(graph.operators) - len(ran)} operators never ran", segment=last)
    for kind in ("swap_out", "swap_in"):
        for memory in MEMORIES:
            _check_lane([e for e in plan.events if e.kind == kind and e.memory == memory])
    _check_times(plan)


def _check_ids(plan: Plan, graph: Graph, operator_of: dict[OperatorId, Operator]) -> None:
    for index, segment in enumerate(plan.segments):
        named = (*segment.inputs, *segment.outputs, *segment.donated, *segment.frees)
        unknown = [t for t in named if not 0 <= t < len(graph.tensors)]
        spans = (*segment.operators, *segment.recomputes)
        if any(not 0 <= a < b <= len(graph.operators) for a, b in spans):
            raise InvalidPlan(f"names operators {spans}, and there are {len(graph.operators)}", segment=index)
        missing = [o for o in unranged(spans) if o not in operator_of]
        if unknown or missing:
            raise InvalidPlan(f"names tensors {unknown} and operators {missing}, which do not exist", segment=index)
    for tensor in plan.tensors:
        true = graph.tensors[tensor.id] if 0 <= tensor.id < len(graph.tensors) else None
        mine = (tensor.nbytes, tensor.host_bytes, tensor.shape, tensor.dtype)
        if true is None or (true.nbytes, true.host_bytes, true.shape, true.dtype) != mine:
            raise InvalidPlan(f"the plan has another {tensor.name} than the step", segment=0, tensor=tensor.name)
    for event in plan.events:
        if not 0 <= event.tensor < len(graph.tensors):
            raise InvalidPlan(f"an event names tensor {event.tensor}, which does not exist", segment=event.until)
        if event.kind in ("swap_out", "swap_in") and graph.tensors[event.tensor].in_host_memory:
            raise InvalidPlan(f"copies {event.name}, which the step has in host memory", segment=event.until, tensor=event.name)


def _arrives_on_host(plan: Plan, graph: Graph) -> dict[TensorId, Memory]:
    """Tensors whose first copy is a swap-in: state that the last iteration left on the host, or in another such memory."""
    first: dict[TensorId, Event] = {}
    for event in plan.events:
        if event.kind in ("swap_in", "swap_out"):
            first.setdefault(event.tensor, event)
    state = {pair.input for pair in graph.carried} & graph.donated if plan.state_memory == "any" else set[TensorId]()
    for t, event in first.items():
        if event.kind == "swap_in" and t not in state:
            raise InvalidPlan(f"brings in {event.name}, which never left", segment=event.trigger + 1, tensor=event.name)
    return {t: event.memory for t, event in first.items() if event.kind == "swap_in"}


def _issued(events: Sequence[Event], index: int) -> list[Event]:
    copies = [e for e in events if e.trigger == index - 1 and e.kind in ("swap_out", "swap_in")]
    return sorted(copies, key=lambda e: e.kind == "swap_in")


def _issue(
    event: Event,
    index: int,
    device: set[TensorId],
    host: dict[TensorId, Memory],
    moving_in: dict[TensorId, Event],
    leaving: dict[TensorId, Event],
    owned_by_caller: set[TensorId],
) -> None:
    t = event.tensor
    if event.kind == "swap_out":
        if t not in device or t in leaving or t in owned_by_caller:
            raise InvalidPlan(f"swaps out {event.name}, which is not there to go", segment=index, tensor=event.name)
        leaving[t] = event
        return
    if t in leaving and leaving[t].until <= index:
        device.discard(t)
        host[t] = leaving.pop(t).memory
    if host.get(t) != event.memory or t in device:
        raise InvalidPlan(f"swaps in {event.name}, which is not in {event.memory} memory", segment=index, tensor=event.name)
    device.add(t)
    moving_in[t] = event


def _run(segment: Segment, index: int, operator_of: dict[OperatorId, Operator], graph: Graph) -> set[TensorId]:
    known = set(segment.inputs)
    made: set[TensorId] = set()
    for o in (*unranged(segment.recomputes), *unranged(segment.operators)):
        operator = operator_of[o]
        for t in operator.inputs:
            tensor = graph.tensors[t]
            if t not in known and not (tensor.producer is None and tensor.role == "constant"):
                raise InvalidPlan(f"runs {operator.name} without {tensor.name}", segment=index)
        known.update(operator.outputs)
        made.update(operator.outputs)
    return made


def _check_results(plan: Plan, graph: Graph, device: set[TensorId], host: Mapping[TensorId, Memory]) -> None:
    state = {pair.output for pair in graph.carried}
    for t in graph.outputs:
        if t in device or (plan.state_memory == "any" and t in state and t in host):
            continue
        raise InvalidPlan(
            f"the result {graph.tensors[t].name} is not there when the step ends",
            segment=len(plan.segments),
            tensor=graph.tensors[t].name,
        )


def _check_memory(memory: Memory, plan: Plan, graph: Graph, there: set[TensorId], *, resting: set[TensorId]) -> None:
    """A memory never holds more than the plan says: `there` at the beginning, and every copy until nothing needs it."""
    peak, budget = peaks_of(plan)[memory], budgets_of(plan)[memory]
    if peak is None:
        return
    later = {e.tensor: e.until for e in sorted(plan.events, key=lambda e: e.trigger) if e.kind == "swap_in"}
    for index in range(len(plan.segments) + 1):
        there |= {e.tensor for e in _issued(plan.events, index) if e.kind == "swap_out" and e.memory == memory}
        needed = sum(graph.tensors[t].nbytes for t in there)
        if needed > peak or (budget is not None and needed > budget):
            raise InvalidPlan(f"needs {needed} bytes in {memory} memory; the plan says {peak}, of {budget}", segment=index)
        there -= {t for t in there if later.get(t, index + 1) <= index and t not in resting}


def _check_lane(copies: Sequence[Event]) -> None:
    ordered = sorted(copies, key=lambda e: (e.begin_us, e.end_us))
    for before, after in zip(ordered, ordered[1:], strict=False):
        if after.begin_us < before.end_us - _CLOCK_SLACK:
            raise InvalidPlan(f"the copies of {before.name} and {after.name} overlap", segment=after.until, tensor=after.name)


def _check_times(plan: Plan) -> None:
    """No copy begins before the segment that triggers it is over, or ends after the one that waits for it begins."""
    last = len(plan.segments)
    for event in plan.events:
        if event.kind not in ("swap_out", "swap_in"):
            continue
        if not -1 <= event.trigger < last or not 0 <= event.until <= last:
            raise InvalidPlan(f"the copy of {event.name} has no segment to follow", segment=event.until, tensor=event.name)
        trigger = plan.segments[event.trigger] if event.trigger >= 0 else None
        if trigger is not None and event.begin_us < trigger.begin_us + trigger.latency_us - _CLOCK_SLACK:
            raise InvalidPlan(f"the copy of {event.name} begins before it is triggered", segment=event.until, tensor=event.name)
        deadline = plan.segments[event.until].begin_us if event.until < last else plan.step_us
        if event.end_us > deadline + _CLOCK_SLACK:
            raise InvalidPlan(f"the copy of {event.name} ends after it is needed", segment=event.until, tensor=event.name)
