"""Jobs in processes of their own: results, ends of every kind, and that the runtime and its other jobs survive them.

A process takes some seconds to start, so the tests that are not `slow` put several jobs into one runtime.
"""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tensile_jax as tensile
from tensile_jax.errors import JobFailed, ProcessDied
from tensile_jax.exec.actor.entrypoint import Entrypoint
from tensile_jax.exec.child_process import job_process as process
from tensile_jax.exec.child_process.isolated_actor import IsolatedActor
from tensile_jax.exec.runtime.job import Job
from tensile_jax.exec.runtime.runtime import Runtime
from tests.exec import isolated_jobs as jobs

LIMIT_S = 120.0
HERE = "tests.exec.isolated_jobs"


@pytest.fixture
def runtime(tmp_path: Path) -> Iterator[Runtime]:
    """When the test is over all of its jobs have ended, no process is left, nothing is held, and the budget was kept."""
    with Runtime("1MiB", checkpoints=tmp_path / "checkpoints", look="always") as one:
        yield one
        one.stop()
    assert one.peak_bytes <= 2**20
    assert all(sum(level.jobs.values()) <= level.budget_bytes for level in one.record().levels)
    assert one.status().device_bytes == 0
    assert poll(lambda: not any(thread.name.startswith("tensile-") for thread in threading.enumerate()))
    pids = [actor.process.pid for job in one.jobs if isinstance(actor := job._stored.actor, IsolatedActor)]
    assert not any(is_there(pid) for pid in pids if pid is not None)


def lonely(job: Job, steps: int, made: jobs.Job | None = None) -> Any:
    """The state after so many steps of the job's plan, alone and in this process."""
    step, state, batches = made or jobs.make_job()
    planned = tensile.jit(step, plan=job.plan, donate_argnums=0, state_memory="any")
    for _, batch in zip(range(steps), batches(), strict=False):
        state, _ = planned(state, batch)
    return state


def test_jobs_end_as_alone_whichever_process_they_run_in(runtime: Runtime) -> None:
    called: list[tuple[int, int, int]] = []

    def on_step(step: int, metrics: Any) -> None:
        called.append((step, int(metrics["process"]), os.getpid()))

    state = jobs.make_state()
    by_function = runtime.submit(jobs.step, state, jobs.batches, steps=5, on_step=on_step, isolation="process")
    by_name = runtime.submit(Entrypoint(f"{HERE}:make_job", {"seed": 3}), steps=6, isolation="process")
    here = runtime.submit(Entrypoint(f"{HERE}:make_job"), steps=40)
    assert state["w"].is_deleted()
    for job, steps, seed in ((by_function, 5, 0), (by_name, 6, 3), (here, 40, 0)):
        result = job.result(LIMIT_S)
        assert job.status.state == "finished"
        assert jobs.bits(result) == jobs.bits(lonely(job, steps, jobs.make_job(seed=seed)))
    for job in (by_function, by_name, here):
        notes = [event.note for event in runtime.events() if (event.job, event.kind) == (job.name, "preparing")]
        assert notes[0] == "tracing" and len(notes) > 1
    assert (by_function.name, by_name.name, here.name) == ("step", "make_job", "make_job-2")
    assert isinstance(by_function.result()["w"], np.ndarray)
    theirs = called[0][1]
    assert theirs != os.getpid()
    assert called == [(i, theirs, os.getpid()) for i in range(1, 6)]
    spans = {(span.job, span.lane) for span in runtime.record().spans}
    assert {("step", "compute"), ("make_job", "compute"), ("step", "into"), ("step", "out")} <= spans


def test_a_killed_process_costs_its_own_job_only(runtime: Runtime) -> None:
    def kill(step: int, metrics: Any) -> None:
        if step == 3:
            os.kill(int(metrics["process"]), signal.SIGKILL)

    killed = runtime.submit(jobs.step, jobs.make_state(), jobs.batches, steps=10_000, on_step=kill, isolation="process", name="k")
    other = runtime.submit(Entrypoint(f"{HERE}:make_job"), steps=50, name="other", isolation="process")
    error = killed.exception(LIMIT_S)
    assert isinstance(error, ProcessDied)
    assert (error.job, error.exit_code) == ("k", -9)
    assert str(error).startswith("The process of 'k' (pid ")
    assert str(error).endswith(") was killed by SIGKILL.")
    with pytest.raises(JobFailed, match=r"^k failed after \d+ steps: ProcessDied: The process of 'k' .* was killed by SIGKILL"):
        killed.result()
    assert killed.status.step >= 3
    assert killed.status.device_bytes == killed.status.host_bytes == 0
    assert jobs.bits(other.result(LIMIT_S)) == jobs.bits(lonely(other, 50))


def test_what_cannot_be_sent_is_refused_before_anything_is_done(runtime: Runtime) -> None:
    state = jobs.make_state()
    with pytest.raises(TypeError, match="^batches cannot be sent to the job's own process: .*generator"):
        runtime.submit(jobs.step, state, jobs.batches(), steps=1, isolation="process")
    with pytest.raises(TypeError, match=r"^state is given beside Entrypoint\('a:b'\), which makes it"):
        runtime.submit(Entrypoint("a:b"), state, steps=1)
    with pytest.raises(TypeError, match="^batches must be an iterable or a function that gives one, got None"):
        runtime.submit(jobs.step, state, steps=1)
    assert not state["w"].is_deleted()
    assert runtime.jobs == ()


@pytest.mark.slow
def test_what_user_code_raises_there_comes_here(runtime: Runtime) -> None:
    cases: list[tuple[Any, type[BaseException], str, str]] = [
        ((jobs.step, jobs.make_state(), jobs.fails_at_three), ValueError, "^the fourth batch is bad", "in fails_at_three"),
        ((jobs.wrong_step, jobs.make_state(), jobs.batches), ZeroDivisionError, "^in the step", "in wrong_step"),
        (
            (Entrypoint(f"{HERE}:refuses", {"story": "s"}),),
            ValueError,
            "refuses' with story='s' raised LookupError: s",
            "in refuses",
        ),
        ((jobs.step, jobs.make_state(), []), ValueError, "gave nothing", ""),
    ]
    submitted = [runtime.submit(*case[0], steps=9, name=f"job{i}", isolation="process") for i, case in enumerate(cases)]
    for job, (_, kind, story, where) in zip(submitted, cases, strict=True):
        error = job.exception(LIMIT_S)
        assert error is not None and type(error) is kind
        with pytest.raises(kind, match=story):
            raise error
        assert where in "".join(getattr(error, "__notes__", [""]))
    assert submitted[0].status.step <= 3
    assert [job.status.step for job in submitted[1:]] == [0, 0, 0]


@pytest.mark.slow
def test_whatever_a_process_does_it_is_the_end_of_its_job_only(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_SILENCE_S", 12.0)
    other = runtime.submit(Entrypoint(f"{HERE}:make_job"), steps=200, name="other")
    cases: list[tuple[Callable[[], Any], str]] = [
        (jobs.ends_the_process, r"ended with exit code 3\."),
        (jobs.talks_garbage, r"because it sent something that is no message \(more than \d+ bytes at once"),
        (jobs.sends_a_bomb, r"because it sent something that is no message \(more than \d+ bytes at once"),
        (jobs.hangs, r"was killed by SIGKILL because it gave no sign of life for 12 s"),
    ]
    for batches, story in cases:
        job = runtime.submit(jobs.step, jobs.make_state(), batches, steps=10_000, name=batches.__name__, isolation="process")
        error = job.exception(LIMIT_S)
        assert isinstance(error, ProcessDied)
        with pytest.raises(ProcessDied, match=story):
            raise error
    assert jobs.bits(other.result(LIMIT_S)) == jobs.bits(lonely(other, 200))


@pytest.mark.slow
def test_a_process_ends_with_its_runtime_and_not_with_an_interrupt(tmp_path: Path) -> None:
    path = tmp_path / "pid"
    script = f"""
        import tensile_jax as tensile
        if __name__ == "__main__":
            job = tensile.Entrypoint("{HERE}:make_waiting_job", {{"path": {str(path)!r}}})
            with tensile.Runtime("1MiB") as runtime:
                runtime.submit(job, steps=9, isolation="process")
    """
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)], env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    )
    assert poll(lambda: path.exists() and path.read_text() != "")
    pid = int(path.read_text())
    os.kill(pid, signal.SIGINT)  # as from the terminal
    assert is_there(pid)
    parent.kill()
    parent.wait(LIMIT_S)
    assert poll(lambda: not is_there(pid))


@pytest.mark.slow
def test_a_script_without_a_guard_is_told_so(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
        import tensile_jax as tensile
        from tests.exec import isolated_jobs as jobs

        def step(state, batch):
            return jobs.step(state, batch)

        with tensile.Runtime("1MiB") as runtime:
            job = runtime.submit(step, jobs.make_state(), jobs.batches, steps=2, isolation="process")
            job.result()
        """)
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    found = subprocess.run(
        [sys.executable, script], env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert found.returncode == 1
    assert 'Put what the script does under: if __name__ == "__main__":' in found.stderr
    script.write_text(
        script.read_text()
        .replace("with tensile", 'if __name__ == "__main__":\n  with tensile')
        .replace("\n    job", "\n      job")
    )
    subprocess.run([sys.executable, script], env=environment, timeout=LIMIT_S, check=True)


@pytest.mark.slow
def test_a_job_is_paused_resumed_and_cancelled(runtime: Runtime) -> None:
    job = runtime.submit(Entrypoint(f"{HERE}:make_job"), steps=10_000, isolation="process")
    early = runtime.submit(Entrypoint(f"{HERE}:make_job"), steps=5, name="early", isolation="process")
    early.cancel()
    wait_for_event(runtime, job, "step")
    job.pause()
    wait_for_event(runtime, job, "paused")
    rested = job.status.step
    job.resume()
    wait_for_event(runtime, job, "resumed")
    assert poll(lambda: job.status.step >= rested + 3)
    job.cancel()
    state = job.result(LIMIT_S)
    assert job.status.state == "cancelled"
    assert int(state["count"]) == job.status.step
    assert jobs.bits(state) == jobs.bits(lonely(job, job.status.step))
    assert early.wait(LIMIT_S)
    with pytest.raises(JobFailed, match="early is cancelled and has no state: .* had not made it yet"):
        early.result()
    assert (early.status.state, early.status.step) == ("cancelled", 0)


@pytest.mark.slow
def test_a_lower_budget_holds_for_it_too(runtime: Runtime) -> None:
    job = runtime.submit(Entrypoint.of_model("mlp", {"batch_size": 32}), steps=100_000, isolation="process")
    wait_for_event(runtime, job, "step")
    assert job.plan is not None
    assert job.plan.floor_bytes < job.plan.peak_bytes - 8
    runtime.set_budget(job.plan.peak_bytes - 8)
    wait_for_event(runtime, job, "renewed")
    assert job.plan.peak_bytes < runtime.status().budget_bytes
    step = job.status.step
    assert poll(lambda: job.status.step >= step + 3)
    job.cancel()
    assert int(job.result(LIMIT_S).step) == job.status.step


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [("thread", "process"), ("process", "thread"), ("process", "process")])
def test_a_checkpoint_is_resumed_in_either_kind_of_isolation(before: Any, after: Any, tmp_path: Path) -> None:
    job = Entrypoint(f"{HERE}:make_job")
    with Runtime("1MiB", checkpoints=tmp_path) as runtime:
        runtime.submit(job, steps=6, name="job", checkpoint_every=4, isolation=before).result(LIMIT_S)
        kinds = [event.kind for event in runtime.events()]
    assert kinds.count("checkpointed") == 2
    with Runtime("1MiB", checkpoints=tmp_path) as runtime:
        resumed = runtime.submit(job, steps=9, name="job", resume=True, isolation=after)
        given = runtime.submit(jobs.step, jobs.make_state(), jobs.batches, steps=9, name="given", isolation=after)
        assert jobs.bits(resumed.result(LIMIT_S)) == jobs.bits(given.result(LIMIT_S))
        assert jobs.bits(resumed.result()) == jobs.bits(lonely(resumed, 9))
        assert resumed.status.step == 9
        steps = [event.step for event in runtime.events() if event.job == "job" and event.kind == "step"]
    assert steps == [7, 8, 9]
    with Runtime("1MiB", checkpoints=tmp_path) as runtime:
        done = runtime.submit(jobs.step, jobs.make_state(), jobs.batches, steps=9, name="job", resume=True, isolation=after)
        assert jobs.bits(done.result(LIMIT_S)) == jobs.bits(resumed.result())


def wait_for_event(runtime: Runtime, job: Job, kind: str) -> None:
    assert any(event.kind == kind and event.job == job.name for event in runtime.events())


def is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z" if Path("/proc").is_dir() else True


def poll(condition: Callable[[], bool]) -> bool:
    """Whether it comes true in time; nothing tells of a process that is not one's own child."""
    end = time.monotonic() + LIMIT_S
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True
