"""`make bench-h200`: compiles planned steps and plain jit for an NVIDIA H200 and compares memory and traffic. Nothing runs.

Peaks are from XLA's own memory figures, in the order of the launches. Traffic is the number of bytes that the kernels read and
write; on a GPU, traffic determines the time of a step that is limited by memory bandwidth. Writes
`benchmarks/results/h200-compiled.json`.
"""

import json
import warnings
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jax

from benchmarks.h200_device import H200Compiler, h200, placed, traffic
from tensile_jax.budget import Budget
from tensile_jax.device_profiles import load_profile
from tensile_jax.errors import BudgetTooSmall
from tensile_jax.exec.step.compile import peak_of
from tensile_jax.exec.step.prepared_step import Options, PreparedStep
from tensile_jax.installed_models import MODELS
from tensile_jax.plan import Measured
from tensile_jax.trace import trace_step

_RESULTS = Path(__file__).parent / "results" / "h200-compiled.json"
# Budgets: a part of plain jit's peak, or bytes (75 %, 50 % and 40 % of the 1.83 GB that plain jit takes of another ResNet-50).
_CASES = (("resnet50", 16, (None, 0.9, 1_375_000_000, 0.75, 0.6, 915_000_000, 0.5, 733_000_000, 0.4, 600_000_000, 450_000_000)),)


def main() -> None:
    """Compile every case and write the figures."""
    warnings.simplefilter("ignore")
    device = h200()
    rows: list[dict[str, Any]] = []
    for name, batch_size, budgets in _CASES:
        model = MODELS[name](batch_size=batch_size)
        compiler = H200Compiler(device)
        arguments = placed((model.state_shape, model.batch_shape), device)
        step = trace_step(jax.jit(model.step, donate_argnums=0), model.step, arguments, {})
        plain = compiler.compile_whole(step.traced)
        peak, moved = peak_of(plain), traffic(plain)
        print(f"{name} batch {batch_size}: plain jit peak {peak / 1e9:.3f} GB, traffic {moved / 1e9:.2f} GB", flush=True)
        for budget in budgets:
            share = budget / peak if isinstance(budget, int) else budget
            row = _case(step, compiler, peak, share)
            rows.append({"model": name, "batch_size": batch_size, "jit_peak_bytes": peak, "jit_traffic_bytes": moved, **row})
            if "traffic_bytes" in row:
                row["traffic_ratio"] = rows[-1]["traffic_ratio"] = row["traffic_bytes"] / moved
                print(
                    f"  budget {'none' if share is None else f'{share:.0%}':>5}: peak {row['peak_bytes'] / peak:.3f}, "
                    f"traffic {row['traffic_ratio']:.3f}, {row['segments']} segments, "
                    f"{row['swapped_bytes'] / 1e6:.0f} MB swapped",
                    flush=True,
                )
    document = {
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "jax": jax.__version__,
        "what": "compiled for an H200 without a GPU; nothing ran",
        "command": "make bench-h200",
        "cases": rows,
    }
    _RESULTS.write_text(json.dumps(document, indent=1) + "\n")


def _case(step: Any, compiler: H200Compiler, peak: int, share: float | None) -> dict[str, Any]:
    budget = None if share is None else Budget(int(share * peak), None)
    options = Options("none" if share is None else "auto", load_profile("h200"), "device")
    prepared = PreparedStep(step, budget, options, compiler)
    prepared.measured = Measured(whole=peak)
    try:
        found = prepared.choose_and_compile()
    except BudgetTooSmall as error:
        return {"share": share, "floor_bytes": error.floor_bytes}
    plan, executables = found.plan, found.executables
    assert executables is not None  # every budget here is below plain jit's peak
    return {
        "share": share,
        "peak_bytes": plan.peak_bytes,
        "traffic_bytes": sum(traffic(e.call) for e in executables),
        "segments": len(plan.segments),
        "swapped_bytes": plan.swapped_out_bytes + plan.swapped_in_bytes,
        "predicted_stall_us": plan.stall_us,
        "predicted_step_us": plan.step_us,
        "floor_bytes": plan.floor_bytes,
        "profile": asdict(options.profile),
    }


if __name__ == "__main__":
    main()
