"""Fits the rates of a GPU's device profile to measured training steps of plain jit, and shows how well they predict these.

    python -m benchmarks.fit_profile benchmarks/results/nvidia-h200/fitted.json --device-profile h200

The rates are `flops_per_us`, `bytes_per_us` and `kernel_us`. Of all values, these have the least sum of squares of the
logarithm of predicted time / time in which the device was busy. Beside them stands what the profile predicts of a step that
is not waited for, with a host that needs `--host-kernel-us` to issue a kernel. Prints one JSON object. No GPU is needed:
steps are traced, and nothing runs.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import jax
from scipy.optimize import minimize

from tensile_jax.device_profiles import DeviceProfile, load_profile
from tensile_jax.installed_models import MODELS
from tensile_jax.plan.analysis.fusion import Fusion, find_fusion
from tensile_jax.plan.analysis.latency import fused_latencies, rewriting_us
from tensile_jax.plan.analysis.liveness import Liveness, find_liveness
from tensile_jax.plan.analysis.operator_order import order
from tensile_jax.trace import trace_step

_Traced = tuple[Liveness, Fusion]


@click.command()
@click.argument("measured", type=click.Path(exists=True, path_type=Path))
@click.option("--device-profile", "name", default="h200", help="The profile that is shown, and from which the fit begins.")
@click.option("--host-kernel-us", default=10.0, help="Of the machine on which the steps were measured.")
def main(measured: Path, name: str, host_kernel_us: float) -> None:
    """Fit to the steps in a file."""
    profile = load_profile(name)
    rows: Sequence[dict[str, Any]] = json.loads(measured.read_text())["steps"]
    steps = [_traced(row, profile) for row in rows]
    busy_us = [1e3 * (row["busy_ms"] or row["pipelined_ms"]) for row in rows]

    def of(numbers: Sequence[float]) -> DeviceProfile:
        flops, nbytes, kernel = (math.exp(number) for number in numbers)
        return replace(profile, flops_per_us=flops, bytes_per_us=nbytes, kernel_us=kernel)

    def error(numbers: Sequence[float]) -> float:
        return sum(math.log(_us(step, of(numbers)) / us) ** 2 for step, us in zip(steps, busy_us, strict=True))

    begin = [math.log(x) for x in (profile.flops_per_us, profile.bytes_per_us, max(profile.kernel_us, 1.0))]
    fitted = of(minimize(error, begin, method="Nelder-Mead").x)
    on_host = replace(profile, host_kernel_us=host_kernel_us)
    shown = [
        {
            "model": row["model"],
            "batch_size": row["batch_size"],
            "fitted over busy": round(_us(step, fitted) / us, 3),
            "profile over busy": round(_us(step, profile) / us, 3),
            "profile over pipelined": round(_us(step, on_host) / (1e3 * row["pipelined_ms"]), 3),
        }
        for row, step, us in zip(rows, steps, busy_us, strict=True)
    ]
    rates = {field: getattr(fitted, field) for field in ("flops_per_us", "bytes_per_us", "kernel_us")}
    print(json.dumps({"fitted": rates, "steps": shown}, indent=1))


def _traced(row: dict[str, Any], profile: DeviceProfile) -> _Traced:
    model = MODELS[row["model"]](batch_size=row["batch_size"], **row["sizes"])
    step = trace_step(jax.jit(model.step, donate_argnums=0), model.step, (model.state_shape, model.batch_shape), {})
    liveness = find_liveness(order(step.whole_graph or step.graph), transposed_updates=profile.fused_reductions)
    return liveness, find_fusion(liveness, fused_reductions=profile.fused_reductions)


def _us(step: _Traced, profile: DeviceProfile) -> float:
    liveness, fusion = step
    return sum(fused_latencies(liveness, fusion, profile)) + rewriting_us(liveness, profile)


if __name__ == "__main__":
    main()
