"""Which budgets are compared, and that each is planned once."""

from collections import Counter

import pytest

from tensile_jax.plan import Planner, comparison
from tensile_jax.plan.comparison import compare_policies
from tests.builders import PROFILE, training_graph


def test_the_gaps_between_budgets_are_filled_as_densely_as_ten_points_are() -> None:
    assert comparison._between([], 0, 90) == {10, 20, 30, 40, 50, 60, 70, 80}
    assert comparison._between([0, 90, 120, 40], 0, 90) == {10, 20, 30, 50, 60, 70, 80}
    assert comparison._between([20], 0, 90) == {10, 30, 40, 50, 60, 70, 80}
    assert comparison._between([10, 20, 30, 40, 50, 60, 70, 80], 0, 90) == set()
    assert comparison._between([5], 7, 7) == comparison._between([5], 9, 7) == set()


def test_auto_plans_each_budget_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: Counter[float] = Counter()
    planner = Planner(training_graph(4), PROFILE).across_iterations()

    def fastest(limit: float) -> Planner:
        asked[limit] += 1
        return planner

    told: list[tuple[str, int, int]] = []
    made = compare_policies(planner, fastest=fastest, bounded=planner, progress=lambda *phase: told.append(phase))
    assert set(asked.values()) == {1}
    budgets = {at.budget_bytes for at in made.budgets} | {entry.peak_bytes for entry, _ in made.least} | {made.whole.peak_bytes}
    assert budgets <= set(asked) and len(made.curve) >= 3
    assert [done for _, done, _ in told[1:]] == list(range(len(told) - 1)) and told[-1][1] == told[-1][2]
    for at in made.budgets:
        mine = at.of("auto")
        if mine is not None and mine.peak_bytes <= made.whole.peak_bytes:
            assert any(entry.budget_bytes == at.budget_bytes and entry.step_us <= mine.step_us for entry in made.curve)
