"""Measures steps that are issued one after another, as in a training, and how long kernels run in them. Prints one JSON object.

    python -m benchmarks.device_time resnet50 --batch-size 128 --budget 50%

For plain jit and for each planned step: `pipelined_ms`, the time of a step if none is waited for; `waited_ms`, the median
time of a step if each is waited for; `call_ms`, the median time until a call returns; and on a GPU `busy_ms`, the time of a
step in which at least one kernel or copy runs, and `kernels`, how many these are, from jax's profiler. Where `pipelined_ms`
is far above `busy_ms`, the device waits for the host, which issues launches. Budgets are shares of plain jit's compiled peak.
"""

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import jax

import tensile_jax as tensile
from tensile_jax.exec.compiling.compiler import peak_of
from tensile_jax.installed_models import MODELS

_STEPS, _WAITED, _PROFILED = 10, 5, 3


@click.command()
@click.argument("model")
@click.option("--batch-size", type=int, required=True)
@click.option(
    "--budget", "budgets", multiple=True, help='Such as "50%"; several give several plans. Without any, plain jit only.'
)
@click.option("--sizes", default="{}", help="Keyword arguments of the model, as JSON.")
@click.option("--state-memory", default="device")
@click.option("--cache", help="A folder for jax's persistent compilation cache.")
def main(model: str, batch_size: int, budgets: tuple[str, ...], sizes: str, state_memory: str, cache: str | None) -> None:
    """Measure one model."""
    if cache:
        jax.config.update("jax_compilation_cache_dir", cache)
    built = MODELS[model](batch_size=batch_size, **json.loads(sizes))
    batch = jax.tree.map(jax.numpy.asarray, next(built.batches()))
    plain = jax.jit(built.step, donate_argnums=0).lower(built.state_shape, batch).compile()
    peak = peak_of(plain)
    found: dict[str, Any] = {
        "model": model,
        "batch_size": batch_size,
        "sizes": json.loads(sizes),
        "device": str(jax.devices()[0].device_kind),
        "jax": jax.__version__,
        "jit_peak_bytes": peak,
        "jit": measured(plain, built.init(), batch),
    }
    for budget in budgets:
        step = tensile.jit(
            built.step,
            budget=round(float(budget.rstrip("%")) / 100 * peak),
            state_memory=state_memory,  # pyright: ignore[reportArgumentType] # click gives a str
            donate_argnums=0,
        )
        began = time.perf_counter()
        state, _ = step(built.init(), batch)
        first_call_s = time.perf_counter() - began
        row = measured(step, state, batch)
        plan, report = step.plan(built.state_shape, batch), step.report()
        found[budget] = row | {
            "time_ratio": row["pipelined_ms"] / found["jit"]["pipelined_ms"],
            "first_call_s": first_call_s,
            "peak_ratio": report.peak_bytes / peak,
            "swapped_bytes": report.swapped_bytes,
            "segments": report.segments,
            "launches": report.launches,
            "predicted_ms": plan.step_us / 1e3,
            "arguments": [len(segment.inputs) for segment in plan.segments],
            "results": [len(segment.outputs) for segment in plan.segments],
        }
    print(json.dumps(found))


def measured(step: Callable[..., Any], state: Any, batch: Any) -> dict[str, Any]:
    """How long steps take that are issued one after another, and how long kernels run in them; `state` may be donated."""

    def run(steps: int) -> list[float]:
        nonlocal state
        calls: list[float] = []
        for _ in range(steps):
            began = time.perf_counter()
            state, _ = step(state, batch)
            calls.append((time.perf_counter() - began) * 1e3)
        jax.block_until_ready(state)
        return calls

    def timed(steps: int) -> float:
        began = time.perf_counter()
        run(steps)
        return (time.perf_counter() - began) * 1e3 / steps

    run(3)
    pipelined_ms = timed(_STEPS)
    calls = run(_STEPS)
    waited_ms = statistics.median(timed(1) for _ in range(_WAITED))
    with tempfile.TemporaryDirectory() as folder:
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # otherwise, every call of a Python function is recorded, and takes longer
        with jax.profiler.trace(folder, profiler_options=options):
            run(_PROFILED)
        busy_ms, kernels = _busy(next(Path(folder).rglob("*.xplane.pb")))
    return {
        "pipelined_ms": pipelined_ms,
        "waited_ms": waited_ms,
        "call_ms": statistics.median(calls),
        "busy_ms": busy_ms,
        "kernels": kernels,
    }


def _busy(trace: Path) -> tuple[float | None, float]:
    """The time of a step in which something ran on a stream of a GPU, None if nothing did; and of how many kernels and copies."""
    planes = [plane for plane in jax.profiler.ProfileData.from_file(str(trace)).planes if "GPU" in plane.name]
    spans = sorted(
        (event.start_ns, event.start_ns + event.duration_ns)
        for plane in planes
        for line in plane.lines
        if "Stream" in line.name
        for event in line.events
    )
    busy = until = 0.0
    for begin, end in spans:
        busy += max(0.0, end - max(begin, until))
        until = max(until, end)
    return (busy / 1e6 / _PROFILED if spans else None), len(spans) / _PROFILED


if __name__ == "__main__":
    main()
