"""The measured peak counts all that lies on the device for the step, at every time at which it grows, and nothing twice."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import tensile_jax as tensile

BATCH = jnp.ones((64, 1024))


def scaled(state: list[jax.Array], batch: jax.Array) -> tuple[list[jax.Array], jax.Array]:
    """A step whose arguments and results need more than any of its segments."""
    return [w * 0.9 + jnp.sum(batch) for w in state], jnp.sum(batch)


def four() -> list[jax.Array]:
    return [jnp.full((256, 256), float(i)) for i in range(4)]


def floor_of(step: Any, *args: Any, **options: Any) -> int:
    with pytest.raises(tensile.BudgetTooSmall) as refused:
        tensile.jit(step, budget=1000, donate_argnums=0, **options)(*args)
    return refused.value.floor_bytes


@pytest.mark.parametrize("state_memory", ["device", "any"])
def test_the_measured_peak_is_not_below_the_live_arguments(state_memory: Any) -> None:
    floor = floor_of(scaled, four(), BATCH, state_memory=state_memory)
    function = tensile.jit(scaled, budget=floor, donate_argnums=0, state_memory=state_memory)
    state, live = four(), 0
    for _ in range(3):
        arguments = (a for a in (*state, BATCH) if a.sharding.memory_kind == "device")
        live = max(live, sum(a.nbytes for a in arguments)) if state_memory == "device" else 0
        state, _ = function(state, BATCH)
    plan = function.plan(state, BATCH)
    assert not plan.whole
    assert max(live, BATCH.nbytes) <= function.report().peak_bytes == plan.peak_bytes


def test_the_peak_of_a_job_is_not_below_its_live_arguments() -> None:
    floor = floor_of(scaled, four(), BATCH, state_memory="any")
    with tensile.Runtime(floor + (1 << 16)) as run:
        job = run.submit(scaled, four(), [BATCH] * 5, steps=5)
    assert job.exception() is None and job.plan is not None and not job.plan.whole
    assert BATCH.nbytes <= job.status.peak_bytes == job.plan.peak_bytes
    assert run.peak_bytes >= job.status.peak_bytes


@pytest.mark.parametrize("where", ["in the loop", "at the end", "alone"])
def test_what_a_segment_with_effects_returns_beside_its_outputs_is_counted_once(where: str) -> None:
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
            if where == "in the loop":
                jax.debug.callback(lambda said: None, jnp.sum(x))
            return jnp.tanh(x @ w), None

        x, _ = jax.lax.scan(layer, x, w)
        if where == "alone":
            jax.debug.callback(lambda said: None, x)
        return jnp.sum(x * x)

    def step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        value, gradient = jax.value_and_grad(loss)(w, x)
        w = w - 0.1 * gradient
        if where == "at the end":
            jax.debug.callback(lambda said: None, w[0, 0, 0])
        return w, value

    args = jnp.full((4, 256, 256), 0.01), jnp.ones((256, 256))
    function = tensile.jit(step, budget=3_000_000, donate_argnums=0)
    function(*args)
    plan = function.plan(*args)
    assert not plan.whole and len(plan.segments) > 1
    assert function.report().peak_bytes == plan.peak_bytes
