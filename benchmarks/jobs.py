"""`make bench-jobs`: compares several jobs under one budget with the same jobs under plain jit, one after another.

Each case runs in a process of its own (`jobs_case.py`). Budgets are parts of the sum of the jobs' plain-jit peaks. Writes
`benchmarks/results/jobs-<device>.json`, and prints a table.
"""

import json
import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

_RESULTS = Path(__file__).parent / "results"
_MOST_S = 1200
_CASES: tuple[tuple[str, ...], ...] = (
    ("gpt:8", "gpt:8", "--lowest"),
    ("gpt:8", "gpt:8", "gpt:8"),
    ("gpt:8", "gpt:8", "gpt:8", "gpt:8"),
    ("resnet50:4", "resnet50:4"),
    ("resnet50:4", "gpt:8", "--lowest"),
    ("resnet50:4", "gpt:8", "cnn:256"),
    ("resnet50:4", "gpt:8", "gpt:8", "cnn:256"),
)


def run_case(arguments: tuple[str, ...]) -> dict[str, Any]:
    """The JSON that the case prints; an `error` if it fails."""
    command = [sys.executable, "-m", "benchmarks.jobs_case", *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_MOST_S)
    except subprocess.TimeoutExpired:
        return {"case": list(arguments), "error": f"took more than {_MOST_S} s"}
    if done.returncode:
        return {"case": list(arguments), "error": done.stderr[-2000:]}
    return {"case": list(arguments), **json.loads(done.stdout.splitlines()[-1])}


def table_of(cases: list[dict[str, Any]]) -> Table:
    """One row a budget."""
    table = Table(title="jobs together / plain jax.jit one after another")
    for column in ("jobs", "budget", "peak", "of planned", "throughput", "in CPU time", "computing", "parks", "us a launch"):
        table.add_column(column, justify="right")
    for case in cases:
        if "error" in case:
            table.add_row(" ".join(case["case"]), "failed")
            continue
        for row in case["budgets"]:
            if "throughput" not in row:
                table.add_row(" + ".join(case["jobs"]), f"{row['budget']:.2f}", "-")
                continue
            table.add_row(
                " + ".join(case["jobs"]), f"{row['budget']:.2f}", f"{row['peak_ratio']:.3f}",
                f"{row['peak_over_planned_sum']:.3f}", f"{row['throughput']:.2f}", f"{row['cpu_throughput']:.2f}",
                f"{row['computing']:.2f}", f"{row['parks']:.0f}", f"{row['controller_us_per_launch']:.0f}",
            )  # fmt: skip
    return table


@click.command()
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Where to write the JSON.")
def main(output: Path | None) -> None:
    console = Console(stderr=True, width=140)
    cases: list[dict[str, Any]] = []
    for arguments in _CASES:
        console.print("running", *arguments)
        cases.append(run_case(arguments))
    document = {
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        "command": "make bench-jobs",
        "load": "each case has the machine's load averages at its end; one process alone is about 1 to 2",
        "cases": cases,
    }
    device = next((case["device"] for case in cases if "device" in case), "unknown")
    path = output or _RESULTS / f"jobs-{device.lower().replace(' ', '-')}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n")
    Console(width=140).print(table_of(cases))
    console.print("written", path)


if __name__ == "__main__":
    main()
