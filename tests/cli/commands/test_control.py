"""`tensile status`, `pause`, `resume`, `cancel` and `budget`, on a run that is a stand-in."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner, Result

from tensile_jax.cli.main import main
from tensile_jax.cli.run.control import serving
from tensile_jax.runtime_records import Status
from tests.cli.fake_run import GIB, STATUS, FakeRun


@pytest.fixture
def run(tmp_path: Path) -> Iterator[FakeRun]:
    one = FakeRun()
    with serving(tmp_path, one):
        yield one


def tensile(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, list(map(str, arguments)), catch_exceptions=False)


def test_status_shows_every_job_and_the_device(run: FakeRun, tmp_path: Path) -> None:
    shown = tensile("status", tmp_path)
    assert shown.exit_code == 0
    assert "95.0 s, 4 jobs" in shown.stdout and "1 GiB of 4 GiB, peak 2 GiB" in shown.stdout
    assert [line.split()[:3] for line in shown.stdout.splitlines() if line[:3] in ("cnn", "gpt", "mlp", "old")][:4] == [
        ["cnn", "running", "40/100"], ["gpt", "queued", "0/100"], ["mlp", "paused", "40/100"], ["old", "finished", "100/100"],
    ]  # fmt: skip
    assert "needs 2 GiB [/bold] more" in shown.stdout


def test_status_of_one_job_and_as_json(run: FakeRun, tmp_path: Path) -> None:
    alone = tensile("status", tmp_path, "mlp").stdout
    assert "mlp" in alone and "1 job" in alone and "cnn" not in alone
    assert msgspec.json.decode(tensile("status", tmp_path, "--json").stdout, type=Status) == STATUS
    one = msgspec.json.decode(tensile("status", tmp_path, "old", "--json").stdout, type=Status)
    assert one == replace(STATUS, jobs=STATUS.jobs[3:])


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("pause", [("paused", "cnn"), ("paused", "gpt")]),
        ("resume", [("running", "mlp")]),
        ("cancel", [("cancelled", "cnn"), ("cancelled", "gpt"), ("cancelled", "mlp")]),
    ],
)
def test_without_a_job_all_are_meant_to_which_it_applies(
    command: str, told: list[tuple[str, str]], run: FakeRun, tmp_path: Path
) -> None:
    done = tensile(command, tmp_path)
    assert (done.exit_code, done.stderr, run.told) == (0, "", told)
    assert [line.split()[0] for line in done.stdout.splitlines()] == [name for _, name in told]


@pytest.mark.parametrize(
    ("command", "job", "told", "said"),
    [
        ("pause", "cnn", ("paused", "cnn"), "cnn will pause.\n"),
        ("resume", "mlp", ("running", "mlp"), "mlp goes on.\n"),
        ("cancel", "mlp", ("cancelled", "mlp"), "mlp is cancelled.\n"),
        ("budget", "8GiB", ("budget", 8 * GIB), None),
        ("budget", "1000", ("budget", 1000), None),
    ],
)
def test_what_is_named_is_done(
    command: str, job: str, told: tuple[str, str | int], said: str | None, run: FakeRun, tmp_path: Path
) -> None:
    done = tensile(command, tmp_path, job)
    assert (done.exit_code, run.told) == (0, [told])
    assert done.stdout == (
        said or f"The budget of the run in {tmp_path} is {job.replace('8G', '8 G').replace('1000', '1000 B')} from now on.\n"
    )


def test_where_there_is_nothing_to_do_it_is_said(run: FakeRun, tmp_path: Path) -> None:
    tensile("resume", tmp_path)
    again = tensile("resume", tmp_path)
    assert (again.exit_code, again.stderr) == (0, "There is no job to resume: none is paused.\n")
    tensile("cancel", tmp_path)
    again = tensile("cancel", tmp_path)
    assert (again.exit_code, again.stderr) == (0, "There is no job to cancel: all of them have ended.\n")


def test_a_job_that_refuses_does_not_keep_the_others_from_being_asked(run: FakeRun, tmp_path: Path) -> None:
    shown = run.status()
    tensile("pause", tmp_path, "cnn")
    run.status = lambda: shown  # as when cnn had ended after it was asked for
    done = tensile("pause", tmp_path)
    assert (done.exit_code, done.stdout) == (2, "gpt will pause.\n")
    assert done.stderr == "Error: cnn is paused: it cannot become paused.\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["pause", "ghost"], "Error: there is no job 'ghost'."),
        (["status", "ghost"], "JOB=ghost: the run in "),
        (["status", "ghost"], " has no such job. It has: cnn, gpt, mlp, old."),
        (["resume", "cnn"], "Error: cnn is running: it cannot become running."),
        (["cancel", "old"], "Error: old is finished: it cannot become cancelled."),
        (["budget", "1"], "Error: budget 1 cannot be kept: cnn alone needs 2 GiB."),
        (["budget", "50%"], "Error: BYTES=50%: a share is taken when a run begins."),
        (["budget", "lots"], "Error: BYTES: budget 'lots' cannot be read."),
        (["budget", "0"], "Error: BYTES: budget must be above zero, got '0'."),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line(arguments: list[str], message: str, run: FakeRun, tmp_path: Path) -> None:
    refused = tensile(arguments[0], tmp_path, arguments[1])
    assert (refused.exit_code, refused.stdout, run.told) == (2, "", [])
    assert message in refused.stderr
    assert len(refused.stderr.splitlines()) == 1


@pytest.mark.parametrize("arguments", [["status"], ["pause"], ["resume", "cnn"], ["cancel"], ["budget", "1GiB"]])
def test_without_a_run_every_command_says_so(arguments: list[str], tmp_path: Path) -> None:
    refused = tensile(arguments[0], tmp_path, *arguments[1:])
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert f"no run is alive in {tmp_path}" in refused.stderr
    assert tensile(arguments[0], tmp_path / "nowhere", *arguments[1:]).exit_code == 2
