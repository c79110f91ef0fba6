"""Fifty budgets, one after another: what a lower one may cost, and what it may not."""

import numpy as np
import pytest

from tensile_jax.plan import LEAST, Ladder, Measured, floor, order, whole_peak
from tensile_jax.plan.policies.auto import auto
from tensile_jax.plan.result.build import assemble, empty_plan, planned_whole
from tensile_jax.plan.search.choice import WHOLE, Choice, layout
from tensile_jax.plan_format import Plan
from tests.builders import PROFILE, training_graph

NOTHING = Measured()
_NOISE = 0.05  # of a step: rungs are ranked by what their cuts cost, which leaves out how copies come to lie


def plan_of(ladder: Ladder, choice: Choice) -> Plan:
    if choice.rung == WHOLE:
        peak, latency_us = whole_peak(ladder, NOTHING), sum(ladder.latencies)
        return planned_whole(ladder.graph, empty_plan(ladder.graph), PROFILE, peak_bytes=peak, latency_us=latency_us)
    chosen = layout(ladder, choice, NOTHING)
    return assemble(chosen, ladder.traffic, PROFILE, ladder.latencies, empty_plan(ladder.graph))


@pytest.mark.parametrize("donated", [True, False])
@pytest.mark.parametrize("weight", [1_000, 300_000])
@pytest.mark.parametrize("state_may_stay_out", [True, False])
def test_a_lower_budget_never_needs_more_and_is_never_faster_by_more_than_noise(
    donated: bool, weight: int, state_may_stay_out: bool
) -> None:
    graph = order(training_graph(8, activation=100_000, weight=weight, donated=donated))
    ladder = Ladder(graph, PROFILE, state_may_stay_out=state_may_stay_out)
    least, _ = floor(ladder, NOTHING)
    plans: list[Plan] = []
    for limit in np.linspace(whole_peak(ladder, NOTHING), least, 50):
        choice = auto(ladder, float(np.ceil(limit)), NOTHING)
        assert choice is not None
        plans.append(plan_of(ladder, choice))
        assert plans[-1].peak_bytes <= np.ceil(limit)
    peaks = [plan.peak_bytes for plan in plans]
    assert peaks == sorted(peaks, reverse=True)
    slowest = np.maximum.accumulate([plan.step_us for plan in plans])
    worst = max(before / plan.step_us - 1 for plan, before in zip(plans, slowest, strict=True))
    assert worst <= _NOISE


def test_as_little_as_possible_is_the_floor() -> None:
    ladder = Ladder(order(training_graph(4, activation=100_000)), PROFILE, state_may_stay_out=False)
    choice = auto(ladder, LEAST, NOTHING)
    assert choice is not None
    assert plan_of(ladder, choice).peak_bytes <= floor(ladder, NOTHING)[0]
