"""`make bench-loops`: steps with loops, compiled for an NVIDIA H200, with the loops opened or split. Nothing runs.

GPT-2-small's shapes, batch 8 x 1024 tokens, bf16 compute, AdamW. Peak and traffic (bytes that kernels read and write) of plain
jit: with the layers in a loop (`nn.scan`), unrolled, and with `nn.remat` for every layer; and of the scanned step under budgets,
which are shares of the unrolled step's peak. Then, for 12, 24 and 48 layers, the seconds to plan and to compile, and the number
of distinct executables. Then long loops of time steps: a recurrent network and a differential equation, under shares of plain
jit's peak. Writes `benchmarks/results/loops.json`.
"""

import json
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click
import jax
import jax.numpy as jnp
import optax
from tensile_models.gpt import gpt2_small

from benchmarks.h200_device import H200Compiler, h200, traced_for, traced_on, traffic, write_compiled
from benchmarks.workloads import Workload
from benchmarks.workloads.sequences import differential_equation, lstm
from tensile_jax.budget import Budget
from tensile_jax.device_profiles import load_profile
from tensile_jax.errors import BudgetTooSmall
from tensile_jax.exec.compiling.compiler import peak_of
from tensile_jax.exec.compiling.step import Options, step_of
from tensile_jax.exec.fitting.find_plan import fit
from tensile_jax.exec.fitting.fitting import Fitting
from tensile_jax.exec.fitting.forms import fastest_form
from tensile_jax.exec.fitting.knowledge import Knowledge
from tensile_jax.plan import CompiledSizes
from tensile_jax.trace import TracedStep

_RESULTS = Path(__file__).parent / "results" / "loops.json"
_SHARES = (0.9, 0.75, 0.6, 0.5, 0.4, 0.3)
_DEPTHS = (12, 24, 48)
_LONG_SHARES = (0.5, 0.25, 0.125)


@click.command()
@click.option("--layers", type=int, default=12, help="Of the step that is planned under every budget.")
@click.option("--depth", "depths", type=int, multiple=True, default=_DEPTHS, help="Numbers of layers that are compared.")
@click.option("-o", "--output", type=click.Path(path_type=Path), default=_RESULTS)
def main(layers: int, depths: tuple[int, ...], output: Path) -> None:
    """Compile every case and write the figures."""
    warnings.simplefilter("ignore")
    plain = {form: _plain(layers, **options) for form, options in _FORMS.items()}
    unrolled = plain["unrolled"]
    scanned = plain["scan"]["peak_bytes"]
    step = _step(layers, scan=True)
    budgets = [_planned(step, share * unrolled["peak_bytes"], scanned) for share in _SHARES]
    budgets.append(_planned(step, 1, scanned))
    for share, row in zip((*_SHARES, None), budgets, strict=True):
        row["share"] = share
        if "traffic_bytes" in row:
            row["traffic_ratio"] = row["traffic_bytes"] / unrolled["traffic_bytes"]
        print(json.dumps(row), flush=True)
    deep = []
    for depth in depths:
        known = _plain(depth, scan=True)
        planned = _planned(_step(depth, scan=True), 0.6 * known["peak_bytes"], known["peak_bytes"])
        deep.append({"layers": depth, "plain": known, "unrolled": _plain(depth), **planned})
        print(json.dumps(deep[-1]), flush=True)
    long = [row for name, workload in _LONG.items() for row in _rows_of_a_long_loop(name, workload())]
    write_compiled(output, "make bench-loops", layers=layers, plain=plain, planned=budgets, depths=deep, long=long)


_FORMS: dict[str, dict[str, bool]] = {
    "unrolled": {},
    "scan": {"scan": True},
    "scan, remat": {"scan": True, "remat": True},
}


def _step(layers: int, **options: bool) -> TracedStep:
    model = gpt2_small(batch_size=8, layers=layers, dtype=jnp.bfloat16, optimizer=optax.adamw(1e-4), **options)
    return traced_for(model, h200())


_LONG: dict[str, Callable[[], Workload]] = {
    "recurrent network": partial(lstm, width=1024, texts=128, length=512),
    "differential equation": partial(differential_equation, unknowns=64, width=1024, beginnings=8192, steps=100),
}


def _rows_of_a_long_loop(name: str, workload: Workload) -> list[dict[str, Any]]:
    """Plain jit's figures, and those of plans under `_LONG_SHARES` of its peak."""
    shapes = jax.eval_shape(workload.init), jax.eval_shape(lambda: workload.batch(0))
    step = traced_on(h200(), workload.step, shapes)
    plain = _plain_of(step)
    rows = [{"step": name, **plain}]
    for share in _LONG_SHARES:
        row = _planned(step, share * plain["peak_bytes"], plain["peak_bytes"])
        if "traffic_bytes" in row:
            row["traffic_ratio"] = row["traffic_bytes"] / plain["traffic_bytes"]
        rows.append({"step": name, "share": share, **row})
        print(json.dumps(rows[-1]), flush=True)
    return rows


def _plain(layers: int, **options: bool) -> dict[str, Any]:
    """Plain jit's figures of a decoder."""
    row = _plain_of(_step(layers, **options))
    print(layers, options, json.dumps(row), flush=True)
    return row


def _plain_of(step: TracedStep) -> dict[str, Any]:
    """Plain jit's peak, traffic and seconds of compiling. The bodies of loops count as often as they run."""
    compiler = H200Compiler(h200())
    began = time.perf_counter()
    compiled = compiler.compile_whole(step.traced)
    return {
        "peak_bytes": peak_of(compiled),
        "traffic_bytes": traffic(compiled),
        "compile_s": time.perf_counter() - began,
    }


def _planned(traced: TracedStep, budget: float, plain_bytes: int) -> dict[str, Any]:
    """The step under a budget in bytes, or under the least one if that is too small; plain jit needs `plain_bytes`."""
    compiler = H200Compiler(h200())
    step = step_of(traced, Options("auto", load_profile("h200"), "device"), compiler)
    fitting = Fitting(step, Budget(int(budget), None), Knowledge(CompiledSizes(whole=plain_bytes)))
    began = time.perf_counter()
    fastest = fastest_form(fitting)
    planning_s = time.perf_counter() - began
    try:
        found = fit(fastest)
    except BudgetTooSmall as error:
        return (
            _planned(traced, error.floor_bytes, plain_bytes) if budget < error.floor_bytes else {"floor_bytes": error.floor_bytes}
        )
    plan, executables = found.plan, found.executables
    assert executables is not None
    return {
        "budget_bytes": int(budget),
        "notes": plan.notes,
        "peak_bytes": plan.peak_bytes,
        "traffic_bytes": sum(traffic(e.call) for e in executables),
        "predicted_ratio": plan.step_us / found.step.planner.model.whole_us,
        "segments": len(plan.segments),
        "executables": len(compiler),
        "rounds": compiler.rounds,
        "planning_s": planning_s + found.spent.plan_s,
        "compile_s": found.spent.compile_s,
        "seconds": time.perf_counter() - began,
    }


if __name__ == "__main__":
    main()
