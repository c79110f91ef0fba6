"""The search from higher limits, which is for limits under which plans are slow."""

import pytest

from tensile_jax.plan import Measured
from tensile_jax.plan.analysis.operator_order import order
from tensile_jax.plan.policies.auto import floor_bytes
from tensile_jax.plan.search import search
from tensile_jax.plan.search.choice import whole_peak
from tensile_jax.plan.search.step_model import StepModel
from tests.plan.small_steps import small_step


@pytest.mark.parametrize("seed", range(5))
def test_plans_from_higher_limits_keep_the_limit_and_are_taken_if_they_are_faster(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph, profile = small_step(seed, most=20)
    step, nothing = StepModel(order(graph), profile, state_may_stay_out=True), Measured()
    least, most = floor_bytes(step, nothing), whole_peak(step, nothing)
    for part in (0.0, 0.05, 0.2, 0.5):
        limit = least + part * (most - least)
        monkeypatch.setattr(search, "_TIGHT", float("inf"))
        without = search.fastest(step, limit, nothing)
        monkeypatch.setattr(search, "_TIGHT", 0.0)  # every plan counts as slow
        found = search.fastest(step, limit, nothing)
        assert (found is None) == (without is None)
        if found is not None and without is not None:
            assert found.peak <= limit
            assert found.cost <= without.cost
