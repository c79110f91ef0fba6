"""`make bench-workloads`: trains every workload under budgets beside plain jit, each in a process of its own.

Writes `benchmarks/results/workloads-<device>.json`, and prints a table. The caches of earlier runs are not used.
"""

import json
import os
import platform
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

import click
import jax
from rich.console import Console
from rich.table import Table

from benchmarks.workloads import WORKLOADS

_RESULTS = Path(__file__).parents[1] / "results"
_BUDGETS = ("60%", "40%")
_LIMIT_S = 900  # of one process


def run_case(name: str, budget: str, improve: str | None) -> dict[str, Any]:
    """The JSON that the case prints; an `error` if it fails."""
    command = [sys.executable, "-m", "benchmarks.workloads.case", name, "--budget", budget]
    command += [] if improve is None else ["--improve", improve]
    failed = {"workload": name, "budget": budget}
    with tempfile.TemporaryDirectory() as cache:
        try:
            environment = {**os.environ, "TENSILE_CACHE_DIR": cache}
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_LIMIT_S, env=environment)
        except subprocess.TimeoutExpired:
            return {**failed, "error": f"took more than {_LIMIT_S} s"}
    return {**failed, "error": done.stderr[-1500:]} if done.returncode else json.loads(done.stdout.splitlines()[-1])


def table_of(cases: list[dict[str, Any]]) -> Table:
    """One row a case."""
    table = Table(title="planned step beside plain jax.jit")
    columns = ("workload", "budget", "peak", "time", "first call s", "plan", "compile", "jit's", "segments", "losses")
    for column in columns:
        table.add_column(column, justify="right")
    for c in cases:
        if "error" in c:
            table.add_row(c["workload"], c["budget"], "failed")
            continue
        seconds = [f"{c[name]:.1f}" for name in ("first_call_s", "plan_s", "compile_s", "jit_first_call_s")]
        budget = f"{c['budget_ratio']:.3f} least" if c["refused"] else c["budget"]
        difference = f"{c['loss_difference']:.0e}"
        table.add_row(
            c["workload"], budget, f"{c['peak_ratio']:.3f}", f"{c['time_ratio']:.2f}", *seconds, str(c["segments"]), difference
        )
    return table


@click.command()
@click.option("--only", multiple=True, type=click.Choice(list(WORKLOADS)), help="These workloads only.")
@click.option("--budget", "budgets", multiple=True, default=_BUDGETS, show_default=True)
@click.option("--improve", type=click.Choice(["background"]), help="As in `tensile_jax.jit`.")
@click.option("--at-once", default=1, show_default=True, help="Cases at a time: more are done sooner, and are slower.")
@click.option("--note", default="", help="What a reader of the figures must know, such as what else ran.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Where to write the JSON.")
def main(
    only: tuple[str, ...], budgets: tuple[str, ...], improve: str | None, at_once: int, note: str, output: Path | None
) -> None:
    """Run every case and write the figures."""
    console = Console(stderr=True, width=140)
    device = jax.devices()[0].device_kind.lower().replace(" ", "-")
    path = output or _RESULTS / f"workloads-{device}.json"
    cases: list[dict[str, Any]] = []
    with ThreadPoolExecutor(at_once) as pool:
        running = [pool.submit(run_case, name, budget, improve) for name, budget in product(only or tuple(WORKLOADS), budgets)]
        for one in running:
            case = one.result()
            cases.append(case)
            console.print(f"{len(cases)} of {len(running)}:", case["workload"], case["budget"], case.get("error", ""))
            document = {
                "made": datetime.now(UTC).isoformat(timespec="seconds"),
                "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
                "versions": {name: version(name) for name in ("tensile_jax", "jax", "jaxlib", "flax", "optax")},
                "command": " ".join(["python -m benchmarks.workloads", *sys.argv[1:]]),
                "note": note,
                "cases": cases,
            }
            path.write_text(json.dumps(document, indent=1) + "\n")  # after each case, since all of them take long
    console.print(table_of(cases))
    console.print("written", path)


if __name__ == "__main__":
    main()
