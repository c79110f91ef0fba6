"""In which memory the last state of a job is returned."""

import threading
import warnings
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tensile_jax.errors import JobFailed
from tensile_jax.exec.runtime.runtime import Runtime
from tensile_jax.exec.transfer import Transfer, on_host

STATE_BYTES = 64 * 64 * 4
BATCHES = [np.ones(64, np.float32)] * 3


def step(state: Any, batch: Any) -> Any:
    state = state + batch @ state
    return state, state.sum()


def weights() -> jax.Array:
    return jnp.ones((64, 64), jnp.float32)


def test_the_result_of_a_finished_job_is_computed_with_as_it_is() -> None:
    with Runtime("10MB") as runtime:
        job = runtime.submit(step, weights(), BATCHES, steps=3)
    result = job.result()
    assert not on_host(result)
    np.testing.assert_array_equal(result + 1, np.asarray(job.result(memory="host")) + 1)


def test_a_result_in_host_memory_is_there_for_those_who_ask() -> None:
    with Runtime("10MB") as runtime:
        job = runtime.submit(step, weights(), BATCHES, steps=3)
    assert on_host(job.result(memory="host"))
    with pytest.raises(ValueError, match='memory must be "device" or "host", got \'gpu\''):
        job.result(memory="gpu")  # pyright: ignore[reportArgumentType]  # the mistake


def test_a_result_may_be_donated_and_asked_for_again() -> None:
    with Runtime("10MB") as runtime:
        job = runtime.submit(step, weights(), BATCHES, steps=3)
    first = job.result()
    before = np.array(first)
    jax.block_until_ready(jax.jit(lambda x: x * 0, donate_argnums=0)(first))
    np.testing.assert_array_equal(job.result(), before)


def held(release: threading.Event) -> Iterator[Any]:
    yield BATCHES[0]
    release.wait(60)
    yield BATCHES[0]


def test_a_result_that_does_not_fit_beside_what_runs_is_on_the_host_with_one_warning() -> None:
    release = threading.Event()
    with Runtime("10MB") as roomy:
        alone = roomy.submit(step, weights(), BATCHES, steps=1)
    peak = alone.status.planned_bytes
    with Runtime(peak + STATE_BYTES // 2) as runtime:
        done = runtime.submit(step, weights(), BATCHES, steps=1, name="done")
        done.wait()
        runs = runtime.submit(step, weights(), lambda: held(release), steps=2, name="runs")
        while runs.status.step < 1:
            runs.wait(0.01)
        with pytest.warns(UserWarning, match=r"The result of done is in host memory\. .*tensile\.to_device\(result\)"):
            assert on_host(done.result())
        with warnings.catch_warnings(action="error"):
            assert on_host(done.result())  # it has been said
        release.set()
        runs.wait()
        assert not on_host(done.result())


def test_results_that_are_in_use_on_the_device_leave_less_room() -> None:
    with Runtime(int(2.5 * STATE_BYTES)) as runtime:
        job = runtime.submit(step, weights(), BATCHES, steps=1, name="job")
        job.wait()
    held = [job.result(), job.result()]
    with pytest.warns(UserWarning, match="The result of job is in host memory"):
        assert on_host(job.result())
    held.pop()
    assert not on_host(job.result())


def test_beside_a_job_without_a_plan_there_is_no_room() -> None:
    release = threading.Event()

    def late() -> Iterator[Any]:
        release.wait(60)
        yield from BATCHES

    with Runtime("10MB") as runtime:
        done = runtime.submit(step, weights(), BATCHES, steps=1, name="done")
        done.wait()
        runtime.submit(step, weights(), late, steps=1, name="late")
        with pytest.warns(UserWarning, match="The result of done is in host memory"):
            assert on_host(done.result())
        release.set()


def test_where_the_device_has_no_memory_left_the_result_is_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    with Runtime("10MB") as runtime:
        job = runtime.submit(step, weights(), BATCHES, steps=1, name="job")

    def full(transfer: Transfer, array: Any) -> Any:
        raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 16384 bytes.")

    monkeypatch.setattr(Transfer, "copy_into", full)
    with pytest.warns(UserWarning, match="The result of job is in host memory"):
        assert on_host(job.result())


def test_arrays_that_the_step_keeps_in_host_memory_stay_there() -> None:
    def keeps(state: Any, batch: Any) -> Any:
        there, here = state
        return (there, here + batch.sum()), here.sum()

    kind = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    with Runtime("10MB") as runtime:
        job = runtime.submit(keeps, (jax.device_put(weights(), kind), weights()), BATCHES, steps=2)
    there, here = job.result()
    assert on_host(there) and not on_host(here)


def test_the_state_of_a_failed_job_is_where_a_result_would_be() -> None:
    def breaks() -> Iterator[Any]:
        yield BATCHES[0]
        raise OSError("the disk is gone")

    with Runtime("10MB") as runtime:
        job = runtime.submit(step, weights(), breaks, steps=3)
    with pytest.raises(JobFailed) as failed:
        job.result()
    assert not on_host(failed.value.state)
    assert (failed.value.state + 1).shape == (64, 64)
