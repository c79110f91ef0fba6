"""Measures one model under one budget in a process of its own: the steps of plain jit and of the planned step alternate.

    python -m benchmarks.case resnet50 --batch-size 8 --budget 50% --steps 5

Prints one JSON object with times, peaks, and differences between prediction and measurement.
"""

import json
import statistics
import time
from typing import Any

import click
import jax

import tensile_jax as tensile
from benchmarks.loop import loop_us_per_segment
from tensile_jax.exec.step.compile import peak_of
from tensile_jax.installed_models import MODELS


@click.command()
@click.argument("model")
@click.option("--batch-size", type=int, required=True)
@click.option("--budget", help='Such as "50%"; "none" for the segments without events.', required=True)
@click.option("--steps", type=int, default=5, help="Steps of each, alternating; 0 compiles only.")
@click.option("--sequence-length", type=int)
@click.option("--cache", help="A folder for jax's persistent compilation cache.")
@click.option("--state-memory", default="device")
@click.option("--policy", default="auto")
def main(
    model: str,
    batch_size: int,
    budget: str,
    steps: int,
    sequence_length: int | None,
    cache: str | None,
    state_memory: str,
    policy: str,
) -> None:
    if cache:
        jax.config.update("jax_compilation_cache_dir", cache)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    sizes = {"sequence_length": sequence_length} if sequence_length else {}
    built = MODELS[model](batch_size=batch_size, **sizes)
    state: Any = built.init()
    feed = built.batches()
    batches = [jax.tree.map(jax.numpy.asarray, next(feed)) for _ in range(max(steps, 1))]

    began = time.perf_counter()
    plain = jax.jit(built.step, donate_argnums=0).lower(state, batches[0]).compile()
    jit_compile_s = time.perf_counter() - began
    jit_peak = peak_of(plain)
    unplanned = budget == "none"
    step = tensile.jit(
        built.step,
        budget=None if unplanned else int(float(budget.rstrip("%")) / 100 * jit_peak),
        policy="none" if unplanned else policy,  # pyright: ignore[reportArgumentType] # click gives a str
        state_memory=state_memory,  # pyright: ignore[reportArgumentType] # click gives a str
        donate_argnums=0,
    )
    result: dict[str, Any] = {
        "model": model,
        "batch_size": batch_size,
        "budget": budget,
        "policy": "none" if unplanned else policy,
        "state_memory": state_memory,
        "device": str(jax.devices()[0].device_kind),
        "jax": jax.__version__,
        "jit_peak_bytes": jit_peak,
        "jit_compile_s": jit_compile_s,
    }
    began = time.perf_counter()
    try:
        plan = step.plan(state, batches[0])
    except tensile.BudgetTooSmall as error:
        print(json.dumps({**result, "too_small": error.floor_bytes, "floor_ratio": error.floor_bytes / jit_peak}))
        return
    result["trace_to_plan_s"] = time.perf_counter() - began
    mine, theirs = _copy(state), _copy(state)
    del state
    mine, metrics = step(mine, batches[0])
    theirs, expected = plain(theirs, batches[0])
    result["first_loss_difference"] = abs(float(metrics["loss"]) - float(expected["loss"]))
    jit_us: list[float] = []
    for batch in batches[1:] * 2:
        began = time.perf_counter()
        theirs, _ = plain(theirs, batch)
        jax.block_until_ready(theirs)
        jit_us.append((time.perf_counter() - began) * 1e6)
        mine, _ = step(mine, batch)
        jax.block_until_ready(mine)
    plan, report = step.plan(mine, batches[0]), step.report()
    result |= {
        "predicted_peak_bytes": plan.peak_bytes,
        "peak_bytes": report.peak_bytes,
        "peak_ratio": report.peak_bytes / jit_peak,
        "predicted_over_measured": plan.peak_bytes / report.peak_bytes,
        "floor_ratio": plan.floor_bytes / jit_peak,
        "segments": report.segments,
        "swapped_bytes": report.swapped_bytes,
        "compile_s": report.compile_s,
        "compile_ratio": report.compile_s / jit_compile_s,
        "loop_us_per_segment": loop_us_per_segment(step, mine, batches[0]),
    }
    if jit_us and report.step_us is not None:
        jit_step_us = statistics.median(jit_us)
        result |= {
            "jit_step_us": jit_step_us,
            "step_us": report.step_us,
            "time_ratio": report.step_us / jit_step_us,
            "predicted_step_us": plan.step_us,
            "predicted_over_measured_time": plan.step_us / report.step_us,
            "stall_us": report.stall_us,
        }
    print(json.dumps(result))


def _copy(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.copy(), tree)


if __name__ == "__main__":
    main()
