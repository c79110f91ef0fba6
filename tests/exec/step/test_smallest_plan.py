"""Where the planner has no plan that compiling confirms, the one with the least peak is tried: quickly at first."""

import pytest

import tensile_jax as tensile
from tensile_jax.exec.step.prepared_step import PreparedStep
from tensile_jax.plan import Goal
from tensile_jax.plan.policies import auto
from tests.builders import batch, fresh, low_budget, running, sgd_step, weights


def test_no_plan_is_made_faster_for_a_call_that_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = weights(5), batch(rows=900)
    function = tensile.jit(sgd_step, budget=10_000, donate_argnums=0)
    monkeypatch.setattr(auto, "improve", lambda *_: pytest.fail("A plan that nobody will run was improved."))
    with pytest.raises(tensile.BudgetTooSmall):
        function(*arguments)
    assert not any(array.is_deleted() for array in arguments[0])


def test_the_plan_with_the_least_peak_is_made_faster_where_it_keeps_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = weights(5), batch(rows=800)  # no other test of this process has plans for them
    budget = low_budget(sgd_step, *arguments, part=0.05, donate_argnums=0)
    monkeypatch.setattr(PreparedStep, "_within", lambda *_, **__: None)
    function = tensile.jit(sgd_step, budget=budget, donate_argnums=0)
    function(fresh(arguments[0]), arguments[1])
    prepared = running(function).prepared
    slow = prepared.planner.plan_of(prepared.planner.lowest_choice(prepared.measured), Goal(budget), prepared.measured)
    plan = function.plan(*arguments)
    assert slow is not None and plan.step_us < 0.9 * slow.step_us
    assert plan.peak_bytes <= budget
