"""How a step is brought into a form that can be planned, without planning forms that cannot be chosen."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import tensile_jax as tensile
from tensile_jax.errors import BudgetTooSmall
from tensile_jax.exec.fitting import forms
from tensile_jax.exec.fitting.find_plan import begin
from tensile_jax.exec.fitting.fitting import Fitting
from tensile_jax.plan import Planner
from tensile_jax.plan.search import search
from tensile_jax.trace import TracedStep
from tests.builders import fresh, in_chunks


def step(state: list[jax.Array], batch: tuple[jax.Array, jax.Array]) -> tuple[list[jax.Array], jax.Array]:
    """Dense layers, and a loss over words."""

    def loss_of(state: list[jax.Array]) -> jax.Array:
        x = batch[0]
        for w in state[:-1]:
            x = jnp.sin(x @ w)
        return optax.softmax_cross_entropy_with_integer_labels(x @ state[-1], batch[1]).mean()

    loss, gradients = jax.value_and_grad(loss_of)(state)
    return jax.tree.map(lambda w, g: w - 0.1 * g, state, gradients), loss


def arguments(rows: int, *, words: int = 256, width: int = 32, layers: int = 2) -> tuple[Any, Any]:
    keys = jax.random.split(jax.random.key(0), layers + 1)
    state = [jax.random.normal(k, (width, width)) / 6 for k in keys[1:]] + [jax.random.normal(keys[0], (width, words)) / 6]
    return state, (jnp.ones((rows, width)), jnp.zeros((rows,), jnp.int32))


def watched(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, place: int = 0) -> list[Any]:
    """The argument at this place (by default the first one) of every call of a function from now on."""
    seen: list[Any] = []
    original: Callable[..., Any] = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *a, **k: (seen.append(a[place]), original(*a, **k))[1])
    return seen


def test_a_step_whose_plan_is_hardly_slower_than_the_whole_is_not_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = watched(monkeypatch, TracedStep, "rewritten", 1)
    ranked = watched(monkeypatch, Fitting, "quick_us")
    plan = tensile.jit(step, budget="90%", donate_argnums=0).plan(*arguments(4000, words=1024, width=256, layers=6))
    assert len(ranked) == 1 and not plan.whole and not in_chunks(plan)
    assert not any(rewrite.series for rewrite in tried)


def test_a_step_whose_logits_exceed_the_budget_is_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    state, batch = arguments(2100)
    function = tensile.jit(step, budget=len(batch[0]) * 2**10, donate_argnums=0)
    plan = function.plan(state, batch)
    expected, loss = jax.jit(step)(state, batch)
    found, ours = function(fresh(state), batch)
    assert in_chunks(plan) and in_chunks(function.plan(state, batch))
    assert jnp.allclose(ours, loss, rtol=1e-5)
    assert all(jnp.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in zip(found, expected, strict=True))


def test_no_plan_is_sought_of_a_variant_whose_bound_is_too_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = tensile.jit(step, budget="70%", donate_argnums=0)._calls
    fitting = begin(calls.step(arguments(2200, layers=6), {}), calls.budget)
    sought = watched(monkeypatch, Planner, "quick_us")
    assert fitting.quick_us(fitting.bound_us()) == float("inf") and not sought
    assert fitting.bound_us() <= fitting.quick_us(float("inf")) < float("inf") and sought


def test_the_plan_by_which_a_step_was_ranked_is_not_sought_again(monkeypatch: pytest.MonkeyPatch) -> None:
    sought = watched(monkeypatch, search, "_from_cuts")
    ranked = watched(monkeypatch, Fitting, "quick_us")
    function = tensile.jit(step, budget="90%", donate_argnums=0)
    function.plan(*arguments(4100, words=1024, width=256, layers=6))
    assert len(ranked) == 1
    assert sum(one is ranked[0].planner.model for one in sought) == 1


def test_more_chunks_are_not_tried_once_twice_as_many_gain_little(monkeypatch: pytest.MonkeyPatch) -> None:
    times = {(): 100.0, ("rows in 2 chunks",): 80.0, ("rows in 4 chunks",): 79.5, ("rows in 8 chunks",): 10.0}
    tried: list[tuple[str, ...]] = []

    def quick_us(self: Fitting, upper: float) -> float:
        tried.append(tuple(rewrite.name for rewrite in self.step.traced.rewrites))
        return times[tried[-1]]

    monkeypatch.setattr(Fitting, "quick_us", quick_us)
    calls = tensile.jit(step, budget="50%", donate_argnums=0)._calls
    fitting = begin(calls.step(arguments(2400), {}), calls.budget)
    monkeypatch.setattr(type(fitting.planner.model), "whole_us", 50.0)
    chosen = forms.fastest_form(fitting).step.traced
    assert [rewrite.name for rewrite in chosen.rewrites] == ["rows in 2 chunks"]
    assert tried == list(times)[:3]


@pytest.mark.parametrize(
    ("before_us", "form_us", "ends"),
    [(100.0, 99.0, False), (100.0, 100.0, True), (100.0, float("inf"), False), (float("inf"), 100.0, False)],
)
def test_with_loops_a_series_goes_on_while_it_gains_or_nothing_is_known(before_us: float, form_us: float, ends: bool) -> None:
    assert forms._ends_series(form_us, before_us, has_loops=True) == ends
    without_loops = before_us < float("inf")  # each of these gains too little to go on
    assert forms._ends_series(form_us, before_us, has_loops=False) == without_loops


def test_a_lower_budget_takes_the_variant_of_the_next_higher_one_though_the_step_as_it_is_seems_faster(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    state, batch = arguments(2500)
    high = tensile.jit(step, budget=len(batch[0]) * 2**10, donate_argnums=0)
    high(fresh(state), batch)
    assert in_chunks(high.plan(state, batch))
    peak = high.plan(state, batch).peak_bytes
    monkeypatch.setattr(Fitting, "quick_us", lambda *_: 0.0)
    low = tensile.jit(step, budget=peak, donate_argnums=0)
    low(fresh(state), batch)
    assert low.plan(state, batch).peak_bytes <= peak and in_chunks(low.plan(state, batch))


def test_another_form_is_compiled_before_a_budget_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    state, batch = arguments(2600)
    budget = len(batch[0]) * 2**10
    tried: list[tuple[str, ...]] = []
    original = forms.fit

    def refusing_the_first(fitting: Fitting, *rest: Any) -> Any:
        tried.append(tuple(rewrite.name for rewrite in fitting.step.traced.rewrites))
        if tried.count(tried[0]) == len(tried):
            raise BudgetTooSmall("compiling shows more", budget_bytes=budget, floor_bytes=budget + 1)
        return original(fitting, *rest)

    monkeypatch.setattr(forms, "fit", refusing_the_first)
    function = tensile.jit(step, budget=budget, donate_argnums=0)
    function(fresh(state), batch)
    plan = function.plan(state, batch)
    assert in_chunks(plan) and plan.peak_bytes <= budget
    assert tried[-1] != tried[0] and all("chunks" in rewrites[-1] for rewrites in tried)
