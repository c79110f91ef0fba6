"""Where predictions are far too high, compiling shows it, and the plan uses the memory that is there."""

from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

import tensile_jax as tensile
from tensile_jax.exec.step.prepared_step import Compiled, PreparedStep
from tests.builders import batch, fresh, sgd_step, weights


def test_a_faster_plan_is_sought_once_the_one_with_the_least_peak_was_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (files("tensile_jax.device_profiles") / "cpu.toml").read_text()
    pessimist = tmp_path / "pessimist.toml"
    pessimist.write_text(
        text.replace("late_weight = 0.2", "late_weight = 2.0").replace("early_weight = 0.9", "early_weight = 9.0")
    )
    smallest: list[Compiled] = []
    search = PreparedStep._smallest_plan

    def watched(self: PreparedStep, goal: Any) -> Compiled:
        smallest.append(search(self, goal))
        return smallest[-1]

    monkeypatch.setattr(PreparedStep, "_smallest_plan", watched)

    def function(budget: int) -> Any:
        return tensile.jit(sgd_step, budget=budget, device_profile=str(pessimist), donate_argnums=0)

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
