"""Large segments that need several times what was predicted do not rule out small ones."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

import tensile_jax as tensile
from tensile_jax.budget import Budget
from tensile_jax.exec.fitting import find_plan
from tensile_jax.exec.fitting.fitting import Fitting
from tensile_jax.plan import Choice, CompiledSizes, Planner
from tests.builders import batch, low_budget, running, sgd_step, weights


def shown(times: int) -> tuple[Fitting, Choice, int]:
    """A fitting, a choice of it whose segments were shown to need `times` what was predicted, and the budget in bytes."""
    arguments = weights(8), batch(rows=1700)
    budget = low_budget(sgd_step, *arguments, part=0.4, donate_argnums=0)
    function = tensile.jit(sgd_step, budget=budget, donate_argnums=0)
    function(*jax.tree.map(jnp.copy, arguments))
    fitting = find_plan.begin_to_predict(running(function).compiled.step, Budget(budget, None))
    chosen = fitting.chosen(fitting.goal())
    assert chosen is not None
    needed = [times * segment.workspace_bytes for segment in chosen.plan.segments]
    measured = fitting.planner.with_measured(chosen.choice, needed, fitting.measured)
    fitting.known = replace(fitting.known, measured=measured.without_hints())
    return fitting, chosen.choice, budget


def test_another_plan_is_found_though_with_caution_there_is_none() -> None:
    fitting, _, budget = shown(times=4)
    assert fitting.measured.cautious
    assert fitting.planner.plan(fitting.goal(), fitting.measured) is None
    found = fitting.chosen_with_margin(fitting.goal(), 2)
    assert found is not None and found.plan.peak_bytes <= budget


def test_the_plan_is_revised_though_with_caution_it_cannot_be() -> None:
    fitting, choice, budget = shown(times=2)
    assert fitting.planner.revise(choice, fitting.goal(), fitting.measured) is None
    found = fitting.revised(choice, fitting.goal(), 2)
    assert found is not None and found.plan.peak_bytes <= budget


def test_a_much_faster_plan_is_tried_that_only_corrected_predictions_rule_out() -> None:
    fitting, choice, budget = shown(times=4)
    goal = fitting.goal()
    scratch, slow = fitting.planner.plan(goal, CompiledSizes()), fitting.chosen_with_margin(goal, 2)
    assert scratch is not None and scratch.choice.key == choice.key and slow is not None
    slower = slow._replace(plan=replace(slow.plan, step_us=100 * slow.plan.step_us))
    hoped = fitting.chosen_in_hope(goal, slower)
    assert hoped is not None and hoped.choice.key != choice.key  # that one is known to exceed the budget
    assert hoped.plan.peak_bytes <= budget and hoped.plan.step_us <= slow.plan.step_us
    assert fitting.chosen_in_hope(goal, None) is not None
    as_fast = hoped._replace(plan=replace(hoped.plan, step_us=1.4 * hoped.plan.step_us))
    assert fitting.chosen_in_hope(goal, as_fast) is None
    fitting.known = replace(fitting.known, measured=CompiledSizes())
    assert fitting.chosen_in_hope(goal, slower) is None


def test_where_nothing_was_compiled_no_plan_is_sought_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    function = tensile.jit(sgd_step, budget=2**40, donate_argnums=0)
    function(weights(3), batch(rows=1650))
    fitting = find_plan.begin_to_predict(running(function).compiled.step, Budget(10_000, None))
    fitting.known = replace(fitting.known, measured=CompiledSizes())
    sought: list[CompiledSizes] = []
    monkeypatch.setattr(Planner, "plan", lambda self, goal, measured: sought.append(measured))
    assert fitting.chosen_with_margin(fitting.goal()) is None
    assert len(sought) == 1
