"""Ctrl-C and SIGTERM at any moment of a command: its exit code, at most one line about it, and what it leaves behind.

The moments are told from when Python has begun to import the command line: Python's own start cannot be helped.
"""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from tensile_jax.cli.run.folder import RunFolder
from tensile_jax.plan_format import Plan
from tests.cli.plans import PLAN
from tests.cli.records import RECORD

_PROGRAM = "import os, tensile_jax; os.write(1, b'begun\\n'); from tensile_jax.cli.program import start; start()"
_UNTIL_IT_LISTENS_S = 0.1  # for the first module of the command line to be imported
_SAID = ("Interrupted.", "Ended by SIGTERM.")

_JOBS = """
[device]
budget = "80%"
[defaults]
steps = 1000000
model = "mlp"
[[jobs]]
args = {batch_size = 32}
count = 2
[[jobs]]
name = "apart"
isolation = "process"
args = {batch_size = 16}
[[jobs]]
name = "late"
args = {batch_size = 16}
start_after = "mlp-1:2"
"""


@dataclass(frozen=True)
class Ended:
    """A command that has ended."""

    exit_code: int
    stdout: str
    stderr: str


def interrupt(here: Path, arguments: list[str], after_s: float, number: signal.Signals = signal.SIGINT) -> Ended:
    """Send the signal to the command and to all that it has started, as a terminal does."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "JAX_PLATFORMS": "cpu"}
    process = subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, *arguments],
        cwd=here,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    time.sleep(_UNTIL_IT_LISTENS_S + after_s)
    try:
        os.killpg(process.pid, number)
        stdout, stderr = process.communicate(timeout=120)
    finally:
        process.kill()
    return Ended(process.returncode, stdout, stderr)


def check(ended: Ended, number: signal.Signals, story: str, *, may_have_ended: bool = False) -> None:
    assert ended.exit_code in ((128 + number, 0) if may_have_ended else (128 + number,)), (story, ended)
    for word in ("Traceback", "Exception ignored", "Fatal", "terminate called", "Error"):
        assert word not in ended.stderr, (story, ended)
    assert sum(line in _SAID for line in ended.stderr.splitlines()) <= 1, (story, ended)


def check_model(here: Path, after_s: float, number: signal.Signals) -> None:
    """A user's plan is there before; it is that one, or a whole one, after."""
    PLAN.save(here / "plan.json")
    arguments = ["run", "mlp", "--batch-size", "8", "--budget", "85%", "--steps", "1000000", "--json", "--save-plan", "plan.json"]
    ended = interrupt(here, arguments, after_s, number)
    story = f"{number.name} after {after_s:.3f} s"
    check(ended, number, story)
    trained = bool(ended.stdout)
    if trained:
        outcome = json.loads(ended.stdout)
        assert outcome["interrupted"] and outcome["steps_done"] >= 1, story
    assert (Plan.load(here / "plan.json") != PLAN) or not trained, story
    assert [path.name for path in here.iterdir()] == ["plan.json"], story


def check_jobs(here: Path, after_s: float, number: signal.Signals) -> None:
    (here / "jobs.toml").write_text(_JOBS)
    ended = interrupt(here, ["run", "jobs.toml", "--output", "run", "--json"], after_s, number)
    story = f"{number.name} after {after_s:.3f} s"
    check(ended, number, story)
    run = here / "run"
    assert run.exists() == bool(ended.stdout), story
    if not run.exists():
        return
    outcome = json.loads((run / "outcome.json").read_text())
    assert outcome == json.loads(ended.stdout) and outcome["interrupted"], story
    names = {path.name for path in run.rglob("*")}
    assert {"config.json", "versions.json", "events.jsonl", "record.json", "trace.json"} <= names, story
    assert not [name for name in names if name.endswith((".partial", ".sock"))], story
    for job in outcome["jobs"]:
        saved = [int(path.name.split("-")[0]) for path in (run / "checkpoints" / job["name"]).glob("[0-9]*")]
        assert job["state"] == "cancelled" and max(saved, default=0) == job["steps_done"], (story, job)


@pytest.mark.parametrize("after_s", [0.0, 0.6])
def test_a_training_is_interrupted_at_some_moments(tmp_path: Path, after_s: float) -> None:
    check_model(tmp_path, after_s, signal.SIGINT)


def test_a_run_of_jobs_is_ended_by_sigterm(tmp_path: Path) -> None:
    check_jobs(tmp_path, 3.0, signal.SIGTERM)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("moment", range(40))
def test_a_training_is_interrupted_at_any_moment(tmp_path: Path, moment: int, number: signal.Signals) -> None:
    check_model(tmp_path, moment * 0.1, number)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("moment", range(40))
def test_a_run_of_jobs_is_interrupted_at_any_moment(tmp_path: Path, moment: int, number: signal.Signals) -> None:
    check_jobs(tmp_path, moment * 0.25, number)


_OTHERS = {
    "plan": (["plan", "mlp", "--budget", "80%", "-o", "written"], 4.0),
    "plan of jobs": (["plan", "jobs.toml", "-o", "written"], 6.0),
    "check": (["check", "mlp", "--budget", "80%", "-o", "written"], 12.0),
    "compare": (["compare", "mlp", "-o", "written"], 4.0),
    "demo": (["demo", "--output", "run"], 12.0),
    "picture": (["picture", "past", "-o", "written"], 1.5),
    "short training": (["run", "mlp", "--batch-size", "8", "--steps", "2", "--save-plan", "written"], 5.0),
    "show": (["show", "plan.json"], 0.5),
}


@pytest.mark.slow
@pytest.mark.parametrize("moment", range(12))
@pytest.mark.parametrize("command", _OTHERS)
def test_any_other_command_is_interrupted_at_any_moment(tmp_path: Path, command: str, moment: int) -> None:
    arguments, lasts_s = _OTHERS[command]
    (tmp_path / "jobs.toml").write_text(_JOBS)
    PLAN.save(tmp_path / "plan.json")
    RunFolder.create(tmp_path / "past").write_record(RECORD)
    (tmp_path / "written").write_bytes(b"the user's")
    ended = interrupt(tmp_path, arguments, lasts_s * moment / 12)
    check(ended, signal.SIGINT, f"{command}, moment {moment}", may_have_ended=True)
    if (tmp_path / "run").exists():
        assert json.loads((tmp_path / "run" / "outcome.json").read_text())["interrupted"]
    written = (tmp_path / "written").read_bytes()
    assert written == b"the user's" or written.startswith(b"\x89PNG") or json.loads(written)
    assert not list(tmp_path.glob(".tensile-*"))
