"""Where the planner has no plan that compiling confirms, the one with the least peak is tried: quickly at first."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import tensile_jax as tensile
from tensile_jax.exec.fitting import find_plan
from tensile_jax.exec.fitting.fitting import Fitting
from tensile_jax.plan import Goal
from tensile_jax.plan.policies import auto
from tests.builders import batch, fresh, low_budget, running, sgd_step, weights


def test_no_plan_is_made_faster_for_a_call_that_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = weights(5), batch(rows=900)
    function = tensile.jit(sgd_step, budget=10_000, donate_argnums=0)
    monkeypatch.setattr(auto, "improve", lambda *_: pytest.fail("A plan that nobody will run was improved."))
    with pytest.raises(tensile.BudgetTooSmall):
        function(*arguments)
    assert not any(array.is_deleted() for array in arguments[0])


def test_the_plan_with_the_least_peak_is_made_faster_where_it_keeps_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = weights(5), batch(rows=800)
    budget = low_budget(sgd_step, *arguments, part=0.05, donate_argnums=0)
    monkeypatch.setattr(find_plan, "_within", lambda *_, **__: None)
    function = tensile.jit(sgd_step, budget=budget, donate_argnums=0)
    function(fresh(arguments[0]), arguments[1])
    fitting = find_plan.begin(running(function).compiled.step, None)
    slow = fitting.planner.plan_of(fitting.planner.lowest_choice(fitting.measured), Goal(budget), fitting.measured)
    plan = function.plan(*arguments)
    assert slow is not None and plan.step_us < 0.9 * slow.step_us
    assert plan.peak_bytes <= budget


def scans_step(state: list[jax.Array], x: jax.Array) -> tuple[list[jax.Array], jax.Array]:
    def loss_of(state: list[jax.Array]) -> jax.Array:
        carried = x
        for w in state:
            carried, _ = lax.scan(lambda c, _, w=w: (jnp.tanh(c @ w), jnp.sin(c)), carried, None, length=40)
        return jnp.mean(carried**2)

    return jax.tree.map(lambda w, g: w - 0.1 * g, state, jax.grad(loss_of)(state)), jnp.sum(x)


def test_the_budget_that_an_error_names_does_not_depend_on_what_was_compiled_before(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = weights(2, 32), batch(rows=256, width=32)
    within = find_plan._within

    def named(parts: tuple[float, ...]) -> int:
        def compiled_before(fitting: Fitting, *_: object, **__: object) -> None:
            for part in parts:
                planner, measured = fitting.planner, fitting.measured
                least, most = planner.floor_bytes(measured), planner.whole_peak_bytes(measured)
                chosen = planner.plan(Goal(least + part * (most - least)), measured)
                assert chosen is not None
                fitting.compiled(chosen.choice, Goal(float("inf")))

        monkeypatch.setattr(find_plan, "_within", compiled_before)
        with pytest.raises(tensile.BudgetTooSmall) as refused:
            tensile.jit(scans_step, budget=10_000, donate_argnums=0, open_loops=False)(*arguments)
        return refused.value.floor_bytes

    least = named(())
    assert named((0.6, 0.2, 0.0)) == least
    monkeypatch.setattr(find_plan, "_within", within)
    function = tensile.jit(scans_step, budget=least, donate_argnums=0, open_loops=False)
    function(fresh(arguments[0]), arguments[1])
    assert function.plan(*arguments).peak_bytes <= least
