"""Every policy's plan keeps its limit of host memory, as its replay counts it, and a limit that does not bind changes nothing."""

import random
from dataclasses import replace

import pytest

from tensile_jax.plan import POLICIES, CompiledSizes, PolicyName
from tensile_jax.plan.analysis.operator_order import order
from tensile_jax.plan.planner import Goal, Planner
from tensile_jax.plan.policies.host_limit import host_peak_of, within_host_limit
from tensile_jax.plan.result.check import check
from tensile_jax.plan.search.choice import LEAST, Choice, predicted_plan, whole_peak
from tensile_jax.plan.search.step_model import StepModel
from tensile_jax.plan_format import Plan
from tests.builders import PROFILE, floor_bytes, slow_but, training_graph
from tests.plan.result.test_memory_curve import random_graph
from tests.plan.search.schedules import odd_step, plan_of, random_schedule, wander

NOTHING = CompiledSizes()


def planned(step: StepModel, choice: Choice) -> Plan:
    """The plan, which says that it has this budget of host memory."""
    state_memory = "any" if step.state_may_stay_out else "device"
    plan = replace(predicted_plan(step, choice, NOTHING), state_memory=state_memory)
    return replace(plan, host_budget_bytes=None if step.host_limit == float("inf") else int(step.host_limit))


@pytest.mark.parametrize("seed", slow_but(range(200), *range(12)))
def test_any_schedule_counts_at_least_what_its_plan_has_in_host_memory(seed: int) -> None:
    """All tensors are significant here, and so the count is exact."""
    rng, step = random.Random(seed), odd_step(seed)
    for _, schedule in wander(random_schedule(step.evaluator, rng), rng, 12):
        assert schedule.host_peak == plan_of(step, schedule).host_peak_bytes


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("seed", slow_but(range(20), *range(2)))
def test_every_plan_keeps_its_limit_of_host_memory(seed: int, name: PolicyName) -> None:
    rng = random.Random(seed)
    graph, stays_out = order(random_graph(rng)), rng.random() < 0.5
    free = StepModel(graph, PROFILE, state_may_stay_out=stays_out)
    least = POLICIES[name](free, LEAST, NOTHING)
    most = 0 if least is None or least.runs_whole else planned(free, least).host_peak_bytes or 0
    for part in (0.0, 0.3, 0.7, 1.0):
        step = StepModel(graph, PROFILE, state_may_stay_out=stays_out, host_limit=part * most)
        floor = floor_bytes(step, NOTHING, POLICIES[name])
        for limit in (LEAST, floor, floor + rng.random() * max(0, whole_peak(step, NOTHING) - floor)):
            choice = POLICIES[name](step, limit, NOTHING)
            assert choice is not None
            if not choice.runs_whole:
                plan = planned(step, choice)
                check(plan, graph)
                assert limit == LEAST or plan.peak_bytes <= limit


@pytest.mark.parametrize("stays_out", [True, False])
def test_a_limit_that_is_not_reached_changes_nothing_although_all_tensors_together_are_more(stays_out: bool) -> None:
    graph = order(training_graph(3, weight=100_000))
    free = StepModel(graph, PROFILE, state_may_stay_out=stays_out)
    step = StepModel(graph, PROFILE, state_may_stay_out=stays_out, host_limit=sum(t.nbytes for t in graph.tensors) - 1)
    assert step.host_limit < float("inf")
    for name, policy in POLICIES.items():
        for limit in (LEAST, 0.8 * whole_peak(free, NOTHING)):
            one, two = policy(free, limit, NOTHING), policy(step, limit, NOTHING)
            assert (one and one.key) == (two and two.key), name
    assert StepModel(graph, PROFILE, state_may_stay_out=stays_out, host_limit=10**12).host_limit == float("inf")


def test_less_host_memory_needs_more_on_the_device_and_never_more_than_without_swaps() -> None:
    graph = order(training_graph(8, activation=300_000, weight=100_000))
    floors = [
        Planner(graph, PROFILE, state_memory="any", host_limit=part * 10**6).floor_bytes(NOTHING) for part in (9.0, 1.5, 0.7, 0.0)
    ]
    assert floors == sorted(floors) and floors[0] < floors[-1]


def test_a_choice_whose_plan_has_more_on_the_host_than_was_counted_is_made_again_for_less() -> None:
    step = StepModel(order(training_graph(6)), PROFILE, state_may_stay_out=False)
    swapping = POLICIES["auto"](step, LEAST, NOTHING)
    assert swapping is not None
    most = predicted_plan(step, swapping, NOTHING).host_peak_bytes
    limited = step.with_host_limit((most or 0) - 1)
    asked: list[float] = []

    def decide(step: StepModel) -> Choice | None:
        asked.append(step.host_limit)
        return swapping if step.may_swap else POLICIES["none"](step, LEAST, NOTHING)

    found = within_host_limit(limited, 10**6, NOTHING, decide)
    assert found is not None and host_peak_of(limited, found) == 0
    assert asked == [float("inf"), *(part * limited.host_limit for part in (1.0, 0.9, 0.7, 0.0))]


def test_of_offloaded_state_the_largest_tensors_are_on_the_host_that_fit_there() -> None:
    graph = order(training_graph(5, weight=100_000))
    for state, most in ((500_000, 10**9), (200_000, 200_000), (100_000, 199_999), (0, 99_999)):
        planner = Planner(graph, PROFILE, policy="none", state_memory="any", host_limit=most)
        choice = planner.least_choice(NOTHING)
        out = planner.offload_state(choice, [old for old, _ in planner.model.pairs])
        plan = planner.plan_of(out, Goal(float("inf")), NOTHING)
        assert plan is not None and (plan.host_peak_bytes or 0) <= most
        assert (plan.host_peak_bytes or 0) >= 0.9 * state, plan.host_peak_bytes
