"""Runs the tests of this folder that need several devices in processes that have eight, since a process settles how many it has
when JAX starts."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
FILES = sorted(file.name for file in HERE.glob("test_*.py") if "several_devices" in file.read_text() and file != Path(__file__))


def _run(file: str, marked: str, cache: pytest.Cache) -> None:
    kept = cache.mkdir("eight-devices")  # as in tests/conftest.py; another folder than that of the run that began this one
    environment = {
        **os.environ,
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0",
        "JAX_PLATFORMS": "cpu",
    }
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-m", marked, "-o", f"cache_dir={kept}", str(HERE / file)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    none_selected = 5
    assert done.returncode in (0, none_selected), done.stdout[-8000:] + done.stderr[-2000:]
    assert " passed" in done.stdout or done.returncode == none_selected


@pytest.mark.parametrize("file", FILES)
def test_the_tests_for_several_devices_pass_on_eight_devices_of_a_cpu(file: str, pytestconfig: pytest.Config) -> None:
    _run(file, "several_devices and not slow", pytestconfig.cache)


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES)
def test_those_that_take_long_pass_too(file: str, pytestconfig: pytest.Config) -> None:
    _run(file, "several_devices and slow", pytestconfig.cache)
