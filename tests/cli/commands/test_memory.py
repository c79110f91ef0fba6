"""`tensile memory`: what the step of a named model needs."""

import json
from pathlib import Path

import jsonschema
from click.testing import CliRunner, Result

import tensile_jax as tensile
from tensile_jax.cli.main import main


def asked(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["memory", *arguments, "--device-profile", "cpu"], catch_exceptions=False)


def test_a_model_is_reported_on_as_text_json_and_page(tmp_path: Path) -> None:
    done = asked("mlp", "--batch-size", "8", "--compile", "-o", f"{tmp_path}/m.json", "--html", f"{tmp_path}/m.html")
    assert done.exit_code == 0 and "On the device at the peak" in done.stdout and "as XLA compiles it" in done.stdout
    report = tensile.MemoryReport.from_json((tmp_path / "m.json").read_bytes())
    assert str(report) in done.stdout and report.missed_donations == ()
    assert "<!doctype html>" in (tmp_path / "m.html").read_text()
    schema = CliRunner().invoke(main, ["schema", "memory"])
    jsonschema.validate(json.loads((tmp_path / "m.json").read_text()), json.loads(schema.stdout))
