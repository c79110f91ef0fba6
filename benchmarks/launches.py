"""`make bench-launches`: the same plans launched by segments and as programs, compiled for an NVIDIA H200. Nothing runs.

For each budget, the planner's first choice is compiled with every segment as an executable of its own, and with segments joined
into programs with each form of barriers (`tensile_jax/exec/compiling/program_code.py`). Peak and traffic (bytes that kernels
read and write) are relative to plain jit's, and so are the seconds to compile. A step takes the first program that keeps its
budget, and else segments; `make bench-h200` shows that. Writes `benchmarks/results/launches-h200.json`.
"""

import json
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from benchmarks.h200_device import H200Compiler, h200, traced_for, traffic, write_compiled
from tensile_jax.budget import Budget
from tensile_jax.device_profiles import load_profile
from tensile_jax.exec.compiling.compiler import peak_of
from tensile_jax.exec.compiling.step import Options, step_of
from tensile_jax.exec.fitting.fitting import Fitting
from tensile_jax.exec.fitting.knowledge import Knowledge
from tensile_jax.installed_models import MODELS
from tensile_jax.plan import CompiledSizes, Goal
from tensile_jax.plan.result.joined import can_be_joined
from tensile_jax.plan_format import Barriers

_RESULTS = Path(__file__).parent / "results" / "launches-h200.json"
_MODELS = (("gpt", 64), ("resnet50", 16))
_SHARES = (0.75, 0.5, 0.4)  # of plain jit's peak


def main() -> None:
    """Compile every case and write the figures."""
    warnings.simplefilter("ignore")
    device = h200()
    rows: list[dict[str, Any]] = []
    for name, batch_size in _MODELS:
        model = MODELS[name](batch_size=batch_size)
        traced = traced_for(model, device)
        began = time.perf_counter()
        plain = H200Compiler(device).compile_whole(traced.traced)
        plain_s, peak, moved = time.perf_counter() - began, peak_of(plain), traffic(plain)
        for share in _SHARES:
            options = Options("auto", load_profile("h200"), "device")
            step = step_of(traced, options, H200Compiler(device))
            fitting = Fitting(step, Budget(int(share * peak), None), Knowledge(CompiledSizes(whole=peak)))
            goal = Goal(share * peak)
            chosen = fitting.chosen(goal)
            if chosen is None or chosen.plan.whole:
                continue
            for barriers in (None, *(form for form in get_args(Barriers) if can_be_joined(chosen.plan, step.graph, form))):
                began = time.perf_counter()
                found = fitting.compiled(replace(chosen.choice, barriers=barriers), goal)
                if found is None or found.executables is None:
                    continue
                seconds = time.perf_counter() - began
                known = {"model": name, "batch_size": batch_size, "share": share, "barriers": barriers}
                rows.append({
                    **known,
                    "segments": len(found.plan.segments),
                    "launches": len(found.executables),
                    "peak_ratio": round(found.plan.peak_bytes / peak, 4),
                    "traffic_ratio": round(sum(traffic(e.call) for e in found.executables) / moved, 4),
                    "compile_ratio": round(seconds / plain_s, 2),
                })  # fmt: skip
                print(json.dumps(rows[-1]), flush=True)
    write_compiled(_RESULTS, "make bench-launches", cases=rows)


if __name__ == "__main__":
    main()
