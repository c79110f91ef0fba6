"""`tensile --version`, and the one version that the files of a release name."""

import os
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import jax
from click.testing import CliRunner

from tensile_jax.cli.main import main

_ROOT = Path(__file__).parents[2]


def test_the_version_names_the_packages_and_the_default_device() -> None:
    shown = CliRunner().invoke(main, ["--version"])
    assert shown.exit_code == 0, shown.output
    device = jax.devices()[0]
    assert shown.output.splitlines() == [
        *(f"{package} {version(package)}" for package in ("tensile_jax", "jax", "jaxlib")),
        f"device {device.device_kind} ({device.platform})",
    ]


def test_the_version_says_in_one_line_that_no_device_can_be_reached() -> None:
    script = "from tensile_jax.cli.program import start; start()"
    environment = {**os.environ, "PYTHONPATH": str(_ROOT), "JAX_PLATFORMS": "no_such_platform"}
    shown = subprocess.run([sys.executable, "-c", script, "--version"], env=environment, capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
    assert len(shown.stdout.splitlines()) == 4
    assert shown.stdout.splitlines()[3].startswith("device cannot be reached: ")
    assert "Traceback" not in shown.stderr


def test_the_files_of_a_release_name_the_same_version() -> None:
    released = tomllib.loads((_ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert f"\nversion: {released}\n" in (_ROOT / "CITATION.cff").read_text()
    changes = (_ROOT / "CHANGELOG.md").read_text()
    assert next(line for line in changes.splitlines() if line.startswith("## ")).startswith(f"## {released} ")
