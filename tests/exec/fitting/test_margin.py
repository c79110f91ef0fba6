"""What predictions miss is kept free before anything is compiled, and given up where no plan is left otherwise."""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest

import tensile_jax as tensile
from tensile_jax.exec.fitting.fitting import Fitting
from tensile_jax.plan import Choice, CompiledSizes, Goal, Planned, Planner
from tests.builders import batch, fresh, low_budget, sgd_step, weights

ARGUMENTS = (weights(6), batch(rows=1500))


@pytest.fixture
def margins(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """For each plan that is asked for: the margin in bytes, and whether there was a plan."""
    seen: list[tuple[int, bool]] = []
    plan: Callable[[Planner, Goal, CompiledSizes], Planned | None] = Planner.plan

    def watched(self: Planner, goal: Goal, measured: CompiledSizes) -> Any:
        found = plan(self, goal, measured)
        seen.append((measured.margin, found is not None))
        return found

    monkeypatch.setattr(Planner, "plan", watched)
    return seen


def run(budget: int, arguments: Any = ARGUMENTS) -> int:
    function = tensile.jit(sgd_step, budget=budget, donate_argnums=0)
    function(fresh(arguments[0]), arguments[1])
    return function.plan(*arguments).peak_bytes


def test_two_per_cent_of_the_budget_are_free_in_the_first_plan_that_is_compiled(margins: list[tuple[int, bool]]) -> None:
    budget = low_budget(sgd_step, *ARGUMENTS, part=0.6, donate_argnums=0)
    margins.clear()
    assert run(budget) <= budget
    assert margins[0] == (int(0.02 * budget), True)


@pytest.mark.parametrize("more, left", [(0.015, 0.01), (0.0, 0.0)])
def test_what_is_free_is_halved_and_given_up_where_there_is_no_plan_otherwise(
    margins: list[tuple[int, bool]], more: float, left: float
) -> None:
    arguments = (weights(6), batch(rows=1300 if more else 1200))
    floor = tensile.jit(sgd_step, budget=2**40, donate_argnums=0).plan(*arguments).floor_bytes
    budget = int((1 + more) * floor)
    margins.clear()
    with contextlib.suppress(tensile.BudgetTooSmall):  # the floor is a prediction
        assert run(budget, arguments) <= budget
    assert margins[0] == (pytest.approx(left * budget, abs=2), True)


def test_the_plan_that_was_shown_is_compiled_first_and_not_sought_again(monkeypatch: pytest.MonkeyPatch) -> None:
    happened: list[object] = []
    choices: Callable[[Planner, float, CompiledSizes], Any] = Planner._choices
    monkeypatch.setattr(
        Planner, "_choices", lambda self, limit, measured: (happened.append(limit), choices(self, limit, measured))[1]
    )
    compile_ = Fitting.compile_segments
    monkeypatch.setattr(Fitting, "compile_segments", lambda self, plan: (happened.append(plan), compile_(self, plan))[1])
    arguments = (weights(5), batch(rows=1400))
    budget = low_budget(sgd_step, *arguments, part=0.6, donate_argnums=0)
    happened.clear()
    function = tensile.jit(sgd_step, budget=budget, donate_argnums=0)
    shown = function.plan(*arguments)
    function(fresh(arguments[0]), arguments[1])
    searched, compiled, *_ = happened
    assert searched == budget and isinstance(compiled, tensile.Plan)
    assert [segment.operators for segment in compiled.segments] == [segment.operators for segment in shown.segments]


@pytest.mark.slow
def test_the_budget_that_an_error_names_is_kept_though_nothing_is_free_then() -> None:
    with pytest.raises(tensile.BudgetTooSmall) as caught:
        run(ARGUMENTS[1].nbytes)
    floor = caught.value.floor_bytes
    assert run(floor) <= floor


def test_a_plan_that_two_revisions_do_not_lower_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    here, predicted = Fitting.workspaces, Fitting.predicted
    attempts: list[int] = []

    def revised(self: Fitting, choice: Choice, goal: Goal, attempt: int) -> Planned | None:
        attempts.append(attempt)
        found = predicted(self, choice, goal)
        return None if found is None else Planned(found.plan, choice)

    arguments = (weights(6), batch(rows=1450))
    budget = low_budget(sgd_step, *arguments, part=0.3, donate_argnums=0)
    monkeypatch.setattr(Fitting, "workspaces", lambda self, *of: [nbytes + budget for nbytes in here(self, *of)])
    monkeypatch.setattr(Fitting, "revised", revised)
    with pytest.raises(tensile.BudgetTooSmall):
        run(budget, arguments)
    assert attempts == [2, 3]
