"""`tensile compare`: every policy on one step, as tables, JSON and a picture."""

import json
from pathlib import Path
from typing import get_args

import pytest
from click.testing import CliRunner

from tensile_jax.cli.main import main
from tensile_jax.plan import POLICIES, PolicyName
from tests.cli.small_models import small_models

_STEP = ["compare", "mlp", "--batch-size", "256", "--image-size", "16", "--device-profile", "h200"]


def test_policies_have_the_names_that_the_command_line_offers() -> None:
    assert set(POLICIES) == set(get_args(PolicyName))


def test_the_comparison_states_the_metrics_of_the_paper(tmp_path: Path) -> None:
    file, picture = tmp_path / "made.json", tmp_path / "curve"
    with small_models():
        shown = CliRunner().invoke(main, [*_STEP, "-o", str(file), "--picture", str(picture)])
    assert shown.exit_code == 0, shown.output
    made = json.loads(file.read_text())
    vanilla = made["vanilla"]
    assert (vanilla["policy"], vanilla["msr"], vanilla["eor"]) == ("none", 0.0, 1.0)
    assert made["state_memory"] == "any", "the paper schedules across iterations"
    assert "state memory any" in shown.output
    entries = [e for pair in made["least"] for e in pair] + made["curve"] + [e for b in made["budgets"] for e in b["entries"]]
    for entry in entries:
        assert entry["msr"] == pytest.approx(1 - entry["peak_bytes"] / vanilla["peak_bytes"])
        assert entry["eor"] == pytest.approx(entry["step_us"] / vanilla["step_us"])
        assert not entry["budget_bytes"] or entry["peak_bytes"] <= entry["budget_bytes"]
    assert [e["policy"] for e, _ in made["least"]] == [p for p in POLICIES if p not in ("auto", "none")]
    for budget in made["budgets"]:
        assert budget["passive_eor"] > 0
        assert not budget["entries"] or 0 < budget["bound_eor"] <= min(e["eor"] for e in budget["entries"]) + 1e-6
    peaks = [e["peak_bytes"] for e in made["curve"]]
    assert peaks == sorted(peaks, reverse=True)
    times = [e["step_us"] for e in made["curve"][:-1]]
    assert times == sorted(times), "a lower budget is never faster"
    for policy in get_args(PolicyName):
        assert policy in shown.output
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (tmp_path / "curve.svg").read_text()
