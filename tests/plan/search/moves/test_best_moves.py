"""Every move of a repair lowers the excess, costs less than it may, and gives a plan that survives its replay."""

import random

import pytest

from tensile_jax.plan.search.moves import best_moves
from tensile_jax.plan.search.moves.best_moves import BestMoves
from tests.plan.search.schedules import model_of, odd_step, plan_of, random_schedule


def repaired(seed: int) -> tuple[int, float, int]:
    """The moves that were made, the cost after them, and the peak."""
    step, rng = odd_step(seed, most=40), random.Random(seed)
    schedule = random_schedule(model_of(step), rng)
    limit, upper = rng.uniform(0.4, 0.9) * schedule.peak, rng.choice((1.5, 4.0)) * schedule.cost
    moves, made = BestMoves(upper, None), 0
    while schedule.peak > limit and made < 40:
        lower = moves.make_one(schedule, limit)
        if lower is None:
            break
        assert lower.excess(limit) < schedule.excess(limit)
        assert lower.cost < upper
        schedule, made = lower, made + 1
    plan_of(step, schedule)
    return made, schedule.cost, schedule.peak


@pytest.mark.parametrize("part", range(4))
def test_every_move_lowers_the_excess(part: int) -> None:
    assert sum(made for made, _, _ in map(repaired, range(part, 80, 4))) > 40


def test_moves_that_are_not_listed_anew_cost_little_more(monkeypatch: pytest.MonkeyPatch) -> None:
    lazily = [repaired(seed) for seed in range(60)]
    monkeypatch.setattr(best_moves, "_TRIED_AGAIN", 0)
    anew = [repaired(seed) for seed in range(60)]
    assert lazily != anew
    assert sum(cost for _, cost, _ in lazily) < 1.05 * sum(cost for _, cost, _ in anew)
