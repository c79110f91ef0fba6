"""The replay accepts every plan that the planner makes, and refuses each way of breaking one."""

import dataclasses
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tensile_jax.errors import InvalidPlan
from tensile_jax.ir import Graph, TensorId
from tensile_jax.plan.analysis.absence import Absence
from tensile_jax.plan.analysis.liveness import find_liveness
from tensile_jax.plan.analysis.operator_order import order
from tensile_jax.plan.analysis.retention import retain
from tensile_jax.plan.result.build import build_whole_plan
from tensile_jax.plan.result.check import check
from tensile_jax.plan_format import Event, Plan, Segment, ranges, unranged
from tests.builders import PROFILE, graph_of, header_for, plan_by_hand, tensor_named, training_graph


@pytest.fixture(scope="module")
def graph() -> Graph:
    return order(training_graph(4, activation=100_000))


@pytest.fixture(scope="module")
def plan(graph: Graph) -> Plan:
    """By hand: every operator a segment, but for two; y0 and y1 go to the host and return, y2 is computed again."""
    liveness = find_liveness(graph)
    y0, y1, y2 = (tensor_named(graph, name) for name in ("y0", "y1", "y2"))
    first = {t: next(p for p in liveness.uses[t]) for t in (y0, y1, y2)}
    again = {t: next(p for p in liveness.uses[t] if p > first[t]) for t in (y0, y1, y2)}
    retention = retain(liveness, {y2: first[y2]})
    absences = {t: (Absence(t, first[t] + 1, again[t] - 2, 0.0),) for t in (y0, y1)}
    count = len(graph.operators)
    bounds = tuple(b for b in range(count + 1) if b not in (2, count - 2))
    return plan_by_hand(graph, retention, bounds, absences, workspace=1_000)


def with_state_out(graph: Graph) -> Plan:
    """Every operator a segment; the first weight is on the host between iterations."""
    retention = retain(find_liveness(graph), {})
    w, v = tensor_named(graph, "w0"), tensor_named(graph, "v0")
    count = len(graph.operators)
    made = retention.liveness.begin[v]
    absences = {w: (Absence(w, -1, -1, 0.0),), v: (Absence(v, min(made + 1, count - 1), count, 0.0),)}
    return plan_by_hand(graph, retention, range(count + 1), absences, state_memory="any")


def with_two_absences(graph: Graph) -> Plan:
    """Every operator a segment; the second weight goes to the host before its forward use, and off the device again after it."""
    retention = retain(find_liveness(graph), {})
    w = tensor_named(graph, "w1")
    count = len(graph.operators)
    first, again = retention.needs[w][:2]
    absences = {w: (Absence(w, -1, first - 1, 0.0), Absence(w, first, again - 2, 0.0))}
    return plan_by_hand(graph, retention, range(count + 1), absences, state_memory="any")


def with_segment(plan: Plan, index: int, **changes: Any) -> Plan:
    segments = list(plan.segments)
    segments[index] = dataclasses.replace(segments[index], **changes)
    return dataclasses.replace(plan, segments=tuple(segments))


def with_event(plan: Plan, event: Event, **changes: Any) -> Plan:
    changed = msgspec.structs.replace(event, **changes)
    return dataclasses.replace(plan, events=tuple(changed if e is event else e for e in plan.events))


def without_event(plan: Plan, event: Event) -> Plan:
    return dataclasses.replace(plan, events=tuple(e for e in plan.events if e is not event))


def copies(plan: Plan, kind: str) -> list[Event]:
    return [e for e in plan.events if e.kind == kind]


def find(plan: Plan, wanted: Any) -> tuple[int, Segment]:
    return next((i, s) for i, s in enumerate(plan.segments) if wanted(s))


def test_the_plan_under_test_swaps_and_recomputes_and_is_valid(graph: Graph, plan: Plan) -> None:
    check(plan, graph)
    assert copies(plan, "swap_out") and copies(plan, "swap_in") and len(plan.segments) > 3
    assert any(s.donated for s in plan.segments) and any(s.frees for s in plan.segments)
    assert copies(plan, "recompute") and any(s.recomputes for s in plan.segments)
    assert {e.name for e in copies(plan, "swap_out")} == {e.name for e in copies(plan, "swap_in")} == {"y0", "y1"}


def test_a_tensor_that_the_host_has_leaves_again_without_a_copy(graph: Graph) -> None:
    plan = with_two_absences(graph)
    check(plan, graph)
    w = tensor_named(graph, "w1")
    moves = [(e.kind, e.trigger) for e in plan.events if e.tensor == w]
    first, again = find_liveness(graph).uses[w][:2]
    assert moves[:3] == [("swap_in", first - 2), ("release", first), ("swap_in", again - 3)]
    assert plan.swapped_out_bytes == 0 and plan.swapped_in_bytes == 2 * graph.tensors[w].nbytes
    with pytest.raises(InvalidPlan, match="reads w1, which is not there"):
        check(without_event(plan, copies(plan, "swap_in")[1]), graph)


def test_a_whole_plan_is_valid(graph: Graph) -> None:
    check(build_whole_plan(graph, header_for(graph), PROFILE, needed_bytes=10**6, latency_us=1.0), graph)


def test_a_swap_in_that_was_lost_is_refused(graph: Graph, plan: Plan) -> None:
    event = copies(plan, "swap_in")[0]
    with pytest.raises(InvalidPlan, match=f"reads {event.name}, which is not there") as caught:
        check(without_event(plan, event), graph)
    assert caught.value.segment > event.trigger


def test_a_swap_out_that_was_lost_is_refused(graph: Graph, plan: Plan) -> None:
    event = copies(plan, "swap_out")[0]
    with pytest.raises(InvalidPlan):
        check(without_event(plan, event), graph)


def test_both_copies_lost_leave_more_on_the_device_than_the_plan_says(graph: Graph, plan: Plan) -> None:
    t = copies(plan, "swap_out")[0].tensor
    stripped = dataclasses.replace(plan, events=tuple(e for e in plan.events if e.tensor != t or e.kind == "release"))
    with pytest.raises(InvalidPlan, match=r"needs \d+ bytes; it says"):
        check(stripped, graph)


def test_a_swap_in_that_comes_too_late_is_refused(graph: Graph, plan: Plan) -> None:
    event = copies(plan, "swap_in")[0]
    with pytest.raises(InvalidPlan, match="not there"):
        check(with_event(plan, event, trigger=event.until, until=event.until + 1), graph)


def test_a_swap_in_before_the_swap_out_is_refused(graph: Graph, plan: Plan) -> None:
    out = copies(plan, "swap_out")[0]
    into = next(e for e in copies(plan, "swap_in") if e.tensor == out.tensor)
    with pytest.raises(InvalidPlan):
        check(with_event(plan, into, trigger=out.trigger - 1), graph)


def test_a_tensor_that_leaves_before_it_is_made_is_refused(graph: Graph, plan: Plan) -> None:
    event = copies(plan, "swap_out")[0]
    with pytest.raises(InvalidPlan, match="swaps out .*, which is not there to go"):
        check(with_event(plan, event, trigger=-1), graph)


def test_swapping_what_belongs_to_the_caller_is_refused(graph: Graph, plan: Plan) -> None:
    x = tensor_named(graph, "x")
    event = copies(plan, "swap_out")[0]
    theirs = msgspec.structs.replace(event, tensor=x, name="x", trigger=0, until=1)
    with pytest.raises(InvalidPlan, match="swaps out x"):
        check(dataclasses.replace(plan, events=(theirs, *plan.events)), graph)


def test_copies_of_one_direction_that_overlap_are_refused(graph: Graph, plan: Plan) -> None:
    first, second = copies(plan, "swap_out")[:2]
    with pytest.raises(InvalidPlan, match=f"the copies of .*{second.name}.* overlap|copies of .* overlap"):
        check(with_event(plan, second, begin_us=first.begin_us + 1, end_us=first.end_us + 1), graph)


def test_a_copy_that_ends_after_the_segment_that_needs_it_begins_is_refused(graph: Graph, plan: Plan) -> None:
    event = max(copies(plan, "swap_in"), key=lambda e: e.end_us)
    until = plan.segments[event.until].begin_us
    with pytest.raises(InvalidPlan, match="ends"):
        check(with_event(plan, event, begin_us=until + 1, end_us=until + 1 + event.end_us - event.begin_us), graph)


def test_a_copy_that_begins_before_it_is_triggered_is_refused(graph: Graph, plan: Plan) -> None:
    event = max(copies(plan, "swap_out"), key=lambda e: e.begin_us)
    before = min(e.begin_us for e in copies(plan, "swap_out")) - (event.end_us - event.begin_us) - 1
    with pytest.raises(InvalidPlan, match="begins"):
        check(with_event(plan, event, begin_us=before, end_us=before + event.end_us - event.begin_us), graph)


def test_segments_in_another_order_are_refused(graph: Graph, plan: Plan) -> None:
    for i in range(len(plan.segments) - 1):
        segments = list(plan.segments)
        segments[i], segments[i + 1] = segments[i + 1], segments[i]
        with pytest.raises(InvalidPlan):
            check(dataclasses.replace(plan, segments=tuple(segments)), graph)


def test_a_saved_plan_whose_segments_have_other_names_is_read_and_stands(graph: Graph, plan: Plan, tmp_path: Path) -> None:
    numbered = tuple(dataclasses.replace(s, name=f"segment_{i:03d}") for i, s in enumerate(plan.segments))  # of earlier versions
    dataclasses.replace(plan, segments=numbered).save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    check(loaded, graph)
    assert loaded.segments == numbered and loaded.events == plan.events


def test_a_segment_that_was_lost_is_refused(graph: Graph, plan: Plan) -> None:
    for i in range(len(plan.segments)):
        with pytest.raises(InvalidPlan):
            check(dataclasses.replace(plan, segments=(*plan.segments[:i], *plan.segments[i + 1 :])), graph)


def test_a_segment_that_runs_twice_is_refused(graph: Graph, plan: Plan) -> None:
    for i in range(len(plan.segments)):
        with pytest.raises(InvalidPlan):
            check(dataclasses.replace(plan, segments=(*plan.segments[: i + 1], *plan.segments[i:])), graph)


def test_operators_in_another_order_are_refused(graph: Graph, plan: Plan) -> None:
    index, segment = find(plan, lambda s: len(unranged(s.operators)) > 1)
    backwards = ranges(unranged(segment.operators)[::-1])
    with pytest.raises(InvalidPlan, match="runs .* without"):
        check(with_segment(plan, index, operators=backwards), graph)


def test_an_operator_that_never_runs_is_refused(graph: Graph, plan: Plan) -> None:
    index, segment = find(plan, lambda s: len(unranged(s.operators)) > 1)
    with pytest.raises(InvalidPlan):
        check(with_segment(plan, index, operators=ranges(unranged(segment.operators)[:-1])), graph)


def test_recomputing_what_has_not_run_is_refused(graph: Graph, plan: Plan) -> None:
    last = unranged(plan.segments[-1].operators)[-1]
    with pytest.raises(InvalidPlan):
        check(with_segment(plan, 0, recomputes=((last, last + 1),)), graph)


def test_a_recomputation_that_was_lost_is_refused(graph: Graph, plan: Plan) -> None:
    index, _ = find(plan, lambda s: s.recomputes)
    with pytest.raises(InvalidPlan, match="runs .* without y2"):
        check(with_segment(plan, index, recomputes=()), graph)


def test_an_input_that_a_segment_does_not_name_is_refused(graph: Graph, plan: Plan) -> None:
    for i, segment in enumerate(plan.segments):
        for t in segment.inputs:
            if t in segment.donated:
                continue
            with pytest.raises(InvalidPlan):
                check(with_segment(plan, i, inputs=tuple(u for u in segment.inputs if u != t)), graph)


def test_an_output_that_is_not_handed_on_is_refused(graph: Graph, plan: Plan) -> None:
    for i, segment in enumerate(plan.segments):
        for t in segment.outputs:
            with pytest.raises(InvalidPlan):
                check(with_segment(plan, i, outputs=tuple(u for u in segment.outputs if u != t)), graph)


def test_an_output_that_the_segment_does_not_make_is_refused(graph: Graph, plan: Plan) -> None:
    stranger = plan.segments[-1].outputs[0]
    index, segment = find(plan, lambda s: stranger not in s.outputs)
    changed = with_segment(plan, index, outputs=(*segment.outputs, stranger), device_bytes=10**9)
    with pytest.raises(InvalidPlan, match="gives an output that it does not make"):
        check(dataclasses.replace(changed, peak_bytes=10**9), graph)


def test_an_output_that_is_only_an_input_is_refused(graph: Graph, plan: Plan) -> None:
    index, segment = find(plan, lambda s: s.inputs)
    changed = with_segment(plan, index, outputs=(*segment.outputs, segment.inputs[0]), device_bytes=10**9)
    with pytest.raises(InvalidPlan, match="gives an output that it does not make"):
        check(dataclasses.replace(changed, peak_bytes=10**9), graph)


def test_a_tensor_freed_while_it_is_needed_is_refused(graph: Graph, plan: Plan) -> None:
    broken = 0
    for i, segment in enumerate(plan.segments):
        for t in segment.inputs:
            needed = any(t in later.inputs for later in plan.segments[i + 1 :]) or t in graph.outputs
            if needed and t not in (*segment.frees, *segment.donated):
                with pytest.raises(InvalidPlan):
                    check(with_segment(plan, i, frees=(*segment.frees, t)), graph)
                broken += 1
    assert broken > 3


def test_freeing_twice_or_what_belongs_to_the_caller_is_refused(graph: Graph, plan: Plan) -> None:
    index, segment = find(plan, lambda s: s.frees)
    with pytest.raises(InvalidPlan, match="frees .*, which it may not"):
        check(with_segment(plan, index, frees=(*segment.frees, segment.frees[0])), graph)
    last = len(plan.segments) - 1
    with pytest.raises(InvalidPlan, match="frees x, which it may not"):
        check(with_segment(plan, last, frees=(*plan.segments[last].frees, tensor_named(graph, "x"))), graph)


def test_donating_what_a_later_segment_reads_is_refused(graph: Graph, plan: Plan) -> None:
    index, segment = find(
        plan, lambda s: any(t in later.inputs for t in s.inputs for later in plan.segments if later.begin_us > s.begin_us)
    )
    t = next(t for t in segment.inputs if any(t in later.inputs for later in plan.segments[index + 1 :]))
    with pytest.raises(InvalidPlan):
        check(with_segment(plan, index, donated=(*segment.donated, t)), graph)


def test_donating_what_is_no_input_of_the_segment_is_refused(graph: Graph, plan: Plan) -> None:
    segment = plan.segments[-1]
    stored = next(t for t in graph.outputs if t not in (*segment.inputs, *segment.outputs))
    with pytest.raises(InvalidPlan, match="donates .*, which it does not read"):
        check(with_segment(plan, len(plan.segments) - 1, donated=(*segment.donated, stored)), graph)


def test_donating_what_no_output_takes_over_is_refused(graph: Graph, plan: Plan) -> None:
    index, segment = find(plan, lambda s: set(s.frees) & set(s.inputs))
    t = next(t for t in segment.frees if t in segment.inputs)
    moved = with_segment(plan, index, frees=tuple(u for u in segment.frees if u != t), donated=(*segment.donated, t))
    with pytest.raises(InvalidPlan, match="donates .*, whose memory no output takes over"):
        check(moved, graph)


def test_a_footprint_that_is_understated_is_refused(graph: Graph, plan: Plan) -> None:
    for i, segment in enumerate(plan.segments):
        with pytest.raises(InvalidPlan, match=r"(needs|begins with) \d+ bytes; it says \d+"):
            check(with_segment(plan, i, device_bytes=segment.device_bytes - segment.resident_bytes), graph)


def test_the_footprint_of_every_segment_is_exact(graph: Graph, plan: Plan) -> None:
    for i, segment in enumerate(plan.segments):
        with pytest.raises(InvalidPlan, match=r"needs \d+ bytes; it says"):
            check(with_segment(plan, i, device_bytes=segment.device_bytes - 1), graph)


def test_a_peak_below_that_of_a_segment_is_refused(graph: Graph, plan: Plan) -> None:
    with pytest.raises(InvalidPlan, match="the plan"):
        check(dataclasses.replace(plan, peak_bytes=plan.peak_bytes - 1), graph)


def test_a_workspace_that_does_not_fit_is_refused(graph: Graph, plan: Plan) -> None:
    i = plan.peak_segment
    with pytest.raises(InvalidPlan, match=r"needs \d+ bytes"):
        check(with_segment(plan, i, workspace_bytes=plan.segments[i].workspace_bytes + 1), graph)


def test_a_result_left_on_the_host_is_refused_unless_it_is_state_that_may_stay_there() -> None:
    graph = order(training_graph(3, weight=200_000, activation=50_000))
    plan = with_state_out(graph)
    check(plan, graph)
    assert {e.tensor for e in copies(plan, "swap_out")} & set(graph.outputs)
    on_device = dataclasses.replace(plan, state_memory="device")
    with pytest.raises(InvalidPlan, match="brings in w0, which never left"):
        check(on_device, graph)
    with pytest.raises(InvalidPlan, match="the result v0 is not there when the step ends"):
        check(without_event(on_device, copies(on_device, "swap_in")[0]), graph)


def test_a_plan_for_another_graph_is_refused(plan: Plan) -> None:
    with pytest.raises(InvalidPlan):
        check(plan, order(training_graph(5)))
    with pytest.raises(InvalidPlan):
        check(plan, order(training_graph(3)))


def test_tensors_and_operators_that_do_not_exist_are_refused(graph: Graph, plan: Plan) -> None:
    for changes in ({"inputs": (TensorId(10**6),)}, {"operators": ((10**6, 10**6 + 1),)}, {"frees": (TensorId(-1),)}):
        with pytest.raises(InvalidPlan):
            check(with_segment(plan, 0, **changes), graph)
    event = copies(plan, "swap_out")[0]
    with pytest.raises(InvalidPlan):
        check(with_event(plan, event, tensor=TensorId(10**6)), graph)


def test_the_story_names_the_segment_and_the_tensor(graph: Graph, plan: Plan) -> None:
    event = copies(plan, "swap_out")[0]
    with pytest.raises(InvalidPlan) as caught:
        check(with_event(plan, event, trigger=-1), graph)
    assert (caught.value.segment, caught.value.tensor) == (0, event.name)
    assert str(caught.value).startswith("Segment 0: swaps out")


def test_what_is_there_when_the_iteration_begins_or_ends_counts(graph: Graph, plan: Plan) -> None:
    first, last = plan.segments[0], plan.segments[-1]
    held = sum(t.nbytes for t in graph.tensors if t.producer is None)
    with pytest.raises(InvalidPlan, match=f"begins with {held} bytes; it says {held - 1}"):
        check(with_segment(plan, 0, workspace_bytes=0, resident_bytes=0, device_bytes=held - 1), graph)
    assert first.device_bytes >= held
    results = sum(graph.tensors[t].nbytes for t in set(graph.outputs)) + graph.tensors[tensor_named(graph, "x")].nbytes
    assert last.device_bytes >= results


def test_results_that_come_back_in_the_end_count() -> None:
    """`a` and `b` are on the host while y is made, and both are back when the iteration ends."""
    lines = ["a = heavy(x)", "b = heavy(a)", "c = heavy(b)", "d = heavy(c)", "y = heavy(d)"]
    graph = graph_of(lines, inputs="x", outputs="a b y", sizes={"a": 1000, "b": 1000})
    absences = {t: (Absence(t, 2, 5, 0.0),) for t in (tensor_named(graph, "a"), tensor_named(graph, "b"))}
    absences = {t: (dataclasses.replace(away[0], back=4),) for t, away in absences.items()}
    plan = plan_by_hand(graph, retain(find_liveness(graph), {}), range(6), absences)
    residencies = {e.tensor: e for e in copies(plan, "swap_in")}
    late = dataclasses.replace(
        plan,
        events=tuple(msgspec.structs.replace(e, trigger=4, until=5) if e in residencies.values() else e for e in plan.events),
    )
    shrunk = dataclasses.replace(with_segment(late, 4, device_bytes=300, resident_bytes=300), step_us=plan.step_us + 1000)
    with pytest.raises(InvalidPlan, match="holds 2200 bytes in the end; it says 300"):
        check(shrunk, graph)
