"""A step that fits the budget as one executable runs so, also if it is predicted to need more."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tensile_jax as tensile
from tensile_jax.exec.compiling.compiler import Compiler, peak_of
from tensile_jax.exec.compiling.plain_jit import PlainJit
from tensile_jax.exec.fitting import find_plan
from tensile_jax.exec.fitting.fitting import Fitting
from tensile_jax.plan import CompiledSizes, Planner, PolicyName
from tests.builders import fresh, numbers, within_budget

Case = tuple[Any, Any, Any]
OPTIMIZER = optax.contrib.schedule_free_adamw(1e-2)


def dense(rows: int) -> Case:
    """Four dense layers with an optimizer of many small operators, of which XLA needs somewhat less than predicted."""
    keys = jax.random.split(jax.random.key(rows), 5)
    weights = [jax.random.normal(k, (128, 128)) / 12 for k in keys[:4]]

    def loss_of(weights: list[jax.Array], x: jax.Array) -> jax.Array:
        for w in weights:
            x = jax.nn.gelu(x @ w)
        return jnp.mean(x**2)

    def step(state: Any, x: jax.Array) -> Any:
        weights, optimizer = state
        loss, gradients = jax.value_and_grad(loss_of)(weights, x)
        updates, optimizer = OPTIMIZER.update(gradients, optimizer, weights)
        return (optax.apply_updates(weights, updates), optimizer), loss

    return step, (weights, OPTIMIZER.init(weights)), jax.random.normal(keys[4], (rows, 128))


def kernel(rows: int) -> Case:
    """A kernel of all pairs of rows and its Cholesky factor, of which XLA needs much less than predicted."""

    def loss_of(scales: jax.Array, x: jax.Array) -> jax.Array:
        scaled = x * jnp.exp(scales)
        distances = ((scaled[:, None] - scaled[None]) ** 2).sum(-1)
        factor = jnp.linalg.cholesky(jnp.exp(-distances / 2) + 0.1 * jnp.eye(rows))
        whitened = jax.scipy.linalg.solve_triangular(factor, jnp.sin(x[:, 0]), lower=True)
        return jnp.sum(whitened**2) / 2 + jnp.sum(jnp.log(jnp.diag(factor)))

    def step(scales: jax.Array, x: jax.Array) -> Any:
        loss, gradient = jax.value_and_grad(loss_of)(scales, x)
        return scales - 1e-3 * gradient, loss

    return step, jnp.zeros(4), jax.random.normal(jax.random.key(rows), (rows, 4))


def curved(rows: int) -> Case:
    """Five dense layers and the product of the loss's second derivatives with a direction, for less than is predicted."""
    keys = jax.random.split(jax.random.key(rows), 6)
    weights = [jax.random.normal(k, (128, 128)) / 12 for k in keys[:5]]

    def loss_of(weights: list[jax.Array], x: jax.Array) -> jax.Array:
        for w in weights:
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    def step(state: Any, x: jax.Array) -> Any:
        weights, along = state
        loss, gradients = jax.value_and_grad(loss_of)(weights, x)
        curvature = jax.jvp(lambda q: jax.grad(loss_of)(q, x), (weights,), (along,))[1]
        along = jax.tree.map(lambda v, g, c: 0.9 * v + g - 0.1 * c, along, gradients, curvature)
        return (jax.tree.map(lambda w, v: w - 0.01 * v, weights, along), along), loss

    return step, (weights, jax.tree.map(jnp.zeros_like, weights)), jax.random.normal(keys[5], (rows, 128))


def halves(rows: int) -> Case:
    """Four dense layers in 16 bits, which XLA computes in 32 on a CPU, in more memory than is predicted."""
    keys = jax.random.split(jax.random.key(rows), 5)
    weights = [jax.random.normal(k, (128, 128)) / 12 for k in keys[:4]]

    def loss_of(weights: list[jax.Array], x: jax.Array) -> jax.Array:
        x = x.astype(jnp.float16)
        for w in weights:
            x = jnp.tanh(x @ w.astype(jnp.float16))
        return jnp.mean(x.astype(jnp.float32) ** 2)

    def step(weights: list[jax.Array], x: jax.Array) -> Any:
        loss, gradients = jax.value_and_grad(loss_of)(weights, x)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), loss

    return step, weights, jax.random.normal(keys[4], (rows, 128))


def peaks(function: tensile.PlannedFunction, *arguments: Any) -> tuple[int, int]:
    """Plain jit's peak as predicted, and as compiled, of which the package learns nothing here."""
    step = function._calls.step(arguments, {})
    return step.planner.whole_peak_bytes(CompiledSizes()), peak_of(step.traced.traced.lower().compile())


def planned(case: Case, budget: Any, **options: Any) -> tensile.PlannedFunction:
    return tensile.jit(case[0], budget=budget, donate_argnums=0, **options)


def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is compiled from now on."""
    seen: list[str] = []
    whole, segments = Compiler.begin_whole, Fitting.compile_segments
    monkeypatch.setattr(Compiler, "begin_whole", lambda self, traced, **how: seen.append("whole") or whole(self, traced, **how))
    monkeypatch.setattr(Fitting, "compile_segments", lambda self, plan: seen.append("segments") or segments(self, plan))
    return seen


def check_same(
    case: Case, function: tensile.PlannedFunction, compare: Callable[[Any, Any], None] = np.testing.assert_array_equal
) -> None:
    step, state, batch = case
    state, expected = fresh(state), jax.jit(step)(state, batch)
    for a, b in zip(numbers(function(state, batch)), numbers(expected), strict=True):
        compare(a, b)


def test_a_budget_just_below_what_is_predicted_is_tried_with_plain_jits_step(monkeypatch: pytest.MonkeyPatch) -> None:
    case = dense(512)
    predicted, compiled = peaks(planned(case, "1TiB"), *case[1:])
    assert compiled < predicted < 1.3 * compiled
    seen = counted(monkeypatch)
    function = planned(case, compiled)
    check_same(case, function)
    plan = function.plan(*case[1:])
    assert plan.whole and plan.peak_bytes == compiled and seen == ["whole"]


def test_a_budget_that_plain_jits_step_exceeds_after_all_is_kept_by_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    case = dense(520)
    budget = peaks(planned(case, "1TiB"), *case[1:])[1] - 1
    seen = counted(monkeypatch)
    function = planned(case, budget)
    function(fresh(case[1]), case[2])
    plan = function.plan(*case[1:])
    assert not plan.whole and plan.peak_bytes <= budget and seen[0] == "whole" and seen.count("whole") == 1
    again = planned(case, budget)  # the plan is known now
    again(fresh(case[1]), case[2])
    assert again.plan(*case[1:]).segments == plan.segments and seen.count("whole") == 1


def test_a_budget_that_no_other_plan_keeps_is_tried_with_plain_jits_step() -> None:
    case = kernel(320)
    predicted, compiled = peaks(planned(case, "1TiB"), *case[1:])
    assert predicted > 1.4 * compiled
    function = planned(case, compiled)
    assert function.plan(*case[1:]).whole  # before the call, too
    check_same(case, function)
    assert function.plan(*case[1:]).whole


@pytest.mark.parametrize("ask", ["plan", "call"])
def test_no_error_names_more_than_plain_jit_needs(ask: str) -> None:
    case = kernel(336 if ask == "plan" else 352)
    refusing = planned(case, 100_000)
    with pytest.raises(tensile.BudgetTooSmall) as refused:
        refusing.plan(*case[1:]) if ask == "plan" else refusing(fresh(case[1]), case[2])
    function = planned(case, refused.value.floor_bytes)
    assert refused.value.floor_bytes <= function.jit_peak_bytes(*case[1:])
    check_same(case, function)


def test_once_plain_jits_step_is_known_to_fit_no_earlier_plan_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    case = dense(544)
    budget = peaks(planned(case, "1TiB"), *case[1:])[1]
    with monkeypatch.context() as patched:  # plain jit's step is not tried
        patched.setattr(find_plan, "_NEAR", 0.0)
        patched.setattr(find_plan, "_shown_ratio", lambda fitting: 1.0)
        function = planned(case, budget)
        function(fresh(case[1]), case[2])
    assert not function.plan(*case[1:]).whole
    assert function.jit_peak_bytes(*case[1:]) == budget
    other = planned(case, budget)
    other(fresh(case[1]), case[2])
    assert other.plan(*case[1:]).whole


def test_compiled_segments_may_show_that_plain_jits_step_fits(monkeypatch: pytest.MonkeyPatch, cheap_launches: str) -> None:
    case = curved(512)
    predicted, compiled = peaks(planned(case, "1TiB"), *case[1:])
    if predicted < 1.4 * compiled:
        pytest.skip("the XLA of this jax needs about as much as predicted, so plain jit is compiled first")
    seen = counted(monkeypatch)
    function = planned(case, int(1.05 * compiled), device_profile=cheap_launches)
    check_same(case, function)
    assert function.plan(*case[1:]).whole and seen[0] == "segments" and seen[-1] == "whole"


@pytest.mark.parametrize("make", [curved, dense, halves])
@pytest.mark.parametrize("share", [0.6, 0.8])
def test_a_share_is_one_of_plain_jits_own_peak(share: float, make: Callable[[int], Case]) -> None:
    case = make(576 if share == 0.6 else 592)
    predicted, compiled = peaks(planned(case, "1TiB"), *case[1:])
    assert make is dense or max(predicted / compiled, compiled / predicted) > 1.2
    function = planned(case, f"{share:.0%}")
    check_same(case, function, partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6))
    plan = function.plan(*case[1:])
    assert not plan.whole and plan.budget_bytes == int(share * compiled) and within_budget(plan)
    assert plan.budget_basis is not None and plan.budget_basis.endswith("as compiled")
    again = planned(case, f"{share:.0%}")
    again(fresh(case[1]), case[2])
    assert again.plan(*case[1:]).peak_bytes <= share * compiled


@pytest.mark.parametrize("policy", ["tensile", "checkpoint", "none"])
def test_a_share_is_one_of_plain_jits_own_peak_under_every_policy(policy: PolicyName) -> None:
    case = halves(608)
    compiled = peaks(planned(case, "1TiB"), *case[1:])[1]
    function = tensile.jit(case[0], budget="90%", policy=policy, donate_argnums=0)
    function(fresh(case[1]), case[2])
    plan = function.plan(*case[1:])
    assert plan.budget_bytes == int(0.9 * compiled) and within_budget(plan)


@pytest.mark.parametrize("ask", ["plan", "call"])
def test_a_share_of_more_than_was_predicted_is_not_refused(ask: str) -> None:
    case = halves(2048 if ask == "plan" else 2064)
    predicted, compiled = peaks(planned(case, "1TiB"), *case[1:])
    with pytest.raises(tensile.BudgetTooSmall) as refused:
        planned(case, 1000).plan(*case[1:])
    share = next(s for s in range(1, 100) if s / 100 * compiled > 1.02 * refused.value.floor_bytes)
    assert share / 100 * predicted < refused.value.floor_bytes
    function = planned(case, f"{share}%")
    if ask == "call":
        function(fresh(case[1]), case[2])
    plan = function.plan(*case[1:])
    assert plan.budget_bytes == int(share / 100 * compiled) and within_budget(plan)


def test_a_share_that_is_too_small_of_either_peak_is_refused_without_another_search(monkeypatch: pytest.MonkeyPatch) -> None:
    case = dense(584)
    seen = counted(monkeypatch)
    with pytest.raises(tensile.BudgetTooSmall):
        planned(case, "5%").plan(*case[1:])
    assert not seen


def test_plain_jits_step_is_compiled_once_for_a_share(monkeypatch: pytest.MonkeyPatch) -> None:
    case = dense(536)
    seen = counted(monkeypatch)
    function = planned(case, "80%")
    function(fresh(case[1]), case[2])
    assert not function.plan(*case[1:]).whole and seen[0] == "whole" and seen.count("whole") == 1
    again = planned(case, "70%")
    again(fresh(case[1]), case[2])
    assert seen.count("whole") == 1 and again.jit_peak_bytes(*case[1:]) == function.jit_peak_bytes(*case[1:])


def test_the_planner_begins_while_plain_jits_step_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    case = dense(624)
    happened: list[str] = []
    begin, finish, floor = PlainJit.begin, PlainJit.sized, Planner.quick_floor
    monkeypatch.setattr(PlainJit, "begin", lambda self: happened.append("begun") or begin(self))
    monkeypatch.setattr(PlainJit, "sized", lambda self, *tell: happened.append("waited") or finish(self, *tell))
    monkeypatch.setattr(Planner, "quick_floor", lambda self, measured: happened.append("planned") or floor(self, measured))
    planned(case, "80%")(fresh(case[1]), case[2])
    assert happened.index("begun") < happened.index("planned") < happened.index("waited")


def test_a_share_is_of_the_prediction_where_plain_jits_step_may_exceed_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    case = dense(560)
    predicted, _ = peaks(planned(case, "1TiB"), *case[1:])
    monkeypatch.setattr(find_plan, "memory_of", lambda _: predicted - 1)
    seen = counted(monkeypatch)
    function = planned(case, "80%")
    function(fresh(case[1]), case[2])
    plan = function.plan(*case[1:])
    assert plan.budget_bytes == int(0.8 * predicted) and within_budget(plan) and "whole" not in seen


def test_a_step_that_may_exceed_the_device_is_not_left_to_xlas_own_rematerialization(monkeypatch: pytest.MonkeyPatch) -> None:
    case = dense(552)
    predicted, compiled = peaks(planned(case, "1TiB"), *case[1:])
    monkeypatch.setattr(find_plan, "memory_of", lambda _: predicted - 1)
    seen = counted(monkeypatch)
    function = planned(case, compiled)
    function(fresh(case[1]), case[2])
    assert not function.plan(*case[1:]).whole and "whole" not in seen


@pytest.mark.parametrize("asked", [{"policy": "none"}, {"max_slowdown": 1.5}], ids=["none", "max_slowdown"])
def test_without_a_budget_in_bytes_plain_jit_is_not_compiled(asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    case = dense(568)
    seen = counted(monkeypatch)
    function = tensile.jit(case[0], donate_argnums=0, **asked)
    function(fresh(case[1]), case[2])
    assert not function.plan(*case[1:]).whole and "whole" not in seen
