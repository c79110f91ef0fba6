"""Algorithm 2 of TENSILE for several jobs that share a link. The link moves one byte in a microsecond."""

from dataclasses import replace
from itertools import pairwise

import pytest

from tensile_jax.ir import TensorId
from tensile_jax.plan import CompiledSizes, Goal, Planner
from tensile_jax.plan.analysis.access import AccessSequence
from tensile_jax.plan.multi_job.joint_swaps import SwappingJob, agree_on_swaps, agreed_swaps
from tensile_jax.plan.policies.tensile.complete_scheduling import find_schedule
from tensile_jax.plan.policies.tensile.swap_scheduling import SwappedOut, SwapScheduling
from tests.builders import PROFILE, convolutions, with_link
from tests.plan.policies.tensile.algorithm_1 import events_of, find_peak
from tests.plan.sequences import random_sequence, sequence_of

A = TensorId(1)
# a lies idle from 20 to 80; the peak is at 40, when a, b and c are there.
VALLEY = ["a = x @ 20", "b = x @ 20", "c = b @ 20", "d = c @ 20", "y = a d @ 20"]


def valley(a: int) -> AccessSequence:
    return sequence_of(VALLEY, {"x": 1, "a": a, "b": 5, "c": 30, "d": 5, "y": 1}, initial="x", results="y")


def agreed(*sequences: AccessSequence, rates: tuple[float, ...] | None = None) -> tuple[tuple[SwappedOut, ...], ...]:
    rates = rates or (1.0,) * len(sequences)
    jobs = [SwappingJob(one, False, rate) for one, rate in zip(sequences, rates, strict=True)]
    return agree_on_swaps(jobs, with_link(1.0))


def test_the_largest_tensor_of_any_job_is_chosen_first_and_takes_the_best_windows() -> None:
    """The 10 bytes of the second job go from 20 to 30 and return at 70; the 8 bytes of the first take what is left."""
    small, large = agreed(valley(8), valley(10))
    assert large == (SwappedOut(A, 0, 4, True, 20.0, 30.0, 70.0, 80.0),)
    assert small == (SwappedOut(A, 0, 4, True, 30.0, 38.0, 62.0, 70.0),)


def test_where_the_link_is_busy_a_job_goes_without() -> None:
    """Both of 20 bytes: the copy out of the first takes all the time until the peak."""
    first, second = agreed(valley(20), valley(20))
    assert first == (SwappedOut(A, 0, 4, True, 20.0, 40.0, 60.0, 80.0),)
    assert second == ()


def test_a_job_alone_swaps_what_algorithm_3_swaps_for_it() -> None:
    sequence = random_sequence(7)
    alone = find_schedule(sequence, SwapScheduling(sequence, with_link(4.0), across_iterations=True), free_bytes=10**9)
    assert agree_on_swaps([SwappingJob(sequence, True, 1.0)], with_link(4.0)) == (alone.swaps,)
    assert alone.swaps


def test_no_job_takes_more_than_its_rate_of_what_all_jobs_swap() -> None:
    lines = ["a = x @ 20", "b = x @ 20", "c = x @ 20", "d = x @ 40", "e = d @ 40", "y = a b c @ 20"]
    sizes = {"x": 1, "a": 4, "b": 6, "c": 6, "d": 1, "e": 50, "y": 1}
    many = sequence_of(lines, sizes, initial="x", results="y")
    free, other = agreed(many, valley(2))
    bound, same = agreed(many, valley(2), rates=(0.5, 1.0))
    assert (len(free), len(other)) == (3, 1)
    assert (len(bound), len(same)) == (2, 1), "1 of 2 is not above a half, 2 of 3 are"


def test_jobs_that_do_not_take_part_get_nothing() -> None:
    found = agreed_swaps([None, valley(10), None], [1.0, 1.0, 1.0], with_link(1.0))
    assert found == [None, (SwappedOut(A, 0, 4, True, 20.0, 30.0, 70.0, 80.0),), None]
    assert agreed_swaps([], [], with_link(1.0)) == []


@pytest.mark.parametrize("seed", range(60))
def test_copies_of_all_jobs_take_turns_on_the_link_and_no_jobs_peak_rises(seed: int) -> None:
    sequences = [replace(random_sequence(3 * seed + k), job=k) for k in range(3)]
    jobs = [SwappingJob(one, (seed + k) % 2 == 0, 1.0) for k, one in enumerate(sequences)]
    found = agree_on_swaps(jobs, with_link(4.0))
    assert found == agree_on_swaps(jobs, with_link(4.0))
    events = [[event for away in swaps for event in events_of(away)] for swaps in found]
    for sequence, of_job in zip(sequences, events, strict=True):
        assert find_peak(sequence, of_job).nbytes <= find_peak(sequence).nbytes
    ordered = sorted((event for of_job in events for event in of_job), key=lambda event: event.begin_us)
    assert all(one.end_us <= other.begin_us for one, other in pairwise(ordered))


def test_a_planner_makes_the_agreed_swaps_and_no_others() -> None:
    graph = convolutions(6)
    alone = Planner(graph, PROFILE, policy="tensile", state_memory="any")
    accesses = alone.swapping_accesses()
    assert accesses is not None
    least = alone.plan(Goal(0.0), CompiledSizes())
    (swaps,) = agree_on_swaps([SwappingJob(accesses, True, 1.0)], PROFILE)
    same = Planner(graph, PROFILE, policy="tensile", state_memory="any", agreed_swaps=swaps).plan(Goal(0.0), CompiledSizes())
    none = Planner(graph, PROFILE, policy="tensile", state_memory="any", agreed_swaps=()).plan(Goal(0.0), CompiledSizes())
    assert least is not None and same is not None and none is not None
    assert same.plan == least.plan and same.plan.swapped_out_bytes > 0
    assert none.plan.swapped_out_bytes == 0
    assert Planner(graph, PROFILE, policy="auto").swapping_accesses() is None
    assert Planner(graph, PROFILE, policy="tensile", host_limit=0).swapping_accesses() is None
