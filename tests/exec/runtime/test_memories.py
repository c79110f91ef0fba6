"""Jobs whose step itself keeps a part of the state in host memory: it stays there, and nothing of it is lost."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

import tensile_jax as tensile
from tensile_jax.exec.runtime.runtime import Runtime

WIDTH, LAYERS, STEPS = 192, 3, 4


def sharding(memory: str) -> SingleDeviceSharding:
    return SingleDeviceSharding(jax.devices()[0], memory_kind=memory)


def step(state: Any, x: Any) -> Any:
    """Momentum in host memory, beside weights on the device and a counter in host memory, which is counted there."""
    weights, momentum, count = state
    loss, gradients = jax.value_and_grad(lambda w: jnp.mean(sum(jnp.tanh(x @ one) for one in w) ** 2))(weights)
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, jax.device_put(momentum, jax.memory.Space.Device), gradients)
    weights = jax.tree.map(lambda w, m: w - 0.1 * m, weights, momentum)
    return (weights, jax.device_put(momentum, sharding("pinned_host")), count + 1), loss


def state_of(*, on_host: bool = True) -> Any:
    rng = np.random.default_rng(0)
    weights = [jnp.asarray(rng.normal(size=(WIDTH, WIDTH)).astype(np.float32) / 20) for _ in range(LAYERS)]
    momentum = jax.tree.map(jnp.zeros_like, weights), jnp.zeros((1,), jnp.int32)
    return (weights, *(jax.device_put(momentum, sharding("pinned_host")) if on_host else momentum))


def batches() -> list[np.ndarray]:
    rng = np.random.default_rng(1)
    return [rng.normal(size=(256, WIDTH)).astype(np.float32) for _ in range(STEPS)]


def trained(steps: int = STEPS) -> Any:
    state, jitted = state_of(), jax.jit(step)
    for batch in batches()[:steps]:
        state, _ = jitted(state, batch)
    return state


def assert_trained(state: Any, steps: int = STEPS) -> None:
    for mine, its in zip(jax.tree.leaves(state), jax.tree.leaves(trained(steps)), strict=True):
        np.testing.assert_allclose(np.asarray(mine), np.asarray(its), rtol=1e-5, atol=1e-6)


STATE_BYTES = 4 * WIDTH * WIDTH * LAYERS  # of the weights, and of the momentum


@pytest.mark.parametrize("budget", [1_900_000, 2_500_000, 100_000_000])
def test_state_that_the_step_has_in_host_memory_stays_there(budget: int) -> None:
    with Runtime(budget=budget) as runtime:
        job = runtime.submit(step, state_of(), batches(), steps=STEPS)
        job.wait()
    assert job.exception() is None
    assert_trained(job.result())
    assert runtime.peak_bytes <= budget
    if budget > 10**7:  # the step runs whole, with the weights on the device, and without the momentum
        plan = job.plan
        assert plan is not None
        on_host = {tensor.name for tensor in plan.tensors if tensor.host_bytes is not None}
        assert {f"state[1][{i}]" for i in range(LAYERS)} | {"state[2]"} <= on_host


def test_two_jobs_share_a_budget_in_which_what_is_in_host_memory_does_not_count() -> None:
    with Runtime(budget=3_200_000) as runtime:
        jobs = [runtime.submit(step, state_of(), batches(), steps=STEPS) for _ in range(2)]
        for job in jobs:
            job.wait()
    for job in jobs:
        assert job.exception() is None
        assert_trained(job.result())


def test_a_state_on_the_device_goes_to_where_the_step_returns_it() -> None:
    with Runtime(budget=100_000_000) as runtime:
        job = runtime.submit(step, state_of(on_host=False), batches(), steps=STEPS)
        job.wait()
    assert job.exception() is None
    assert_trained(job.result())


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_a_resumed_job_goes_on_in_the_same_memories(tmp_path: Path, isolation: Any) -> None:
    with Runtime(budget=20_000_000, checkpoints=tmp_path) as runtime:
        runtime.submit(step, state_of(), batches()[:2], steps=2, name="j", checkpoint_every=1, isolation=isolation).wait()
    with Runtime(budget=20_000_000, checkpoints=tmp_path) as runtime:
        job = runtime.submit(
            step, state_of(), batches(), steps=STEPS, name="j", checkpoint_every=1, resume=True, isolation=isolation
        )
        job.wait()
    assert job.exception() is None
    assert_trained(job.result())


def swapping(state: Any, x: Any) -> Any:
    """Returns each of two arrays in the memory in which the other one was given."""
    a, b = state
    return (jax.device_put(b, sharding("pinned_host")), jax.device_put(a, sharding("device"))), x.sum()


def alternating(state: Any, x: Any) -> Any:
    there = jax.typeof(state).memory_space is jax.memory.Space.Host
    return jax.device_put(state, sharding("device" if there else "pinned_host")), x.sum()


def test_a_job_whose_state_never_rests_in_one_memory_is_refused_in_a_sentence() -> None:
    with Runtime(budget=20_000_000) as runtime:
        job = runtime.submit(alternating, jnp.ones((64, 64)), [np.ones(3, np.float32)] * 2, steps=2)
        job.wait()
    assert isinstance(job.exception(), tensile.TraceError)
    assert "returned in host memory if it is given in device memory" in str(job.exception())


def test_arrays_that_change_places_and_memories_are_not_lost() -> None:
    numbers = np.arange(64 * 64, dtype=np.float32).reshape(64, 64)
    given = jax.device_put(numbers, sharding("device")), jax.device_put(2 * numbers, sharding("pinned_host"))
    with Runtime(budget=20_000_000) as runtime:
        job = runtime.submit(swapping, given, [np.ones(3, np.float32)] * 3, steps=3)
        job.wait()
    if job.exception() is None:
        np.testing.assert_array_equal(np.asarray(job.result()[0]), 2 * numbers)
        np.testing.assert_array_equal(np.asarray(job.result()[1]), numbers)
    else:
        assert isinstance(job.exception(), tensile.TraceError)
