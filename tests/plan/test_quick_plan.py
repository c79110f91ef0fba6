"""The plan of a short search keeps the limit, and is found with far fewer evaluations than that of the whole search."""

import pytest

from tensile_jax.plan import CompiledSizes, Goal, Planner, PolicyName
from tests.builders import PROFILE, slow_but, training_graph
from tests.plan.small_steps import small_step

NOTHING = CompiledSizes()


def _limits(planner: Planner) -> list[float]:
    floor, whole = planner.floor_bytes(NOTHING), planner.whole_peak_bytes(NOTHING)
    return [floor + part * (whole - floor) for part in (0.0, 0.3, 0.6, 0.9)]


@pytest.mark.parametrize("seed", slow_but(range(0, 120, 2), *range(0, 120, 8)))
def test_it_keeps_the_limit_and_is_the_same_each_time(seed: int) -> None:
    graph, profile = small_step(seed, most=30)
    planner, other = Planner(graph, profile), Planner(graph, profile)
    for limit in _limits(planner):
        found, again = planner.quick_plan(Goal(limit), NOTHING), other.quick_plan(Goal(limit), NOTHING)
        assert (found and found.plan) == (again and again.plan)
        if found is not None:
            assert found.plan.peak_bytes <= limit
            assert found.plan.whole or found.plan.step_us >= planner.bound_us(limit, NOTHING) * (1 - 1e-9)


@pytest.mark.parametrize("state_memory", ["device", "any"])
def test_it_is_found_with_few_evaluations_and_is_hardly_slower(state_memory: str) -> None:
    def planner() -> Planner:
        return Planner(training_graph(16), PROFILE, state_memory="any" if state_memory == "any" else "device")

    quick, whole = planner(), planner()
    goal = Goal(0.6 * quick.whole_peak_bytes(NOTHING))
    soon, best = quick.quick_plan(goal, NOTHING), whole.plan(goal, NOTHING)
    assert soon is not None and best is not None
    assert best.plan.step_us <= soon.plan.step_us <= 1.6 * whole.whole_us
    assert quick.model.search_evaluator.evaluated < whole.model.search_evaluator.evaluated / 2


def test_host_memory_is_limited() -> None:
    free = Planner(training_graph(8, weight=300_000), PROFILE, state_memory="any")
    goal = Goal(0.6 * free.whole_peak_bytes(NOTHING))
    for host_limit in (0, 200_000):
        found = free.with_host_limit(host_limit).quick_plan(goal, NOTHING)
        assert found is None or (found.plan.host_peak_bytes or 0) <= host_limit


def test_a_step_that_fits_runs_whole_and_what_is_impossible_has_none() -> None:
    planner = Planner(training_graph(4), PROFILE)
    found = planner.quick_plan(Goal(2.0**40), NOTHING)
    assert found is not None and found.plan.whole
    assert planner.quick_plan(Goal(1.0), NOTHING) is None


@pytest.mark.parametrize("policy", ["tensile", "vdnn", "capuchin", "none"])
def test_other_policies_have_none(policy: PolicyName) -> None:
    assert Planner(training_graph(4), PROFILE, policy=policy).quick_plan(Goal(2.0**40), NOTHING) is None
