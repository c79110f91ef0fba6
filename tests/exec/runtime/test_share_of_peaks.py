"""A runtime's budget that is a share of the sum of its jobs' peaks under plain jit."""

import threading
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tensile_jax as tensile
from tensile_jax.exec.runtime.runtime import Runtime

BATCHES = [np.ones((256, 64), np.float32)] * 4


def step(weights: Any, batch: Any) -> Any:
    def loss_of(weights: Any) -> Any:
        x = batch
        for w in weights:
            x = jnp.tanh(x @ w)
        return jnp.mean((x - batch) ** 2)

    loss, gradients = jax.value_and_grad(loss_of)(weights)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), {"loss": loss}


def weights(layers: int) -> list[jax.Array]:
    return list(jax.random.normal(jax.random.key(0), (layers, 64, 64)) / 8)


def plain_peak(layers: int) -> int:
    return tensile.jit(step, donate_argnums=0).jit_peak_bytes(weights(layers), BATCHES[0])


def test_the_budget_is_the_share_of_the_sum_of_the_peaks_and_is_kept() -> None:
    with Runtime("70%") as runtime:
        assert runtime.status().budget_of == "70% of the sum of the plain-jit peaks of the jobs, of which none is known yet"
        jobs = [runtime.submit(step, weights(layers), BATCHES, steps=4) for layers in (12, 8)]
    assert [job.status.state for job in jobs] == ["finished"] * 2, [job.status.note for job in jobs]
    status, peaks = runtime.status(), plain_peak(12) + plain_peak(8)
    assert status.budget_bytes == int(0.7 * peaks)
    assert status.budget_of.startswith("70% of ") and status.budget_of.endswith(", the sum of the plain-jit peaks of 2 jobs")
    assert 0 < status.peak_bytes <= status.budget_bytes
    first = jobs[0].plan
    assert first is not None and first.peak_bytes <= int(0.7 * plain_peak(12))


def test_jobs_are_planned_in_the_order_of_submission_whichever_is_traced_first() -> None:
    release = threading.Event()

    def late() -> Iterator[Any]:
        release.wait(60)
        yield from BATCHES

    with Runtime("90%") as runtime:
        first = runtime.submit(step, weights(12), late, steps=4, name="first")
        second = runtime.submit(step, weights(8), BATCHES, steps=4, name="second")
        while second.status.note != "waiting to be planned":
            second.wait(0.01)
        assert second.plan is None
        release.set()
        for job in (first, second):
            job.wait()
    planned = [event.job for event in runtime.events() if event.kind == "planned"]
    assert planned == ["first", "second"]


def test_a_job_that_ends_before_it_was_traced_is_waited_for_no_longer() -> None:
    release = threading.Event()

    def never() -> Iterator[Any]:
        release.wait(60)
        yield from BATCHES

    with Runtime("90%") as runtime:
        first = runtime.submit(step, weights(12), never, steps=4, name="first")
        second = runtime.submit(step, weights(8), BATCHES, steps=4, name="second")
        first.cancel()
        assert second.wait(60)
        release.set()
    assert second.status.state == "finished", second.status.note
    assert runtime.status().budget_bytes == int(0.9 * plain_peak(8))


def test_a_budget_in_bytes_ends_the_share() -> None:
    with Runtime("90%") as runtime:
        runtime.submit(step, weights(8), BATCHES, steps=4).wait()
        runtime.set_budget("64MiB")
        later = runtime.submit(step, weights(12), BATCHES, steps=4)
        later.wait()
    assert later.status.state == "finished", later.status.note
    assert (runtime.status().budget_bytes, runtime.status().budget_of) == (64 * 2**20, "")


def test_a_job_in_its_own_process_counts_as_well() -> None:
    with Runtime("90%") as runtime:
        job = runtime.submit(tensile.Entrypoint("mlp", {"batch_size": 32}), steps=2, isolation="process")
    assert job.status.state == "finished", job.status.note
    assert runtime.status().budget_of.endswith("the sum of the plain-jit peaks of 1 job")


@pytest.mark.parametrize("argument", ["budget", "plan_for"])
def test_a_share_that_cannot_be_meant_is_refused_with_the_call_that_knows_the_peak(argument: str) -> None:
    with Runtime("10MB") as runtime:
        with pytest.raises(ValueError, match=rf"{argument}='10%' is a share\. .*jit_peak_bytes\(state, batch\)"):
            runtime.submit(step, weights(2), BATCHES, steps=1, **{argument: "10%"})  # pyright: ignore[reportArgumentType]
        with pytest.raises(ValueError, match=r"budget='10%' is a share\. .*jit_peak_bytes\(state, batch\)"):
            runtime.set_budget("10%")
