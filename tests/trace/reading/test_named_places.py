"""The devices and memory spaces that a step names are those by which `jax.jit` decides whether it commits the step's results."""

from collections.abc import Callable
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import compute_on
from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from tensile_jax.trace.reading.named_places import shardings_in

X = jnp.linspace(0.1, 1.0, 16).reshape(4, 4)
DEVICE = jax.devices()[0]
HERE = SingleDeviceSharding(DEVICE)
ON_MESH = NamedSharding(Mesh([DEVICE], "d"), PartitionSpec())


def _ignoring(named: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def step(x: Any) -> Any:
        named(x)
        return x + 1

    return step


def _shard_map(body: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    return jax.shard_map(body, mesh=ON_MESH.mesh, in_specs=in_specs, out_specs=out_specs)


_compute_on: Any = getattr(compute_on, "compute_on2", compute_on.compute_on)  # jax 0.10 has another function of the second name

STEPS: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda x: x + 1,
    "gradient of a cond": jax.grad(lambda x: lax.cond(x.sum() > 0, lambda y: jnp.sum(jnp.sin(y) ** 2), jnp.sum, x)),
    "gradient of a switch": jax.grad(lambda x: lax.switch(1, [jnp.sum, lambda y: jnp.sum(jnp.sin(y) ** 2)], x)),
    "cast of a gradient": jax.grad(lambda x: jnp.sum(jnp.sin(x.astype(jnp.bfloat16)).astype(jnp.float32))),
    "device": lambda x: jax.device_put(x, DEVICE) + 1,
    "no device": lambda x: jax.device_put(x) + 1,
    "sharding": lambda x: jax.device_put(x, HERE) + 1,
    "format": lambda x: jax.device_put(x, Format(Layout((0, 1)), HERE)) + 1,
    "memory space": lambda x: jax.device_put(x, jax.memory.Space.Device) + 1,
    "mesh": lambda x: jax.device_put(x, ON_MESH) + 1,
    "constraint": lambda x: lax.with_sharding_constraint(x, ON_MESH) + 1,
    "dead constraint": _ignoring(lambda x: lax.with_sharding_constraint(x, ON_MESH)),
    "constraint in a loop": lambda x: lax.scan(lambda c, _: (lax.with_sharding_constraint(c, ON_MESH), None), x, None, length=2),
    "dead constraint in a loop": lambda x: lax.scan(
        lambda c, _: ((lax.with_sharding_constraint(c[0], ON_MESH), c[1] + 1), None), (x, x), None, length=2
    )[0][1],
    "jit": lambda x: jax.jit(lambda y: y + 1)(x),
    "jit with shardings": lambda x: jax.jit(lambda y: y + 1, out_shardings=HERE)(x),
    "shard_map": lambda x: _shard_map(jnp.sin, PartitionSpec(), PartitionSpec())(x),
    "shard_map without arguments": lambda x: x + _shard_map(lambda: jnp.ones(()), (), PartitionSpec())(),
    "compute_on": lambda x: _compute_on(jnp.sin, compute_type="device_host", out_memory_spaces=jax.memory.Space.Device)(x),
    "exported": lambda x: jax.export.export(jax.jit(jnp.sin))(x).call(x),
}  # fmt: skip


@pytest.mark.parametrize("keep_unused", [False, True])
@pytest.mark.parametrize("name", STEPS)
def test_a_step_names_a_place_exactly_if_jit_commits_its_results(name: str, keep_unused: bool) -> None:
    jax.clear_caches()  # what jit did with another `keep_unused` would decide for this one
    jitted = jax.jit(STEPS[name], keep_unused=keep_unused)
    committed = jax.tree.leaves(jitted(X))[0].committed
    assert bool(shardings_in(jitted.trace(X).jaxpr.jaxpr, keep_unused=keep_unused)) == committed
