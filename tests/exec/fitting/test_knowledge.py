"""What one budget has confirmed holds for the others."""

import random

import pytest

import tensile_jax as tensile
from tensile_jax.exec.fitting.knowledge import Knowledge
from tensile_jax.plan import Choice
from tensile_jax.plan.result.layout import Layout
from tests.builders import batch, fresh, low_budget, running, sgd_step, weights


def test_the_next_higher_budget_is_taken_over_where_its_plan_fits() -> None:
    known = Knowledge()
    known = known.with_confirmed(100, 70, Choice(Layout((0, 5, 9), {})))
    assert known.above(100) is not None and known.above(70) is not None
    assert known.above(69) is None  # its plan does not keep it
    assert known.above(101) is None  # nothing is known of more


def test_the_next_lower_budget_is_taken_over_where_the_search_ended_below_it() -> None:
    known = Knowledge()
    known = known.with_confirmed(100, 70, Choice(Layout((0, 5, 9), {})))
    found = known.below(120, 60)
    assert found is not None and found.boundaries == (0, 5, 9)
    assert known.below(120, 70) is None
    assert known.below(100, 60) is None  # not lower


@pytest.mark.parametrize("seed", range(50))
def test_whatever_the_searches_find_peaks_ascend_with_budgets(seed: int) -> None:
    rng = random.Random(seed)
    known = Knowledge()
    peak_of = {}
    for limit in rng.sample(range(100, 200), 30):
        peak = rng.randint(50, limit)
        choice = Choice(Layout((0, peak), {}))
        taken = known.above(limit) or known.below(limit, peak) or choice
        peak_of[limit] = taken.boundaries[1]
        assert peak_of[limit] <= limit
        known = known.with_confirmed(limit, peak_of[limit], taken)
    peaks = [peak_of[limit] for limit in sorted(peak_of)]
    assert peaks == sorted(peaks)


def test_a_budget_that_another_plan_keeps_is_not_searched_for() -> None:
    x = batch(rows=136)
    budget = low_budget(sgd_step, weights(7), x, part=0.5, donate_argnums=0)
    first = tensile.jit(sgd_step, budget=budget, donate_argnums=0)
    first(fresh(weights(7)), x)
    peak = running(first).plan.peak_bytes
    second = tensile.jit(sgd_step, budget=peak, donate_argnums=0)
    second(fresh(weights(7)), x)
    assert running(second).plan.segments == running(first).plan.segments
    assert len(running(second).compiled.step.compiler) <= len(running(second).plan.segments)
