"""Nothing waits for itself: calls in a job's own code that would never return say so, and a step that hangs costs its job only.

No test sleeps; the time limits only end a test that fails.
"""

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import tensile_jax as tensile
from tensile_jax.exec.runtime.job import Job
from tests.exec import isolated_jobs
from tests.exec.conftest import MakeRuntime, threads
from tests.exec.small_jobs import PATIENCE_S, counting, total, until

COUNT = counting()

WAITS: dict[str, Callable[[tensile.Runtime, Job], Any]] = {
    "result": lambda run, job: job.result(),
    "exception": lambda run, job: job.exception(),
    "wait": lambda run, job: job.wait(),
    "close": lambda run, job: run.close(),
    "with": lambda run, job: run.__exit__(None, None, None),
    "events": lambda run, job: list(run.events()),
    "events until closed": lambda run, job: list(run.events(until_closed=True)),
}


@pytest.mark.parametrize("where", ["on_step", "batches", "step"])
def test_a_job_that_would_wait_for_itself_is_told_at_once(runtime: MakeRuntime, where: str) -> None:
    jobs: dict[str, Job] = {}
    said: dict[str, list[str]] = {name: [] for name in WAITS}
    submitted = threading.Event()

    def submit(name: str) -> Job:
        def wait() -> None:
            assert submitted.wait(PATIENCE_S)
            with pytest.raises(RuntimeError, match="it would never return") as caught:
                WAITS[name](run, jobs[name])
            said[name].append(str(caught.value))

        def on_step(step: int, metrics: Any) -> None:
            if where == "on_step" and step in (1, 3):  # in the middle, and when nothing else is left to do
                wait()

        def batches() -> Iterator[Any]:
            for k, batch in zip(range(3), COUNT.batches(), strict=False):
                if where == "batches" and k == 1:
                    wait()
                yield batch

        def step(state: Any, batch: Any) -> Any:
            if where == "step":
                wait()
            return COUNT.step(state, batch)

        return run.submit(step, COUNT.state(), batches, steps=3, on_step=on_step, name=name)

    with runtime() as run:
        for name in WAITS:
            jobs[name] = submit(name)
        submitted.set()
    for name, job in jobs.items():
        assert total(job) == 6
        assert len(said[name]) == {"on_step": 2, "batches": 1, "step": 1}[where]
        assert all(f"{name!r} (its on_step, its batches or its step)" in one for one in said[name])


def test_an_error_of_that_kind_fails_the_job_if_it_is_not_caught(runtime: MakeRuntime) -> None:
    with runtime() as run:
        job = run.submit(COUNT.step, COUNT.state(), COUNT.batches, steps=3, on_step=lambda step, metrics: run.close())
    assert job.status.state == "failed"
    assert "its callback raised RuntimeError: close() waits until every job has ended" in job.status.note


def test_events_begun_elsewhere_are_not_waited_for_either(runtime: MakeRuntime) -> None:
    with runtime() as run:
        events = run.events()

        def on_step(step: int, metrics: Any) -> None:
            list(events)

        job = run.submit(COUNT.step, COUNT.state(), COUNT.batches, steps=3, on_step=on_step)
    assert "its callback raised RuntimeError: events() waits" in job.status.note


def test_a_job_may_wait_for_another_one_and_with_a_time_limit_for_itself(runtime: MakeRuntime) -> None:
    found: list[Any] = []
    jobs: list[Job] = []

    def on_step(step: int, metrics: Any) -> None:
        found.append((float(jobs[0].result()["total"][0]), jobs[1].wait(0)))

    with runtime() as run:
        jobs.append(run.submit(COUNT.step, COUNT.state(), COUNT.batches, steps=3, name="first"))
        gate = threading.Event()

        def batches() -> Iterator[Any]:
            assert gate.wait(PATIENCE_S)
            yield from COUNT.batches()

        jobs.append(run.submit(COUNT.step, COUNT.state(), batches, steps=1, name="second", on_step=on_step))
        gate.set()
    assert found == [(6.0, False)]
    assert total(jobs[1]) == 1


def test_jobs_that_wait_for_each_other_are_told(runtime: MakeRuntime) -> None:
    jobs: dict[str, Job] = {}
    submitted, said = threading.Event(), list[str]()

    def waits_for(name: str) -> Callable[[int, Any], None]:
        def on_step(step: int, metrics: Any) -> None:
            assert submitted.wait(PATIENCE_S)
            try:
                jobs[name].wait()
            except RuntimeError as error:
                said.append(str(error))

        return on_step

    with runtime() as run:
        for name, other in (("a", "b"), ("b", "c"), ("c", "a")):
            jobs[name] = run.submit(COUNT.step, COUNT.state(), COUNT.batches, steps=1, name=name, on_step=waits_for(other))
        submitted.set()
    assert len(said) == 1
    assert any(circle in said[0] for circle in ("a -> b -> c -> a", "b -> c -> a -> b", "c -> a -> b -> c"))
    assert {job.status.state for job in jobs.values()} == {"finished"}


# -- steps that hang -----------------------------------------------------------------------------------------------------------


def test_a_step_that_hangs_while_it_is_traced_costs_its_own_job_only(runtime: MakeRuntime) -> None:
    never, entered = threading.Event(), threading.Event()

    def hangs(state: Any, batch: Any) -> Any:
        entered.set()
        never.wait(PATIENCE_S)
        return COUNT.step(state, batch)

    with runtime() as run:
        ill = run.submit(hangs, COUNT.state(), COUNT.batches, steps=3, name="hangs")
        assert entered.wait(PATIENCE_S)
        well = run.submit(COUNT.step, COUNT.state(), COUNT.batches, steps=3, name="well")
        assert total(well) == 6
        assert ill.status.state == "preparing"
        ill.cancel()
        assert np.array_equal(ill.result(PATIENCE_S)["total"], np.zeros(8))
    assert (ill.status.state, ill.status.step) == ("cancelled", 0)
    tracing = ill._stored.tracing
    assert tracing is not None
    never.set()
    tracing.join(PATIENCE_S)


@pytest.mark.slow
def test_an_isolated_job_that_hangs_at_any_place_is_cancelled_and_the_others_are_prepared(runtime: MakeRuntime) -> None:
    """In its step, while that is traced; where its process makes it; and where its module is imported."""
    here = "tests.exec.isolated_jobs"
    with runtime() as run:
        in_step = run.submit(
            isolated_jobs.step_that_hangs, isolated_jobs.make_state(), isolated_jobs.batches, steps=3, name="step",
            isolation="process",
        )  # fmt: skip
        in_making = run.submit(tensile.Entrypoint(f"{here}:make_that_hangs"), steps=3, name="making", isolation="process")
        until(lambda: in_step._stored.tracing is not None)
        well = run.submit(COUNT.step, COUNT.state(), COUNT.batches, steps=3, name="well")
        assert total(well) == 6
        for job in (in_step, in_making):
            assert job.status.state == "preparing"
            job.cancel()
        begun = isolated_jobs.bits(in_step.result(PATIENCE_S))
        assert begun == isolated_jobs.bits(isolated_jobs.make_state())
        assert in_making.wait(PATIENCE_S)
        with pytest.raises(tensile.JobFailed, match="making is cancelled and has no state: .* had not made it yet"):
            in_making.result()
    assert {in_step.status.state, in_making.status.state} == {"cancelled"}


# -- runtimes that nobody closes ------------------------------------------------------------------------------------------------


def test_the_threads_of_runtimes_that_were_dropped_end() -> None:
    assert not threads()
    seen = [_drop(steps) for steps in (0, 1, 5)]
    until(lambda: not any(gc.collect() < 0 or one() is not None for one in seen))
    left = threads()
    for thread in left:
        thread.join(PATIENCE_S)
    assert not threads()


def _drop(steps: int) -> "weakref.ref[tensile.Runtime]":
    """Make a runtime, run a job, and do not close it."""
    run = tensile.Runtime("64MiB")
    if steps:
        run.set_budget("63MiB")
        job = run.submit(COUNT.step, COUNT.state(), COUNT.batches, steps=steps, on_step=lambda step, metrics: None)
        assert total(job) == steps * (steps + 1) / 2
    return weakref.ref(run)


def test_a_runtime_that_was_dropped_goes_on_until_its_jobs_have_ended() -> None:
    go, heard = threading.Event(), list[int]()

    def on_step(step: int, metrics: Any) -> None:
        heard.append(step)
        assert step != 2 or go.wait(PATIENCE_S)

    seen: list[weakref.ref[tensile.Runtime]] = []

    def begin() -> None:
        run = tensile.Runtime("64MiB")
        run.submit(COUNT.step, COUNT.state(), COUNT.batches, steps=5, on_step=on_step)
        seen.append(weakref.ref(run))

    begin()
    until(lambda: heard == [1, 2])
    gc.collect()
    assert seen[0]() is not None
    go.set()
    until(lambda: heard == [1, 2, 3, 4, 5])
    until(lambda: gc.collect() >= 0 and seen[0]() is None)
    until(lambda: not threads())
