"""`make bench-first-call`: how long the first call of a step takes under a budget, beside plain jit's.

Each first call happens in a process of its own (`first_call_case.py`): with an empty cache of compiled programs (cold), then with
the cache that the process before it has left (warm). Ratios are relative to plain jit's first call with an empty cache. Writes
`benchmarks/results/first-call.json`, and prints a table. `--note` is written into the file, such as what else the machine did.
"""

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from benchmarks.first_call_case import MIXER, SIZES

_RESULTS = Path(__file__).parent / "results" / "first-call.json"
_BUDGETS = ("90%", "60%", "40%")
_LIMIT_S = 600  # of one process


def run_case(*arguments: str) -> dict[str, Any]:
    """The JSON that the case prints; an `error` if it fails."""
    command = [sys.executable, "-m", "benchmarks.first_call_case", *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_LIMIT_S)
    except subprocess.TimeoutExpired:
        return {"error": f"took more than {_LIMIT_S} s"}
    return {"error": done.stderr[-1000:]} if done.returncode else json.loads(done.stdout.splitlines()[-1])


def cold_and_warm(*arguments: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The case with an empty cache, and again with the cache that this has left."""
    with tempfile.TemporaryDirectory() as cache:
        return run_case(*arguments, "--cache", cache), run_case(*arguments, "--cache", cache)


def measure(model: str, budgets: tuple[str, ...]) -> list[dict[str, Any]]:
    """Plain jit's first call, and those under each budget."""
    plain_cold, plain_warm = cold_and_warm(model)
    cases: list[dict[str, Any]] = [{"model": model, "budget": None, "cold": plain_cold, "warm": plain_warm}]
    for budget in budgets:
        cold, warm = cold_and_warm(model, "--budget", budget)
        case: dict[str, Any] = {"model": model, "budget": budget, "cold": cold, "warm": warm}
        for prefix, run in (("", cold), ("warm_", warm)):
            if "error" not in run and "too_small" not in run:
                case[f"{prefix}ratio"] = run["first_call_s"] / plain_cold["first_call_s"]
                case[f"{prefix}cpu_ratio"] = run["cpu_s"] / plain_cold["cpu_s"]
        cases.append(case)
    return cases


def prediction(cases: list[dict[str, Any]], name: str) -> dict[str, float]:
    """Median and 95th percentile of the size of the errors called `name`, and the worst prediction that was too low."""
    errors = [error for case in cases for error in case["cold"].get(name, [])]
    sizes = sorted(map(abs, errors))
    if not sizes:
        return {}
    high = sizes[min(int(0.95 * len(sizes)), len(sizes) - 1)]
    return {"segments": len(sizes), "median": statistics.median(sizes), "percentile_95": high, "lowest": min(errors)}


def table_of(cases: list[dict[str, Any]]) -> Table:
    """One row a case."""
    table = Table(title="first call, seconds; ratios to plain jit's with an empty cache")
    columns = (
        "model", "budget", "cold s", "ratio", "of cpu", "warm s", "ratio", "of cpu",
        "trace", "plan", "compile", "rounds", "executables",
    )  # fmt: skip
    for column in columns:
        table.add_column(column, justify="right")
    for case in cases:
        cold, warm = case["cold"], case["warm"]
        if "error" in cold or "too_small" in cold:
            table.add_row(case["model"], str(case["budget"]), "failed" if "error" in cold else "too small")
            continue
        parts = [f"{cold[name]:.2f}" if name in cold else "" for name in ("trace_s", "plan_s", "compile_s")]
        counts = [f"{cold.get(name, '')}" for name in ("rounds", "executables")]
        times: list[str] = []
        for prefix, run in (("", cold), ("warm_", warm)):
            ratios = [f"{case[name]:.2f}" if name in case else "" for name in (f"{prefix}ratio", f"{prefix}cpu_ratio")]
            times += [f"{run.get('first_call_s', float('nan')):.2f}", *ratios]
        table.add_row(case["model"], case["budget"] or "plain jit", *times, *parts, *counts)
    return table


@click.command()
@click.option("--only", multiple=True, help="These models only.")
@click.option("--budget", "budgets", multiple=True, default=_BUDGETS)
@click.option("--note", default="", help="What a reader of the figures must know, such as what else ran.")
@click.option("-o", "--output", type=click.Path(path_type=Path), default=_RESULTS)
def main(only: tuple[str, ...], budgets: tuple[str, ...], note: str, output: Path) -> None:
    console = Console(stderr=True, width=120)
    cases: list[dict[str, Any]] = []
    document: dict[str, Any] = {}
    for model in only or (*SIZES, MIXER):
        console.print("running", model)
        cases += measure(model, budgets)
        document = {
            "made": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
            "versions": {name: version(name) for name in ("tensile_jax", "jax", "jaxlib", "flax", "optax")},
            "command": " ".join(["python -m benchmarks.first_call", *sys.argv[1:]]) if sys.argv[1:] else "make bench-first-call",
            "note": note,
            "sizes": SIZES,
            "workspace_error": prediction(cases, "workspace_errors"),
            "device_bytes_error": prediction(cases, "device_bytes_errors"),
            "cases": cases,
        }
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(document, indent=1) + "\n")  # after each model, since all of them take long
    Console(width=140).print(table_of(cases))
    for name in ("workspace_error", "device_bytes_error"):
        console.print(name, document[name])
    console.print("written", output)


if __name__ == "__main__":
    main()
