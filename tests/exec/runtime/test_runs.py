"""Moves are issued in runs: what is recorded of a run, and jobs that fail in the middle of one."""

import threading
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest

import tensile_jax as tensile
from tensile_jax.exec.actor.local_actor import LocalActor
from tensile_jax.exec.controller.state import State
from tensile_jax.exec.running.executor import Iteration
from tensile_jax.exec.running.instructions import Instruction, Launch
from tensile_jax.exec.runtime import runtime as runtimes
from tensile_jax.exec.runtime.dispatcher import Dispatcher
from tensile_jax.exec.runtime.job import Job
from tensile_jax.plan.drift import WATCHED_FIRST, is_watched
from tensile_jax.plan.multi_job.memory_profile import LAUNCH, WAIT
from tests.exec.conftest import MakeRuntime
from tests.exec.small_jobs import PATIENCE_S, assert_lonely, heavy, until, wide

WORK = wide(0)
BUDGET = "380KiB"  # cuts the step into several segments, and swaps
UNSWAPPED = "420KiB"  # cuts it into several segments, and swaps nothing


def submit(run: tensile.Runtime, *, steps: int, budget: str = BUDGET) -> Job:
    return run.submit(WORK.step, WORK.state(), WORK.batches, steps=steps, budget=budget)


def test_a_run_is_one_span_and_in_a_watched_iteration_each_launch_is_one(runtime: MakeRuntime) -> None:
    with runtime() as run:
        job = submit(run, steps=WATCHED_FIRST + 3, budget=UNSWAPPED)
    assert_lonely(WORK, job)
    assert job.plan is not None and not job.plan.swapped_out_bytes, "there is no wait, so an iteration is one run"
    names = [s.name for s in job.plan.segments]
    assert len(names) > 2
    spans = [span for span in run.record().spans if span.lane == "compute"]
    assert Counter(span.step for span in spans) == {
        **dict.fromkeys(range(WATCHED_FIRST), len(names)),
        **dict.fromkeys(range(WATCHED_FIRST, WATCHED_FIRST + 3), 1),
    }
    assert [span.name for span in spans if span.step == 0] == names
    assert {span.name for span in spans if span.step >= WATCHED_FIRST} == {f"{names[0]} .. {names[-1]}"}
    assert all(a.end_us <= b.begin_us for a, b in zip(spans, spans[1:], strict=False))
    assert run.controller_us[1] == len(names) * (WATCHED_FIRST + 3)


def test_plans_that_swap_change_no_bit_in_runs(runtime: MakeRuntime, fast_link: str) -> None:
    works = wide(0), wide(1), heavy(2)
    budgets = BUDGET, BUDGET, None
    with runtime("3MiB", device_profile=fast_link) as run:
        jobs = [
            run.submit(w.step, w.state(), w.batches, steps=12, name=f"job{k}", budget=budget)
            for k, (w, budget) in enumerate(zip(works, budgets, strict=True))
        ]
    for work, job in zip(works, jobs, strict=True):
        assert_lonely(work, job)
    assert jobs[0].plan is not None and jobs[0].plan.swapped_out_bytes


def test_a_wait_ends_a_run_unless_no_other_job_could_run_meanwhile(runtime: MakeRuntime, fast_link: str) -> None:
    def spans_of(job: Job, *, step: int) -> int:
        spans = run.record().spans
        return sum((span.lane, span.job, span.step) == ("compute", job.name, step) for span in spans)

    go, idle = threading.Event(), wide(1)

    def batches() -> Iterator[Any]:
        for number, one in enumerate(idle.batches()):
            assert number == 0 or go.wait(PATIENCE_S)
            yield one

    with runtime(device_profile=fast_link) as run:
        alone = submit(run, steps=WATCHED_FIRST + 1)
        alone.wait(PATIENCE_S)
        other = run.submit(idle.step, idle.state(), batches, steps=2, name="other")
        until(lambda: other.status.step == 1)
        beside = submit(run, steps=WATCHED_FIRST + 1)
        beside.wait(PATIENCE_S)
        go.set()
    kinds = beside._stored.in_use.memory.kinds if beside._stored.in_use is not None else ()
    waits = [k for k, kind in enumerate(kinds) if kind == WAIT]
    between = [kinds[a:b] for a, b in pairwise([0, *waits, len(kinds)])]
    assert len(waits) > 1 and spans_of(alone, step=WATCHED_FIRST) == 1
    assert spans_of(beside, step=WATCHED_FIRST) == sum(LAUNCH in moves for moves in between)
    for work, job in ((WORK, alone), (WORK, beside), (idle, other)):
        assert_lonely(work, job)


@pytest.fixture
def in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs are issued as on a GPU: all moves at once, and three runs may be in flight."""
    monkeypatch.setattr(LocalActor, "_in_order", True)
    monkeypatch.setattr(runtimes, "State", lambda budget, host, depth: State(budget, host, depth=3))


@pytest.mark.parametrize("budget", [None, UNSWAPPED])
def test_runs_of_several_iterations_in_flight_are_recorded_each_with_its_own_step(
    runtime: MakeRuntime, in_order: None, budget: str | None
) -> None:
    # the fiftieth iteration is watched, and is issued while runs of iterations before it, which are not, are in flight
    steps = 55
    with runtime() as run:
        job = run.submit(WORK.step, WORK.state(), WORK.batches, steps=steps, budget=budget, renew_above=100.0)
    assert_lonely(WORK, job)
    assert job.plan is not None
    launches = len(job.plan.segments) or 1
    spans = Counter(span.step for span in run.record().spans if span.lane == "compute")
    assert spans == {step: launches if is_watched(step + 1) else 1 for step in range(steps)}


def test_a_runtime_ends_after_the_end_of_its_last_run_is_reported(
    runtime: MakeRuntime, monkeypatch: pytest.MonkeyPatch, in_order: None
) -> None:
    # the last state may be on the host, and the job over, while the launches' thread is about to report the end of the last run
    ending, late = threading.Event(), list[bool]()
    end, decide = Dispatcher.end, Dispatcher._decide

    def ends(self: Dispatcher) -> None:
        end(self)
        ending.set()

    def slowly(self: Dispatcher, what: Any) -> None:
        if threading.current_thread().name == "tensile-launches" and what.func.__name__ == "_run_over" and what.args[2].step == 4:
            late.append(ending.wait(PATIENCE_S))
        decide(self, what)

    monkeypatch.setattr(Dispatcher, "end", ends)
    monkeypatch.setattr(Dispatcher, "_decide", slowly)
    with runtime() as run:
        job = submit(run, steps=5, budget=UNSWAPPED)
    assert late == [True]
    assert_lonely(WORK, job)
    assert run._dispatcher.state.in_flight == () and run._dispatcher.state.held_bytes == 0


def test_runs_that_are_issued_at_once_give_the_same_and_a_failure_in_one_costs_its_job_only(
    runtime: MakeRuntime, monkeypatch: pytest.MonkeyPatch, in_order: None
) -> None:
    perform, well = Iteration.perform, wide(1)

    def failing(self: Any, instruction: Instruction) -> None:
        if self.watch is None and isinstance(instruction, Launch) and instruction.index == 2:
            raise RuntimeError("broken")
        perform(self, instruction)

    with runtime() as run:
        other = run.submit(well.step, well.state(), well.batches, steps=8, name="well", budget=BUDGET)
        other.wait(PATIENCE_S)
        monkeypatch.setattr(Iteration, "perform", failing)
        assert isinstance(submit(run, steps=8).exception(PATIENCE_S), RuntimeError)
        monkeypatch.setattr(Iteration, "perform", perform)
        job = submit(run, steps=8)
    for work, one in ((well, other), (WORK, job)):
        assert_lonely(work, one)


@pytest.mark.parametrize("launch", [0, 2])
def test_a_launch_that_raises_in_a_run_costs_its_job_only(
    runtime: MakeRuntime, monkeypatch: pytest.MonkeyPatch, launch: int
) -> None:
    perform, seen = Iteration.perform, list[Any]()

    def failing(self: Any, instruction: Instruction) -> None:
        if self.watch is None and isinstance(instruction, Launch) and instruction.index == launch and not seen:
            seen.append(instruction)
            raise RuntimeError("broken")
        perform(self, instruction)

    monkeypatch.setattr(Iteration, "perform", failing)
    well = wide(1)
    with runtime() as run:
        ill = submit(run, steps=8)
        assert isinstance(ill.exception(), RuntimeError)
        other = run.submit(well.step, well.state(), well.batches, steps=8, name="well")
    assert (ill.status.state, ill.status.step) == ("failed", WATCHED_FIRST)
    assert_lonely(well, other)


@pytest.mark.parametrize("watched", [False, True])
def test_a_job_that_fails_while_its_run_is_carried_out_gives_its_memory_back_after_the_move_under_way(
    runtime: MakeRuntime, monkeypatch: pytest.MonkeyPatch, watched: bool
) -> None:
    perform, entered, go = Iteration.perform, threading.Event(), threading.Event()
    after: list[Instruction] = []

    def slow(self: Any, instruction: Instruction) -> None:
        if entered.is_set():
            after.append(instruction)
        here = (self.watch is not None) == watched and isinstance(instruction, Launch) and instruction.index == 1
        if here and not entered.is_set():
            entered.set()
            assert go.wait(PATIENCE_S)
        perform(self, instruction)

    monkeypatch.setattr(Iteration, "perform", slow)
    well = heavy(1)
    with runtime() as run:
        ill = submit(run, steps=8)
        assert entered.wait(PATIENCE_S)
        dispatcher, number = run._dispatcher, ill._stored.number
        dispatcher.fail(number, RuntimeError("broken elsewhere"))
        handled = threading.Event()
        dispatcher.call(handled.set)
        assert handled.wait(PATIENCE_S)
        record = dispatcher.state.record(number)
        assert record is not None and dispatcher.state.in_flight, "the controller is not told before the move has ended"
        go.set()
        assert "broken elsewhere" in str(ill.exception(PATIENCE_S))
        until(lambda: dispatcher.state.record(number) is None)
        assert not after, "no further move is carried out"
        monkeypatch.undo()
        other = run.submit(well.step, well.state(), well.batches, steps=4, name="well")
    assert ill.status.state == "failed"
    assert_lonely(well, other)
