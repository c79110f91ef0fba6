"""`make bench`: compares planned steps with plain `jax.jit`: peaks, times, and the quality of the predictions.

Each case runs in a process of its own (`case.py`), in which the steps of both alternate. Ratios are relative to plain jit. Writes
`benchmarks/results/<device>.json`, and prints a table.
"""

import json
import platform
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

_RESULTS = Path(__file__).parent / "results"
_TEXT = '{"sequence_length": 256}'
_CASES: tuple[tuple[str, ...], ...] = (
    *(("resnet50", "--batch-size", "8", "--budget", b, "--steps", "4") for b in ("none", "75%", "50%", "30%", "25%")),
    *(("vgg16", "--batch-size", "4", "--budget", b, "--steps", "4") for b in ("none", "80%", "75%")),
    ("vgg16", "--batch-size", "4", "--budget", "60%", "--steps", "4", "--state-memory", "any"),
    *(("gpt", "--batch-size", "8", "--sizes", _TEXT, "--budget", b) for b in ("none", "75%", "50%", "30%", "20%")),
    *(("gpt_scan", "--batch-size", "8", "--sizes", _TEXT, "--budget", b) for b in ("none", "75%", "50%", "40%", "20%")),
    *(
        (*case, "--steps", "3", "--policy", policy)
        for case in (
            ("resnet50", "--batch-size", "8", "--budget", "75%"),
            ("resnet50", "--batch-size", "8", "--budget", "60%"),
            ("gpt", "--batch-size", "8", "--budget", "60%", "--sizes", _TEXT),
        )
        for policy in ("tensile", "capuchin", "vdnn", "checkpoint")
    ),
)

TIME_IS_UP = "The time was up."


def run_case(
    arguments: tuple[str, ...], *options: str, program: str = "benchmarks.case", seconds: float | None = None
) -> dict[str, Any]:
    """The JSON that the program prints last; an `error` if it fails. `options` are of this machine and not part of the case.

    If the program takes longer than so many seconds, it is killed. What it has printed by then is `cut_off`; without any, that is
    the error `TIME_IS_UP`.
    """
    command = [sys.executable, "-m", program, *arguments, *options]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=seconds)
    except subprocess.TimeoutExpired as late:
        whole = (late.stdout or b"").decode().rpartition("\n")[0].splitlines()
        found = {**json.loads(whole[-1]), "cut_off": True} if whole else {"error": TIME_IS_UP}
        return {"case": list(arguments), **found}
    if done.returncode:
        return {"case": list(arguments), "error": done.stderr[-2000:]}
    return {"case": list(arguments), **json.loads(done.stdout.splitlines()[-1])}


def table_of(cases: list[dict[str, Any]]) -> Table:
    """One row a case."""
    table = Table(title="planned step / plain jax.jit")
    for column in (
        "model",
        "budget",
        "policy",
        "peak",
        "time",
        "predicted peak",
        "predicted time",
        "segments",
        "launches",
        "swapped MB",
        "plan s",
        "compile",
        "loop us",
    ):
        table.add_column(column, justify="right")
    for c in cases:
        if "time_ratio" not in c:
            why = f"floor {c['floor_ratio']:.3f}" if "floor_ratio" in c else "failed"
            table.add_row(c["case"][0], c.get("budget", ""), c.get("policy", ""), why)
            continue
        table.add_row(
            f"{c['model']} b{c['batch_size']}", c["budget"], c["policy"], f"{c['peak_ratio']:.3f}", f"{c['time_ratio']:.3f}",
            f"{c['predicted_over_measured']:.4f}", f"{c['predicted_over_measured_time']:.3f}", str(c["segments"]),
            str(c["launches"]), f"{c['swapped_bytes'] / 1e6:.0f}", f"{c['trace_to_plan_s']:.2f}", f"{c['compile_ratio']:.2f}",
            f"{c['loop_us_per_segment']:.1f}",
        )  # fmt: skip
    return table


@click.command()
@click.option("--only", help="Cases of this model only.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Where to write the JSON.")
def main(only: str | None, output: Path | None) -> None:
    console = Console(stderr=True, width=120)
    cases: list[dict[str, Any]] = []
    for arguments in _CASES:
        if only and arguments[0] != only:
            continue
        console.print("running", *arguments)
        cases.append(run_case(arguments))
    with tempfile.TemporaryDirectory() as cache:
        for label in ("cold", "warm"):
            warm = run_case(("resnet50", "--batch-size", "8", "--budget", "50%", "--steps", "1"), "--cache", cache)
            console.print(
                label,
                "cache: compile",
                round(warm.get("compile_s", 0), 2),
                "s, plain jit",
                round(warm.get("jit_compile_s", 0), 2),
            )
            cases.append({"cache": label, **warm})
    document = {
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": f"{platform.machine()}, Python {platform.python_version()}",
        "command": "make bench",
        "cases": cases,
    }
    path = output or _RESULTS / f"{cases[0].get('device', 'unknown').lower().replace(' ', '-')}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n")
    Console(width=150).print(table_of([c for c in cases if "cache" not in c]))
    console.print("written", path)


if __name__ == "__main__":
    main()
