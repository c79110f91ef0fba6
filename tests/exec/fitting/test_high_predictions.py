"""Where predictions are far too high, compiling shows it, and the plan uses the memory that is there."""

from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

import tensile_jax as tensile
from tensile_jax.exec.compiling.step import CompiledPlan
from tensile_jax.exec.fitting import find_plan
from tensile_jax.exec.fitting.fitting import Fitting
from tests.builders import batch, fresh, sgd_step, weights


@pytest.fixture
def pessimist(tmp_path: Path) -> str:
    """A device profile with which workspaces are predicted to be ten times as large as they are."""
    text = (files("tensile_jax.device_profiles") / "cpu.toml").read_text()
    file = tmp_path / "pessimist.toml"
    file.write_text(text.replace("late_weight = 0.2", "late_weight = 2.0").replace("early_weight = 0.9", "early_weight = 9.0"))
    return str(file)


def test_a_faster_plan_is_sought_once_the_one_with_the_least_peak_was_compiled(
    pessimist: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    smallest: list[CompiledPlan] = []
    search = find_plan._smallest_plan

    def watched(fitting: Fitting, goal: Any) -> CompiledPlan:
        smallest.append(search(fitting, goal))
        return smallest[-1]

    monkeypatch.setattr(find_plan, "_smallest_plan", watched)

    def function(budget: int) -> Any:
        return tensile.jit(sgd_step, budget=budget, device_profile=pessimist, donate_argnums=0)

    def arguments(rows: int) -> Any:  # with other rows, nothing that was compiled is known
        return weights(8), batch(rows=rows)

    predicted = function(2**40).plan(*arguments(2000)).floor_bytes
    with pytest.raises(tensile.BudgetTooSmall) as caught:
        function(arguments(2000)[1].nbytes)(*arguments(2000))
    least = caught.value.floor_bytes
    assert least < 0.6 * predicted
    budget = (least + predicted) // 2
    planned = function(budget)
    state, images = arguments(2001)
    planned(fresh(state), images)
    plan = planned.plan(state, images)
    assert len(smallest) == 1
    assert plan.step_us < smallest[0].plan.step_us and smallest[0].plan.peak_bytes < plan.peak_bytes <= budget


def test_a_faster_plan_is_sought_where_the_first_one_leaves_memory_free(pessimist: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[CompiledPlan] = []
    compiled = Fitting.compiled

    def watched(self: Fitting, choice: Any, goal: Any) -> CompiledPlan | None:
        one = compiled(self, choice, goal)
        found.extend([one] if one is not None else [])
        return one

    monkeypatch.setattr(Fitting, "compiled", watched)
    state, images = weights(8), batch(rows=2002)
    least = tensile.jit(sgd_step, budget=2**40, device_profile=pessimist, donate_argnums=0).plan(state, images).floor_bytes
    planned = tensile.jit(sgd_step, budget=int(1.05 * least), device_profile=pessimist, donate_argnums=0)
    planned(fresh(state), images)
    plan = planned.plan(state, images)
    first, *others = (one.plan for one in found)
    assert others and first.peak_bytes < 0.95 * int(1.05 * least)
    assert plan.step_us <= 0.99 * first.step_us and first.peak_bytes < plan.peak_bytes <= int(1.05 * least)
