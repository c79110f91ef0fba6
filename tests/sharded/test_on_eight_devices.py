"""Runs the tests of this folder that need several devices in a process that has eight, since a process settles how many it has
when JAX starts."""

import os
import subprocess
import sys
from pathlib import Path


def test_all_tests_for_several_devices_pass_on_eight_devices_of_a_cpu() -> None:
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-m", "several_devices", "-p", "no:cacheprovider", str(Path(__file__).parent)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
