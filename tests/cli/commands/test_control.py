"""`tensile status`, `pause`, `resume`, `cancel` and `budget`, on a run that is a stand-in."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner, Result

from tensile_jax.budget import Budget
from tensile_jax.cli.jobs_file import DeviceTable, JobEntry, JobsFile
from tensile_jax.cli.main import main
from tensile_jax.cli.run.control import serving
from tensile_jax.cli.run.folder import RunConfig, RunFolder
from tensile_jax.cli.run.report import JobOutcome, JobsOutcome
from tensile_jax.runtime_records import NO_LIMIT, EventName, JobEvent, Status
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


def _ended_folder(folder: Path, *, killed: bool) -> Path:
    """The folder of a run of two jobs: one finished, the other did one step of ten."""
    entries = tuple(JobEntry(f"jobs.toml, line {i}: jobs[{i}]", name, "mlp", None, {}, 10) for i, name in enumerate("ab"))
    jobs = JobsFile("jobs.toml", DeviceTable(Budget(4 * GIB, None), None, None), entries)
    run = RunFolder.create(folder)
    run.write_config(RunConfig(jobs, 4 * GIB))
    run.write_versions(device_kind="cpu")
    events: tuple[tuple[str, EventName, int], ...] = (
        ("a", "submitted", 0),
        ("b", "submitted", 0),
        ("b", "step", 1),
        ("a", "finished", 10),
    )
    for job, kind, step in events:
        run.write_event(JobEvent(float(step), kind, job, step, values={"loss": 0.5} if kind == "step" else {}))
    if not killed:
        outcomes = (
            JobOutcome("a", "mlp", None, "finished", "", 10, 10, 2.0, 1.0, GIB, GIB, None, 9.0, None, None, None, None),
            JobOutcome("b", "mlp", None, "failed", "no batch", 10, 1, 0.5, 0.5, GIB, GIB, None, 3.0, None, None, None, None),
        )
        run.write_outcome(JobsOutcome("elsewhere", "cpu", False, 4 * GIB, None, 2 * GIB, 9.0, (), outcomes))
    return folder


def test_the_status_of_a_run_that_has_ended_is_its_final_table_and_how_to_go_on(tmp_path: Path) -> None:
    folder = _ended_folder(tmp_path / "a run", killed=False)
    shown = tensile("status", folder)
    assert (shown.exit_code, shown.stderr) == (0, "")
    assert shown.stdout.splitlines()[0] == "The run has ended: 1 finished, 1 failed."
    assert f"Not all jobs have finished; go on with: tensile run --resume '{folder}'" in shown.stdout.splitlines()
    assert "Together: 2 GiB at most of 4 GiB (50.0% of the budget), 9.0 s" in shown.stdout
    assert tensile("status", folder, "ghost").exit_code == 2
    assert "1 job on cpu" in tensile("status", folder, "a").stdout
    found = msgspec.json.decode(tensile("status", folder, "--json").stdout, type=Status)
    assert [(job.name, job.state, job.step) for job in found.jobs] == [("a", "finished", 10), ("b", "failed", 1)]
    assert (found.peak_bytes, found.host_budget_bytes, found.device_bytes) == (2 * GIB, NO_LIMIT, 0)


def test_the_status_of_a_run_that_was_killed_is_made_from_its_events(tmp_path: Path) -> None:
    folder = _ended_folder(tmp_path / "run", killed=True)
    shown = tensile("status", folder)
    assert (shown.exit_code, shown.stderr) == (0, "")
    lines = shown.stdout.splitlines()
    assert lines[0] == "The run was killed, or could not write how it ended: 1 finished, 1 cancelled."
    assert "b cancelled: cut off with the run" in lines
    assert f"Not all jobs have finished; go on with: tensile run --resume {folder}" in lines
    assert "the peak is not known" in shown.stdout
