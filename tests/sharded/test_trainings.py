"""Trainings on eight devices under a budget for each device."""

import functools
from contextlib import nullcontext
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import tensile_jax as tensile
from tests.sharded.decoder import ShardedDecoder, Way

pytestmark = pytest.mark.several_devices

_STEPS = 20
_FORMS = [
    ("fsdp", True, 1), pytest.param("tensor", False, 1, marks=pytest.mark.slow),
    *(pytest.param(way, typed, 2, marks=pytest.mark.slow) for way in get_args(Way) for typed in (False, True)),
]  # fmt: skip


def _trained(jit: Any, decoder: ShardedDecoder) -> tuple[list[float], Any, Any]:
    step = jit(decoder.step, donate_argnums=0)
    state, losses = decoder.state(), []
    for i in range(_STEPS):
        state, metrics = step(state, decoder.batch(i))
        losses.append(float(metrics["loss"]))
    return losses, state, step


@pytest.mark.parametrize(("way", "typed", "layers"), _FORMS)
def test_a_sharded_training_under_half_of_the_memory_is_that_of_jit(way: Way, typed: bool, layers: int) -> None:
    decoder = ShardedDecoder(way, typed, layers)
    with jax.set_mesh(decoder.mesh) if typed else nullcontext():
        losses, state, _ = _trained(jax.jit, decoder)
        whole_peak = tensile.jit(decoder.step, donate_argnums=0).jit_peak_bytes(decoder.state(), decoder.batch(0))
        budget = int(0.5 * whole_peak)
        ours, our_state, step = _trained(lambda f, **options: tensile.jit(f, budget=budget, **options), decoder)
        np.testing.assert_allclose(ours, losses, rtol=1e-5)  # cut and recomputed, sums are rounded in another order
        for mine, its in zip(jax.tree.leaves(our_state), jax.tree.leaves(state), strict=True):
            assert mine.sharding == its.sharding
            # Adam divides by moments near zero, which makes differences of rounding larger
            np.testing.assert_allclose(mine, its, atol=2e-4)
        plan, report = step.plan(our_state, decoder.batch(0)), step.report()
        assert plan.peak_bytes <= budget < whole_peak
        assert report.peak_bytes == plan.peak_bytes  # on each device, to the byte
        assert not plan.whole and report.passive_swap_ins == 0
        assert plan.devices == 8 and "8, all alike" in str(plan)


def test_state_that_stays_in_host_memory_keeps_its_division_and_every_bit() -> None:
    decoder = ShardedDecoder("fsdp", layers=1)
    results: list[Any] = []
    for policy in ("none", "tensile"):  # the same segments are not promised; the results of swapping alone are
        step = tensile.jit(decoder.step, donate_argnums=0, policy=policy, state_memory="any")
        state = decoder.state()
        for i in range(3):
            state, _ = step(state, decoder.batch(i))
        results.append(tensile.to_device(state))
    for a, b, first in zip(*map(jax.tree.leaves, (*results, decoder.state())), strict=True):
        assert a.sharding == b.sharding == first.sharding
        np.testing.assert_allclose(a, b, atol=2e-4)


def test_a_swapped_run_is_bit_for_bit_that_of_the_same_segments_without_swaps() -> None:
    decoder = ShardedDecoder("tensor", layers=1)
    whole = tensile.jit(decoder.step, donate_argnums=0).jit_peak_bytes(decoder.state(), decoder.batch(0))
    step = tensile.jit(decoder.step, donate_argnums=0, budget=int(0.45 * whole))
    state = decoder.state()
    state, metrics = step(state, decoder.batch(0))
    plan = step.plan(state, decoder.batch(0))
    assert plan.swapped_out_bytes > 0
    again = tensile.jit(decoder.step, donate_argnums=0, plan=plan)
    other, other_metrics = again(decoder.state(), decoder.batch(0))
    assert metrics["loss"] == other_metrics["loss"]
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_budget_below_the_floor_of_a_device_names_the_floor_of_a_device() -> None:
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))

    def step(weights: list[jax.Array], x: jax.Array) -> Any:
        def loss_of(weights: list[jax.Array]) -> jax.Array:
            return jnp.mean(functools.reduce(lambda x, w: jnp.tanh(x @ w), weights, x) ** 2)

        return jax.tree.map(lambda w, g: w - g, weights, jax.grad(loss_of)(weights))

    weights = jax.device_put([i * jnp.eye(64) for i in range(4)], NamedSharding(mesh, PartitionSpec()))
    x = jax.device_put(jnp.ones((512, 64)), NamedSharding(mesh, PartitionSpec("data")))
    with pytest.raises(tensile.BudgetTooSmall, match="on each of the 8 devices") as caught:
        tensile.jit(step, donate_argnums=0, budget="10KB")(weights, x)
    assert not any(w.is_deleted() for w in weights)
    enough = tensile.jit(step, donate_argnums=0, budget=int(caught.value.floor_bytes))
    enough(weights, x)
    assert enough.report().peak_bytes <= caught.value.floor_bytes
