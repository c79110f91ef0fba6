"""Compares the report on each program's memory with what XLA says of plain jit, and times reports and pages.

    python -m benchmarks.memory
    python -m benchmarks.memory --only diffusion --only nanogpt

For each workload and each program of `benchmarks/workloads`: whether the report's compiled peak is that of `jax.jit`'s own
executable, the predicted peak beside it, whether what lives at the peak adds up to the predicted peak, and which part of that is
packing. Ends with an error if a report is wrong. Before that, for ResNet-50: how long a report takes beside the trace of the
step, and how large its page is. Writes `benchmarks/results/memory.json`.
"""

import json
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import jax
from tensile_models.resnet import resnet50

import tensile_jax as tensile
from benchmarks.workloads import PROGRAMS, WORKLOADS, Program
from tensile_jax.memory_report.calls import calls_of

RESULTS = Path(__file__).parent / "results" / "memory.json"
MOST_PACKING = 0.2  # of the predicted peak; more would mean that the report is wrong about what lives there


def program_of(name: str) -> Program:
    """The workload or the program of this name. The state of a workload is donated."""
    if name in PROGRAMS:
        return PROGRAMS[name]()
    workload = WORKLOADS[name]()
    return Program(workload.step, jax.eval_shape(lambda: (workload.init(), workload.batch(0))), {"donate_argnums": 0})


def measured(program: Program) -> dict[str, Any]:
    """The peaks of one program, and how what lives at the peak adds up."""
    report = tensile.memory(program.function, *program.arguments, compile=True, **program.options)
    memory: Any = jax.jit(program.function, **program.options).lower(*program.arguments).compile().memory_analysis()
    beside = memory.output_size_in_bytes - memory.alias_size_in_bytes + memory.temp_size_in_bytes
    packing = sum(part.nbytes for part in report.held if part.role == "packing")
    return {
        "jit_peak_bytes": memory.argument_size_in_bytes + beside,
        "compiled_peak_bytes": report.compiled_peak_bytes,
        "predicted_peak_bytes": report.predicted_peak_bytes,
        "adds_up": sum(part.nbytes for part in report.held) == report.predicted_peak_bytes,
        "packing_share": packing / report.predicted_peak_bytes,
        "tensors": len(report.tensors),
    }


def is_right(row: dict[str, Any]) -> bool:
    """Whether the compiled peak is `jax.jit`'s, and what lives at the peak adds up to the prediction without much packing."""
    same = row["compiled_peak_bytes"] == row["jit_peak_bytes"]
    return same and row["adds_up"] and abs(row["packing_share"]) <= MOST_PACKING


def seconds(act: Callable[[], object]) -> float:
    """How long it takes."""
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


def timed() -> dict[str, float]:
    """How long a report on ResNet-50 takes beside the trace, and how large its page is and how long that takes."""
    traced, reported = resnet50(batch_size=16), resnet50(batch_size=16)
    calls = calls_of(traced.step, {"device_profile": "cpu"}, {"donate_argnums": 0})
    trace_s = seconds(lambda: calls.step((traced.state_shape, traced.batch_shape), {}))
    found: list[tensile.MemoryReport] = []
    report_s = seconds(
        lambda: found.append(
            tensile.memory(reported.step, reported.state_shape, reported.batch_shape, device_profile="cpu", donate_argnums=0)
        )
    )
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "memory.html"
        page_s = seconds(lambda: found[0].save(page))
        page_bytes = page.stat().st_size
    operators = len(found[0].operators)
    return {"trace_s": trace_s, "report_s": report_s, "page_s": page_s, "page_bytes": page_bytes, "operators": operators}


@click.command()
@click.option("--only", multiple=True, type=click.Choice([*WORKLOADS, *PROGRAMS]), help="Only these.")
def main(only: Sequence[str]) -> None:
    jax.block_until_ready(jax.jit(lambda x: x + 1)(0.0))  # JAX's own first call of anything
    times = timed()
    print(
        f"ResNet-50: trace {times['trace_s']:.2f} s, report {times['report_s']:.2f} s "
        f"({times['report_s'] / times['trace_s']:.2f} times), page of {times['operators']} operators "
        f"{times['page_bytes'] / 1e6:.2f} MB in {times['page_s']:.2f} s"
    )
    rows: dict[str, Any] = {}
    for name in only or (*WORKLOADS, *PROGRAMS):
        rows[name] = row = measured(program_of(name))
        off = row["predicted_peak_bytes"] / row["compiled_peak_bytes"]
        print(
            f"{name:24} XLA {row['compiled_peak_bytes'] / 2**20:8.2f} MiB  predicted {off:5.2f}  "
            f"packing {row['packing_share']:+.3f}  "
            f"same as jax.jit {row['jit_peak_bytes'] == row['compiled_peak_bytes']}  adds up {row['adds_up']}",
            flush=True,
        )
    if not only:
        about = {"made": datetime.now(UTC).isoformat(timespec="seconds"), "jax": jax.__version__, "command": "make bench-memory"}
        of = {kind: {name: rows[name] for name in names} for kind, names in (("workloads", WORKLOADS), ("programs", PROGRAMS))}
        RESULTS.write_text(json.dumps({**about, "resnet50": times, **of}, indent=1) + "\n")
    wrong = [name for name, row in rows.items() if not is_right(row)]
    if wrong:
        raise click.ClickException(f"These reports are wrong: {', '.join(wrong)}.")


if __name__ == "__main__":
    main()
