"""A full disk wherever the command line writes: one line, exit code 1, and nothing that looks whole and is not."""

import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tensile_jax.cli.main import main
from tensile_jax.cli.run.folder import RunFolder, read_events
from tensile_jax.runtime_records import JobEvent
from tests.cli.plans import PLAN
from tests.cli.records import RECORD
from tests.full_disk import FullDisk

_JOBS = """
[device]
budget = "1MiB"
[[jobs]]
entrypoint = "by_hand:make_job"
steps = 2
"""

_MADE_BY_HAND = """
import numpy as np

def make_job():
    ones = np.ones(8, np.float32)
    return lambda state, batch: (state + batch.sum(), {"loss": state.mean()}), ones.copy(), [ones] * 2
"""


def tensile(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, list(map(str, arguments)), catch_exceptions=False)


def errors(result: Result) -> list[str]:
    return [line for line in result.stderr.splitlines() if line.startswith("Error")]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "by_hand.py").write_text(_MADE_BY_HAND)
    (tmp_path / "jobs.toml").write_text(_JOBS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "by_hand", raising=False)
    return tmp_path


def check_every_failure(arguments: list[str | Path], file: Path) -> None:
    """Of each call of the disk that the command makes for `file`, which had other content before."""
    with pytest.MonkeyPatch.context() as patch:
        disk = FullDisk(patch, lambda number: False)
        assert tensile(*arguments).exit_code == 0
    new = file.read_bytes()
    for failing in range(disk.calls):
        file.write_bytes(b"the user's")
        with pytest.MonkeyPatch.context() as patch:
            FullDisk(patch, lambda number, failing=failing: number == failing)
            failed = tensile(*arguments)
        assert (failed.exit_code, len(errors(failed))) == (1, 1), failed.stderr
        assert str(file) in failed.stderr and "No space left on device" in failed.stderr
        assert file.read_bytes() == b"the user's"
        assert [path.name for path in file.parent.glob(".tensile-*")] == []
    assert new != b"the user's"


def test_a_picture_is_drawn_whole_or_not_at_all(here: Path) -> None:
    folder = RunFolder.create(here / "run")
    folder.write_record(RECORD)
    check_every_failure(["picture", here / "run", "-o", here / "memory.png"], here / "memory.png")


def test_a_plan_is_written_whole_or_not_at_all(here: Path) -> None:
    check_every_failure(["plan", "mlp", "--batch-size", "8", "--policy", "none", "-o", here / "plan.json"], here / "plan.json")


@pytest.mark.slow
def test_a_comparison_and_its_pictures_are_written_whole_or_not_at_all(here: Path) -> None:
    arguments: list[str | Path] = ["compare", "mlp", "--batch-size", "8"]
    check_every_failure([*arguments, "-o", here / "compared.json"], here / "compared.json")
    failed = 0
    for failing in range(9):
        with pytest.MonkeyPatch.context() as patch:
            FullDisk(patch, lambda number, failing=failing: number == failing)
            result = tensile(*arguments, "--picture", here / "curve")
        failed += result.exit_code == 1 and len(errors(result)) == 1
        assert not list(here.glob(".tensile-*"))
        for file in here.glob("curve.*"):
            assert file.read_bytes()
            file.unlink()
    assert failed == 9


def told(folder: RunFolder) -> None:
    for event in (JobEvent(0.0, "queued", "gpt", 0), *(JobEvent(1.0, "step", "gpt", step) for step in (1, 2, 3))):
        folder.write_event(event)
    folder.write_versions(device_kind="cpu")
    folder.write_plan("gpt", PLAN)
    folder.write_log("gpt", "Traceback ...\nValueError: no batch")
    folder.write_record(RECORD)
    folder.write_outcome({"interrupted": False})


def test_whichever_write_of_a_run_folder_fails_the_others_are_whole_and_the_failure_is_told(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        disk = FullDisk(patch, lambda number: False)
        told(RunFolder.create(tmp_path / "whole"))
    whole = {path.relative_to(tmp_path / "whole") for path in (tmp_path / "whole").rglob("*") if path.is_file()}
    assert disk.calls > 30
    for failing in range(disk.calls):
        folder = RunFolder.create(tmp_path / str(failing))
        with pytest.MonkeyPatch.context() as patch:
            FullDisk(patch, lambda number, failing=failing: number == failing)
            told(folder)
        assert len(folder.troubles) == 1 and "No space left on device" in folder.troubles[0]
        files = {path.relative_to(folder.path): path for path in folder.path.rglob("*") if path.is_file()}
        assert len(whole - set(files)) <= 1 and set(files) <= whole
        for file in files.values():
            if file.suffix == ".json":
                json.loads(file.read_bytes())
            elif file.suffix == ".jsonl":
                assert all(json.loads(line) for line in file.read_bytes().splitlines())
        assert len(read_events(folder.path)) >= 3


def run_on_a_disk_full_from(here: Path, full: int, output: str) -> tuple[Result, int]:
    with pytest.MonkeyPatch.context() as patch:
        disk = FullDisk(patch, lambda number: number >= full)
        return tensile("run", "jobs.toml", "--output", output), disk.calls


def check_a_run(here: Path, full: int) -> None:
    failed, _ = run_on_a_disk_full_from(here, full, f"run-{full}")
    assert (failed.exit_code, len(errors(failed))) == (1, 1), failed.stderr
    assert "No space left on device" in failed.stderr
    folder = here / f"run-{full}"
    if full < 4:  # its config could not be written: nothing has begun, and the folder can be named again
        assert not folder.exists()
        return
    assert list(folder.rglob("*.partial")) == []
    for file in folder.rglob("*.json"):
        json.loads(file.read_bytes())


def test_a_run_on_a_full_disk_says_so_and_trains_to_its_end_where_it_had_begun(here: Path) -> None:
    for full in (0, 3, 4, 17):
        check_a_run(here, full)


@pytest.mark.slow
def test_a_run_whose_disk_is_full_from_any_moment_on_says_so(here: Path) -> None:
    whole, calls = run_on_a_disk_full_from(here, 10**9, "whole")
    assert whole.exit_code == 0 and calls > 30
    for full in range(0, calls - 4, 3):
        check_a_run(here, full)
