"""The cheapest cut and the least peak, against every cut of small steps."""

import random
from itertools import combinations, pairwise

import pytest

from tensile_jax.plan.search.cost.segment_evaluator import Evaluator
from tensile_jax.plan.search.schedule import Schedule
from tensile_jax.plan.search.starts.segment_boundaries import cheapest_cuts, least_peak
from tensile_jax.plan.search.starts.start_schedules import held_at, last_held, start
from tests.plan.search.schedules import model_of, odd_step


def all_cuts(evaluator: Evaluator, required: set[int]) -> list[list[int]]:
    """All of two segments or more; the one segment where there is no other."""
    last = len(evaluator.places) - 1
    inner = range(1, last)
    found = [[0, *some, last] for n in range(1 if inner else 0, len(inner) + 1) for some in combinations(inner, n)]
    return [cuts for cuts in found if required <= set(cuts)]


def small_case(seed: int, most: int) -> tuple[Evaluator, list[int], list[int], set[int]]:
    """A step of at most so many boundaries; what is kept until when, what is stored at each boundary, and boundaries to take."""
    rng = random.Random(seed)
    evaluator = next(m for s in range(seed, 10**9, 1000) if len((m := model_of(odd_step(s))).places) <= most)
    dropped = {
        t: max(made, 0)
        for t, made in enumerate(evaluator.condensed.made)
        if evaluator.condensed.recipes[t] and rng.random() < 0.4
    }
    end = last_held(evaluator.condensed, dropped)
    required = {b for b in range(1, len(evaluator.places) - 1) if rng.random() < 0.1}
    return evaluator, end, held_at(evaluator.condensed, end), required


def as_cut(evaluator: Evaluator, end: list[int], cuts: list[int]) -> Schedule:
    found = start(evaluator, cuts, end)
    assert found is not None
    return found


def naive(evaluator: Evaluator, stored: list[int], cuts: list[int]) -> tuple[float, float]:
    """The peak and the cost of a cut, segment by segment."""
    step, peak, cost = evaluator.condensed, 0.0, 0.0
    for a, b in pairwise(cuts):
        wanted = stored[b] & ~stored[a]
        found = evaluator.evaluate(a, b, stored[a], wanted, evaluator.aliased(stored[a], stored[b], wanted))
        assert found is not None
        held = step.base_bytes + int(step.small_bytes[a, b]) + step.bytes_of(stored[a]) + found.result_bytes
        peak = max(peak, held + evaluator.workspace(a, b, found.account, wanted)[0])
        cost += evaluator.profile.launch_us + evaluator.compiling_us + found.account.us + found.written_us
    return peak, cost


@pytest.mark.parametrize("seed", range(60))
def test_the_cheapest_cut_is_the_cheapest_of_all_under_the_limit(seed: int) -> None:
    """With five boundaries, no segment is given up before its last end is tried."""
    evaluator, _, stored, required = small_case(seed, 5)
    everything = [(naive(evaluator, stored, cuts), cuts) for cuts in all_cuts(evaluator, required)]
    peaks = sorted(peak for (peak, _), _ in everything)
    for limit in (peaks[0], peaks[len(peaks) // 2], float("inf")):
        best = min(cost for (peak, cost), _ in everything if peak <= limit)
        cuts = cheapest_cuts(evaluator, stored, limit, required)
        assert required <= set(cuts)
        peak, cost = naive(evaluator, stored, cuts)
        assert peak <= limit
        assert cost == pytest.approx(best)


@pytest.mark.parametrize("seed", range(60))
def test_the_least_peak_is_the_least_of_all_cuts(seed: int) -> None:
    evaluator, _, stored, required = small_case(seed, 9)
    assert least_peak(evaluator, stored, required) == min(
        naive(evaluator, stored, cuts)[0] for cuts in all_cuts(evaluator, required)
    )


@pytest.mark.parametrize("seed", range(60))
def test_a_schedule_of_a_cut_needs_no_more_than_the_cut_was_counted_with(seed: int) -> None:
    """A schedule releases what nothing needs any more, at each of its boundaries."""
    evaluator, end, stored, required = small_case(seed, 9)
    for cuts in random.Random(seed).sample(all_cuts(evaluator, required), 1):
        schedule = as_cut(evaluator, end, cuts)
        at_end = evaluator.condensed.base_bytes + evaluator.condensed.bytes_of(schedule.at[-1])
        assert schedule.peak <= max(naive(evaluator, stored, cuts)[0], at_end)
