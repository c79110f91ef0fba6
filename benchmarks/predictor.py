"""`make bench-predictor`: how far predicted latencies of operators are from measured ones, on networks that were not fitted to.

Calibrates this machine anew, in a folder of its own, and then measures every different heavy operator of each model's train step
as an executable of its own. Beside the latency model, there are the roofline with the measured rates, and the roofline with the
rates of the profile that comes with the package. Writes `benchmarks/results/predictor.json`.
"""

import json
import os
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import jax
import numpy as np

from tensile_jax.device_profiles import calibrations, profile_for, shipped_profile
from tensile_jax.exec.calibration.calibrate import SECONDS, calibrate
from tensile_jax.exec.calibration.operators import samples_of
from tensile_jax.installed_models import MODELS
from tensile_jax.plan.analysis.latency import operator_latency
from tensile_jax.trace import trace_step

_RESULTS = Path(__file__).parent / "results" / "predictor.json"
_CASES: dict[str, dict[str, int]] = {
    "resnet50": {"batch_size": 4},
    "vgg16": {"batch_size": 2},
    "inceptionv3": {"batch_size": 2},
    "inceptionv4": {"batch_size": 1},
    "densenet121": {"batch_size": 4},
    "gpt": {"batch_size": 16},
}


@click.command()
@click.option("--quick", is_flag=True, help="A calibration of 10 s.")
@click.option("-o", "--output", type=click.Path(path_type=Path), default=_RESULTS)
def main(quick: bool, output: Path) -> None:
    """Calibrate, measure, compare, and write the figures."""
    os.environ["TENSILE_CACHE_DIR"] = tempfile.mkdtemp()
    device = jax.devices()[0]
    began = time.perf_counter()
    made = calibrate(device, quick=quick)
    calibration_s = time.perf_counter() - began
    calibrations._models.clear()  # so that the model is read from its file, as in another process
    began = time.perf_counter()
    profile = profile_for(device.device_kind)
    load_ms = (time.perf_counter() - began) * 1e3
    model = profile.latency_model
    assert model is not None
    rows: list[dict[str, Any]] = []
    everything: list[tuple[str, float, float, float]] = []
    for name, sizes in _CASES.items():
        built = MODELS[name](**sizes)
        step = trace_step(jax.jit(built.step, donate_argnums=0), built.step, (built.state_shape, built.batch_shape), {})
        heavy = [op for op in step.graph.operators if op.kind == "heavy" and op.features]
        samples = samples_of(device, step.program, [step.program.equations[op.id] for op in heavy])
        began = time.perf_counter()
        predicted = model.predict(heavy)
        predict_ms = (time.perf_counter() - began) * 1e3
        roofline = [operator_latency(op, profile) for op in heavy]
        shipped = [operator_latency(op, shipped_profile(device.device_kind)) for op in heavy]
        known = [i for i, s in enumerate(samples) if s is not None]
        measured = np.array([s.us for s in samples if s is not None])
        own = np.where(np.isnan(predicted), roofline, predicted)
        figures = {
            "model": name, **sizes, "operators": len(known), "predict_ms": predict_ms,
            "not_predicted": int(np.isnan(predicted[known]).sum()),
            "latency_model": _errors(own[known], measured),
            "roofline": _errors(np.array(roofline)[known], measured),
            "shipped_roofline": _errors(np.array(shipped)[known], measured),
        }  # fmt: skip
        rows.append(figures)
        print(json.dumps(figures), flush=True)
        everything += [(heavy[i].primitive, own[i], roofline[i], us) for i, us in zip(known, measured, strict=True)]
    document = {
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "jax": jax.__version__,
        "device": device.device_kind,
        "command": "make bench-predictor",
        "calibration_s": calibration_s,
        "seconds_asked": None if quick else SECONDS,
        "operators_measured": len(made.operators),
        "model_bytes": calibrations.file_for(device.device_kind).with_suffix(".npz").stat().st_size,
        "load_ms": load_ms,
        "models": rows,
        "kinds": _by_kind(everything),
    }
    output.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps({k: v for k, v in document.items() if k != "models"}))


def _errors(predicted: np.ndarray, measured: np.ndarray) -> dict[str, float]:
    """The median of the relative errors, and that of the sum."""
    return {
        "median": float(np.median(np.abs(predicted / measured - 1))),
        "sum": float(predicted.sum() / measured.sum() - 1),
    }


def _by_kind(everything: Sequence[tuple[str, float, float, float]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for primitive in sorted({kind for kind, _, _, _ in everything}):
        own, roofline, us = (np.array(v) for v in zip(*(row[1:] for row in everything if row[0] == primitive), strict=True))
        found[primitive] = {"operators": len(us), "latency_model": _errors(own, us), "roofline": _errors(roofline, us)}
    return found


if __name__ == "__main__":
    main()
