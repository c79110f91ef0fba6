"""Jobs that share a device give what each would give alone, bit for bit, and never need more than the budget."""

import random
from typing import Any

import jax
import pytest

import tensile_jax as tensile
from tensile_jax.exec.actor.plans import PlanWithin
from tensile_jax.exec.running.executor import Iteration
from tensile_jax.exec.running.instructions import Instruction, Launch
from tensile_jax.plan.multi_job.admission import JobLimits
from tests.builders import device_bytes
from tests.exec.conftest import MakeRuntime
from tests.exec.small_jobs import PATIENCE_S, Gate, assert_lonely, counting, heavy, total, until, wide


@pytest.mark.smoke
def test_two_jobs_give_what_lonely_runs_give(runtime: MakeRuntime) -> None:
    works = wide(0), heavy(1)
    with runtime("64MiB", look="always") as run:
        jobs = [run.submit(w.step, w.state(), w.batches, steps=6, name=f"job{k}") for k, w in enumerate(works)]
    for work, job in zip(works, jobs, strict=True):
        assert job.status.state == "finished"
        assert job.status.step == 6
        assert repr(job) == f"<Job {job.name!r}: finished, 6 of 6 steps>"
        assert_lonely(work, job)
    assert 0 < run.peak_bytes <= 64 << 20


def test_three_jobs_under_a_budget_that_makes_them_swap_and_park(runtime: MakeRuntime, fast_link: str) -> None:
    works = wide(0), heavy(1), heavy(2)
    with runtime("2MiB", look="always", device_profile=fast_link) as run:
        jobs = [run.submit(w.step, w.state(), w.batches, steps=8, name=f"job{k}") for k, w in enumerate(works)]
        for job in jobs:
            job.pause()
        until(lambda: all(job.plan is not None for job in jobs))
        for job in jobs:
            job.resume()
        kinds = [event.kind for event in run.events()]
    assert "parked" in kinds
    for work, job in zip(works, jobs, strict=True):
        assert_lonely(work, job)
    assert run.peak_bytes <= 2 << 20


def test_a_plan_that_swaps_among_others_changes_no_bit(runtime: MakeRuntime, fast_link: str) -> None:
    works = wide(0), wide(1)
    with runtime("64MiB", look="always", device_profile=fast_link) as run:
        jobs = [run.submit(w.step, w.state(), w.batches, steps=6, name=f"job{k}", budget="460KiB") for k, w in enumerate(works)]
    for work, job in zip(works, jobs, strict=True):
        assert job.plan is not None and job.plan.swapped_out_bytes, "the plan was to swap"
        assert job.plan.peak_bytes <= 460 << 10
        assert_lonely(work, job)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_pauses_and_resumes_at_any_step_change_no_bit(runtime: MakeRuntime, fast_link: str, seed: int) -> None:
    chance = random.Random(seed)
    works = wide(0), heavy(1), heavy(2)
    with runtime("2MiB", device_profile=fast_link, look="always") as run:
        jobs = [run.submit(w.step, w.state(), w.batches, steps=12, name=f"job{k}") for k, w in enumerate(works)]
        for event in run.events():
            if event.kind == "step" and chance.random() < 0.4:
                _pause(chance.choice(jobs))
            elif event.kind == "paused":
                next(job for job in jobs if job.name == event.job).resume()
    for work, job in zip(works, jobs, strict=True):
        assert job.status.state == "finished"
        assert job.status.step == 12
        assert_lonely(work, job)


def _pause(job: Any) -> None:
    try:
        job.pause()
    except ValueError as error:  # it has ended meanwhile
        assert "cannot be paused" in str(error)


def test_a_budget_lowered_below_a_peak_renews_the_plan_and_raised_again_leaves_it(runtime: MakeRuntime) -> None:
    work, gate = wide(0), Gate(wide(0))
    with runtime("64MiB", look="always") as run:
        job = run.submit(work.step, work.state(), gate, steps=12)
        gate.allow(4)
        until(lambda: job.status.step == 4)
        assert job.plan is not None
        high = job.plan.peak_bytes
        run.set_budget(high * 9 // 10)
        until(lambda: len(job.plans) == 2)
        gate.allow(4)
        until(lambda: job.status.step == 8)
        run.set_budget("64MiB")
        gate.open()
        kinds = [(event.kind, event.step) for event in run.events() if event.kind in ("renewed", "budget")]
    assert job.plans[1][0] == 4
    assert job.plans[1][1].peak_bytes <= high * 9 // 10 < job.plans[0][1].peak_bytes
    assert kinds == [("budget", 0), ("renewed", 4), ("budget", 0)]
    assert_lonely(work, job)
    assert all(level.planned_bytes <= level.budget_bytes for level in run.record().levels)


def test_a_budget_lowered_while_three_jobs_run_is_kept_and_changes_no_bit(runtime: MakeRuntime, fast_link: str) -> None:
    works = wide(0), heavy(1), wide(2)
    with runtime("3MiB", device_profile=fast_link, look="always") as run:
        jobs = [run.submit(w.step, w.state(), w.batches, steps=20, name=f"job{k}") for k, w in enumerate(works)]
        budgets = iter(("1800KiB", "3MiB", "1MiB", "3MiB"))
        for event in run.events():
            if event.kind == "step" and event.step % 5 == 0 and event.job == "job0":
                run.set_budget(next(budgets, "3MiB"))
    for work, job in zip(works, jobs, strict=True):
        assert job.status.step == 20
        assert_lonely(work, job)


def test_a_job_that_waits_in_the_queue_is_renewed_there(runtime: MakeRuntime) -> None:
    work = wide(0)
    with runtime("64MiB", look="always") as run:
        job = run.submit(work.step, work.state(), work.batches, steps=3)
        job.pause()
        until(lambda: job.status.state == "paused")
        assert job.plan is not None
        high = job.plan.peak_bytes
        run.set_budget(high * 9 // 10)
        until(lambda: job.plan is not None and job.plan.peak_bytes < high)
        job.resume()
    assert len(job.plans) == 1, "the first was never in use"
    assert job.plans[0][1] is job.plan
    assert_lonely(work, job)


HOST = 125_000  # bytes: room for the state of ten layers of `wide`, and for none of their activations beside it


def test_a_job_for_whose_swaps_the_host_has_no_room_is_renewed_without_them(runtime: MakeRuntime) -> None:
    work, gate = wide(0, layers=10), Gate(wide(0, layers=10))
    gate.allow(1)
    lower = 700_000
    with runtime("64MiB", host_budget=HOST) as run:
        job = run.submit(work.step, work.state(), gate, steps=3, policy="tensile")
        until(lambda: job.status.step == 1)
        stored = job._stored
        assert job.plan is not None and stored.in_use is not None
        assert stored.actor.plan(PlanWithin(JobLimits(lower, lower), stored.in_use.id)).memory.host_bytes > HOST
        run.set_budget(lower)
        until(lambda: len(job.plans) == 2)
        gate.open()
    assert job.plan.swapped_out_bytes == 0
    assert job.plan.peak_bytes <= lower
    assert_lonely(work, job)


@pytest.mark.slow
def test_a_job_that_the_host_has_no_room_to_renew_says_so_and_goes_on_when_the_budget_is_raised(runtime: MakeRuntime) -> None:
    work, gate = wide(0, layers=10), Gate(wide(0, layers=10))
    gate.allow(1)
    with runtime("64MiB", host_budget=HOST) as run:
        job = run.submit(work.step, work.state(), gate, steps=3, policy="tensile")
        until(lambda: job.status.step == 1)
        run.set_budget(600_000)  # tensile needs 460 kB with swaps, and 660 kB without
        gate.open()
        until(lambda: "on the host" in job.status.note)
        assert job.status.state == "queued"
        assert job.status.step == 1
        run.set_budget("64MiB")
    assert len(job.plans) == 1
    assert_lonely(work, job)


def test_live_arrays_and_workspace_stay_under_the_budget_at_every_launch(
    runtime: MakeRuntime, fast_link: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By JAX's own list of arrays, whatever the runtime says of itself."""
    baseline, seen = device_bytes(), list[int]()
    perform = Iteration.perform

    def watched(self: Any, instruction: Instruction) -> None:
        perform(self, instruction)
        if isinstance(instruction, Launch):
            seen.append(device_bytes() - baseline + instruction.workspace_bytes)

    monkeypatch.setattr(Iteration, "perform", watched)
    works = wide(0), heavy(1), heavy(2)
    with runtime("2MiB", device_profile=fast_link, look="always") as run:
        # Beside nobody, each step would fit whole: the first gets a lower limit, and all begin when they are planned.
        limits = ("700KiB", None, None)
        jobs = [
            run.submit(w.step, jax.device_get(w.state()), w.batches, steps=8, name=f"job{k}", plan_for=limit)
            for k, (w, limit) in enumerate(zip(works, limits, strict=True))
        ]
        for job in jobs:
            job.pause()
        until(lambda: all(job.plan is not None for job in jobs))
        for job in jobs:
            job.resume()
    for work, job in zip(works, jobs, strict=True):
        assert_lonely(work, job)
    assert len(seen) >= 24
    assert max(seen) <= 2 << 20


def test_a_job_that_comes_late_takes_its_place(runtime: MakeRuntime) -> None:
    work, gate = wide(0), Gate(wide(0))
    with runtime("64MiB") as run:
        first = run.submit(work.step, work.state(), gate, steps=6, name="first")
        gate.allow(3)
        until(lambda: first.status.step == 3)
        late = run.submit(heavy(1).step, heavy(1).state(), heavy(1).batches, steps=4, name="late")
        late.wait(PATIENCE_S)
        gate.open()
    assert_lonely(work, first)
    assert_lonely(heavy(1), late)


@pytest.mark.slow
def test_a_job_that_can_never_fit_says_its_floor_and_the_others_go_on(runtime: MakeRuntime) -> None:
    work, big = counting(), heavy(1, width=512, layers=1)
    with runtime("1MiB") as run:
        small = run.submit(work.step, work.state(), work.batches, steps=5, name="small")
        large = run.submit(big.step, big.state(), big.batches, steps=5, name="large")
    assert total(small) == 15
    error = large.exception()
    assert isinstance(error, tensile.BudgetTooSmall)
    assert error.floor_bytes > 1 << 20
    assert str(error.floor_bytes) in large.status.note
    with pytest.raises(tensile.JobFailed, match="smallest that works"):
        large.result()
    with runtime(4 << 20) as run:
        job = run.submit(big.step, big.state(), big.batches, steps=2, budget=error.floor_bytes)
    assert job.exception() is None
    assert job.status.planned_bytes <= error.floor_bytes


def test_a_job_for_which_the_host_has_no_room_waits_and_says_what_it_needs(runtime: MakeRuntime) -> None:
    work, gate = heavy(0), Gate(heavy(0))
    with runtime("64MiB", host_budget="2MiB") as run:
        gate.allow(1)
        first = run.submit(work.step, work.state(), gate, steps=2, name="first")
        until(lambda: first.status.state == "running")
        second = run.submit(heavy(1).step, heavy(1).state(), heavy(1).batches, steps=2, name="second")
        until(lambda: second.status.state == "queued")
        assert "on the host" in second.status.note
        assert second.status.step == 0
        gate.open()
        events = list(run.events())
    queued = next(event for event in events if event.kind == "queued")
    assert queued.job == "second"
    assert queued.values["host_bytes"] > 2 << 20
    order = [(event.job, event.kind) for event in events]
    assert order.index(("first", "finished")) > order.index(("second", "queued"))
    assert_lonely(heavy(1), second)


def test_a_job_that_is_planned_for_a_limit_has_the_same_plan_whoever_is_there(runtime: MakeRuntime) -> None:
    plans, states = [], []
    for others in (0, 2):
        with runtime("2MiB") as run:
            for k in range(others):
                run.submit(heavy(k).step, heavy(k).state(), heavy(k).batches, steps=4, name=f"other{k}")
            until(lambda run=run: all(job.plan is not None for job in run.jobs))
            work = wide(5)
            job = run.submit(work.step, work.state(), work.batches, steps=6, name="job", plan_for="700KiB")
            states.append(job.result())
            assert job.plan is not None
            plans.append([(segment.name, segment.operators) for segment in job.plan.segments])
    assert plans[0] == plans[1]
    assert all((one == other).all() for one, other in zip(*map(jax.tree.leaves, states), strict=True))


@pytest.mark.slow
def test_a_limit_that_is_too_small_gives_way_to_the_budget(runtime: MakeRuntime) -> None:
    work = wide(0)
    with runtime("2MiB") as run:
        job = run.submit(work.step, work.state(), work.batches, steps=2, plan_for=1)
    assert job.status.state == "finished"
