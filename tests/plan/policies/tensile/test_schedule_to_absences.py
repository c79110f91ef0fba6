"""From a schedule's times to places of the graph."""

import dataclasses

import pytest

from tensile_jax.ir import Graph, TensorId
from tensile_jax.plan.analysis.absence import Absence
from tensile_jax.plan.analysis.access import AccessSequence, access_sequence
from tensile_jax.plan.analysis.liveness import find_liveness
from tensile_jax.plan.analysis.retention import retain
from tensile_jax.plan.policies.tensile.complete_scheduling import Schedule
from tensile_jax.plan.policies.tensile.footprint import Recomputation
from tensile_jax.plan.policies.tensile.schedule_to_absences import absences_of, dropped_for, schedule_events
from tensile_jax.plan.policies.tensile.swap_scheduling import SwappedOut
from tests.builders import PROFILE, graph_of, tensor_named, training_graph

# Ten places of 10 us in five segments of two.
BOUNDARIES = (0, 2, 4, 6, 8, 10)


def ten() -> tuple[Graph, AccessSequence, TensorId]:
    lines = ["a = heavy(x)", *(f"b{k} = heavy({'a' if k in (4, 5) else 'x'})" for k in range(1, 9)), "y = heavy(a, x)"]
    graph = graph_of(lines, inputs="x", outputs="y")
    sequence = access_sequence(retain(find_liveness(graph), {}), BOUNDARIES, [10.0] * 10)
    return graph, sequence, tensor_named(graph, "a")


def placed(*swaps: SwappedOut) -> dict[TensorId, tuple[Absence, ...]]:
    _, sequence, _ = ten()
    return absences_of(Schedule(swaps, (), 0, 0), sequence, BOUNDARIES)


def test_a_tensor_is_away_at_the_boundaries_after_its_copy_out_and_up_to_its_copy_in() -> None:
    _, _, a = ten()
    # Out during segment 1, in from within segment 3: away at the boundaries 4 and 6.
    assert placed(SwappedOut(a, 0, 4, True, 20.0, 30.0, 70.0, 80.0)) == {a: (Absence(a, 3, 6, 20.0),)}


def test_a_copy_that_ends_with_a_segment_is_out_at_its_end() -> None:
    _, _, a = ten()
    assert placed(SwappedOut(a, 0, 4, True, 20.0, 40.0, 60.0, 80.0)) == {a: (Absence(a, 3, 6, 40.0),)}


def test_what_the_host_has_is_released_and_copied_in_only() -> None:
    _, _, a = ten()
    found = placed(
        SwappedOut(a, 0, 2, True, 20.0, 25.0, 40.0, 45.0), SwappedOut(a, 2, 4, False, 60.0, 60.0, 75.0, 80.0)
    )  # fmt: skip
    assert found == {a: (Absence(a, 3, 4, 10.0), Absence(a, 5, 6, 5.0))}


def test_an_absence_without_a_boundary_is_left_out() -> None:
    _, _, a = ten()
    found = placed(
        SwappedOut(a, 0, 2, True, 20.0, 25.0, 35.0, 40.0), SwappedOut(a, 2, 4, False, 60.0, 60.0, 75.0, 80.0)
    )  # fmt: skip
    assert found == {a: (Absence(a, 5, 6, 5.0),)}


def test_across_the_iteration_boundary() -> None:
    _, _, a = ten()
    assert placed(SwappedOut(a, 2, 5, True, 70.0, 75.0, 100.0, 100.0)) == {a: (Absence(a, 7, 10, 5.0),)}
    assert placed(SwappedOut(a, -1, 2, False, 0.0, 0.0, 15.0, 20.0)) == {a: (Absence(a, -1, 0, 5.0),)}


def test_what_is_recomputed_is_dropped_with_what_its_chain_passes_through() -> None:
    big = dict.fromkeys("abcdyz", 2**17)
    graph = graph_of(
        ["a = light(x)", "b, z = heavy(a)", "c = heavy(b)", "d = heavy(c)", "y = heavy(d, b, x, z)"],
        inputs="x", outputs="y", sizes=big,
    )  # fmt: skip
    a, b = tensor_named(graph, "a"), tensor_named(graph, "b")
    retention = retain(find_liveness(graph), {})
    schedule = Schedule((), (Recomputation(b, 2, 4),), 0, 0)
    assert dropped_for(schedule, retention, range(6)) == {a: 1, b: 2}
    assert retain(retention.liveness, {a: 1, b: 2}).end[a] == 1, "and not 4, as it would be to make b again"
    assert dropped_for(schedule, retain(find_liveness(graph), {a: 0}), range(6)) == {a: 0, b: 2}


@pytest.mark.parametrize("across", [False, True])
def test_the_events_of_a_training_graph(across: bool) -> None:
    graph = training_graph(4, activation=2**17, weight=2**16)
    retention = retain(find_liveness(graph), {})
    count = len(graph.operators)
    profile = dataclasses.replace(PROFILE, device_to_host_bytes_per_us=5000.0, host_to_device_bytes_per_us=5000.0)
    found = schedule_events(
        retention, [100.0] * count, profile,
        boundaries=range(count + 1), budget_bytes=0, state_may_stay_out=across,
    )  # fmt: skip
    assert found.absences and found.schedule.swaps
    for t, absences in found.absences.items():
        assert list(absences) == sorted(absences, key=lambda absence: absence.leave)
        for absence in absences:
            assert absence.tensor == t and -1 <= absence.leave < absence.back <= count
            assert not any(absence.leave < place <= absence.back for place in retention.needs[t])
    assert any(absence.back == count for some in found.absences.values() for absence in some) == across
    for t, place in found.dropped.items():
        assert t not in found.absences and retention.liveness.begin[t] <= place < retention.end[t]
