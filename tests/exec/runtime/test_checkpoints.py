"""Checkpoints of jobs in a runtime: when they are made, what they hold, and that a run goes on from them bit for bit."""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

import tensile_jax as tensile
from tensile_jax.errors import CheckpointError
from tensile_jax.exec.checkpoint.checkpoints import Checkpoints
from tensile_jax.exec.checkpoint.folder_lock import FolderLock
from tests.exec.checkpoint.test_checkpoints import contents, data_file, flip
from tests.exec.conftest import MakeRuntime
from tests.exec.small_jobs import PATIENCE_S, Gate, assert_lonely, counting, equal, heavy, total, until, wide


def saved(run: Any) -> list[tuple[str, int]]:
    return [(event.job, event.step) for event in run.events() if event.kind == "checkpointed"]


def test_checkpoints_are_made_at_multiples_of_n_and_at_the_end_while_others_run(runtime: MakeRuntime, tmp_path: Path) -> None:
    work, other = wide(0), heavy(1)
    with runtime("64MiB", checkpoints=tmp_path) as run:
        job = run.submit(work.step, work.state(), work.batches, steps=10, name="saved", checkpoint_every=3)
        run.submit(other.step, other.state(), other.batches, steps=10, name="other")
    assert [step for name, step in saved(run) if name == "saved"] == [3, 6, 9, 10]
    assert [step for name, step in saved(run) if name == "other"] == [10]  # any job's end is kept
    assert_lonely(work, job)
    kept = Checkpoints(tmp_path / "saved")
    assert kept.latest() == 10
    assert equal(kept.restore(10, work.state()), job.result())
    assert equal(kept.restore(9, work.state()), work.lonely(job.plans, 9))


def test_pauses_and_resumes_lose_no_checkpoint(runtime: MakeRuntime, tmp_path: Path) -> None:
    work = counting()
    with runtime(checkpoints=tmp_path) as run:
        job = run.submit(work.step, work.state(), work.batches, steps=60, name="saved", checkpoint_every=2)
        for event in run.events():
            if event.kind == "step" and job.status.state == "running":
                try:
                    job.pause()
                    job.resume()
                except ValueError:
                    assert job.wait(0)
    assert set(saved(run)) >= {("saved", step) for step in range(2, 61, 2)}
    assert total(job) == 60 * 61 / 2


def test_a_resumed_job_goes_on_bit_for_bit(runtime: MakeRuntime, tmp_path: Path, fast_link: str) -> None:
    work = wide(0)
    options: dict[str, Any] = {"checkpoints": tmp_path, "device_profile": fast_link}
    gate = Gate(work)
    gate.allow(7)
    with runtime("460KiB", **options) as run:
        job = run.submit(work.step, work.state(), gate, steps=12, name="saved", checkpoint_every=3)
        until(lambda: job.status.step == 7)
        job.cancel()
        gate.open()
    first_plan = job.plan
    with runtime("460KiB", **options) as run:
        again = run.submit(work.step, work.state(), work.batches, steps=12, name="saved", checkpoint_every=3, resume=True)
    assert next(run.events()).note == "resumed at step 7"
    assert saved(run) == [("saved", step) for step in (9, 12)]
    assert again.plan is not None and again.plan == first_plan
    assert equal(again.result(), work.lonely([(0, first_plan)], 12))


def test_checkpoints_of_an_earlier_run_are_not_written_over(runtime: MakeRuntime, tmp_path: Path) -> None:
    work = counting()
    with runtime(checkpoints=tmp_path) as run:
        run.submit(work.step, work.state(), work.batches, steps=4, name="saved")
    with runtime(checkpoints=tmp_path) as run:
        with pytest.raises(ValueError, match=r"saved has a checkpoint after 4 steps.*pass resume=True to go on"):
            run.submit(work.step, work.state(), work.batches, steps=2, name="saved")
    assert Checkpoints(tmp_path / "saved").latest() == 4


def test_a_job_that_was_done_has_its_result_at_once(runtime: MakeRuntime, tmp_path: Path) -> None:
    work = counting()
    for again in (False, True):
        with runtime(checkpoints=tmp_path) as run:
            job = run.submit(work.step, work.state(), work.batches, steps=4, name="saved", resume=True)
        assert job.status.state == "finished"
        assert job.status.step == 4
        assert total(job) == 10
        assert ("4 steps already" in job.status.note) == again


def test_a_checkpoint_that_cannot_be_written_is_reported_and_the_job_goes_on(
    runtime: MakeRuntime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work, save = wide(0), Checkpoints.save

    def full(self: Checkpoints, step: int, state: Any) -> None:
        if step == 4:
            raise CheckpointError("No space left on device", folder=str(self.folder), step=step)
        save(self, step, state)

    monkeypatch.setattr(Checkpoints, "save", full)
    with runtime(checkpoints=tmp_path) as run:
        job = run.submit(work.step, work.state(), work.batches, steps=6, name="saved", checkpoint_every=2)
    told = [(event.kind, event.step) for event in run.events() if event.kind.startswith("checkpoint")]
    assert told == [("checkpointed", 2), ("checkpoint_failed", 4), ("checkpointed", 6)]
    assert_lonely(work, job)


def test_a_pause_makes_a_checkpoint_of_the_step_that_it_says(runtime: MakeRuntime, tmp_path: Path) -> None:
    work = counting()
    gate = Gate(work)
    gate.allow(3)
    with runtime(checkpoints=tmp_path) as run:
        job = run.submit(work.step, work.state(), gate, steps=5, name="saved")
        until(lambda: job.status.step == 3)
        job.pause()
        next(event for event in run.events() if event.kind == "checkpointed")
        assert job.status.state == "paused"
        job.resume()
        gate.open()
    assert [(e.kind, e.step) for e in run.events() if e.kind in ("paused", "resumed", "checkpointed")] == [
        ("paused", 3), ("checkpointed", 3), ("resumed", 3), ("checkpointed", 5),
    ]  # fmt: skip
    assert total(job) == 15


def test_ctrl_c_in_the_block_ends_every_job_with_a_checkpoint(runtime: MakeRuntime, tmp_path: Path) -> None:
    work, other = counting(), heavy(1)
    run = runtime(checkpoints=tmp_path)
    with pytest.raises(KeyboardInterrupt):
        with run:
            a = run.submit(work.step, work.state(), work.batches, steps=100_000, name="a", checkpoint_every=50_000)
            b = run.submit(other.step, other.state(), other.batches, steps=100_000, name="b", checkpoint_every=50_000)
            until(lambda: a.status.step > 3 and b.status.step > 3)
            raise KeyboardInterrupt
    for job in run.jobs:
        assert job.status.state == "cancelled"
        assert Checkpoints(tmp_path / job.name).latest() == job.status.step
    assert_lonely(other, run.jobs[1])


def test_ctrl_c_while_the_block_waits_for_its_end_stops_all_jobs(runtime: MakeRuntime, tmp_path: Path) -> None:
    work, main = counting(), os.getpid()

    def on_step(step: int, metrics: Any) -> None:
        if step == 5:
            os.kill(main, signal.SIGINT)

    with runtime(checkpoints=tmp_path) as run:
        job = run.submit(
            work.step, work.state(), work.batches, steps=1_000_000, name="a", on_step=on_step, checkpoint_every=500_000
        )
    assert job.status.state == "cancelled"
    assert Checkpoints(tmp_path / "a").latest() == job.status.step >= 5
    assert total(job) == job.status.step * (job.status.step + 1) / 2


# -- folders that are not as they were left -----------------------------------------------------------------------------------


def run_saved(runtime: MakeRuntime, folder: Path, steps: int, **options: Any) -> tuple[Any, Any]:
    work = counting()
    with runtime(checkpoints=folder) as run:
        job = run.submit(work.step, work.state(), work.batches, steps=steps, name="saved", checkpoint_every=2, **options)
    return run, job


def test_a_job_without_readable_checkpoints_does_not_begin_again(runtime: MakeRuntime, tmp_path: Path) -> None:
    run_saved(runtime, tmp_path, 4)
    for step in ("2", "4"):
        flip(data_file(tmp_path / "saved" / step))
    before, work = contents(tmp_path), counting()
    state = work.state()
    with runtime(checkpoints=tmp_path) as run:
        with pytest.raises(CheckpointError, match="checkpoint 4 cannot be read: .*checkpoint 2 cannot be read: .*move them"):
            run.submit(work.step, state, work.batches, steps=6, name="saved", resume=True)
        with pytest.raises(ValueError, match="saved has a checkpoint after 4 steps"):
            run.submit(work.step, state, work.batches, steps=6, name="saved")
        assert run.jobs == ()
    assert not state["total"].is_deleted()
    assert contents(tmp_path) == before


def test_a_job_goes_on_from_an_older_checkpoint_and_says_so(runtime: MakeRuntime, tmp_path: Path) -> None:
    run_saved(runtime, tmp_path, 4)
    flip(data_file(tmp_path / "saved" / "4"))
    damaged = contents(tmp_path / "saved" / "4")
    run, job = run_saved(runtime, tmp_path, 8, resume=True)
    note = next(event.note for event in run.events() if event.kind == "submitted")
    assert note.startswith("resumed at step 2, since the checkpoint 4 cannot be read: ")
    assert note.endswith("; it was left where it is")
    assert total(job) == 36
    assert contents(tmp_path / "saved" / "4") == damaged
    assert Checkpoints(tmp_path / "saved").steps() == (8, 6, 4)


def test_two_runtimes_do_not_share_a_jobs_folder(runtime: MakeRuntime, tmp_path: Path) -> None:
    work = counting()
    gate = Gate(work)
    with runtime(checkpoints=tmp_path) as first, runtime(checkpoints=tmp_path) as second:
        job = first.submit(work.step, work.state(), gate, steps=2, name="saved")
        for resume in (False, True):
            state = work.state()
            with pytest.raises(CheckpointError, match="saved is in use by another job of this process"):
                second.submit(work.step, state, work.batches, steps=2, name="saved", resume=resume)
            assert not state["total"].is_deleted()
        other = second.submit(work.step, work.state(), work.batches, steps=2, name="other")
        assert total(other) == 3
        gate.open()
        assert total(job) == 3
        lock = job._stored.lock
        until(lambda: lock is not None and lock.descriptor is None)
        again = second.submit(work.step, work.state(), work.batches, steps=4, name="saved", resume=True)
        assert total(again) == 10


def test_a_job_that_ends_in_any_way_lets_its_folder_go(runtime: MakeRuntime, tmp_path: Path) -> None:
    work = counting()

    def fails(step: int, metrics: Any) -> None:
        raise ZeroDivisionError

    gate = Gate(work)
    with runtime(checkpoints=tmp_path) as run:
        ends: tuple[tuple[str, Any, dict[str, Any]], ...] = (
            ("finished", work.batches, {}), ("failed", work.batches, {"on_step": fails}), ("empty", [], {}),
            ("cancelled", gate, {}), ("unfit", work.batches, {"budget": 1}),
        )  # fmt: skip
        for name, batches, options in ends:
            run.submit(work.step, work.state(), batches, steps=3, name=name, **options)
        run.cancel("cancelled")
        gate.open()
        with pytest.raises(TypeError):
            run.submit(work.step, work.state(), 5, steps=3, name="refused")  # pyright: ignore[reportArgumentType]
    for name in ("finished", "failed", "empty", "cancelled", "unfit", "refused"):
        FolderLock(tmp_path / name).release()


@pytest.mark.slow
def test_the_folder_of_an_isolated_job_is_let_go_at_once(runtime: MakeRuntime, tmp_path: Path) -> None:
    here = tensile.Entrypoint("tests.exec.isolated_jobs:make_job")
    for steps in (2, 4):
        with runtime("1MiB", checkpoints=tmp_path) as run:
            job = run.submit(here, steps=steps, name="job", isolation="process", resume=True)
            assert int(job.result(PATIENCE_S)["count"]) == steps
        FolderLock(tmp_path / "job").release()


RUN = """
    import sys
    from pathlib import Path
    import tensile_jax as tensile
    from tests.exec.small_jobs import wide, heavy
    a, b = wide(0), heavy(1)
    with tensile.Runtime("64MiB", checkpoints=Path(sys.argv[1])) as run:
        for name, work in (("a", a), ("b", b)):
            run.submit(work.step, work.state(), work.batches, steps=100_000, name=name, checkpoint_every=4)
        for event in run.events():
            print(event.kind, event.job, event.step, flush=True)
"""


@pytest.mark.slow
def test_a_killed_runtime_goes_on_from_its_last_checkpoints(runtime: MakeRuntime, tmp_path: Path) -> None:
    command = [sys.executable, "-c", textwrap.dedent(RUN), str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        seen = set[str]()
        for line in process.stdout:
            kind, job, step = line.split()[:3] if len(line.split()) > 2 else ("", "", "0")
            if kind == "checkpointed" and int(step) >= 8:
                seen.add(job)
            if seen == {"a", "b"}:
                break
        process.send_signal(signal.SIGKILL)
    works = {"a": wide(0), "b": heavy(1)}
    begun = {name: Checkpoints(tmp_path / name).latest() or 0 for name in works}
    assert all(step >= 8 and step % 4 == 0 for step in begun.values())
    with runtime("64MiB", checkpoints=tmp_path) as run:
        jobs = [
            run.submit(w.step, w.state(), w.batches, steps=begun[name] + 5, name=name, resume=True) for name, w in works.items()
        ]
    for job in jobs:
        assert job.wait(PATIENCE_S)
        assert equal(job.result(), works[job.name].lonely([(0, job.plan)], job.status.step))
