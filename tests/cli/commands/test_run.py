"""`tensile run` and `tensile plan` on small models."""

import json
import re
from io import StringIO
from pathlib import Path

import jsonschema
import pytest
from click.testing import CliRunner, Result
from rich.console import Console

from tensile_jax.cli.main import main
from tensile_jax.cli.progress import Phases
from tensile_jax.plan_format import Plan


def tensile(*arguments: str | int | Path) -> Result:
    return CliRunner().invoke(main, list(map(str, arguments)), catch_exceptions=False)


@pytest.mark.smoke
def test_run_trains_under_the_budget_and_prints_valid_json(tmp_path: Path) -> None:
    done = tensile("run", "cnn", "--batch-size", 64, "--budget", "75%", "--steps", 4, "--json")
    assert done.exit_code == 0
    outcome = json.loads(done.stdout)
    jsonschema.validate(outcome, json.loads(tensile("schema", "run").stdout))
    assert outcome["peak_bytes"] <= outcome["budget_bytes"]
    assert outcome["budget_bytes"] == int(0.75 * outcome["jit_peak_bytes"])
    assert outcome["peak_bytes"] <= outcome["predicted_peak_bytes"] <= 1.01 * outcome["peak_bytes"]
    assert outcome["loss_last"] < outcome["loss_first"]
    assert (outcome["steps_done"], outcome["interrupted"], outcome["image_size"]) == (4, False, 8)
    assert 0 < outcome["test_accuracy"] < 1


def test_run_without_a_budget_prints_a_table(tmp_path: Path) -> None:
    done = tensile("run", "mlp", "--steps", 2, "--save-plan", tmp_path / "plan.json")
    assert done.exit_code == 0
    for text in ("mlp on ", "peak measured", "the step runs whole, as plain jit", "test accuracy", "tensile show"):
        assert text in done.stdout
    assert re.search(r"step measured +│ [\d.]+ m?u?s ", done.stdout)
    assert re.search(r"step predicted +│ [\d.]+ m?u?s, 1.00 times plain jit's time ", done.stdout)
    assert re.search(r"plain jit predicted +│ [\d.]+ m?u?s ", done.stdout)
    assert "training: 2/2 loss" in done.stderr
    assert Plan.load(tmp_path / "plan.json").whole


def test_a_saved_plan_runs_again_and_only_for_its_own_program(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    made = tensile("plan", "mlp", "--batch-size", 256, "--image-size", 16, "--policy", "none", "-o", file)
    assert (made.exit_code, str(Plan.load(file)) in made.stdout) == (0, True)
    run = ("run", "mlp", "--image-size", 16, "--plan", file)
    done = tensile(*run, "--batch-size", 256, "--steps", 2, "--json")
    assert (done.exit_code, json.loads(done.stdout)["segments"]) == (0, len(Plan.load(file).segments))
    refused = tensile(*run, "--batch-size", 32)
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert "--plan was made for another program" in refused.stderr
    both = tensile(*run, "--budget", "1GiB")
    assert (both.exit_code, "--budget and --plan exclude each other" in both.stderr) == (2, True)


_CNN = ("cnn", "--batch-size", 64)


@pytest.mark.parametrize(
    ("model", "share"),
    [
        (("mlp", "--batch-size", 256, "--image-size", 16), "80%"),
        pytest.param(_CNN, "80%", marks=pytest.mark.slow),
        pytest.param(_CNN, "60%", marks=pytest.mark.slow),
    ],
)
def test_a_plan_that_was_only_predicted_runs_within_its_budget(model: tuple[str | int, ...], share: str, tmp_path: Path) -> None:
    file, ran = tmp_path / "plan.json", tmp_path / "ran.json"
    made = tensile("plan", *model, "--budget", share, "-o", file)
    assert (made.exit_code, "estimates  workspaces" in made.stdout, "peak       about " in made.stdout) == (0, True, True)
    predicted = Plan.load(file)
    assert predicted.workspaces == "predicted"
    assert "estimates  workspaces" in tensile("show", file).stdout
    done = tensile("run", *model, "--plan", file, "--steps", 2, "--save-plan", ran, "--json")
    assert done.exit_code == 0
    outcome, plan = json.loads(done.stdout), Plan.load(ran)
    assert outcome["peak_bytes"] <= outcome["budget_bytes"] == predicted.budget_bytes
    assert plan.workspaces == "compiled" and plan.peak_bytes <= outcome["budget_bytes"]
    for note in plan.notes:
        assert f"Note: {note}" in done.stderr
        assert " ".join(note.split()) in " ".join(tensile("show", ran).stdout.split())


def test_a_file_that_is_no_plan_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    good = tmp_path / "plan.json"
    assert tensile("plan", "mlp", "--policy", "none", "-o", good).exit_code == 0
    raw = json.loads(good.read_text())
    twice = {**raw, "segments": [{**s, "outputs": s["outputs"] + s["outputs"][:1]} for s in raw["segments"]]}
    files = {
        "binary": b"\x00\x93NUMPY\xff\xfe",
        "cut": good.read_bytes()[: good.stat().st_size // 2],
        "other": json.dumps({**raw, "schema_version": 7}).encode(),
        "twice": json.dumps(twice).encode(),
        "peakless": json.dumps({**raw, "peak_segment": len(raw["segments"])}).encode(),
        "empty": b"",
    }
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
        for command in (("run", "mlp", "--plan", tmp_path / name), ("show", tmp_path / name)):
            refused = tensile(*command)
            assert (refused.exit_code, refused.stdout) == (2, ""), name
            assert refused.stderr.startswith("Error: ") and refused.stderr.count("\n") == 1, refused.stderr
            assert "Traceback" not in refused.stderr


def test_a_slowdown_beside_a_plan_is_refused(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text("{}")
    both = tensile("run", "mlp", "--plan", tmp_path / "plan.json", "--max-slowdown", 2)
    assert (both.exit_code, "--max-slowdown and --plan exclude each other" in both.stderr) == (2, True)


@pytest.mark.parametrize("command", ["run", "plan"])
def test_a_budget_that_is_too_small_is_exit_code_3_and_names_one_that_works(command: str) -> None:
    refused = tensile(command, "mlp", "--budget", "1KiB")
    assert (refused.exit_code, refused.stdout) == (3, "")
    assert "the smallest that works is" in refused.stderr
    assert "--state-memory=any" in refused.stderr


@pytest.mark.parametrize(
    ("model", "mib"),
    [(("mlp", "--batch-size", 512, "--image-size", 32), 6), pytest.param(("gpt", "--batch-size", 4), 12, marks=pytest.mark.slow)],
    ids=["mlp", "gpt"],
)
def test_plan_for_another_device_runs_nothing_and_is_valid(model: tuple[str | int, ...], mib: int, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    made = tensile("plan", *model, "--device-profile", "h200", "--budget", f"{mib}MiB", "-o", file)
    assert made.exit_code == 0
    plan = Plan.load(file)
    assert (plan.device_profile, plan.budget_bytes) == ("h200", mib * 2**20)
    assert plan.peak_bytes <= mib * 2**20
    jsonschema.validate(json.loads(file.read_text()), json.loads(tensile("schema", "plan").stdout))
    assert tensile("show", file).exit_code == 0


def test_state_may_wait_in_host_memory(tmp_path: Path) -> None:
    done = tensile("run", "mlp", "--steps", 2, "--state-memory", "any", "--json")
    assert (done.exit_code, json.loads(done.stdout)["state_memory"]) == (0, "any")


def test_progress_shows_phases_that_begin_again_with_another_total() -> None:
    console = Console(width=100, force_terminal=True, record=True, file=StringIO())
    with Phases(console) as phases:
        phases.begin("planning")
        for done, of in ((1, 2), (2, 2), (1, 3), (2, 3), (3, 3)):
            phases.update("compiling", done, of)
        phases.update("training", 1, 4, "loss 1.0000")
    shown = console.export_text()
    assert "3/3" in shown and "1/4" in shown and "loss 1.0000" in shown
