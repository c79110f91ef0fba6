"""Jobs of a `Runtime` whose state is divided among devices, beside jobs on one device."""

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import tensile_jax as tensile
from tests.sharded.decoder import ShardedDecoder

pytestmark = pytest.mark.several_devices

STEPS = 6


def _small_step(weights: Any, x: jax.Array) -> Any:
    def loss_of(weights: Any) -> jax.Array:
        return jnp.mean((functools.reduce(lambda x, w: jnp.tanh(x @ w), weights, x) - x) ** 2)

    loss, gradients = jax.value_and_grad(loss_of)(weights)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), {"loss": loss}


def _small_state() -> list[jax.Array]:
    return list(jax.random.normal(jax.random.key(3), (4, 32, 32)) / 6)


SMALL_BATCH = np.ones((64, 32), np.float32)


def _plain(decoder: ShardedDecoder) -> tuple[list[float], Any]:
    step = jax.jit(decoder.step, donate_argnums=0)
    state, losses = decoder.state(), []
    for i in range(STEPS):
        state, metrics = step(state, decoder.batch(i))
        losses.append(float(metrics["loss"]))
    return losses, state


def _batches(decoder: ShardedDecoder) -> list[Any]:
    return [decoder.batch(i) for i in range(STEPS)]


@pytest.mark.parametrize("way", ["tensor", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_a_job_on_eight_devices_runs_beside_a_job_on_one_under_the_budget_of_each_device(way: Any) -> None:
    decoder = ShardedDecoder(way, layers=1)
    losses, last = _plain(decoder)
    whole = tensile.jit(decoder.step, donate_argnums=0).jit_peak_bytes(decoder.state(), decoder.batch(0))
    budget = int(0.7 * whole)
    seen: list[float] = []
    with tensile.Runtime(budget, devices=jax.devices(), look="always") as runtime:
        large = runtime.submit(
            decoder.step, decoder.state(), _batches(decoder), steps=STEPS, name="large",
            on_step=lambda step, metrics: seen.append(float(metrics["loss"])),
        )  # fmt: skip
        small = runtime.submit(_small_step, _small_state(), [SMALL_BATCH] * STEPS, steps=STEPS, name="small")
    state, small_state = large.result(), small.result()
    assert runtime.peak_bytes <= budget
    np.testing.assert_allclose(seen, losses, rtol=1e-5)  # cut and recomputed, sums are rounded in another order
    for mine, its in zip(jax.tree.leaves(tensile.to_device(state)), jax.tree.leaves(last), strict=True):
        assert mine.sharding.is_equivalent_to(its.sharding, mine.ndim)
        np.testing.assert_allclose(mine, its, atol=2e-4)  # Adam divides by moments near zero
    expected = _small_state()
    for _ in range(STEPS):
        expected, _ = jax.jit(_small_step)(expected, SMALL_BATCH)
    np.testing.assert_allclose(np.asarray(small_state[0]), np.asarray(expected[0]), rtol=1e-5)
    assert large.plan is not None and large.plan.devices == 8
    assert small.plan is not None and small.plan.devices == 1


def test_a_job_that_is_paused_saved_and_resumed_ends_with_the_same_bits(tmp_path: Path) -> None:
    decoder = ShardedDecoder("fsdp", layers=1)
    ends: list[Any] = []
    state: Any = None
    for folder, parts in (("once", (STEPS,)), ("twice", (2, STEPS))):
        for part in parts:
            with tensile.Runtime("64MiB", devices=jax.devices(), checkpoints=tmp_path / folder) as runtime:
                batches = _batches(decoder)
                job = runtime.submit(decoder.step, decoder.state(), batches, steps=part, name="job", resume=True)
                if part == 2:
                    job.pause()
                    job.resume()
                state = job.result()
        ends.append(state)
    for a, b, first in zip(*map(jax.tree.leaves, (*ends, decoder.state())), strict=True):
        np.testing.assert_array_equal(a, b)
        assert a.sharding.is_equivalent_to(first.sharding.with_memory_kind(a.sharding.memory_kind), a.ndim)


def test_batches_of_numpy_are_given_whole_to_each_device() -> None:
    decoder = ShardedDecoder("data", layers=1)
    batch = jax.tree.map(np.asarray, decoder.batch(0))
    with tensile.Runtime("64MiB", devices=jax.devices()) as runtime:
        state = runtime.submit(decoder.step, decoder.state(), [batch] * 2, steps=2, name="job").result()
    expected = decoder.state()
    for _ in range(2):
        expected, _ = jax.jit(decoder.step)(expected, decoder.batch(0))
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-4)


def test_a_state_on_devices_that_the_runtime_has_not_is_refused() -> None:
    decoder = ShardedDecoder("data", layers=1)
    mesh = Mesh(np.array(jax.devices()[:4]), ("data",), axis_types=(AxisType.Auto,))
    half = jax.device_put(jnp.ones((8, 8)), NamedSharding(mesh, PartitionSpec("data")))
    with tensile.Runtime("64MiB", devices=jax.devices()[:4]) as runtime:
        with pytest.raises(ValueError, match=r"spread over 8 devices, and the runtime has .*devices="):
            runtime.submit(decoder.step, decoder.state(), [], steps=1)
        with pytest.raises(ValueError, match='isolation="process" is for one'):
            runtime.submit(lambda s, b: (s, {}), half, [1.0], steps=1, isolation="process")
    with tensile.Runtime("64MiB", devices=jax.devices()) as runtime:
        state = {"half": half, "whole": decoder.state()}
        with pytest.raises(ValueError, match="NamedSharding over the same devices"):
            runtime.submit(lambda s, b: (s, {}), state, [1.0], steps=1)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"devices": []}, ValueError),
        ({"devices": [0]}, TypeError),
        ({"devices": "twice"}, ValueError),
        ({"device": "one", "devices": "all"}, ValueError),
    ],
    ids=["none", "no devices", "twice", "both"],
)
def test_devices_that_are_none_are_refused(arguments: dict[str, Any], error: type[Exception]) -> None:
    named = {"twice": jax.devices()[:1] * 2, "one": jax.devices()[0], "all": jax.devices()}
    given = {name: named[value] if isinstance(value, str) else value for name, value in arguments.items()}
    with pytest.raises(error, match="devices"):
        tensile.Runtime("1MiB", **given)
