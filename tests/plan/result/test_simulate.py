"""Plans on paper: three lanes, first come first served. PROFILE: a launch takes 1 us, a copy of 100 bytes 10 us."""

import dataclasses

import pytest

from tensile_jax.ir import TensorId
from tensile_jax.plan.analysis.absence import Absence
from tensile_jax.plan.analysis.liveness import find_liveness
from tensile_jax.plan.analysis.operator_order import order
from tensile_jax.plan.analysis.retention import retain
from tensile_jax.plan.result.simulate import Simulation, Span, simulate
from tensile_jax.plan_format import Event, EventKind, Plan, PlannedTensor, Segment
from tests.builders import PROFILE, graph_of, header_for, plan_by_hand, tensor_named, training_graph

X, Y, Z = map(TensorId, range(3))


def segment(
    index: int,
    latency_us: float,
    *,
    resident: int,
    inputs: tuple[TensorId, ...] = (),
    outputs: tuple[TensorId, ...] = (),
    frees: tuple[TensorId, ...] = (),
    workspace: int = 0,
) -> Segment:
    return Segment(
        name=f"segment_{index:03d}", operators=((index, index + 1),), recomputes=(), inputs=inputs, outputs=outputs, donated=(),
        frees=frees, resident_bytes=resident, workspace_bytes=workspace, device_bytes=resident + workspace, begin_us=0.0,
        latency_us=latency_us, recomputed_us=0.0, stall_us=0.0,
    )  # fmt: skip


def copy(kind: EventKind, tensor: TensorId, trigger: int, until: int) -> Event:
    return Event(kind, tensor, f"t{tensor}", 100, trigger, until, 0.0, 0.0, 0.0, "")


def plan_of(segments: list[Segment], events: tuple[Event, ...] = ()) -> Plan:
    empty = header_for(graph_of(["y = heavy(x)"], inputs="x", outputs="y"))
    tensors = tuple(PlannedTensor(t, f"t{t}", "activation", 100, (100,), "uint8") for t in (X, Y, Z))
    return dataclasses.replace(empty, segments=tuple(segments), events=events, tensors=tensors, launch_us=PROFILE.launch_us)


def swapping() -> Plan:
    """y, made by segment 0, is on the host while segments 1 and 2 run; 3 reads it. x is always there."""
    return plan_of(
        [
            segment(0, 9.0, resident=200, inputs=(X,), outputs=(Y,), workspace=50),
            segment(1, 19.0, resident=200, inputs=(X,)),
            segment(2, 4.0, resident=200, inputs=(X,)),
            segment(3, 9.0, resident=300, inputs=(X, Y), outputs=(Z,), frees=(Y, Z)),
        ],
        (copy("swap_out", Y, 0, 2), copy("swap_in", Y, 1, 3)),
    )


def spans(found: tuple[Span, ...]) -> list[tuple[int, float, float]]:
    return [(s.index, s.begin_us, s.end_us) for s in found]


def test_copies_run_beside_segments_and_a_segment_waits_for_the_copy_that_it_needs() -> None:
    seen = simulate([swapping()], PROFILE)
    assert spans(seen.copies_out) == [(0, 10.0, 20.0)]
    assert spans(seen.copies_in) == [(1, 30.0, 40.0)]
    assert spans(seen.segments) == [(0, 0.0, 10.0), (1, 10.0, 30.0), (2, 30.0, 35.0), (3, 40.0, 50.0)]
    assert seen.stall_us == ((5.0,),)
    assert seen.step_us == ((50.0,),)


def test_memory_goes_when_the_copy_must_have_left_and_comes_when_the_copy_in_is_issued() -> None:
    seen = simulate([swapping()], PROFILE)
    last_at = dict(seen.memory)  # the last level at each time
    assert last_at == {0.0: 250, 10.0: 200, 30.0: 200, 40.0: 300, 50.0: 0}
    assert seen.peak_bytes == 300


def test_iterations_follow_each_other() -> None:
    seen = simulate([swapping()], PROFILE, iterations=3)
    assert seen.step_us == ((50.0, 50.0, 50.0),)
    assert seen.end_us == 150.0
    assert [s.begin_us for s in seen.segments if s.index == 0] == [0.0, 50.0, 100.0]


def test_an_iteration_ends_when_its_last_copy_has_ended() -> None:
    plan = plan_of([segment(0, 4.0, resident=200, inputs=(X,), outputs=(Y,))], (copy("swap_out", Y, 0, 1),))
    assert simulate([plan], PROFILE).step_us == ((15.0,),)
    assert simulate([plan], PROFILE).stall_us == ((10.0,),)


def test_two_jobs_take_turns_on_compute_and_share_the_link() -> None:
    seen = simulate([swapping(), swapping()], PROFILE)
    by_job = [[(s.index, s.begin_us, s.end_us) for s in seen.segments if s.job == job] for job in (0, 1)]
    assert by_job[0] == [(0, 0.0, 10.0), (1, 20.0, 40.0), (2, 60.0, 65.0), (3, 70.0, 80.0)]
    assert by_job[1] == [(0, 10.0, 20.0), (1, 40.0, 60.0), (2, 65.0, 70.0), (3, 80.0, 90.0)]
    assert [(s.job, s.begin_us, s.end_us) for s in seen.copies_in] == [(0, 40.0, 50.0), (1, 60.0, 70.0)]
    assert seen.peak_bytes <= 2 * 300
    assert seen.end_us == 90.0 < 2 * 50.0  # one waits while the other computes


def test_what_one_job_copies_the_other_waits_for() -> None:
    one = plan_of([segment(0, 0.0, resident=100, inputs=(X,))], (copy("swap_in", X, -1, 0),))
    seen = simulate([one, one], PROFILE)
    assert [(s.job, s.begin_us, s.end_us) for s in seen.copies_in] == [(0, 0.0, 10.0), (1, 10.0, 20.0)]
    assert [s.begin_us for s in seen.segments] == [10.0, 20.0]


def test_lanes_are_exclusive_and_nothing_is_left_on_the_device() -> None:
    seen = simulate([swapping()] * 5, PROFILE, iterations=4)

    def exclusive(found: tuple[Span, ...]) -> bool:
        return all(a.end_us <= b.begin_us for a, b in zip(found, found[1:], strict=False))

    assert exclusive(seen.segments) and exclusive(seen.copies_out) and exclusive(seen.copies_in)
    assert len(seen.segments) == 5 * 4 * 4
    assert seen.memory[-1][1] == 0 and min(nbytes for _, nbytes in seen.memory) >= 0


@pytest.mark.parametrize("donated", [True, False])
def test_the_footprint_of_a_real_plan_is_what_its_segments_state(donated: bool) -> None:
    graph = order(training_graph(5, activation=100_000, donated=donated))
    retention = retain(find_liveness(graph), {})
    y = tensor_named(graph, "y0")
    first, again = retention.needs[y][0], retention.needs[y][-1]
    count = len(graph.operators)
    absences = {y: (Absence(y, first + 1, again - 2, 0.0),)}
    plan = plan_by_hand(graph, retention, range(count + 1), absences, workspace=7)
    seen: Simulation = simulate([plan], PROFILE)
    levels = {s.begin_us: 0 for s in seen.segments}
    for time, nbytes in seen.memory:
        if time in levels:
            levels[time] = max(levels[time], nbytes)
    stated = {s.begin_us: s.device_bytes for s in plan.segments}
    assert seen.peak_bytes == plan.peak_bytes
    assert all(levels[span.begin_us] <= stated[round(span.begin_us, 3)] for span in seen.segments)
    assert plan.step_us == pytest.approx(seen.step_us[0][0], abs=1e-3)
