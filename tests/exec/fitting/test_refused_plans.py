"""A plan that its replay refuses is our mistake, and the user's step runs all the same: by the next plan, with a note."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

import tensile_jax as tensile
from tensile_jax.errors import InvalidPlan
from tensile_jax.ir import Graph
from tensile_jax.plan import planner
from tests.builders import batch, fresh, low_budget, numbers, sgd_step, slow_but, weights

ARGUMENTS = (weights(), batch())
FAULT = "Segment 4: needs 52011389 bytes; it says 51716477"


@pytest.fixture(scope="module")
def budget() -> int:
    return low_budget(sgd_step, *ARGUMENTS, part=0.4, donate_argnums=0)


Refuse = Callable[[Callable[[int, tensile.Plan], bool]], list[tensile.Plan]]


@pytest.fixture
def refuse(monkeypatch: pytest.MonkeyPatch) -> Refuse:
    """`refuse(when)` lets the replay refuse a plan where `when(how many it has seen, plan)`; gives the list of those seen."""

    def begin(when: Callable[[int, tensile.Plan], bool]) -> list[tensile.Plan]:
        seen: list[tensile.Plan] = []

        def check(plan: tensile.Plan, graph: Graph) -> None:
            seen.append(plan)
            if when(len(seen) - 1, plan):
                raise InvalidPlan(FAULT.partition(": ")[2], segment=4)

        monkeypatch.setattr(planner, "check", check)
        return seen

    return begin


def run(function: Any) -> tensile.Plan:
    got, expected = function(fresh(ARGUMENTS[0]), ARGUMENTS[1]), jax.jit(sgd_step)(*ARGUMENTS)
    for a, b in zip(numbers(got), numbers(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    return function.plan(*ARGUMENTS)


@pytest.mark.parametrize("policy", ["auto", "tensile", "none"])
@pytest.mark.parametrize("first", slow_but([1, 4], 1))
def test_the_next_plan_is_taken_within_the_budget_and_says_why(policy: Any, first: int, refuse: Refuse) -> None:
    budget = low_budget(sgd_step, *ARGUMENTS, part=0.4, donate_argnums=0, policy=policy)
    refuse(lambda index, _: index < first)
    function = tensile.jit(sgd_step, budget=budget, policy=policy, donate_argnums=0)
    planned = function.plan(*ARGUMENTS)
    assert planned.peak_bytes <= budget
    assert planned.whole or (len(planned.notes) == 1 and FAULT in planned.notes[0])
    assert all(f" note {note}" in " ".join(str(planned).split()) for note in planned.notes)
    plan = run(function)
    assert plan.peak_bytes <= budget
    assert plan.whole or FAULT in plan.notes[0]


def test_a_plan_that_is_refused_once_it_is_compiled_is_replaced_too(budget: int, refuse: Refuse) -> None:
    seen = refuse(lambda index, _: index == 1)  # the first choice, with the sizes that compiling has shown
    plan = run(tensile.jit(sgd_step, budget=budget, donate_argnums=0))
    assert plan.peak_bytes <= budget
    assert FAULT in plan.notes[0]
    assert len(seen) > 2


def test_where_only_plans_without_swaps_and_recomputations_survive_one_of_these_is_taken(refuse: Refuse) -> None:
    refuse(lambda _, plan: plan.swapped_out_bytes + plan.swapped_in_bytes > 0 or plan.recomputed_us > 0)
    function = tensile.jit(sgd_step, policy="tensile", budget=2**40, donate_argnums=0)
    assert run(function).whole
    unswapped = run(tensile.jit(sgd_step, policy="none", donate_argnums=0))
    assert not unswapped.notes


@pytest.mark.slow
def test_where_nothing_survives_the_error_says_what_to_do_and_nothing_has_run(budget: int, refuse: Refuse) -> None:
    refuse(lambda *_: True)
    state = fresh(ARGUMENTS[0])
    for call in (lambda f: f.plan(state, ARGUMENTS[1]), lambda f: f(state, ARGUMENTS[1])):
        with pytest.raises(tensile.TensileError, match=r"mistake of tensile_jax.*policy=.none.*jax\.jit.*report") as caught:
            call(tensile.jit(sgd_step, budget=budget, donate_argnums=0))
        assert not isinstance(caught.value, InvalidPlan)
        assert FAULT in str(caught.value)
    assert not any(w.is_deleted() for w in state)


def test_a_budget_that_is_too_small_is_told_from_plans_that_are_refused(refuse: Refuse) -> None:
    refuse(lambda *_: True)
    with pytest.raises(tensile.BudgetTooSmall):
        tensile.jit(sgd_step, budget=10_000, donate_argnums=0).plan(*ARGUMENTS)


@pytest.mark.slow
def test_the_least_memory_that_is_fast_enough_passes_over_refused_plans(refuse: Refuse) -> None:
    refuse(lambda index, _: index in (0, 3))
    plan = run(tensile.jit(sgd_step, max_slowdown=1.5, donate_argnums=0))
    assert plan.whole or FAULT in plan.notes[0]


def test_plans_that_are_not_refused_carry_no_notes(budget: int) -> None:
    assert run(tensile.jit(sgd_step, budget=budget, donate_argnums=0)).notes == ()
