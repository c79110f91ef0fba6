"""Measures steps that are issued one after another, as in a training, and how long kernels run in them. Prints one JSON object.

    python -m benchmarks.device_time resnet50 --batch-size 128 --budget 50%

For plain jit and for the planned step: `pipelined_ms`, the time of a step if none is waited for; `call_ms`, the median time until
a call returns; and on a GPU `busy_ms`, the time of a step in which at least one kernel or copy runs, from jax's profiler. Where
`pipelined_ms` is far above `busy_ms`, the device waits for the host, which issues launches.
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
from tensile_jax.installed_models import MODELS

_STEPS, _PROFILED = 10, 3


@click.command()
@click.argument("model")
@click.option("--batch-size", type=int, required=True)
@click.option("--budget", required=True, help='Such as "50%".')
@click.option("--sizes", default="{}", help="Keyword arguments of the model, as JSON.")
def main(model: str, batch_size: int, budget: str, sizes: str) -> None:
    """Measure one model."""
    built = MODELS[model](batch_size=batch_size, **json.loads(sizes))
    batch = jax.tree.map(jax.numpy.asarray, next(built.batches()))
    planned = tensile.jit(built.step, budget=budget, donate_argnums=0)
    found = {
        "jit": _measured(jax.jit(built.step, donate_argnums=0), built.init(), batch),
        "planned": _measured(planned, built.init(), batch),
    }
    plan = planned.plan(built.state_shape, batch)
    found["planned"]["arguments"] = [len(segment.inputs) for segment in plan.segments]
    found["planned"]["results"] = [len(segment.outputs) for segment in plan.segments]
    device = str(jax.devices()[0].device_kind)
    print(
        json.dumps(
            {"model": model, "batch_size": batch_size, "budget": budget, "device": device, "jax": jax.__version__, **found}
        )
    )


def _measured(step: Callable[..., Any], state: Any, batch: Any) -> dict[str, Any]:
    def run(steps: int) -> list[float]:
        nonlocal state
        calls: list[float] = []
        for _ in range(steps):
            began = time.perf_counter()
            state, _ = step(state, batch)
            calls.append((time.perf_counter() - began) * 1e3)
        jax.block_until_ready(state)
        return calls

    run(3)
    began = time.perf_counter()
    calls = run(_STEPS)
    pipelined_ms = (time.perf_counter() - began) * 1e3 / _STEPS
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run(_PROFILED)
        busy_ms = _busy_ms(next(Path(folder).rglob("*.xplane.pb")))
    return {"pipelined_ms": pipelined_ms, "call_ms": statistics.median(calls), "busy_ms": busy_ms}


def _busy_ms(trace: Path) -> float | None:
    """The time of a step in which something ran on a stream of a GPU; None if there is none."""
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
    return busy / 1e6 / _PROFILED if spans else None


if __name__ == "__main__":
    main()
