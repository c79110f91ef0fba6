"""Train steps under plans that swap and recompute look to their caller as under `jax.jit`, call after call.

The step has what makes state awkward: frozen weights that are returned as they are, a random key, a counter, numbers of several
types, a captured table, a metric that is an argument too, and weak types.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tensile_jax as tensile
from tests.builders import kinds_of, low_budget
from tests.conformance.observation import Jit, Seen, expect_same, see

ROWS, WIDTH, LAYERS = 512, 32, 5
TABLE = np.linspace(0.0, 1.0, WIDTH, dtype=np.float32)
CAPTURED = jnp.asarray(TABLE) * 2


def fresh_state() -> dict[str, Any]:
    weights = [jnp.eye(WIDTH) * (1 + 0.01 * i) for i in range(LAYERS)]
    return {
        "weights": weights,
        "momenta": jax.tree.map(jnp.zeros_like, weights),
        "half": jnp.ones((WIDTH,), jnp.bfloat16),
        "frozen": jnp.ones((WIDTH, WIDTH)),
        "key": jax.random.key(3),
        "count": jnp.asarray(0),
        "rate": 0.5,
        "on": jnp.asarray(True),
        "empty": jnp.zeros((0, 3)),
    }


def fresh_batch(place: int) -> Any:
    return np.random.default_rng(place).normal(size=(ROWS, WIDTH)).astype(np.float32)


def step(state: dict[str, Any], batch: Any, scale: float = 1.0) -> Any:
    key, drop = jax.random.split(state["key"])

    def loss(weights: Any) -> Any:
        x = batch @ state["frozen"] * TABLE + CAPTURED
        for w in weights:
            x = jnp.tanh(x @ w) * state["half"].astype(jnp.float32)
        return jnp.mean(x * jax.random.bernoulli(drop, 0.9, x.shape)) * scale

    value, gradients = jax.value_and_grad(loss)(state["weights"])
    momenta = jax.tree.map(lambda m, g: 0.9 * m + g, state["momenta"], gradients)
    new = {
        **state,
        "weights": jax.tree.map(lambda w, m: w - 0.1 * m, state["weights"], momenta),
        "momenta": momenta,
        "half": (state["half"] * 0.999).astype(jnp.bfloat16),
        "key": key,
        "count": state["count"] + 1,
        "rate": state["rate"] * 0.5,
        "on": ~state["on"],
    }
    return new, {"loss": value, "frozen": state["frozen"], "rate": state["rate"], "one": 1}


def train(jit: Jit, **options: Any) -> list[Seen]:
    """Four steps, each on the state of the one before, with other commitments and static arguments in between."""
    seen: list[Seen] = []
    f = jit(step, static_argnames="scale", **options)
    for committed in (False, True):
        state = fresh_state()
        if committed:
            state = jax.device_put(state, jax.devices()[0])
        for place in range(3):
            seen.append(see(f, jax.tree.map(jnp.copy, state), fresh_batch(place), scale=2.0 if place == 2 else 1.0))
            state, _ = f(state, fresh_batch(place))
    return seen


@pytest.mark.parametrize("swaps", [pytest.param(False, id="recomputes", marks=pytest.mark.slow), pytest.param(True, id="swaps")])
@pytest.mark.parametrize(
    "donate", [pytest.param({}, id="kept", marks=pytest.mark.slow), pytest.param({"donate_argnums": 0}, id="donated")]
)
def test_training_under_a_low_budget_looks_as_under_jit(donate: dict[str, Any], swaps: bool, fast_link: str) -> None:
    profile = {"device_profile": fast_link} if swaps else {}
    budget = low_budget(step, fresh_state(), fresh_batch(0), part=0.4, **donate, **profile)
    made: list[tensile.PlannedFunction] = []

    def planned(function: Any, **options: Any) -> tensile.PlannedFunction:
        made.append(tensile.jit(function, budget=budget, **profile, **options))
        return made[-1]

    def trained(jit: Jit) -> list[Seen]:
        return train(jit, **donate)

    expect_same(trained, planned)
    kinds = set().union(*(kinds_of(step.plan) for function in made for step in function._calls._planned.values()))
    assert ({"swap_out", "swap_in"} if swaps else {"recompute"}) <= kinds
