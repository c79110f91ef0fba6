"""What a run's folder keeps, and that nothing it cannot keep ends the run."""

import dataclasses
import json
import math
import os
import shutil
import signal
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import pytest

from tensile_jax.cli.errors import Refusal
from tensile_jax.cli.run.folder import RunFolder, read_events, read_jit_peaks, read_record
from tensile_jax.plan_format import Plan
from tensile_jax.runtime_records import JobEvent
from tests.cli.plans import PLAN
from tests.cli.records import RECORD

QUEUED = JobEvent(0.5, "queued", "gpt", 0, "needs 310 MiB", {"planned_bytes": 310 * 2**20})
STEP = JobEvent(1.5, "step", "gpt", 1, values={"loss": 0.25})
FAILED = JobEvent(2.0, "failed", "gpt", 1, "ValueError: no\nbatch")


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path / "runs" / "one")


def test_a_folder_with_something_in_it_is_refused_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(Refusal, match="is not empty. Name another folder, or resume"):
        RunFolder.create(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(Refusal, match="cannot be made: .* Name another folder"):
        RunFolder.create(tmp_path / "file")


def test_events_are_read_back_as_they_were_told(folder: RunFolder) -> None:
    for event in (QUEUED, STEP, FAILED):
        folder.write_event(event)
    assert read_events(folder.path) == (QUEUED, STEP, FAILED)
    assert folder.troubles == ()


def test_a_job_has_a_log_for_people_and_its_metrics(folder: RunFolder) -> None:
    for event in (QUEUED, STEP, FAILED):
        folder.write_event(event)
    assert (folder.path / "jobs/gpt/log.txt").read_text().splitlines() == [
        "0.5 s  gpt: queued after step 0, planned 310 MiB (needs 310 MiB)",
        "1.5 s  gpt: step 1, loss 0.25",
        "2.0 s  gpt: failed after step 1 (ValueError: no batch)",
    ]
    assert json.loads((folder.path / "jobs/gpt/metrics.jsonl").read_text()) == {
        "step": 1, "time_s": 1.5, "values": {"loss": 0.25},
    }  # fmt: skip


def test_a_loss_that_is_no_number_is_null_and_read_as_nan(folder: RunFolder) -> None:
    folder.write_event(dataclasses.replace(STEP, values={"loss": math.nan}))
    assert json.loads((folder.path / "events.jsonl").read_text())["values"] == {"loss": None}
    assert math.isnan(read_events(folder.path)[0].values["loss"])


def test_no_event_told_before_a_kill_is_lost(tmp_path: Path) -> None:
    script = (
        "import sys, time; from tensile_jax.cli.run.folder import RunFolder; from tensile_jax.runtime_records import JobEvent\n"
        f"folder = RunFolder.create({str(tmp_path / 'run')!r})\n"
        "for step in range(20): folder.write_event(JobEvent(0.0, 'step', 'a', step))\n"
        "print('told', flush=True); time.sleep(60)"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    with subprocess.Popen([sys.executable, "-c", script], env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "told\n"
        process.send_signal(signal.SIGKILL)
    assert [event.step for event in read_events(tmp_path / "run")] == list(range(20))


def test_a_torn_last_line_is_left_out_and_ended_when_the_run_goes_on(folder: RunFolder) -> None:
    folder.write_config({"budget": "1GiB"})
    folder.write_event(QUEUED)
    events = folder.path / "events.jsonl"
    events.write_bytes(events.read_bytes() + b'{"time_s": 1.5, "ki')
    assert read_events(folder.path) == (QUEUED,)
    RunFolder.reopen(folder.path).write_event(STEP)
    assert read_events(folder.path) == (QUEUED, STEP)


def test_a_whole_line_that_is_no_event_is_refused_by_its_number(folder: RunFolder) -> None:
    folder.write_event(QUEUED)
    with (folder.path / "events.jsonl").open("a") as file:
        file.write('{"kind": "lunch"}\n')
    with pytest.raises(Refusal, match="line 2 is not an event"):
        read_events(folder.path)


def test_plans_of_a_job_are_counted_also_by_the_run_that_goes_on(folder: RunFolder) -> None:
    folder.write_config({})
    for job in ("gpt", "gpt", "a/b", "gpt-1"):
        folder.write_plan(job, PLAN)
    RunFolder.reopen(folder.path).write_plan("gpt", PLAN)
    names = sorted(path.name for path in (folder.path / "plans").iterdir())
    assert names == [
        "a%2Fb-0.plan.json", "gpt-0.plan.json", "gpt-1-0.plan.json", "gpt-1.plan.json", "gpt-2.plan.json",
    ]  # fmt: skip
    assert Plan.load(folder.path / "plans/gpt-2.plan.json") == PLAN
    assert read_jit_peaks(folder.path) == {"a/b": 20 * 1024, "gpt": 20 * 1024, "gpt-1": 20 * 1024}


@pytest.mark.parametrize("job", ["..", "../../x", ".hidden", "/etc/x"])
def test_no_name_of_a_job_leads_out_of_the_folder(folder: RunFolder, job: str) -> None:
    folder.write_event(dataclasses.replace(STEP, job=job))
    folder.write_plan(job, PLAN)
    assert folder.troubles == ()
    written = [path for path in folder.path.parent.parent.rglob("*") if path.is_file()]
    assert len(written) == 4
    assert all(path.is_relative_to(folder.path) for path in written)
    assert len(list(folder.path.glob("jobs/*/metrics.jsonl"))) == 1


def test_config_and_versions_are_json(folder: RunFolder) -> None:
    folder.write_config({"device": {"budget": "1GiB"}, "folder": folder.path})
    folder.write_versions(device_kind="cpu")
    assert json.loads((folder.path / "config.json").read_text())["device"] == {"budget": "1GiB"}
    versions = json.loads((folder.path / "versions.json").read_text())
    assert versions["python"].startswith("3.") and versions["device_kind"] == "cpu"
    assert datetime.fromisoformat(versions["date"]).tzinfo is not None


def test_versions_are_looked_up_and_null_where_a_package_is_not_installed(folder: RunFolder) -> None:
    folder.write_versions(device_kind="cpu")
    versions = json.loads((folder.path / "versions.json").read_text())
    assert set(versions) == {
        "tensile_jax", "jax", "jaxlib", "numpy", "flax", "optax", "python", "device_kind", "date",
    }  # fmt: skip
    assert versions["jax"][0].isdecimal()


def test_the_record_is_read_back_as_it_was_and_the_trace_lies_beside_it(folder: RunFolder) -> None:
    folder.write_record(RECORD)
    assert read_record(folder.path) == RECORD
    assert json.loads((folder.path / "trace.json").read_text())["traceEvents"]


@pytest.mark.parametrize(
    ("content", "message"), [(None, "cannot be read"), ('{"spans": [', "is not the record"), ("{}", "is not the record")]
)
def test_a_run_without_a_record_is_refused(folder: RunFolder, content: str | None, message: str) -> None:
    if content is not None:
        (folder.path / "record.json").write_text(content)
    with pytest.raises(Refusal, match=message):
        read_record(folder.path)


def test_what_is_not_the_folder_of_a_run_cannot_be_reopened(tmp_path: Path) -> None:
    with pytest.raises(Refusal, match="no config.json"):
        RunFolder.reopen(tmp_path)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")
def test_a_full_disk_is_told_once_with_its_count_and_other_files_are_written(folder: RunFolder) -> None:
    (folder.path / "events.jsonl").symlink_to("/dev/full")
    for _ in range(3):
        folder.write_event(STEP)
    assert folder.troubles == (f"events.jsonl in {folder.path} could not be written: No space left on device (3 times)",)
    assert len((folder.path / "jobs/gpt/log.txt").read_text().splitlines()) == 3


def test_a_folder_that_is_gone_ends_nothing_and_is_not_made_again(folder: RunFolder) -> None:
    folder.write_event(STEP)
    shutil.rmtree(folder.path)
    folder.write_event(STEP)
    folder.write_plan("gpt", PLAN)
    folder.write_record(RECORD)
    assert not folder.path.exists()
    assert len(folder.troubles) == 6
    assert all("could not be written: No such file or directory" in trouble for trouble in folder.troubles)


def test_what_cannot_be_encoded_is_a_trouble(folder: RunFolder) -> None:
    folder.write_event(dataclasses.replace(STEP, values={"loss": object()}))  # pyright: ignore[reportArgumentType]  # the mistake
    assert "events.jsonl" in folder.troubles[0]
