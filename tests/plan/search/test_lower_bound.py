"""The bound is below every plan, and says when there can be none."""

import dataclasses
import itertools

import numpy as np
import pytest

import tensile_jax as tensile
from tensile_jax.ir import Graph
from tensile_jax.plan import POLICIES, Measured
from tensile_jax.plan.analysis.operator_order import order
from tensile_jax.plan.policies.auto import floor_bytes
from tensile_jax.plan.search.step_model import StepModel
from tensile_jax.plan.search.choice import predicted_plan, whole_peak
from tensile_jax.plan.search.lower_bound import least_step_us
from tests.builders import PROFILE, batch, graph_of, sgd_step, training_graph, weights

SLOW_LINK = dataclasses.replace(PROFILE, device_to_host_bytes_per_us=1e-6, host_to_device_bytes_per_us=1e-6)


def bound(graph: Graph, budget: float, profile: object = PROFILE) -> float:
    step = StepModel(graph, profile, state_may_stay_out=False)  # pyright: ignore[reportArgumentType] # a profile
    return least_step_us(step, budget)


CHAIN = graph_of(
    ["a = heavy(x)", "b = heavy(a)", "c = heavy(b)", "d = heavy(c)", "y = heavy(a, d)"],
    inputs="x", outputs="y", sizes={"x": 10, "a": 1000, "b": 100, "c": 300, "d": 100, "y": 100}, flops=50_000,
)  # fmt: skip


def test_with_memory_enough_it_is_the_latencies_and_one_launch() -> None:
    step = StepModel(CHAIN, PROFILE, state_may_stay_out=False)
    assert bound(CHAIN, 10_000) == pytest.approx(sum(step.latencies) + PROFILE.launch_us)


def test_what_does_not_fit_runs_again_or_crosses_the_link() -> None:
    """`a` is not read while c and d run: x, b, c and nine tenths of `a` fit, and to run it again takes 500 us."""
    alone = bound(CHAIN, 10_000)
    assert bound(CHAIN, 1_310, SLOW_LINK) == pytest.approx(alone + 0.1 * 500)
    assert bound(CHAIN, 1_310) == pytest.approx(alone)  # a tenth of its copies hides beside the rest
    assert bound(CHAIN, 1_000, SLOW_LINK) == np.inf  # y reads a and d, which do not fit beside each other


@pytest.mark.parametrize(("layers", "activation", "donated"), [*itertools.product((2, 4, 7), (1_000, 100_000), (True, False))])
def test_no_plan_is_below_it(layers: int, activation: int, donated: bool) -> None:
    graph = order(training_graph(layers, activation=activation, donated=donated))
    step = StepModel(graph, PROFILE, state_may_stay_out=False)
    least = floor_bytes(step, Measured())
    before = np.inf
    for part in (0.0, 0.2, 0.4, 0.6, 0.8, 1.0):
        limit = least + part * (whole_peak(step, Measured()) - least)
        choice = POLICIES["auto"](step, limit, Measured())
        assert choice is not None
        below = least_step_us(step, limit)
        assert below <= before * (1 + 1e-9)  # more memory never takes longer
        before = below
        if not choice.runs_whole:
            assert predicted_plan(step, choice, Measured()).step_us >= below * (1 - 1e-9)


def test_a_plan_says_how_far_above_its_bound_it_is() -> None:
    function = tensile.jit(sgd_step, budget=300_000, donate_argnums=0)
    plan = function.plan(weights(), batch())
    assert "bound" not in str(plan)
    below = function.bound_us(weights(), batch())
    assert 0 < below <= plan.step_us
    assert f"this one is {plan.step_us / below - 1:.1%} above" in str(dataclasses.replace(plan, bound_us=below))
