"""Steps on several devices that keep values in host memory look the same as under `jax.jit`."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import tensile_jax as tensile
from tests.conformance.observation import VARIANTS, Jit, Seen, expect_same, see

pytestmark = pytest.mark.several_devices


def rows(memory: str) -> NamedSharding:
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    return NamedSharding(mesh, PartitionSpec("x"), memory_kind=memory)


def step(state: Any, x: Any) -> Any:
    weights, momentum = state
    loss, gradients = jax.value_and_grad(lambda ws: jnp.mean(sum(jnp.tanh(x @ w) for w in ws) ** 2))(weights)
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, jax.device_put(momentum, rows("device")), gradients)
    return (jax.tree.map(lambda w, m: w - 0.1 * m, weights, momentum), jax.device_put(momentum, rows("pinned_host"))), loss


def arguments() -> tuple[Any, Any]:
    weights = [jnp.arange(256.0 * 256).reshape(256, 256) / 65536 + i for i in range(2)]
    momentum = jax.tree.map(jnp.zeros_like, weights)
    state = jax.device_put(weights, rows("device")), jax.device_put(momentum, rows("pinned_host"))
    return state, jax.device_put(jnp.ones((256, 256)), rows("device"))


def momentum_in_host_memory(jit: Jit) -> list[Seen]:
    return [see(jit(step, donate_argnums=donated), *arguments()) for donated in (None, 0)]


def results_asked_for_in_a_memory(jit: Jit) -> list[Seen]:
    both = {memory: jax.device_put(jnp.ones((64, 64)), rows(memory)) for memory in ("device", "pinned_host")}
    return [
        see(jit(lambda a: (a, a * 2), out_shardings=rows(asked)), given)
        for given in both.values()
        for asked in ("device", "pinned_host")
    ]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("scenario", [momentum_in_host_memory, results_asked_for_in_a_memory])
def test_values_in_host_memory_look_the_same_as_under_jit(scenario: Any, variant: str) -> None:
    expect_same(scenario, VARIANTS[variant])


def test_a_job_on_several_devices_keeps_what_its_step_has_in_host_memory() -> None:
    state, x = arguments()
    wanted = jax.jit(step)(jax.jit(step)(state, x)[0], x)[0]
    with tensile.Runtime(budget="20MB", devices=jax.devices()) as runtime:
        job = runtime.submit(step, state, [x] * 2, steps=2)
        job.wait()
    assert job.exception() is None
    for mine, its in zip(jax.tree.leaves(job.result()), jax.tree.leaves(wanted), strict=True):
        assert mine.sharding.spec == its.sharding.spec
        assert jnp.allclose(jax.device_put(mine, rows("device")), jax.device_put(its, rows("device")), rtol=1e-5, atol=1e-6)
