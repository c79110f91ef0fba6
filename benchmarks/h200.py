"""`make bench-h200`: compiles planned steps and plain jit for an NVIDIA H200 and compares memory and traffic. Nothing runs.

Peaks are from XLA's own memory figures, in the order of the launches. Traffic is the number of bytes that the kernels read and
write; on a GPU, traffic determines the time of a step that is limited by memory bandwidth. Seconds are those from the traced step
to the compiled plan, with an empty cache: the first call without its trace.

Launch `program` joins the segments into programs with optimization barriers (`tensile_jax/exec/compiling/program_code.py`).

Policy `xla` is XLA's own rematerialization: plain jit's step, compiled for an H200 that has only a share of plain jit's peak as
its memory. `python -m benchmarks.h200 --model gpt` compiles one model's cases; the other rows stay.
Writes `benchmarks/results/h200-compiled.json`.
"""

import json
import time
import warnings
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

import click

from benchmarks.h200_device import H200Compiler, h200, traced_for, traffic, write_compiled
from tensile_jax.budget import Budget
from tensile_jax.device_profiles import load_profile
from tensile_jax.errors import BudgetTooSmall
from tensile_jax.exec.compiling.compiler import peak_of
from tensile_jax.exec.compiling.step import LaunchName, Options, step_of
from tensile_jax.exec.fitting.find_plan import fit
from tensile_jax.exec.fitting.fitting import Fitting
from tensile_jax.exec.fitting.knowledge import Knowledge
from tensile_jax.installed_models import MODELS
from tensile_jax.plan import CompiledSizes
from tensile_jax.trace import TracedStep

_RESULTS = Path(__file__).parent / "results" / "h200-compiled.json"
# Budgets: a part of plain jit's peak, or bytes (75 %, 50 % and 40 % of the 1.83 GB that plain jit takes of another ResNet-50).
_CASES = (
    ("resnet50", 16, (None, 0.9, 1_375_000_000, 0.75, 0.6, 915_000_000, 0.5, 733_000_000, 0.4, 600_000_000, 0.3, 450_000_000)),
    ("gpt", 64, (None, 0.9, 0.75, 0.6, 0.5, 0.4, 0.3)),
)
_XLA_SHARES = (0.9, 0.75, 0.6, 0.5, 0.4)


@click.command()
@click.option("--model", "models", multiple=True, type=click.Choice([name for name, *_ in _CASES]), help="Only these.")
def main(models: tuple[str, ...]) -> None:
    """Compile every case and write the figures."""
    warnings.simplefilter("ignore")
    device = h200()
    kept = json.loads(_RESULTS.read_text())["cases"] if models else []
    rows: list[dict[str, Any]] = [row for row in kept if row["model"] not in models]
    for name, batch_size, budgets in _CASES:
        if models and name not in models:
            continue
        model = MODELS[name](batch_size=batch_size)
        step = traced_for(model, device)
        began = time.perf_counter()
        plain = H200Compiler(device).compile_whole(step.traced)
        plain_s = time.perf_counter() - began
        peak, moved = peak_of(plain), traffic(plain)
        known = {"model": name, "batch_size": batch_size, "jit_peak_bytes": peak, "jit_traffic_bytes": moved, "jit_s": plain_s}
        print(f"{name} batch {batch_size}: plain jit peak {peak / 1e9:.3f} GB, traffic {moved / 1e9:.2f} GB", flush=True)
        for share in _XLA_SHARES:
            rows.append({**known, **_rematerialized(model, share, peak, moved)})
        for budget, launch in product(budgets, ("segments", "program")):
            share = budget / peak if isinstance(budget, int) else budget
            if share is None and launch == "program":
                continue
            row = _case(step, H200Compiler(device), peak, share, launch)
            rows.append({**known, **row})
            if "traffic_bytes" in row:
                row["traffic_ratio"] = rows[-1]["traffic_ratio"] = row["traffic_bytes"] / moved
                form = f" {row['barriers']}" if row["barriers"] else ""
                print(
                    f"  budget {'none' if share is None else f'{share:.0%}':>5} {row['launch']}{form}: peak "
                    f"{row['peak_bytes'] / peak:.3f}, traffic {row['traffic_ratio']:.3f}, {row['segments']} segments, "
                    f"{row['launches']} launches, {row['swapped_bytes'] / 1e6:.0f} MB swapped, {row['rounds']} rounds, "
                    f"{row['seconds'] / plain_s:.2f} of plain jit's seconds",
                    flush=True,
                )
    write_compiled(_RESULTS, "make bench-h200", cases=rows)


def _rematerialized(model: Any, share: float, peak: int, moved: int) -> dict[str, Any]:
    """Plain jit's step where XLA believes that the device has only a share of its peak."""
    device = h200(int(share * peak))
    step = traced_for(model, device)
    compiled = H200Compiler(device).compile_whole(step.traced)
    row = {
        "policy": "xla", "share": share, "peak_bytes": peak_of(compiled), "traffic_bytes": traffic(compiled),
        "traffic_ratio": traffic(compiled) / moved,
    }  # fmt: skip
    print(f"  XLA's own, told {share:>4.0%}: peak {row['peak_bytes'] / peak:.3f}, traffic {row['traffic_ratio']:.3f}", flush=True)
    return row


def _case(traced: TracedStep, compiler: H200Compiler, peak: int, share: float | None, launch: LaunchName) -> dict[str, Any]:
    budget = None if share is None else Budget(int(share * peak), None)
    options = Options("none" if share is None else "auto", load_profile("h200"), "device", launch=launch)
    fitting = Fitting(step_of(traced, options, compiler), budget, Knowledge(CompiledSizes(whole=peak)))
    began = time.perf_counter()
    try:
        found = fit(fitting)
    except BudgetTooSmall as error:
        return {"share": share, "floor_bytes": error.floor_bytes}
    plan, executables = found.plan, found.executables
    assert executables is not None and not plan.whole  # every budget here is below plain jit's peak
    return {
        "policy": options.policy,
        "share": share,
        "seconds": time.perf_counter() - began,
        "rounds": compiler.rounds,
        "executables": len(compiler),
        "peak_bytes": plan.peak_bytes,
        "traffic_bytes": sum(traffic(e.call) for e in executables),
        "segments": len(plan.segments),
        "launch": plan.launch,
        "launches": len(executables),
        "barriers": plan.barriers,
        "swapped_bytes": plan.swapped_out_bytes + plan.swapped_in_bytes,
        "predicted_stall_us": plan.stall_us,
        "predicted_step_us": plan.step_us,
        "floor_bytes": plan.floor_bytes,
        "profile": asdict(options.profile),
    }


if __name__ == "__main__":
    main()
