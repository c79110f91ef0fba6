"""Steps with `jax.shard_map`, whose bodies are planned operator by operator, and with `jax.pmap`."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import tensile_jax as tensile
from tensile_jax.trace import per_device, trace_step

pytestmark = pytest.mark.several_devices

_LAYERS, _WIDTH, _ROWS = 6, 64, 4096
ROWS, WHOLE = PartitionSpec("data"), PartitionSpec()


@functools.cache
def _mesh() -> Mesh:
    return jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))


def _loss(weights: Any, x: jax.Array) -> jax.Array:
    return jnp.mean((functools.reduce(lambda x, w: jnp.tanh(x @ w), weights, x) - x) ** 2)


def gradients_inside(weights: Any, x: jax.Array) -> Any:
    """Data parallel by hand: gradients are summed in the `shard_map`, and the optimizer is outside."""

    def of_shard(weights: Any, x: jax.Array) -> Any:
        loss, gradients = jax.value_and_grad(_loss)(weights, x)
        return jax.lax.pmean((loss, gradients), "data")

    def unchecked(weights: Any, x: jax.Array) -> Any:
        mapped = jax.shard_map(of_shard, mesh=_mesh(), in_specs=(WHOLE, ROWS), out_specs=WHOLE, check_vma=False)
        return mapped(weights, x)

    loss, gradients = unchecked(weights, x)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), {"loss": loss}


def gradients_outside(weights: Any, x: jax.Array) -> Any:
    """The gradient is taken of the `shard_map`, so that its residuals leave it."""
    mapped = jax.shard_map(
        lambda weights, x: jax.lax.pmean(_loss(weights, x), "data"), mesh=_mesh(), in_specs=(WHOLE, ROWS), out_specs=WHOLE
    )
    loss, gradients = jax.value_and_grad(mapped)(weights, x)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), {"loss": loss}


def everything_inside(weights: Any, x: jax.Array) -> Any:
    """The whole step, with parameters divided by their rows, gathered where they are used (ZeRO-3 by hand)."""

    def of_shard(parts: Any, x: jax.Array) -> Any:
        def loss_of(parts: Any) -> jax.Array:
            weights = [jax.lax.all_gather(part, "data", tiled=True) for part in parts]
            return _loss(weights, x) / jax.lax.axis_size("data")

        loss, gradients = jax.value_and_grad(loss_of)(parts)
        return [w - 0.1 * g for w, g in zip(parts, gradients, strict=True)], {"loss": jax.lax.psum(loss, "data")}

    return jax.shard_map(of_shard, mesh=_mesh(), in_specs=(ROWS, ROWS), out_specs=(ROWS, WHOLE))(weights, x)


def a_loop_inside(weights: Any, x: jax.Array) -> Any:
    """The layers are a scan in the `shard_map`; the same array enters it divided in two ways."""

    def of_shard(weights: Any, x: jax.Array, everything: jax.Array) -> Any:
        def loss_of(weights: Any) -> jax.Array:
            # the carry varies along the axis from the first iteration on
            out, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, jnp.stack(weights))
            return jnp.mean((out - x) ** 2) + 0.0 * jnp.sum(everything)

        loss, gradients = jax.value_and_grad(loss_of)(weights)
        return jax.lax.pmean((loss, gradients), "data")

    mapped = jax.shard_map(of_shard, mesh=_mesh(), in_specs=(WHOLE, ROWS, WHOLE), out_specs=WHOLE, check_vma=False)
    loss, gradients = mapped(weights, x, x)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), {"loss": loss}


STEPS: list[Callable[[Any, jax.Array], Any]] = [gradients_inside, gradients_outside, everything_inside, a_loop_inside]


def _arguments(step: Callable[..., Any]) -> tuple[Any, jax.Array]:
    weights = list(jax.random.normal(jax.random.key(0), (_LAYERS, _WIDTH, _WIDTH)) / _WIDTH**0.5)
    x = jax.random.normal(jax.random.key(1), (_ROWS, _WIDTH))
    spec = ROWS if step is everything_inside else WHOLE
    return jax.device_put(weights, NamedSharding(_mesh(), spec)), jax.device_put(x, NamedSharding(_mesh(), ROWS))


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_a_training_in_a_shard_map_is_planned_inside_and_is_that_of_jit(step: Callable[..., Any]) -> None:
    plain = jax.jit(step, donate_argnums=0)
    weights, x = _arguments(step)
    budget = int(0.75 * tensile.jit(step, donate_argnums=0).jit_peak_bytes(weights, x))
    # a loop in a body is one operator, and holds most of the memory
    asked: dict[str, Any] = {"policy": "none"} if step is a_loop_inside else {"budget": budget}
    ours = tensile.jit(step, donate_argnums=0, **asked)
    our_weights, _ = _arguments(step)
    for _ in range(8):
        weights, metrics = plain(weights, x)
        our_weights, our_metrics = ours(our_weights, x)
        np.testing.assert_allclose(our_metrics["loss"], metrics["loss"], rtol=1e-5)  # sums are rounded in another order
    for a, b in zip(our_weights, weights, strict=True):
        assert a.sharding == b.sharding
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    plan = ours.plan(our_weights, x)
    assert len(plan.segments) > 1 and (step is a_loop_inside or plan.peak_bytes <= budget)
    assert ours.report().peak_bytes == plan.peak_bytes


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_the_operators_of_a_body_have_the_sizes_of_one_shard(step: Callable[..., Any]) -> None:
    arguments = _arguments(step)
    traced = trace_step(jax.jit(step), step, arguments, {})
    leaves = jax.tree.leaves(arguments)
    graph = per_device(traced, [leaf.sharding for leaf in leaves], [None] * (_LAYERS + 1), [_mesh()]).graph
    assert not any(operator.primitive == "shard_map" for operator in graph.operators)
    batch = next(t for t in graph.tensors if t.role == "batch")
    assert batch.shape == (_ROWS // 8, _WIDTH)
    first = next(t for t in graph.tensors if t.producer is not None and graph.operators[t.producer].primitive in ("tanh", "scan"))
    assert first.shape == (_ROWS // 8, _WIDTH)
    assert any(operator.exchanged for operator in graph.operators)


def test_a_body_with_a_print_stays_one_operator_and_prints_as_under_jit(capsys: pytest.CaptureFixture[str]) -> None:
    def step(x: jax.Array) -> jax.Array:
        def of_shard(x: jax.Array) -> jax.Array:
            jax.debug.print("a shard of {}", x.shape[0])
            return jnp.tanh(x) * 2

        return jax.shard_map(of_shard, mesh=_mesh(), in_specs=ROWS, out_specs=ROWS)(x) + 1

    x = jax.device_put(jnp.arange(16.0), NamedSharding(_mesh(), ROWS))
    printed: list[str] = []
    for jit in (jax.jit, lambda f: tensile.jit(f, policy="none")):
        jit(step)(x).block_until_ready()
        jax.effects_barrier()
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1] == "a shard of 2\n" * 8
