"""A job whose logits are too large for its budget trains in chunks of rows, as a step under `tensile.jit` does."""

import itertools
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

from tensile_jax.exec.runtime.submission import Isolation
from tests.builders import in_chunks, numbers
from tests.exec.conftest import MakeRuntime
from tests.exec.small_jobs import PATIENCE_S, Gate, Work, assert_lonely, until, wordy

LOW = "2MiB"  # the logits alone need as much
HIGH = "64MiB"


def assert_trained(work: Work, job: Any, steps: int) -> None:
    """The job's result is that of its plans running alone, bit for bit, and plain jit's to rounding."""
    assert job.status.step == steps
    assert_lonely(work, job)
    expected, jitted = work.state(), jax.jit(work.step)
    for batch in itertools.islice(work.batches(), steps):
        expected, _ = jitted(expected, batch)
    for a, b in zip(numbers(job.result(PATIENCE_S)), numbers(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("isolation", ["thread", pytest.param("process", marks=pytest.mark.slow)])
def test_two_jobs_whose_logits_exceed_the_budget_train_in_chunks(isolation: Isolation, runtime: MakeRuntime) -> None:
    works = wordy(0), wordy(1)
    with runtime(LOW, look="always") as run:
        jobs = [run.submit(w.step, w.state(), w.batches, steps=6, isolation=isolation) for w in works]
    for work, job in zip(works, jobs, strict=True):
        assert in_chunks(job.plan)
        assert_trained(work, job, 6)


def test_a_budget_that_is_lowered_divides_the_logits_from_then_on(runtime: MakeRuntime) -> None:
    work = wordy(0)
    gate = Gate(work)
    with runtime(HIGH, look="always") as run:
        job = run.submit(work.step, work.state(), gate, steps=9)
        for plans in (1, 2):
            gate.allow(3)
            until(lambda plans=plans: job.status.step == 3 * plans)
            run.set_budget("3MiB" if plans == 1 else "1MiB")
            until(lambda plans=plans: len(job.plans) > plans)
        gate.open()
    assert [in_chunks(plan) for _, plan in job.plans] == [False, True, True]
    assert_trained(work, job, 9)


def test_a_job_in_chunks_that_may_not_swap_has_a_plan_without_swaps(runtime: MakeRuntime) -> None:
    work, other = wordy(0), wordy(1)
    with runtime(LOW, look="always") as run:
        job = run.submit(work.step, work.state(), work.batches, steps=3, max_swap_rate=0.0)
        run.submit(other.step, other.state(), other.batches, steps=3)
    assert job.plan is not None and in_chunks(job.plan) and not job.plan.swapped_out_bytes
    assert_trained(work, job, 3)


def test_a_job_in_chunks_follows_the_machine_and_stays_under_a_lowered_budget(
    runtime: MakeRuntime, fast_link: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its latencies are measured, so its plan is renewed; under the lower budget it is divided into more chunks."""
    monkeypatch.setattr("tensile_jax.plan.drift.WORTH", 0.0)
    work = wordy(0)
    gate = Gate(work)

    def step_until(what: Callable[[], bool]) -> None:
        """Lets the job go on slowly, so that it does not end before a plan is found."""
        until(lambda: (gate.allow(1), time.sleep(0.03), what())[-1])

    with runtime(LOW, look="always", device_profile=fast_link) as run:
        job = run.submit(work.step, work.state(), gate, steps=3000, renew_above=0.01)
        step_until(lambda: len(job.plans) >= 2)
        run.set_budget("1280KiB")
        step_until(lambda: job.plans[-1][1].peak_bytes <= 1280 * 1024)
        gate.open()
        job.cancel()
    assert all(in_chunks(plan) for _, plan in job.plans)
    assert job.plans[1][1].reason and job.plans[-1][1].peak_bytes <= 1280 * 1024 < job.plans[1][1].peak_bytes
    assert_trained(work, job, job.status.step)
