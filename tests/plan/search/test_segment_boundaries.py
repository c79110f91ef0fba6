"""The cheapest cut and the least peak, against every cut of small steps."""

import random
from itertools import combinations, pairwise

import pytest

from tensile_jax.plan.search.schedule import Schedule
from tensile_jax.plan.search.segment_boundaries import cheapest_cuts, least_peak
from tensile_jax.plan.search.segment_evaluator import Model
from tensile_jax.plan.search.start_schedules import held_at, last_held, start
from tests.plan.search.schedules import model_of, odd_step


def all_cuts(model: Model, required: set[int]) -> list[list[int]]:
    """All of two segments or more; the one segment where there is no other."""
    last = len(model.places) - 1
    inner = range(1, last)
    found = [[0, *some, last] for n in range(1 if inner else 0, len(inner) + 1) for some in combinations(inner, n)]
    return [cuts for cuts in found if required <= set(cuts)]


def small_case(seed: int, most: int) -> tuple[Model, list[int], list[int], set[int]]:
    """A step of at most so many boundaries; what is kept until when, what is stored at each boundary, and boundaries to take."""
    rng = random.Random(seed)
    model = next(m for s in range(seed, 10**9, 1000) if len((m := model_of(odd_step(s))).places) <= most)
    dropped = {t: max(made, 0) for t, made in enumerate(model.step.made) if model.step.recipes[t] and rng.random() < 0.4}
    end = last_held(model.step, dropped)
    required = {b for b in range(1, len(model.places) - 1) if rng.random() < 0.1}
    return model, end, held_at(model.step, end), required


def as_cut(model: Model, end: list[int], cuts: list[int]) -> Schedule:
    found = start(model, cuts, end)
    assert found is not None
    return found


def naive(model: Model, stored: list[int], cuts: list[int]) -> tuple[float, float]:
    """The peak and the cost of a cut, segment by segment."""
    step, peak, cost = model.step, 0.0, 0.0
    for a, b in pairwise(cuts):
        wanted = stored[b] & ~stored[a]
        found = model.contents(a, b, stored[a], wanted, model.aliased(stored[a], stored[b], wanted))
        assert found is not None
        held = step.base_bytes + int(step.small_bytes[a, b]) + step.bytes_of(stored[a]) + found.result_bytes
        peak = max(peak, held + model.workspace(a, b, found.contents, wanted)[0])
        cost += model.profile.launch_us + model.compiling_us + found.contents.us + found.written_us
    return peak, cost


@pytest.mark.parametrize("seed", range(60))
def test_the_cheapest_cut_is_the_cheapest_of_all_under_the_limit(seed: int) -> None:
    """With five boundaries, no segment is given up before its last end is tried."""
    model, _, stored, required = small_case(seed, 5)
    everything = [(naive(model, stored, cuts), cuts) for cuts in all_cuts(model, required)]
    peaks = sorted(peak for (peak, _), _ in everything)
    for limit in (peaks[0], peaks[len(peaks) // 2], float("inf")):
        best = min(cost for (peak, cost), _ in everything if peak <= limit)
        cuts = cheapest_cuts(model, stored, limit, required)
        assert required <= set(cuts)
        peak, cost = naive(model, stored, cuts)
        assert peak <= limit
        assert cost == pytest.approx(best)


@pytest.mark.parametrize("seed", range(60))
def test_the_least_peak_is_the_least_of_all_cuts(seed: int) -> None:
    model, _, stored, required = small_case(seed, 9)
    assert least_peak(model, stored, required) == min(naive(model, stored, cuts)[0] for cuts in all_cuts(model, required))


@pytest.mark.parametrize("seed", range(60))
def test_a_schedule_of_a_cut_needs_no_more_than_the_cut_was_counted_with(seed: int) -> None:
    """A schedule releases what nothing needs any more, at each of its boundaries."""
    model, end, stored, required = small_case(seed, 9)
    for cuts in random.Random(seed).sample(all_cuts(model, required), 1):
        schedule = as_cut(model, end, cuts)
        at_end = model.step.base_bytes + model.step.bytes_of(schedule.at[-1])
        assert schedule.peak <= max(naive(model, stored, cuts)[0], at_end)
