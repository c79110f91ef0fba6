"""Runs scenarios of `program.py` in several processes, each of which has a CPU that stands in for four devices."""

import json
import os
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
PROGRAM = Path(__file__).with_name("program.py")


@dataclass(frozen=True)
class Ended:
    """How a process has ended. `found` is what each of its scenarios has returned, and `after_s` when it ended."""

    code: int
    found: dict[str, Any]
    text: str
    after_s: float


def run(scenarios: str, folder: Path, *, timeout_s: float, processes: int = 2) -> list[Ended]:
    """Run the scenarios in so many processes. A process that has not ended in time is killed, and its code is then negative."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    environment = {
        **os.environ,
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0",  # and compile quickly
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "models"), os.environ.get("PYTHONPATH", "")]),
    }
    began = time.monotonic()
    running: list[subprocess.Popen[bytes]] = []
    ends: dict[int, float] = {}
    try:
        for process in range(processes):
            with (folder / f"output-{process}.txt").open("wb") as output:
                command = [sys.executable, "-u", str(PROGRAM), scenarios, str(process), str(processes), port, str(folder)]
                running.append(subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True))
        while len(ends) < len(running) and time.monotonic() < began + timeout_s:
            time.sleep(0.05)
            for process, one in enumerate(running):
                if one.poll() is not None:
                    ends.setdefault(process, time.monotonic() - began)
    finally:
        for one in running:
            one.kill()
            one.wait()
    return [
        Ended(one.returncode, _found(folder / f"{process}.json"), _text(folder / f"output-{process}.txt"), ends.get(process, 1e9))
        for process, one in enumerate(running)
    ]


def _found(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text()) if file.exists() else {}


def _text(file: Path) -> str:
    return "\n".join(line for line in file.read_text(errors="replace").splitlines() if "[Gloo]" not in line)
