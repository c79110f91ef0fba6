"""Ten budgets, one after another: what a lower one may cost, and what it may not."""

import numpy as np
import pytest

from tensile_jax.plan import CompiledSizes, Goal, Planner
from tensile_jax.plan.analysis.operator_order import order
from tensile_jax.plan.policies.auto import auto, floor_bytes
from tensile_jax.plan.result.build import build_whole_plan, empty_plan
from tensile_jax.plan.search.choice import LEAST, Choice, predicted_plan, whole_peak
from tensile_jax.plan.search.step_model import StepModel
from tensile_jax.plan_format import Plan
from tests.builders import PROFILE, slow_but, slow_if, training_graph

NOTHING = CompiledSizes()
_NOISE = 0.25  # of a step: a local search may end in another optimum at a lower limit


def plan_of(step: StepModel, choice: Choice) -> Plan:
    if choice.runs_whole:
        peak, latency_us = whole_peak(step, NOTHING), sum(step.latencies)
        return build_whole_plan(step.graph, empty_plan(step.graph), PROFILE, needed_bytes=peak, latency_us=latency_us)
    return predicted_plan(step, choice, NOTHING)


@pytest.mark.parametrize("layers", slow_if([3, 4, 8], 4, 8))
@pytest.mark.parametrize("donated", [True, False])
@pytest.mark.parametrize("weight", slow_but([1_000, 300_000], 1_000))
@pytest.mark.parametrize("state_may_stay_out", [True, False])
def test_a_lower_budget_is_kept_and_is_never_faster_by_more_than_noise(
    layers: int, donated: bool, weight: int, state_may_stay_out: bool
) -> None:
    graph = order(training_graph(layers, activation=100_000, weight=weight, donated=donated))
    step = StepModel(graph, PROFILE, state_may_stay_out=state_may_stay_out)
    least = floor_bytes(step, NOTHING)
    plans: list[Plan] = []
    for limit in np.linspace(whole_peak(step, NOTHING), least, 10):
        choice = auto(step, float(np.ceil(limit)), NOTHING)
        assert choice is not None
        plans.append(plan_of(step, choice))
        assert plans[-1].peak_bytes <= np.ceil(limit)
    slowest = np.maximum.accumulate([plan.step_us for plan in plans])
    worst = max(before / plan.step_us - 1 for plan, before in zip(plans, slowest, strict=True))
    assert worst <= _NOISE


def test_a_limit_under_which_there_is_no_choice_is_searched_once() -> None:
    planner, searched = Planner(training_graph(2, activation=100_000), PROFILE), list[float]()

    def policy(step: StepModel, limit: float, measured: CompiledSizes) -> Choice | None:
        searched.append(limit)
        return auto(step, limit, measured)

    planner._policy = policy
    assert planner.plan(Goal(1), NOTHING) is None and not planner.has_choice(1, CompiledSizes())
    assert searched == [1]
    assert planner.has_choice(2**40, NOTHING) and searched == [1, 2**40]


def test_a_plan_that_was_just_found_is_not_sought_again() -> None:
    planner = Planner(training_graph(3, activation=100_000), PROFILE)
    goal = Goal(planner.floor_bytes(NOTHING) + 1_000)
    found = planner.plan(goal, NOTHING)
    assert found is not None and planner.plan(goal, NOTHING) is found
    assert planner.plan(goal, CompiledSizes()) is found
    known = planner.plan(goal, CompiledSizes(whole=10**9))  # plain jit needs more than the limit, as was predicted
    assert known is not None and known.choice is found.choice and known.plan.jit_peak_bytes == 10**9
    assert planner.plan(goal, CompiledSizes(margin=1)) is not found
    assert planner.plan(Goal(goal.limit + 1), NOTHING) is not found


def test_as_little_as_possible_is_the_floor() -> None:
    step = StepModel(order(training_graph(4, activation=100_000)), PROFILE, state_may_stay_out=False)
    choice = auto(step, LEAST, NOTHING)
    assert choice is not None
    assert plan_of(step, choice).peak_bytes <= floor_bytes(step, NOTHING)


def test_the_floor_is_computed_once_whatever_margin_plans_keep() -> None:
    planner, searched = Planner(training_graph(2, activation=100_000), PROFILE, policy="capuchin"), list[float]()
    known = planner._policy

    def policy(step: StepModel, limit: float, measured: CompiledSizes) -> Choice | None:
        searched.append(limit)
        return known(step, limit, measured)

    planner._policy = policy
    floor = planner.floor_bytes(NOTHING)
    assert planner.floor_bytes(CompiledSizes(margin=1000)) == planner.floor_bytes(CompiledSizes()) == floor
    assert searched == [LEAST]
    found = planner.plan(Goal(floor), NOTHING)
    assert found is not None and found.plan.peak_bytes <= floor and searched == [LEAST, floor]
    planner.floor_bytes(CompiledSizes(whole=1))
    assert searched == [LEAST, floor, LEAST]
