"""The main job: what it promises, on small jobs; and, slowly, itself."""

import dataclasses
import json
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from tensile_jax.cli.commands.demo import SideBySide, demo_jobs, failed_checks, own_step_us, run_demo
from tensile_jax.cli.jobs_file import read_jobs_file
from tensile_jax.cli.main import main
from tensile_jax.cli.run.report import JobOutcome, JobsOutcome
from tensile_jax.cli.run.single_model import PlainJob
from tensile_jax.runtime_records import Record, Span

_SMALL = """
[device]
budget = "90%"
[defaults]
steps = 3
[[jobs]]
model = "mlp"
args = {batch_size = 64}
[[jobs]]
name = "late"
model = "mlp"
args = {batch_size = 32}
start_after = "mlp:2"
"""

JOB = JobOutcome("digits", "cnn", None, "finished", "", 9, 9, 2.5, 0.1, 90, 90, 200, 3.0, 2e5, 1e5, 9e4, 0.98)
KEPT = SideBySide(
    (PlainJob("digits", 200, 1.0, 1.5, 2.0, 1e5, 2.5001, 0.1, 0.98),),
    JobsOutcome("runs/demo", "cpu", False, 100, None, 100, 3.0, (), (JOB,)),
    {"digits": 9e4},
    2.5,
)


def test_the_demo_trains_three_models_of_which_two_come_late() -> None:
    jobs = demo_jobs()
    assert [job.model for job in jobs.jobs] == ["bert", "cnn", "gpt"]
    assert (jobs.device.budget.share, [job.start_after == 0.0 for job in jobs.jobs]) == (0.5, [True, False, False])


def test_the_demo_sets_jobs_at_once_beside_plain_jit_one_after_another(tmp_path: Path) -> None:
    (tmp_path / "small.toml").write_text(_SMALL)
    folder = tmp_path / "run"
    small = click.Command("small", callback=lambda: run_demo(read_jobs_file(tmp_path / "small.toml"), folder, least_accuracy={}))
    done = CliRunner().invoke(small, catch_exceptions=False)
    assert done.exit_code == 0, done.stderr
    for text in (
        "late",
        "plain jit",
        "together",
        "had ended its first step",
        "@tensile.jit",
        "The budget was kept.",
    ):
        assert text in done.stdout
    results = json.loads((folder / "results.json").read_text())
    assert all(us > 0 for us in results["own_step_us"].values()) and len(results["own_step_us"]) == 2
    assert all(job["first_step_s"] >= job["compile_s"] > 0 for job in results["plain"])
    assert results["first_steps_s"] > 0
    assert results["together"]["peak_bytes"] <= results["together"]["budget_bytes"]
    assert [job["loss_first"] for job in results["plain"]] == pytest.approx(
        [job["loss_first"] for job in results["together"]["jobs"]], rel=1e-3
    )
    assert (folder / "memory.png").read_bytes()[:4] == b"\x89PNG"


def test_a_step_counts_its_waits_for_copies_but_not_other_jobs_launches() -> None:
    spans = [
        Span("compute", "a", "first", 0, 0, 900, 0),  # the first step
        Span("compute", "a", "begin", 1, 1000, 1010, 0),
        Span("compute", "b", "whole", 0, 1005, 1030, 0),  # 20 of it lie beside a's wait, 5 beside a's launch
        Span("compute", "a", "end", 1, 1040, 1050, 0),
    ]
    assert own_step_us(Record(tuple(spans), ()), "a") == 25.0
    assert own_step_us(Record(tuple(spans), ()), "c") is None


def test_what_the_demo_did_not_keep_is_said() -> None:
    def missed(**changes: object) -> list[str]:
        job = dataclasses.replace(JOB, **{k: v for k, v in changes.items() if k != "peak"})
        together = dataclasses.replace(KEPT.together, jobs=(job,), peak_bytes=changes.get("peak", 100))
        return failed_checks(dataclasses.replace(KEPT, together=together), least_accuracy={"digits": 0.97})

    assert missed() == []
    assert missed(peak=101) == ["The measured peak of all jobs, 101 B, is above the budget, 100 B."]
    assert missed(loss_first=2.6) == ["digits: the first loss, 2.6000, is not plain jit's, 2.5001."]
    assert missed(test_accuracy=0.96) == ["digits: 96.00% test accuracy after 9 steps, less than 97%."]
    assert missed(state="failed", note="no memory") == ["digits failed: no memory."]


@pytest.mark.slow
def test_the_demo_keeps_its_promises(tmp_path: Path) -> None:
    done = CliRunner().invoke(main, ["demo", "--output", str(tmp_path / "run")], catch_exceptions=False)
    assert done.exit_code == 0, done.stderr
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert results["together"]["jobs"][1]["test_accuracy"] >= 0.97
    assert [job["loss_last"] for job in results["plain"]] == pytest.approx(
        [job["loss_last"] for job in results["together"]["jobs"]],
        rel=2e-4,  # four digits, since rounding is small at these learning rates
    )
    assert (
        results["together"]["peak_bytes"]
        <= results["together"]["budget_bytes"]
        < 0.51 * sum(job["peak_bytes"] for job in results["plain"])
    )
