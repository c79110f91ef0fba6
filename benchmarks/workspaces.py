"""`make bench-workspaces`: compares predicted workspaces of segments with those that XLA reports, and fits the two weights.

The segments are those of the first plans under some budgets, before compiling corrects anything. With `--h200`, they are compiled
for an NVIDIA H200 without a GPU (`h200_device.py`); otherwise for this machine's CPU. Nothing runs.

    error  = (predicted - compiled) / (what the segment holds + compiled)

The weights of the device profile (`late_weight`, `early_weight`) are fitted by least squares of this error. Writes
`benchmarks/results/workspaces-cpu.json` or `workspaces-h200.json`.
"""

import json
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import jax
import numpy as np
from scipy.optimize import nnls

from benchmarks.h200_device import H200Compiler, h200, placed
from tensile_jax.device_profiles import load_profile
from tensile_jax.exec.compiling.compiler import Compiler
from tensile_jax.exec.compiling.step import Options, step_of
from tensile_jax.exec.fitting.fitting import Fitting
from tensile_jax.exec.fitting.knowledge import Knowledge
from tensile_jax.installed_models import MODELS
from tensile_jax.plan import CompiledSizes, Goal
from tensile_jax.plan.search.choice import schedule_of
from tensile_jax.trace import trace_step

_RESULTS = Path(__file__).parent / "results"
_CASES = {
    "cpu": (("cnn", 64, (0.7, 0.5)), ("gpt", 8, (0.6, 0.4)), ("resnet50", 4, (0.6,))),
    "h200": (("resnet50", 16, (0.5, 0.35, 0.28)), ("gpt", 64, (0.7, 0.5, 0.3))),
}


@dataclass(frozen=True, slots=True)
class Row:
    """One segment, in bytes; `late` and `early` are what the account computes (`plan/search/cost/segment_account.py`)."""

    model: str
    share: float
    segment: str
    late: int
    early: int
    predicted: int
    compiled: int
    resident: int


@click.command()
@click.option("--h200", "for_h200", is_flag=True, help="Compile for an H200, without a GPU.")
def main(for_h200: bool) -> None:
    """Compile the segments of some plans, and fit the weights."""
    kind = "h200" if for_h200 else "cpu"
    rows = [row for name, batch_size, shares in _CASES[kind] for row in _rows(kind, name, batch_size, shares)]
    errors = np.array([(r.predicted - r.compiled) / (r.resident + r.compiled) for r in rows])
    features = np.array([[r.late, r.early] for r in rows], dtype=float)
    compiled = np.array([r.compiled for r in rows], dtype=float)
    scale = 1 / np.array([r.resident + r.compiled for r in rows], dtype=float)
    weights, _ = nnls(features * scale[:, None], compiled * scale)
    figures = {
        "segments": len(rows),
        "median_error": float(np.median(abs(errors))),
        "95th_percentile": float(np.percentile(abs(errors), 95)),
        "most_below": float(-errors.min()),
        "most_above": float(errors.max()),
        "best_late_weight": float(weights[0]),
        "best_early_weight": float(weights[1]),
    }
    document = {
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "jax": jax.__version__,
        "command": "make bench-workspaces" if kind == "cpu" else "make bench-h200-workspaces",
        **figures,
        "rows": [[getattr(r, name) for name in Row.__slots__] for r in rows],
        "columns": list(Row.__slots__),
    }
    (_RESULTS / f"workspaces-{kind}.json").write_text(json.dumps(document, indent=1) + "\n")
    for name, value in figures.items():
        print(f"{name:18} {value:.3f}")


def _rows(kind: str, name: str, batch_size: int, shares: tuple[float, ...]) -> list[Row]:
    model = MODELS[name](batch_size=batch_size)
    arguments: Any = (model.state_shape, model.batch_shape)
    compiler = Compiler(jax.devices()[0])
    if kind == "h200":
        device = h200()
        compiler, arguments = H200Compiler(device), placed(arguments, device)
    traced = trace_step(jax.jit(model.step, donate_argnums=0), model.step, arguments, {})
    fitting = Fitting(step_of(traced, Options("auto", load_profile(kind), "device"), compiler), None, Knowledge())
    planner, nothing = fitting.planner, CompiledSizes()
    rows: list[Row] = []
    for share in shares:
        found = planner.plan(Goal(share * planner.whole_peak_bytes(nothing)), nothing)
        if found is None or found.choice.layout is None:
            continue
        workspaces = fitting.workspaces(found.plan, fitting.segment_sizes(found.plan))
        accounts = schedule_of(planner.model, found.choice.layout, nothing).accounts
        rows += [
            Row(name, share, s.name, c.late, c.early, s.workspace_bytes, nbytes, s.resident_bytes)
            for s, c, nbytes in zip(found.plan.segments, accounts, workspaces, strict=True)
        ]
    return rows


if __name__ == "__main__":
    main()
