"""`tensile run JOBS.toml`: small jobs to their ends, failures, interruptions, a second terminal, and going on later."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import jsonschema
import pytest
from click.testing import CliRunner, Result

from tensile_jax.cli.errors import Refusal
from tensile_jax.cli.main import main
from tensile_jax.cli.run.control import ask_status
from tensile_jax.cli.run.folder import read_events, read_record
from tensile_jax.plan_format import Plan
from tensile_jax.runtime_records import JobStatus
from tests.cli.chrome_trace import check_format, check_slices_nest

_MADE_BY_HAND = """
import numpy as np
import jax.numpy as jnp

def make_job(size=8, fails_at=None, slow_s=0.0):
    import time
    def step(state, batch):
        return state + batch.sum(), {"loss": (state * state).mean()}
    def batches():
        for index in range(10**9):
            if index == fails_at:
                raise OSError("the disk is gone")
            time.sleep(slow_s)
            yield np.ones(size, np.float32)
    return step, jnp.ones(size), batches

def no_job():
    raise RuntimeError("no data here")
"""


def tensile(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, list(map(str, arguments)), catch_exceptions=False)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the module `by_hand`, in which the commands are typed."""
    (tmp_path / "by_hand.py").write_text(_MADE_BY_HAND)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "by_hand", raising=False)
    return tmp_path


def write(folder: Path, text: str) -> Path:
    file = folder / "jobs.toml"
    file.write_text(text)
    return file


def test_jobs_run_to_their_ends_and_leave_a_complete_folder(here: Path) -> None:
    file = write(
        here,
        """
        [device]
        budget = "80%"
        [defaults]
        steps = 4
        model = "mlp"
        [[jobs]]
        args = {batch_size = 32}
        count = 2
        [[jobs]]
        name = "late"
        args = {batch_size = 16}
        start_after = "mlp-1:2"
        """,
    )
    done = tensile("run", file, "--json", "--output", "run")
    assert done.exit_code == 0, done.stderr
    outcome = json.loads(done.stdout)
    jsonschema.validate(outcome, json.loads(tensile("schema", "run-jobs").stdout))
    jobs = outcome["jobs"]
    assert [(job["name"], job["state"], job["steps_done"]) for job in jobs] == [
        (name, "finished", 4) for name in ("mlp-1", "mlp-2", "late")
    ]
    assert 0 < outcome["peak_bytes"] <= outcome["budget_bytes"] == int(0.8 * sum(job["jit_peak_bytes"] for job in jobs))
    assert all(job["loss_last"] < job["loss_first"] and job["peak_bytes"] for job in jobs)
    assert jobs[0]["loss_last"] == jobs[1]["loss_last"]
    assert all(min(job["step_us"], job["predicted_step_us"], job["predicted_jit_step_us"]) > 0 for job in jobs)
    folder = here / "run"
    assert json.loads((folder / "outcome.json").read_text()) == outcome
    for name in ("mlp-1", "mlp-2", "late"):
        assert Plan.load(folder / "plans" / f"{name}-0.plan.json").program
        assert [path.name for path in (folder / "checkpoints" / name).iterdir() if path.is_dir()] == ["4"]
        rows = (folder / "jobs" / name / "metrics.jsonl").read_text().splitlines()
        assert [json.loads(row)["step"] for row in rows] == [1, 2, 3, 4]
    events = [(event.job, event.kind, event.step) for event in read_events(folder)]
    assert events.index(("mlp-1", "step", 2)) < events.index(("late", "submitted", 0))
    assert {span.job for span in read_record(folder).spans} == {"mlp-1", "mlp-2", "late"}
    names = {path.name for path in folder.iterdir()}
    assert names >= {"config.json", "versions.json", "events.jsonl", "trace.json", "record.json", "outcome.json"}
    assert "control.sock" not in names
    trace = json.loads((folder / "trace.json").read_text())
    check_format(trace)
    check_slices_nest(trace)
    assert {event["name"] for event in trace["traceEvents"] if event["ph"] == "C"} == {"device bytes", "measured bytes", "budget"}
    assert tensile("picture", folder, "-o", here / "memory.png").exit_code == 0
    ended = tensile("status", folder)
    assert (ended.exit_code, ended.stderr) == (0, "")
    assert ended.stdout.startswith("The run has ended: 3 finished.\n3 jobs on cpu") and "go on with" not in ended.stdout
    assert f"Run folder: {folder}\n" in ended.stdout
    assert "step: measured, other jobs' launches included; plain jit: its step, predicted" in ended.stdout
    assert re.search(r"mlp-1: planned for [\d.]+ [KM]iB, to take .* times plain jit's time, predicted", ended.stdout)
    again = tensile("run", "--resume", folder)
    assert (again.exit_code, "all jobs of this run have finished" in again.stderr) == (2, True)


def test_a_job_that_fails_is_exit_code_1_and_costs_no_other(here: Path) -> None:
    file = write(
        here,
        """
        [device]
        budget = "1MiB"
        [defaults]
        steps = 4
        entrypoint = "by_hand:make_job"
        [[jobs]]
        name = "good"
        [[jobs]]
        name = "torn"
        args = {fails_at = 2}
        [[jobs]]
        name = "unmade"
        entrypoint = "by_hand:no_job"
        """,
    )
    done = tensile("run", file, "--output", "run")
    assert done.exit_code == 1, done.stderr
    outcome = json.loads((here / "run" / "outcome.json").read_text())
    assert [job["state"] for job in outcome["jobs"]] == ["finished", "failed", "failed"]
    torn, unmade = ((here / "run" / "jobs" / name / "log.txt").read_text() for name in ("torn", "unmade"))
    assert "OSError: the disk is gone" in torn and "by_hand.py" in torn and "Traceback" in torn
    assert "RuntimeError: no data here" in unmade and "by_hand.py" in unmade
    assert "torn failed: its batches raised OSError: the disk is gone; see run/jobs/torn/log.txt" in done.stdout


def test_without_an_output_the_folder_is_named_after_the_file_and_the_time(here: Path) -> None:
    file = write(here, '[device]\nbudget = "1MiB"\n[[jobs]]\nentrypoint = "by_hand:make_job"\nsteps = 1\n')
    done = tensile("run", file)
    assert done.exit_code == 0, done.stderr
    (folder,) = (here / "runs").iterdir()
    assert folder.name.startswith("jobs-20") and f"Run folder: runs/{folder.name}" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["jobs.toml", "--batch-size", "8"], "--batch-size is for a model; jobs.toml says that in keys of its own."),
        (["jobs.toml", "--steps", "8"], "--steps is for a model; jobs.toml says that in keys of its own."),
        (["jobs.toml", "--budget", "8GiB"], "--budget is for a model; jobs.toml says that in keys of its own."),
        (["mlp", "--output", "x"], "--output is for a jobs file, and mlp is a model. Leave it out."),
        (["mlp", "--resume", "."], "--resume is for a jobs file, and mlp is a model. Leave it out."),
        (["jobs.toml", "--resume", "."], "--resume=. and a model or a file of jobs exclude each other"),
        (["--resume", "."], "config.json cannot be read: No such file or directory."),
        ([], "there is nothing to run. Name a model or a file of jobs"),
        (
            ["alexnet"],
            "'alexnet' is neither a model (bert, cnn, densenet121, gpt, gpt_scan, inceptionv3, inceptionv4, mlp, resnet50, "
            "vgg16) nor a file",
        ),
        (["jobs.toml", "--output", "."], "The run folder . is not empty."),
        (["bad.toml"], "bad.toml, line 3: jobs[0].args: mlp: got an unexpected keyword argument 'batch'. It takes: batch_size"),
        (["none.toml"], "none.toml cannot be read"),
    ],
)
def test_what_cannot_be_run_is_refused_in_one_line(here: Path, arguments: list[str], message: str) -> None:
    write(here, '[device]\nbudget = "1MiB"\n[[jobs]]\nmodel = "mlp"\nsteps = 1\nargs = {batch_size = 8}\n')
    (here / "bad.toml").write_text(
        '[device]\nbudget = "1MiB"\n[[jobs]]\nmodel = "mlp"\nsteps = 1\nargs = {batch_size = 8, batch = 8}\n'
    )
    refused = tensile("run", *arguments)
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert refused.stderr.startswith(f"Error: {message}"), refused.stderr


# -- in a process of its own --------------------------------------------------------------------------------------------------

_ENDLESS = """
[device]
budget = "1MiB"
[defaults]
entrypoint = "by_hand:make_job"
steps = 1000000
args = {slow_s = 0.002}
[[jobs]]
name = "a"
checkpoint_every = 50
[[jobs]]
name = "b"
[[jobs]]
name = "c"
[[jobs]]
name = "later"
start_after = "a"
"""


def start(here: Path, *arguments: str) -> subprocess.Popen[str]:
    root = str(Path(__file__).parents[3])
    environment = {**os.environ, "PYTHONPATH": root, "JAX_PLATFORMS": "cpu"}
    program = "import signal; signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"  # which `nohup` lets children ignore
    program += "from tensile_jax.cli.program import start; start()"
    command = [sys.executable, "-c", program, "run", *arguments]
    return subprocess.Popen(command, cwd=here, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_until(run: Path, holds: Callable[[dict[str, JobStatus]], bool]) -> dict[str, JobStatus]:
    """The jobs of a run in another process, once they are so."""
    deadline = time.monotonic() + 60
    jobs: dict[str, JobStatus] = {}
    while time.monotonic() < deadline:
        try:
            jobs = {job.name: job for job in ask_status(run).jobs}
        except Refusal:
            jobs = {}  # it has not begun to listen
        if jobs and holds(jobs):
            return jobs
        time.sleep(0.05)
    raise AssertionError(f"it never came to that: {jobs}")


def lower_steps(run: Path) -> int:
    """Let the run end soon once it is resumed: at so many steps."""
    steps = max(event.step for event in read_events(run)) + 5
    config = (run / "config.json").read_text()
    (run / "config.json").write_text(config.replace("1000000", str(steps)))
    return steps


def test_a_run_is_controlled_from_outside_interrupted_and_resumed(here: Path) -> None:
    write(here, _ENDLESS)
    run = here / "run"
    process = start(here, "jobs.toml", "--output", "run", "--json")
    jobs = wait_until(run, lambda jobs: all(jobs[name].step > 3 for name in "abc"))
    assert (jobs["later"].state, jobs["later"].note) == ("queued", "starts after a")
    assert "starts after a" in tensile("status", run).stdout
    refused = tensile("pause", run, "later")
    assert (refused.exit_code, "later has not begun: it cannot be paused yet, only cancelled." in refused.stderr) == (2, True)
    assert tensile("pause", run, "b").exit_code == 0
    paused = wait_until(run, lambda jobs: jobs["b"].state == "paused")["b"].step
    assert tensile("cancel", run, "c").stdout == "c is cancelled.\n"
    wait_until(run, lambda jobs: jobs["c"].state == "cancelled" and jobs["a"].step > 60)
    assert wait_until(run, lambda jobs: True)["b"].step == paused
    assert tensile("resume", run, "b").exit_code == 0
    wait_until(run, lambda jobs: jobs["b"].step > paused)

    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    assert (process.returncode, "Traceback" in stderr) == (130, False), stderr
    outcome = json.loads(stdout)
    assert outcome["interrupted"] and f"tensile run --resume {outcome['folder']}" in stderr
    done = {job["name"]: job for job in outcome["jobs"]}
    assert [done[name]["state"] for name in ("a", "b", "c", "later")] == ["cancelled"] * 4
    assert done["later"]["note"] == "interrupted before it began"
    stages = read_record(run).stages
    assert {stage.name for stage in stages if stage.job == "a"} == {"preparing", "compiling", "queued"}
    assert [(stage.job, stage.ended) for stage in stages if stage.ended] == [("later", "cancelled")]
    assert tensile("picture", run, "-o", here / "memory.png").exit_code == 0
    for name in "abc":
        saved = [int(path.name.split("-")[0]) for path in (run / "checkpoints" / name).iterdir() if path.is_dir()]
        assert max(saved) == done[name]["steps_done"]
    assert {path.name for path in run.iterdir()} == {
        "config.json", "versions.json", "plans", "events.jsonl", "jobs", "checkpoints", "outcome.json", "record.json",
        "trace.json",
    }  # fmt: skip
    ended = tensile("status", run)
    assert ended.exit_code == 0 and ended.stdout.startswith("The run was interrupted: 4 cancelled.\n")
    assert f"Interrupted; go on with: tensile run --resume {run}\n" in ended.stdout
    assert tensile("status", run, "b").stdout.count("cancelled") == 2

    steps = lower_steps(run)
    resumed = tensile("run", "--resume", run, "--json")
    assert resumed.exit_code == 0, resumed.stderr
    after = {job["name"]: job for job in json.loads(resumed.stdout)["jobs"]}
    assert [(job["state"], job["steps_done"]) for job in after.values()] == [("finished", steps)] * 4
    submitted = {event.job: event.step for event in read_events(run) if event.kind == "submitted"}
    assert submitted == {**{name: done[name]["steps_done"] for name in "abc"}, "later": 0}
    # the loss before step n is that of n - 1 steps, however often it was interrupted: (1 + 8 (n - 1)) squared
    assert {job["loss_last"] for job in after.values()} == {(1.0 + 8 * (steps - 1)) ** 2}


@pytest.mark.slow
def test_a_run_whose_terminal_goes_away_ends_in_good_order(here: Path) -> None:
    write(here, _ENDLESS)
    process = start(here, "jobs.toml", "--output", "run")
    wait_until(here / "run", lambda jobs: jobs["a"].step > 3)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    process.stderr.close()
    process.send_signal(signal.SIGHUP)
    process.wait(timeout=60)
    outcome = json.loads((here / "run" / "outcome.json").read_text())
    assert outcome["interrupted"] and outcome["jobs"][0]["steps_done"] > 3
    assert (here / "run" / "trace.json").exists()


@pytest.mark.slow
def test_a_run_that_was_killed_goes_on_from_its_last_checkpoints(here: Path) -> None:
    write(here, _ENDLESS)
    run = here / "run"
    process = start(here, "jobs.toml", "--output", "run")
    wait_until(run, lambda jobs: (run / "checkpoints" / "a" / "100").is_dir() and jobs["b"].step > 3)
    process.kill()
    process.communicate(timeout=60)
    ended = tensile("status", run)
    assert ended.exit_code == 0 and "The run was killed, or could not write how it ended: 4 cancelled.\n" in ended.stdout
    assert f"Not all jobs have finished; go on with: tensile run --resume {run}\n" in ended.stdout
    steps = lower_steps(run)
    resumed = tensile("run", "--resume", run, "--json")
    assert resumed.exit_code == 0, resumed.stderr
    assert [job["steps_done"] for job in json.loads(resumed.stdout)["jobs"]] == [steps] * 4
    submitted = {event.job: event.step for event in read_events(run) if event.kind == "submitted"}
    assert (submitted["a"] >= 100, submitted["a"] % 50, submitted["b"]) == (True, 0, 0)
    assert {job["loss_last"] for job in json.loads(resumed.stdout)["jobs"]} == {(1.0 + 8 * (steps - 1)) ** 2}


def test_each_mistake_of_a_jobs_file_has_a_line_of_its_own(here: Path) -> None:
    file = write(here, '[device]\nbudget = "1GiB"\n[[jobs]]\nmodel = "mlpp"\nstpes = 4\n')
    refused = tensile("run", file)
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert refused.stderr.startswith(f"Error: {file}, line ")
    assert [line.rsplit(" Known", 1)[0].rsplit(".", 1)[-1] for line in refused.stderr.splitlines()] == [
        " Did you mean mlp?", " Did you mean steps?",
    ]  # fmt: skip
