"""The command line as a whole: quick help, refusals in one line, schemas, Ctrl-C."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import click
import jsonschema
import pytest
from click.testing import CliRunner

from tensile_jax import budget
from tensile_jax.cli.errors import format_warning
from tensile_jax.cli.jobs_file import read_jobs_file
from tensile_jax.cli.main import main
from tensile_jax.device_profiles.calibrations import file_for
from tests.cli.plans import PLAN

_TENSILE = [sys.executable, "-c", "from tensile_jax.cli.program import start; start()"]


_COMMANDS = ("run", "plan", "compare", "status", "pause", "resume", "cancel", "budget", "show", "picture", "schema", "demo")


def start(*arguments: str, cwd: Path) -> subprocess.Popen[str]:
    """`tensile` in its own process, as from a terminal."""
    root = str(Path(__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": root, "JAX_PLATFORMS": "cpu"}
    return subprocess.Popen(
        [*_TENSILE, *arguments], cwd=cwd, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def wait_for_line(process: subprocess.Popen[str], text: str) -> None:
    assert process.stderr is not None
    for line in process.stderr:
        if text in line:
            return
    raise AssertionError(f"{text!r} never came")


@pytest.mark.smoke
def test_help_does_not_load_jax() -> None:
    script = (
        "import sys; from tensile_jax.cli.main import main; main(['--help'], standalone_mode=False);"
        "print([m for m in ('jax', 'flax', 'optax', 'numpy') if m in sys.modules], file=sys.stderr)"
    )
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert shown.stderr.strip() == "[]"
    assert [name for name in _COMMANDS if f"\n  {name} " not in shown.stdout] == []


@pytest.mark.parametrize("command", _COMMANDS)
def test_every_command_explains_itself(command: str) -> None:
    shown = CliRunner().invoke(main, [command, "--help"])
    assert shown.exit_code == 0
    assert "Usage: main " + command in shown.output


def test_a_saved_plan_is_valid_under_the_printed_schema(tmp_path: Path) -> None:
    schema = json.loads(CliRunner().invoke(main, ["schema", "plan"]).stdout)
    PLAN.save(tmp_path / "plan.json")
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(json.loads((tmp_path / "plan.json").read_text()), schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"schema_version": 1}, schema)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "cnn", "--budget", "0"], "Error: --budget must be above zero, got '0'."),
        (["run", "cnn", "--budget", "lots"], "Error: --budget 'lots' cannot be read."),
        (["plan", "cnn", "--budget", "-1GiB"], "Error: --budget '-1GiB' cannot be read."),
        (["run", "gpt", "--image-size", "8"], "Error: --image-size=8 is not for gpt, which reads text."),
        (["run", "mlp", "--dtype", "bfloat16"], "Error: --dtype=bfloat16 is not for mlp, which computes in one type only."),
        (["plan", "cnn", "--sequence-length", "8"], "Error: --sequence-length=8 is not for cnn, which reads images."),
        (["run", "cnn", "--image-size", "4"], "Error: --image-size must be at least 8: got 4. Pass --image-size=8 or more."),
        (["run", "cnn", "--batch-size", "0"], "Error: --batch-size must be at least 1: got 0."),
        (["plan", "mlp", "--device-profile", "x"], "Error: --device-profile 'x' is not known. Known: a100, b200, cpu, h100,"),
        (["plan", "mlp", "-o", "no/such/plan.json"], "Error: --output=no/such/plan.json: there is no folder no/such."),
        (["run", "mlp", "--save-plan", "."], "Error: --save-plan=. is a folder."),
    ],
)
def test_a_bad_option_is_named_in_one_line(arguments: list[str], message: str) -> None:
    refused = CliRunner().invoke(main, arguments)
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert [line for line in refused.stderr.splitlines() if line.startswith(message)]
    assert "Traceback" not in refused.stderr


@pytest.mark.parametrize(
    "arguments", [["run", "alexnet"], ["run", "cnn", "--steps", "0"], ["show", "nowhere.json"], ["schema", "x"]]
)
def test_what_click_itself_refuses_has_the_same_exit_code(arguments: list[str]) -> None:
    assert CliRunner().invoke(main, arguments).exit_code == 2


def test_what_is_wrong_in_a_jobs_file_is_named_in_the_words_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "jobs.toml").write_text("[device]\nbudget = 1\n[defaults]\nmax_slowdown = 0\n")
    read = click.Command("read", callback=lambda: read_jobs_file(tmp_path / "jobs.toml"))
    monkeypatch.setitem(main.commands, "read", read)
    refused = CliRunner().invoke(main, ["read"])
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert "jobs.toml, line 4: defaults.max_slowdown must be a number of at least 1: got 0." in refused.stderr


def test_ctrl_c_ends_after_the_step_with_the_figures_of_the_steps_done(tmp_path: Path) -> None:
    arguments = ("run", "mlp", "--steps", "1000000", "--json", "--save-plan", "plan.json", "--compile-cache", "cache")
    process = start(*arguments, cwd=tmp_path)
    wait_for_line(process, "training ...")
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    outcome = json.loads(stdout)
    assert process.returncode == 130
    assert "Traceback" not in stderr
    assert outcome["interrupted"] is True
    assert 1 <= outcome["steps_done"] < outcome["steps_asked"] == 1000000
    assert (tmp_path / "plan.json").is_file()
    assert list((tmp_path / "cache").iterdir())


def test_ctrl_c_before_the_first_step_ends_at_once(tmp_path: Path) -> None:
    process = start("run", "mlp", "--budget", "90%", cwd=tmp_path)
    wait_for_line(process, "compiling segments ...")
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    assert (process.returncode, stdout) == (130, "")
    assert "Traceback" not in stderr
    assert stderr.endswith("Interrupted.\n")


def test_a_warning_of_the_package_is_one_line_and_one_of_other_code_says_where_it_comes_from() -> None:
    own = format_warning("budget= was ignored", UserWarning, str(budget.__file__), 3)
    assert own == "Warning: --budget= was ignored\n"
    assert format_warning("two\nlines \x1b", UserWarning, str(budget.__file__), 3) == "Warning: two lines \\x1b\n"
    assert format_warning("old", DeprecationWarning, "/home/me/train.py", 7, "x = 1").startswith(
        "/home/me/train.py:7: Deprecation"
    )


def test_a_damaged_calibration_is_told_in_one_line(tmp_path: Path) -> None:
    damaged = file_for("cpu")  # in the folder of this test
    damaged.parent.mkdir(parents=True)
    damaged.write_text("garbage")
    process = start("plan", "mlp", "--budget=95%", cwd=tmp_path)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 0
    assert [line for line in stderr.splitlines() if "ignored" in line] == [
        f"Warning: {damaged} is ignored, since it cannot be read: JSON is malformed: invalid character (byte 0). Run tensile "
        "calibrate again."
    ]
