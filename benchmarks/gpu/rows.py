"""Measures the rows that a run wants, in their order, and adds each to a JSON file as soon as it is there.

A row is left out if the file has it: measured on the same kind of GPU with the same jax, to its end and without an error. Delete
the file to measure it again. If the time is up while a row is measured, it has what was measured by then (`cut_off`), or is not
added.
"""

import json
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, as_completed
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import click

from benchmarks.cases import Cases, Row
from benchmarks.run import TIME_IS_UP
from tensile_jax.atomic_file import write_whole

_ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Wanted:
    """A row that is wanted: what is asked, which names it in the file, and how it is measured."""

    asked: Mapping[str, str | int]
    start: Callable[[Cases], Future[Row]]


class Run(NamedTuple):
    """What a run wants, and how it shows a row that is there."""

    wanted: Sequence[Wanted]
    shown: Callable[[Row], str]

    def only(self, parts: Sequence[str]) -> "Run":
        """The rows whose names have all these parts."""
        return self._replace(wanted=[one for one in self.wanted if all(part in _name(one.asked) for part in parts)])


def record(file: Path, about: Mapping[str, Any], run: Run, cases: Cases) -> int:
    """Measure what the file does not have yet. Returns how many rows are still missing."""
    document: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {"rows": []}
    rows: dict[str, Row] = {_name(row["asked"]): row for row in document["rows"]}
    missing = [one for one in run.wanted if not _is_done(rows.get(_name(one.asked)), about)]
    started = {one.start(cases): one for one in missing}
    left = 0
    for done in as_completed(started):
        asked, row = started[done].asked, done.result()
        if row.get("error") == TIME_IS_UP:
            left += 1
            continue
        rows[_name(asked)] = {"asked": dict(asked), "made": _now(), **row}
        file.parent.mkdir(parents=True, exist_ok=True)
        document = {**about, "made": _now(), "rows": list(rows.values())}
        write_whole(file, (json.dumps(document, indent=1) + "\n").encode())
        click.echo(f"{_name(asked)}: {_problem(row) or run.shown(row)}")
    return left


def about_this_machine(command: str, commit: str | None) -> dict[str, Any]:
    """The GPU, its driver, and the versions. A process of its own asks jax, since this one must take no memory of the GPU."""
    code = "import jax, json; d = jax.devices()[0]; print(json.dumps([d.platform, d.device_kind]))"
    seen, device = json.loads(_printed(sys.executable, "-c", code).splitlines()[-1])
    driver = _printed("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") if shutil.which("nvidia-smi") else ""
    return {
        "platform": seen,
        "device": device,
        "driver": driver.strip() or None,
        "jax": version("jax"),
        "jaxlib": version("jaxlib"),
        "python": platform.python_version(),
        "tensile_jax": commit or _commit(),
        "command": command,
    }


def _printed(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _commit() -> str:
    """The commit that is checked out; the version of the package where there is no repository."""
    if shutil.which("git") and (_ROOT / ".git").exists():
        return _printed("git", "-C", str(_ROOT), "describe", "--always", "--dirty").strip()
    return version("tensile_jax")


def _name(asked: Mapping[str, str | int]) -> str:
    return ", ".join(str(value) for value in asked.values() if value != "")


def _is_done(row: Row | None, about: Mapping[str, Any]) -> bool:
    if row is None or "error" in row or "cut_off" in row:
        return False
    return (row["device"], row["jax"]) == (about["device"], about["jax"])


def _problem(row: Row) -> str | None:
    if "error" in row:
        return f"failed: {row['error'].strip().splitlines()[-1][:200]}"
    if "too_small" in row:
        return f"the budget is too small: at least {row['floor_ratio']:.3f} of plain jit's peak is needed"
    return None


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
