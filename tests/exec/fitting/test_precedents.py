"""A step that was planned on some shapes is planned quickly on others."""

import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tensile_jax as tensile
from tensile_jax.exec.compiling.plain_jit import PlainJit
from tensile_jax.exec.fitting import forms
from tensile_jax.exec.fitting.fitting import Fitting
from tensile_jax.plan import CompiledSizes, Planner
from tests.builders import fresh


def step(weights: list[jax.Array], x: jax.Array) -> tuple[list[jax.Array], jax.Array]:
    def loss(weights: list[jax.Array]) -> jax.Array:
        h = x
        for w in weights:
            h = h + jnp.tanh(jax.nn.gelu(h @ w))
        return jnp.mean(h**2)

    value, gradients = jax.value_and_grad(loss)(weights)
    return [w - 0.1 * g for w, g in zip(weights, gradients, strict=True)], value


WEIGHTS = [0.05 * jax.random.normal(key, (64, 64)) for key in jax.random.split(jax.random.key(0), 6)]


def rows(n: int) -> jax.Array:
    return jax.random.normal(jax.random.key(1), (n, 64))


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Each search for a plan, and each plan that is adapted, from now on."""
    happened: list[str] = []
    plan, adapt = Planner.plan, Planner.adapt

    def searched(self: Planner, *args: Any) -> Any:
        happened.append("searched")
        return plan(self, *args)

    def adapted(self: Planner, *args: Any) -> Any:
        happened.append("adapted")
        return adapt(self, *args)

    monkeypatch.setattr(Planner, "plan", searched)
    monkeypatch.setattr(Planner, "adapt", adapted)
    return happened


def check(function: tensile.PlannedFunction, n: int) -> float:
    """A step on n rows gives what plain jit gives, within the budget. Its predicted microseconds."""
    expected = jax.jit(step)(WEIGHTS, rows(n))
    new, loss = function(fresh(WEIGHTS), rows(n))
    np.testing.assert_allclose(loss, expected[1], rtol=1e-5)
    for mine, theirs in zip(new, expected[0], strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-6)
    plan = function.plan(fresh(WEIGHTS), rows(n))
    assert not plan.whole and plan.budget_bytes is not None and plan.peak_bytes <= plan.budget_bytes
    assert function.report().peak_bytes <= plan.budget_bytes
    return plan.step_us


def test_other_shapes_need_no_search(searches: list[str]) -> None:
    function = tensile.jit(step, budget="60%", donate_argnums=0)
    large_us = check(function, 8192)
    assert "searched" in searches
    searches.clear()
    with pytest.warns(UserWarning, match="planned and compiled again"):
        assert check(function, 6144) < large_us
    assert searches == ["adapted"]


def test_another_function_with_the_same_operators_needs_none_either(searches: list[str]) -> None:
    check(tensile.jit(step, budget="60%", donate_argnums=0), 8192)
    searches.clear()
    check(tensile.jit(step, budget="60%", donate_argnums=0), 5120)
    assert searches == ["adapted"]


def test_under_another_share_the_plan_is_sought(searches: list[str]) -> None:
    check(tensile.jit(step, budget="60%", donate_argnums=0), 8192)
    searches.clear()
    check(tensile.jit(step, budget="80%", donate_argnums=0), 6144)
    assert "searched" in searches and "adapted" not in searches


def test_other_operators_have_a_plan_of_their_own(searches: list[str]) -> None:
    check(tensile.jit(step, budget="60%", donate_argnums=0), 8192)
    searches.clear()
    shallow = tensile.jit(lambda weights, x: step(weights[:5], x), budget="60%", donate_argnums=0)
    shallow(fresh(WEIGHTS), rows(6144))
    assert "searched" in searches


def test_a_first_plan_is_drafted_while_plain_jit_compiles_and_then_adapted(
    searches: list[str], monkeypatch: pytest.MonkeyPatch, cheap_launches: str
) -> None:
    begin, sized = PlainJit.begin, PlainJit.sized
    monkeypatch.setattr(PlainJit, "begin", lambda self: (searches.append("compiling"), begin(self)))
    monkeypatch.setattr(PlainJit, "sized", lambda self, tell: (searches.append("compiled"), sized(self, tell))[1])
    check(tensile.jit(step, budget="60%", donate_argnums=0, device_profile=cheap_launches), 2048)
    assert searches.index("compiling") < searches.index("searched") < searches.index("compiled") < searches.index("adapted")
    assert "searched" not in searches[searches.index("compiled") :]


def test_a_report_counts_what_choosing_the_form_of_a_draft_took(monkeypatch: pytest.MonkeyPatch) -> None:
    fastest_form, seconds = forms.fastest_form, 0.4

    def slowly(*args: Any, **kwargs: Any) -> Fitting:
        time.sleep(seconds)
        return fastest_form(*args, **kwargs)

    monkeypatch.setattr(forms, "fastest_form", slowly)
    function = tensile.jit(step, budget="60%", donate_argnums=0)
    check(function, 2048)
    assert function.report().plan_s > seconds


def test_what_compiling_has_shown_on_other_shapes_corrects_predictions(monkeypatch: pytest.MonkeyPatch) -> None:
    function = tensile.jit(step, budget="60%", donate_argnums=0)
    check(function, 8192)
    shown: list[CompiledSizes] = []
    adapt = Planner.adapt

    def adapted(self: Planner, choice: Any, goal: Any, measured: CompiledSizes) -> Any:
        shown.append(measured)
        return adapt(self, choice, goal, measured)

    monkeypatch.setattr(Planner, "adapt", adapted)
    with pytest.warns(UserWarning, match="planned and compiled again"):
        check(function, 6144)
    assert len(shown) == 1 and shown[0].alike and not shown[0].workspaces


def test_the_form_of_a_step_with_opened_loops_is_chosen_once_while_plain_jit_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    def looped(weights: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        def loss(weights: jax.Array) -> jax.Array:
            return jnp.mean(jax.lax.scan(lambda h, w: (h + jnp.tanh(jax.nn.gelu(h @ w)), None), x, weights)[0] ** 2)

        value, gradients = jax.value_and_grad(loss)(weights)
        return weights - 0.1 * gradients, value

    chosen: list[Fitting] = []
    original = forms.fastest_form
    monkeypatch.setattr(forms, "fastest_form", lambda *a, **k: (chosen.append(original(*a, **k)), chosen[-1])[1])
    function = tensile.jit(looped, budget="60%", open_loops=True)
    new, _ = function(jnp.stack(WEIGHTS), rows(4096))
    np.testing.assert_allclose(new, jax.jit(looped)(jnp.stack(WEIGHTS), rows(4096))[0], rtol=1e-4, atol=1e-6)
    assert [form.planner.model.has_iterations for form in chosen] == [True]
    assert not function.plan(jnp.stack(WEIGHTS), rows(4096)).whole
