"""What `tensile submit` and the steering commands refuse without a cluster; `tests/ray/test_cluster.py` has one."""

import socket
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tensile_jax.cli.main import main

JOBS = '[device]\nbudget = "50%"\n[[jobs]]\nmodel = "mlp"\nargs = {batch_size = 8}\nsteps = 2\n'


@pytest.fixture
def nobody() -> str:
    """An address at which nothing answers."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


def run(*words: str) -> Result:
    return CliRunner().invoke(main, list(words), catch_exceptions=False)


def submit(folder: Path, *words: str, more: str = "") -> Result:
    (folder / "jobs.toml").write_text(JOBS + more)
    return run("submit", str(folder / "jobs.toml"), *words)


def test_resuming_needs_the_folder(tmp_path: Path) -> None:
    done = submit(tmp_path, "--resume")
    assert (done.exit_code, done.stderr) == (
        2, "Error: --resume needs the folder to go on from. Name it: --checkpoints=DIR.\n",
    )  # fmt: skip


def test_an_address_at_which_nothing_answers_is_a_failure(tmp_path: Path, nobody: str) -> None:
    done = submit(tmp_path, "--ray", nobody)
    assert done.exit_code == 1
    assert f"Nothing answers at --ray='{nobody}'" in done.stderr.replace("address=", "--ray=")
    for command in ("status", "pause", "resume", "cancel"):
        done = run(command, "--ray", nobody)
        assert done.exit_code == 1
        assert "Is the head node up?" in done.stderr


@pytest.mark.parametrize("line", ['policy = "none"', "max_swap_rate = 0.5", "renew_above = 0.3"])
def test_keys_with_which_a_job_could_not_move_are_refused(tmp_path: Path, nobody: str, line: str) -> None:
    done = submit(tmp_path, "--ray", nobody, more=line + "\n")
    key = line.split(" ")[0]
    assert done.exit_code == 2
    assert f"jobs[0].{key} = " in done.stderr
    assert "a job of a cluster has the same plan on every device" in done.stderr


def test_a_job_of_several_devices_is_for_clusters_and_its_group_must_be_as_large(tmp_path: Path, nobody: str) -> None:
    done = submit(tmp_path, "--ray", nobody, "--devices-per-actor", "2", more="devices = 4\n")
    assert done.exit_code == 2
    assert "devices=4 of mlp: devices_per_actor=2, so that no actor holds more" in done.stderr
    assert submit(tmp_path, "--ray", nobody, more="devices = 4\n").exit_code == 1  # it was accepted, and nobody answers
    for command in ("run", "plan"):
        done = run(command, str(tmp_path / "jobs.toml"))
        assert done.exit_code == 2
        assert "line 3: jobs[0].devices = 4: this command has one device for all jobs." in done.stderr


def test_a_run_and_a_cluster_are_not_steered_at_once(tmp_path: Path, nobody: str) -> None:
    done = run("pause", str(tmp_path), "job", "--ray", nobody)
    assert (done.exit_code, done.stderr) == (2, "Error: there are too many arguments: job. Leave them out.\n")
    done = run("status")
    assert (done.exit_code, done.stderr) == (
        2, "Error: RUN is missing: the folder of a run, or --ray=ADDRESS for a cluster. Name one of them.\n",
    )  # fmt: skip
