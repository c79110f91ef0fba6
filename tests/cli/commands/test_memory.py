"""`tensile memory`: what the step of a named model needs."""

import json
from pathlib import Path

import jsonschema
from click.testing import CliRunner, Result

import tensile_jax as tensile
from tensile_jax.cli.main import main
from tensile_jax.memory_report.report import describe


def asked(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["memory", *arguments, "--device-profile", "cpu"], catch_exceptions=False)


def test_a_model_is_reported_on_as_text_json_and_page(tmp_path: Path) -> None:
    done = asked("mlp", "--batch-size", "8", "--compile", "-o", f"{tmp_path}/m.json", "--html", f"{tmp_path}/m.html")
    assert done.exit_code == 0 and "On the device at the predicted peak" in done.stdout and "as XLA compiles it" in done.stdout
    report = tensile.MemoryReport.from_json((tmp_path / "m.json").read_bytes())
    assert describe(report, in_shell=True) in done.stdout and report.missed_donations == ()
    assert "<!doctype html>" in (tmp_path / "m.html").read_text()
    schema = CliRunner().invoke(main, ["schema", "memory"])
    jsonschema.validate(json.loads((tmp_path / "m.json").read_text()), json.loads(schema.stdout))


def test_top_sets_the_rows_of_the_largest_and_the_text_names_options_of_the_command() -> None:
    one, all_rows = (
        asked("mlp", "--batch-size", "8", "--top", "1").stdout,
        asked("mlp", "--batch-size", "8", "--top", "99").stdout,
    )
    assert "--top N shows more" in one and "--top N shows more" not in all_rows
    assert len(one.splitlines()) < len(all_rows.splitlines())
    assert "--compile asks XLA" in one and "compile=True" not in one
