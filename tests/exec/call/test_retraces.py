"""A step that is traced again takes over the plan and the executables of an equal trace, and its results are still jit's."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tensile_jax as tensile
from tensile_jax.exec.compiling import compiler as compile_module
from tests.builders import (
    LAYERS,
    batch,
    dense_loss,
    fresh,
    low_budget,
    optimizer_state,
    optimizer_step,
    running,
    weights,
)

Step = Callable[[Any, Any], Any]


def step(state: Any, x: jax.Array) -> Any:
    """Gradient descent whose average and rate begin as Python numbers: the average is weakly typed in the first call only.

    A number of the state is returned as it is, and once more strongly typed.
    """
    params, average, rate, count, fixed = state
    loss, gradients = jax.value_and_grad(dense_loss)(params, x)
    params = jax.tree.map(lambda w, g: w - rate * g, params, gradients)
    firm = jax.lax.convert_element_type(fixed, jnp.float32)
    return (params, 0.9 * average + 0.1 * loss, rate * 0.99, count + 1, fixed), (loss, firm)


def first_state() -> Any:
    return weights(LAYERS + 1), 0.0, 0.1, 0, 2.5


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was compiled so far."""
    made: list[Any] = []
    compile_one = compile_module._compile

    def counted(lowered: Any, call: Any, **options: Any) -> Any:
        made.append(lowered)
        return compile_one(lowered, call, **options)

    monkeypatch.setattr(compile_module, "_compile", counted)
    return made


@pytest.fixture(scope="module")
def budget() -> int:
    return low_budget(step, first_state(), batch(), part=0.5, donate_argnums=0)


def test_state_that_is_weakly_typed_at_first_costs_one_first_call(budget: int, compiled: list[Any]) -> None:
    function, plain = tensile.jit(step, budget=budget, donate_argnums=0), jax.jit(step)
    state: Any = first_state()
    expected: Any = first_state()
    state = (fresh(state[0]), *state[1:])
    plans: list[Any] = []
    for number in range(4):
        results = state, _ = function(state, batch())
        wanted = expected, _ = plain(expected, batch())
        for ours, theirs in zip(jax.tree.leaves(results), jax.tree.leaves(wanted), strict=True):
            assert (ours.dtype, ours.weak_type) == (theirs.dtype, theirs.weak_type)
            np.testing.assert_allclose(ours, theirs, rtol=2e-3, atol=2e-6)
        plans.append(running(function))
        if number == 0:
            assert compiled
            compiled.clear()
    assert compiled == []
    assert plans[0] is not plans[1]  # the step was traced again
    assert not plans[0].plan.whole
    assert plans[1].plan == plans[0].plan
    assert plans[3] is plans[1]


def test_state_that_is_committed_from_the_second_call_on_costs_one_first_call(budget: int, compiled: list[Any]) -> None:
    function = tensile.jit(step, budget=budget, donate_argnums=0)
    params, *numbers = first_state()
    x = jax.device_put(batch(), jax.devices()[0])
    state, _ = function((fresh(params), *map(jnp.asarray, numbers)), x)
    assert compiled and all(leaf.committed for leaf in jax.tree.leaves(state))
    compiled.clear()
    first = running(function)
    function(state, x)
    assert compiled == []
    assert running(function) is not first and running(function).plan == first.plan


def test_a_gradient_in_fewer_bits_names_no_device(compiled: list[Any]) -> None:
    """JAX notes a sharding on a mesh without axes beside the casts of such a gradient."""

    def mixed(params: Any, x: jax.Array) -> Any:
        def loss(params: Any) -> Any:
            y = x.astype(jnp.bfloat16)
            for weight in params:
                y = jnp.tanh(y @ weight.astype(jnp.bfloat16))
            return jnp.mean(y.astype(jnp.float32) ** 2)

        value, gradients = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, gradients), value

    assert "mesh=AbstractMesh(()" in str([e.params for e in jax.make_jaxpr(mixed)(weights(), batch()).eqns])
    function = tensile.jit(mixed, budget=low_budget(mixed, weights(), batch(), part=0.5, donate_argnums=0), donate_argnums=0)
    state = fresh(weights())
    for number in range(3):
        state, _ = function(state, batch())
        assert not any(leaf.committed for leaf in jax.tree.leaves(state))
        assert bool(compiled) == (number == 0)
        compiled.clear()


def test_state_that_comes_back_on_the_host_costs_one_first_call(fast_link: str, compiled: list[Any]) -> None:
    options: dict[str, Any] = {"state_memory": "any", "device_profile": fast_link, "donate_argnums": 0}
    arguments = optimizer_state(optax.adam(1e-3), weights(4, 128)), batch(rows=128, width=128)
    train_step = optimizer_step(optax.adam(1e-3))
    budget = low_budget(train_step, *arguments, **options)
    function = tensile.jit(train_step, budget=budget, **options)
    state, x = fresh(arguments[0]), arguments[1]
    for number in range(3):
        state, _ = function(state, x)
        assert "pinned_host" in {leaf.sharding.memory_kind for leaf in jax.tree.leaves(state)}
        assert bool(compiled) == (number == 0)
        compiled.clear()


@pytest.mark.parametrize(
    "options",
    [{"policy": "checkpoint", "budget": "95%"}, pytest.param({"max_slowdown": 1.5}, marks=pytest.mark.slow)],
    ids=["policy", "slowdown"],
)
def test_state_that_comes_back_committed_keeps_its_plan(options: dict[str, Any], fast_link: str) -> None:
    function = tensile.jit(
        optimizer_step(optax.adam(1e-3)), state_memory="any", device_profile=fast_link, donate_argnums=0, **options
    )
    state, x = optimizer_state(optax.adam(1e-3), weights(2, 128)), batch(rows=128, width=128)
    plans: list[Any] = []
    for _ in range(3):
        state, _ = function(state, x)
        plans.append(running(function))
    assert plans[0] is not plans[1] and not plans[0].plan.whole
    assert plans[1].plan == plans[0].plan and plans[2] is plans[1]


def test_under_another_setting_of_jax_nothing_is_shared() -> None:
    function = tensile.jit(lambda x: x @ x)
    signatures = function._calls._signatures
    usual = signatures.settings()
    assert signatures.settings() == usual
    with jax.default_matmul_precision("highest"):
        assert signatures.settings() != usual
    assert signatures.settings() == usual
