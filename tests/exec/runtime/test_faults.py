"""What goes wrong in one job costs that job only; what cannot be is said before anything is done."""

import itertools
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tensile_jax as tensile
from tensile_jax.exec.actor.local_actor import LocalActor
from tensile_jax.exec.checkpoint.checkpoints import Checkpoints
from tensile_jax.exec.checkpoint.folder_lock import FolderLock
from tensile_jax.exec.running.executor import Iteration
from tensile_jax.exec.running.instructions import Instruction, Launch
from tensile_jax.exec.runtime.submission import refuse_unfit_name
from tests.exec.conftest import MakeRuntime
from tests.exec.small_jobs import PATIENCE_S, Gate, assert_lonely, counting, heavy, total, until, wide

COUNT = counting()


def submit_count(run: Any, **options: Any) -> Any:
    """A `counting` job of 5 steps that is well."""
    state, batches = options.pop("state", None) or COUNT.state(), options.pop("batches", COUNT.batches)
    return run.submit(COUNT.step, state, batches, **{"steps": 5, "name": "well", **options})


# -- batches and callbacks --------------------------------------------------------------------------------------------------


def test_a_job_whose_batches_raise_fails_with_its_state_in_its_checkpoint(runtime: MakeRuntime, tmp_path: Path) -> None:
    def batches() -> Iterator[Any]:
        yield from itertools.islice(COUNT.batches(), 3)
        raise OSError("the disk is gone")

    with runtime(checkpoints=tmp_path) as run:
        ill = submit_count(run, batches=batches, name="ill")
        well = submit_count(run)
    assert total(well) == 15
    assert isinstance(ill.exception(), OSError)
    with pytest.raises(tensile.JobFailed, match="its batches raised OSError: the disk is gone"):
        ill.result()
    with runtime(checkpoints=tmp_path) as run:
        again = submit_count(run, name="ill", resume=True)
    assert total(again) == 15


def test_batches_that_end_early_end_the_job_with_a_note(runtime: MakeRuntime) -> None:
    with runtime() as run:
        short = submit_count(run, batches=list(itertools.islice(COUNT.batches(), 3)))
    assert total(short) == 6
    assert short.status.state == "finished"
    assert short.status.step == 3
    assert short.status.note == "its batches ended: 3 of 5 steps"


def test_no_batches_at_all_are_a_failure(runtime: MakeRuntime) -> None:
    with runtime() as run:
        job = submit_count(run, batches=[])
    assert "gave nothing" in str(job.exception())


def test_batches_that_change_their_shape_fail_the_job_and_name_the_leaf(runtime: MakeRuntime) -> None:
    with runtime() as run:
        ill = submit_count(run, name="ill", batches=[np.zeros(8, np.float32), np.zeros(7, np.float32)])
        well = submit_count(run)
    assert total(well) == 15
    assert "float32[7]" in str(ill.exception())
    assert "float32[8]" in str(ill.exception())


def test_a_generator_that_hangs_costs_its_own_job_only_and_can_be_cancelled(runtime: MakeRuntime) -> None:
    never, work = threading.Event(), wide(0)

    def batches() -> Iterator[Any]:
        yield from itertools.islice(COUNT.batches(), 2)
        never.wait(PATIENCE_S)

    with runtime() as run:
        ill = submit_count(run, name="hangs", batches=batches)
        well = run.submit(work.step, work.state(), work.batches, steps=5)
        assert well.wait(PATIENCE_S)
        until(lambda: ill.status.step == 2)
        ill.cancel()
        assert ill.wait(PATIENCE_S)
    assert ill.status.state == "cancelled"
    assert total(ill) == 3
    assert_lonely(work, well)
    never.set()


def test_a_generator_that_hangs_before_its_first_batch_can_be_cancelled(runtime: MakeRuntime) -> None:
    never = threading.Event()

    def batches() -> Iterator[Any]:
        never.wait(PATIENCE_S)
        yield from COUNT.batches()

    with runtime() as run:
        ill = submit_count(run, name="hangs", batches=batches)
        well = submit_count(run)
        assert well.wait(PATIENCE_S)
        ill.cancel()
    assert ill.status.state == "cancelled"
    assert np.array_equal(ill.result()["total"], np.zeros(8))
    never.set()


def test_a_slow_callback_slows_its_own_job_only_and_hears_every_step(runtime: MakeRuntime) -> None:
    go, heard = threading.Event(), list[tuple[int, float]]()
    steps = 50  # far more than the batches ahead and the steps in flight

    def on_step(step: int, metrics: Any) -> None:
        assert go.wait(PATIENCE_S)
        heard.append((step, float(metrics["loss"])))

    with runtime() as run:
        slow = submit_count(run, name="slow", on_step=on_step, steps=steps)
        well = submit_count(run)
        assert well.wait(PATIENCE_S)
        assert slow.status.step < steps
        go.set()
    assert total(slow) == steps * (steps + 1) // 2
    assert heard == [(step, 8.0 * step * (step + 1) / 2) for step in range(1, steps + 1)]


def test_a_job_has_ended_once_its_last_callback_has(runtime: MakeRuntime) -> None:
    entered, go = threading.Event(), threading.Event()

    def on_step(step: int, metrics: Any) -> None:
        if step == 5:
            entered.set()
            assert go.wait(PATIENCE_S)

    with runtime() as run:
        slow = submit_count(run, on_step=on_step)
        assert entered.wait(PATIENCE_S)
        until(lambda: run.status().device_bytes == 0)
        assert not slow.wait(0)
        go.set()
    assert total(slow) == 15
    assert slow.status.state == "finished"


def test_a_job_whose_last_callback_raises_fails(runtime: MakeRuntime, tmp_path: Path) -> None:
    def on_step(step: int, metrics: Any) -> None:
        if step == 5:
            raise ZeroDivisionError("at the end")

    with runtime(checkpoints=tmp_path) as run:
        ill = submit_count(run, name="ill", on_step=on_step)
    assert isinstance(ill.exception(), ZeroDivisionError)
    with runtime(checkpoints=tmp_path) as run:
        again = submit_count(run, name="ill", resume=True)
    assert total(again) == 15


def test_a_job_whose_last_callback_hangs_can_be_cancelled_and_has_finished(runtime: MakeRuntime) -> None:
    entered, never = threading.Event(), threading.Event()

    def on_step(step: int, metrics: Any) -> None:
        entered.set()
        never.wait(PATIENCE_S)

    with runtime() as run:
        ill = submit_count(run, name="hangs", on_step=on_step, steps=1)
        assert entered.wait(PATIENCE_S)
        until(lambda: run.status().device_bytes == 0)
        ill.cancel()
        assert ill.wait(PATIENCE_S)
    assert total(ill) == 1
    assert ill.status.state == "finished"
    never.set()


def test_no_batch_is_drawn_that_is_not_needed(runtime: MakeRuntime) -> None:
    drawn: list[int] = []

    def batches() -> Iterator[Any]:
        for k, batch in enumerate(COUNT.batches()):
            drawn.append(k)
            yield batch

    with runtime() as run:
        job = submit_count(run, batches=batches)
    assert total(job) == 15
    assert drawn == [0, 1, 2, 3, 4]


def test_a_callback_that_raises_fails_its_job(runtime: MakeRuntime) -> None:
    def on_step(step: int, metrics: Any) -> None:
        raise ZeroDivisionError(f"at {step}")

    with runtime() as run:
        ill = submit_count(run, name="ill", on_step=on_step, steps=1000)
        well = submit_count(run)
    assert total(well) == 15
    assert isinstance(ill.exception(), ZeroDivisionError)
    assert ill.status.note == "its callback raised ZeroDivisionError: at 1"


# -- steps --------------------------------------------------------------------------------------------------------------------


def test_an_executable_that_raises_costs_its_job_only_and_no_byte(
    runtime: MakeRuntime, fast_link: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ill, well = wide(0), heavy(1)
    shared = [jnp.asarray(b) for b in itertools.islice(ill.batches(), 8)]  # the user's own arrays, which stay
    perform = Iteration.perform

    def failing(self: Any, instruction: Instruction) -> None:
        if isinstance(instruction, Launch) and self._executor._failing and broken.status.step:  # after the first iteration
            raise RuntimeError("INTERNAL: the kernel is broken")
        perform(self, instruction)

    with runtime(look="always", device_profile=fast_link) as run:
        broken = run.submit(ill.step, ill.state(), shared, steps=8, name="broken", budget="460KiB")
        same = run.submit(ill.step, ill.state(), shared, steps=8, name="same", budget="460KiB")
        other = run.submit(well.step, well.state(), well.batches, steps=8, name="other")
        monkeypatch.setattr(Iteration, "perform", failing)
        actor = broken._stored.actor
        assert isinstance(actor, LocalActor)
        monkeypatch.setattr(
            "tensile_jax.exec.running.executor.Executor._failing", property(lambda e: e is actor._executor), raising=False
        )
    monkeypatch.undo()
    assert "kernel is broken" in str(broken.exception())
    assert broken.status.state == "failed"
    assert 0 < broken.status.step < 8
    assert not any(batch.is_deleted() for batch in shared)
    assert_lonely(ill, same)
    assert_lonely(well, other)


OUTSIDE = jax.new_ref(jnp.zeros(8))


def _writes_outside(state: Any, batch: Any) -> Any:
    OUTSIDE[...] += batch
    return state, {}


def _only_state(state: Any, batch: Any) -> Any:
    return {"total": state["total"] + batch}


def _other_shape(state: Any, batch: Any) -> Any:
    return {"total": state["total"][:4]}, {}


def _other_tree(state: Any, batch: Any) -> Any:
    return [state["total"]], {}


def _raises(state: Any, batch: Any) -> Any:
    raise KeyError("no such layer")


@pytest.mark.parametrize(
    ("step", "says"),
    [
        (_writes_outside, "is a mutable reference"),
        (_only_state, "step must return \\(state, metrics\\), a pair: got dict"),
        (_other_shape, "state\\['total'\\] is float32\\[8\\] when it is given and float32\\[4\\] when it is returned"),
        (_other_tree, "structure in which it was given"),
        (_raises, "no such layer"),
    ],
)
def test_a_step_that_cannot_be_planned_fails_its_job_only(runtime: MakeRuntime, step: Callable[..., Any], says: str) -> None:
    with runtime() as run:
        ill = run.submit(step, COUNT.state(), COUNT.batches, steps=3, name="ill")
        well = submit_count(run)
    assert total(well) == 15
    with pytest.raises(tensile.JobFailed, match=says):
        ill.result()


# -- what goes wrong between two steps ---------------------------------------------------------------------------------------


def test_a_batch_that_was_deleted_costs_no_state(runtime: MakeRuntime, tmp_path: Path) -> None:
    """It was given, and donated to something else before its turn came: the state of the steps before is kept."""
    given = [jnp.full(8, k, jnp.float32) for k in range(1, 6)]

    def batches() -> Iterator[Any]:
        for k, batch in enumerate(given):
            if k == 3:
                batch.delete()
            yield batch

    with runtime(checkpoints=tmp_path) as run:
        ill = submit_count(run, name="ill", batches=batches)
    with pytest.raises(tensile.JobFailed, match="the batch has an array that was deleted") as caught:
        ill.result()
    done = ill.status.step
    assert done <= 3
    assert float(caught.value.state["total"][0]) == done * (done + 1) / 2
    with runtime(checkpoints=tmp_path) as run:
        again = submit_count(run, name="ill", resume=True)
    assert total(again) == 15


def test_a_state_of_numpy_is_not_the_users_any_more(runtime: MakeRuntime) -> None:
    state, gate = {"total": np.zeros(4096, np.float32)}, Gate(counting(4096))
    with runtime() as run:
        job = submit_count(run, state=state, batches=gate)
        state["total"][:] = 100
        gate.open()
    assert total(job) == 15
    assert state["total"][0] == 100


def test_a_pause_while_the_runtime_closes_is_refused_since_nobody_could_resume(runtime: MakeRuntime) -> None:
    closing = threading.Event()

    def on_step(step: int, metrics: Any) -> None:
        if step == 2:
            assert closing.wait(PATIENCE_S)
            until(lambda: run._store.closed)
            run.pause("ill")

    with runtime() as run:
        ill = submit_count(run, name="ill", on_step=on_step)
        well = submit_count(run)
        closing.set()
    assert total(well) == 15
    assert "ill cannot be paused: its runtime is closing" in str(ill.exception())


def test_a_thread_that_cannot_be_started_costs_no_state(runtime: MakeRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    start, state = threading.Thread.start, COUNT.state()

    def refuse(self: threading.Thread) -> None:
        if self.name == "tensile-ill":
            raise RuntimeError("can't start new thread")
        start(self)

    with runtime() as run:
        monkeypatch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            run.submit(COUNT.step, state, COUNT.batches, steps=5, name="ill")
        monkeypatch.undo()
        assert not state["total"].is_deleted()
        assert run.jobs == ()
        again = run.submit(COUNT.step, state, COUNT.batches, steps=5, name="ill")
    assert total(again) == 15


def test_a_step_that_cannot_have_its_thread_fails_its_job(runtime: MakeRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start

    def refuse(self: threading.Thread) -> None:
        if self.name == "tensile-ill-trace":
            raise RuntimeError("can't start new thread")
        start(self)

    with runtime() as run:
        monkeypatch.setattr(threading.Thread, "start", refuse)
        ill = submit_count(run, name="ill")
        assert "can't start new thread" in str(ill.exception(PATIENCE_S))
        monkeypatch.undo()


def test_the_working_folder_may_change_while_jobs_run(
    runtime: MakeRuntime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with runtime(checkpoints="kept") as run:
        monkeypatch.chdir(tmp_path / "there")
        submit_count(run)
    assert Checkpoints(tmp_path / "here" / "kept" / "well").latest() == 5
    assert list((tmp_path / "there").iterdir()) == []


def test_a_folder_that_is_removed_under_a_run_is_made_and_locked_again(runtime: MakeRuntime, tmp_path: Path) -> None:
    gate = Gate(COUNT)
    with runtime(checkpoints=tmp_path) as run:
        job = submit_count(run, batches=gate, checkpoint_every=2)
        gate.allow(2)
        next(event for event in run.events() if event.kind == "checkpointed")
        shutil.rmtree(tmp_path / "well")
        gate.allow(2)
        next(event for event in run.events() if event.kind == "checkpointed" and event.step == 4)
        with pytest.raises(tensile.CheckpointError, match="in use"):
            FolderLock(tmp_path / "well")
        gate.open()
    assert total(job) == 15
    assert Checkpoints(tmp_path / "well").steps() == (5, 4)


def test_a_folder_that_another_run_has_taken_after_it_was_removed_is_left_to_it(runtime: MakeRuntime, tmp_path: Path) -> None:
    gate = Gate(COUNT)
    with runtime(checkpoints=tmp_path) as run:
        job = submit_count(run, batches=gate)
        shutil.rmtree(tmp_path / "well")
        other = FolderLock(tmp_path / "well")
        gate.open()
    with pytest.raises(tensile.JobFailed, match="is in use by") as caught:
        job.result()
    assert float(caught.value.state["total"][0]) == 15
    assert Checkpoints(tmp_path / "well").steps() == ()
    other.release()


def test_a_resumed_job_whose_batches_are_too_few_is_told_why(runtime: MakeRuntime, tmp_path: Path) -> None:
    for steps in (3, 5):
        with runtime(checkpoints=tmp_path) as run:
            job = submit_count(run, steps=steps, batches=list(itertools.islice(COUNT.batches(), 3)), resume=True)
    assert "gave no more than those of the 3 steps that are done, which are skipped" in str(job.exception())


@pytest.mark.parametrize("leaf", ["text", object(), np.array(["a"], object)])
def test_a_leaf_of_the_state_that_is_no_value_is_refused_by_its_path(runtime: MakeRuntime, leaf: Any) -> None:
    with runtime() as run:
        with pytest.raises(TypeError, match=r"state\['a'\]\[1\] of 'count' is a .*, with which JAX does not compute"):
            run.submit(COUNT.step, {"a": [1, leaf]}, COUNT.batches, steps=1)


# -- what cannot be -----------------------------------------------------------------------------------------------------------


def test_a_state_that_is_another_jobs_is_refused(runtime: MakeRuntime) -> None:
    state = COUNT.state()
    with runtime() as run:
        first = run.submit(COUNT.step, state, COUNT.batches, steps=5, name="first")
        with pytest.raises(ValueError, match=r"state\['total'\] of 'second' has been given away"):
            run.submit(COUNT.step, state, COUNT.batches, steps=5, name="second")
    assert total(first) == 15


def test_two_jobs_of_one_name_are_refused_and_without_a_name_numbered(runtime: MakeRuntime) -> None:
    with runtime() as run:
        submit_count(run)
        state = COUNT.state()
        with pytest.raises(ValueError, match="name='well' is taken"):
            run.submit(COUNT.step, state, COUNT.batches, steps=5, name="well")
        assert not state["total"].is_deleted()
        names = [run.submit(COUNT.step, COUNT.state(), COUNT.batches, steps=1).name for _ in range(3)]
    assert names == ["count", "count-2", "count-3"]


BAD: list[tuple[dict[str, Any], str]] = [
    ({"steps": 0}, "steps must be a whole number of at least 1, got 0"),
    ({"steps": 2.5}, "steps must be a whole number"),
    ({"steps": True}, "steps must be a whole number"),
    ({"priority": 0}, "priority must be a number above zero, got 0"),
    ({"priority": float("nan")}, "priority must be"),
    ({"max_swap_rate": 1.5}, "max_swap_rate must be from 0 to 1"),
    ({"max_slowdown": 0.5}, "max_slowdown must be at least 1"),
    ({"policy": "best"}, "policy='best' is not known"),
    ({"isolation": "container"}, 'isolation must be "thread" or "process"'),
    ({"name": "a/b"}, "name must be a text without '/'"),
    ({"name": ""}, "name must be a text"),
    ({"budget": "50%"}, "budget='50%' is a share"),
    ({"budget": "much"}, "budget"),
    ({"checkpoint_every": 5}, "need a folder"),
    ({"resume": True}, "need a folder"),
]


@pytest.mark.parametrize(("options", "says"), BAD, ids=lambda value: str(value)[:40])
def test_bad_arguments_are_refused_and_the_state_is_left(runtime: MakeRuntime, options: dict[str, Any], says: str) -> None:
    state = COUNT.state()
    with runtime() as run:
        with pytest.raises(ValueError, match=says):
            run.submit(COUNT.step, state, COUNT.batches, **{"steps": 5, **options})
        assert run.jobs == ()
    assert not state["total"].is_deleted()


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("a\\b", "name must be a text without '/'"),
        (".", "name must be a text"),
        (".hidden", "name must be a text"),
        ("two\nlines", "name must be a text without control characters"),
        ("nul\0", "name must be a text without control characters"),
        ("escape\x1b[31m", "name must be a text without control characters"),
        ("half a letter \ud800", "name must be a text without control characters"),
        ("backwards \u202e", "name must be a text without control characters"),
        (" a", "spaces at its ends"),
        ("a" * 1000, "at most 200 bytes, since folders and files are called after it: got 1000 bytes, 'aaaa"),
        ("\u00e4" * 101, "got 202 bytes"),
        (5, "name must be a text, got 5"),
        (b"job", "name must be a text, got b'job'"),
        (["job"], "name must be a text, got "),
        (Path("job"), "name must be a text, got "),
    ],
    ids=lambda value: ascii(value)[:30],
)
def test_what_cannot_be_a_folders_name_is_no_jobs_name(name: Any, says: str) -> None:
    with pytest.raises(ValueError if isinstance(name, str) else TypeError, match=says):
        refuse_unfit_name(name)


def test_a_step_whose_name_is_no_folders_makes_a_job(runtime: MakeRuntime, tmp_path: Path) -> None:
    def step(state: Any, batch: Any) -> Any:
        return COUNT.step(state, batch)

    step.__name__ = "../outside"
    with runtime(checkpoints=tmp_path / "folder") as run:
        job = run.submit(step, COUNT.state(), COUNT.batches, steps=1)
    assert (job.name, total(job)) == ("job", 1)
    assert [path.name for path in tmp_path.rglob("*") if path.name == "outside"] == []


def test_of_five_jobs_of_one_name_one_is_taken(runtime: MakeRuntime, tmp_path: Path) -> None:
    together, said, won = threading.Barrier(5), list[str](), list[Any]()
    states = [COUNT.state() for _ in range(5)]
    gate = Gate(COUNT)

    def submit(k: int) -> None:
        together.wait(PATIENCE_S)
        try:
            won.append((k, run.submit(COUNT.step, states[k], gate, steps=5, name="well")))
        except ValueError as error:
            said.append(str(error))

    with runtime(checkpoints=tmp_path) as run:
        users = [threading.Thread(target=submit, args=(k,)) for k in range(5)]
        for user in users:
            user.start()
        for user in users:
            user.join(PATIENCE_S)
        gate.open()
    (winner, job), *more = won
    assert more == []
    assert total(job) == 15
    assert len(said) == 4
    assert all("name='well' is taken" in one for one in said)
    assert [k for k in range(5) if states[k]["total"].is_deleted()] == [winner]


def test_a_name_is_free_again_when_its_submission_was_refused(runtime: MakeRuntime, tmp_path: Path) -> None:
    with runtime(checkpoints=tmp_path) as run:
        with pytest.raises(ValueError, match="steps"):
            submit_count(run, steps=0)
        with pytest.raises(TypeError, match="batches"):
            submit_count(run, batches=5)
        job = submit_count(run)
    assert total(job) == 15


def test_a_tracer_is_no_state(runtime: MakeRuntime) -> None:
    with runtime() as run:
        with pytest.raises(TypeError, match=r"state\['total'\] of 'count' is a tracer. Submit jobs outside of functions"):
            jax.eval_shape(lambda state: run.submit(COUNT.step, state, COUNT.batches, steps=1), COUNT.state())


def test_the_state_of_a_job_that_fails_is_not_lost(runtime: MakeRuntime) -> None:
    """Whatever the reason, and without any checkpoint: what was given away comes back."""

    def batches() -> Iterator[Any]:
        yield from itertools.islice(COUNT.batches(), 3)
        raise OSError("the disk is gone")

    with runtime("64KiB") as run:
        jobs = {
            "batches": submit_count(run, name="batches", batches=batches),
            "no batch": submit_count(run, name="no batch", batches=[]),
            "step": run.submit(_raises, COUNT.state(), COUNT.batches, steps=3, name="step"),
            "too large": submit_count(run, name="too large", budget=1),
        }
    assert jobs["batches"].status.step in (1, 2, 3)  # batches are drawn ahead
    for name, job in jobs.items():
        steps = job.status.step
        with pytest.raises(tensile.JobFailed, match=f"^{name} failed after {steps} steps") as caught:
            job.result()
        assert float(caught.value.state["total"][0]) == steps * (steps + 1) / 2


def test_a_step_that_is_no_function_and_batches_that_are_none_are_refused(runtime: MakeRuntime) -> None:
    state = COUNT.state()
    with runtime() as run:
        with pytest.raises(TypeError, match="step must be a function"):
            run.submit(5, state, COUNT.batches, steps=5)  # pyright: ignore[reportArgumentType] # that is what is tested
        with pytest.raises(TypeError, match="batches must be an iterable"):
            run.submit(COUNT.step, state, 5, steps=5)  # pyright: ignore[reportArgumentType] # likewise
    assert not state["total"].is_deleted()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"budget": 0}, "budget"),
        ({"host_budget": "lots"}, "budget"),
        ({"look": "never"}, 'look must be "sampled" or "always"'),
    ],
)
def test_bad_arguments_of_a_runtime_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        tensile.Runtime(**{"budget": "1GiB", **options})
    assert not any(t.name.startswith("tensile-") for t in threading.enumerate())


@pytest.mark.parametrize("device", ["cpu", 3, jax.devices])
def test_a_device_that_is_none_is_refused(device: Any) -> None:
    with pytest.raises(TypeError, match=r"device must be one of jax.devices\(\), such as jax.devices\(\)\[0\]: got "):
        tensile.Runtime("1GiB", device=device)
    assert not any(t.name.startswith("tensile-") for t in threading.enumerate())


def test_a_closed_runtime_takes_no_job_and_leaves_its_state(runtime: MakeRuntime) -> None:
    state = COUNT.state()
    with runtime() as run:
        pass
    with pytest.raises(RuntimeError, match="closed"):
        run.submit(COUNT.step, state, COUNT.batches, steps=5)
    assert not state["total"].is_deleted()


def test_wishes_for_jobs_that_are_not_there_or_have_ended_are_refused(runtime: MakeRuntime) -> None:
    with runtime() as run:
        job = submit_count(run)
        job.wait(PATIENCE_S)
        with pytest.raises(ValueError, match="job 'none' is not known. There are: well"):
            run.pause("none")
        for wish, deed in ((job.pause, "paused"), (job.resume, "resumed"), (job.cancel, "cancelled")):
            with pytest.raises(ValueError, match=f"well is finished; it cannot be {deed}"):
                wish()


def test_a_job_that_has_ended_can_be_forgotten_and_its_name_used_again(runtime: MakeRuntime) -> None:
    gate = Gate(COUNT)
    with runtime() as run:
        first = submit_count(run, batches=gate)
        with pytest.raises(ValueError, match="well has not ended; it is preparing. Cancel it first"):
            run.forget("well")
        gate.open()
        first.wait(PATIENCE_S)
        run.forget("well")
        assert run.jobs == ()
        second = submit_count(run)
    assert run.jobs == (second,)
    assert total(first) == total(second) == 15


def test_a_job_cancelled_at_any_step_keeps_the_state_of_that_step(runtime: MakeRuntime) -> None:
    gate = Gate(COUNT)
    gate.allow(3)
    with runtime() as run:
        job = submit_count(run, batches=gate)
        until(lambda: job.status.step == 3)
        job.cancel()
        gate.open()
    assert job.status.state == "cancelled"
    assert total(job) == 6


def test_no_result_in_time_is_a_timeout(runtime: MakeRuntime) -> None:
    gate = Gate(COUNT)
    with runtime() as run:
        job = submit_count(run, batches=gate)
        with pytest.raises(TimeoutError, match="has not ended within 0.01 s; it is preparing, at step 0"):
            job.result(0.01)
        gate.open()
    assert total(job) == 15
