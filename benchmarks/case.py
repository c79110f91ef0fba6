"""Measures one model under one budget in a process of its own: the steps of plain jit and of the planned step alternate.

    python -m benchmarks.case resnet50 --batch-size 8 --budget 50% --steps 5

Prints one JSON object with times, peaks, and differences between prediction and measurement. On a device whose allocator says
how much was in use, the planned step runs before plain jit does, with one state and one batch on the device, and
`allocator_peak_bytes` is the most that was in use then. In that is what XLA tried kernels with, if it compiled here. There,
steps that are not waited for are measured, too, and how long the device is busy in them: `pipelined` and `jit_pipelined` hold
what `device_time.py` says.

With `--lock`, many such processes compile at once, and each is alone on the machine while it is timed.
"""

import fcntl
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import click
import jax

import tensile_jax as tensile
from benchmarks.device_time import measured
from benchmarks.loop import compiled_plan, loop_us_per_segment
from tensile_jax.exec.compiling.compiler import peak_of
from tensile_jax.installed_models import MODELS

_RAISED = 1.005  # how much more is tried if the budget that a refusal names is refused


@click.command()
@click.argument("model")
@click.option("--batch-size", type=int, required=True)
@click.option(
    "--budget",
    help='Such as "50%", or bytes; "least" for the smallest that the policy can keep; "none" for the segments without events.',
    required=True,
)
@click.option("--steps", type=int, default=5, help="Steps of each, alternating; 0 compiles and runs the planned step once.")
@click.option("--plain-only", is_flag=True, help="Compile plain jit's step, and do nothing else.")
@click.option("--without-plain", is_flag=True, help="Do nothing with plain jit; the budget is in bytes. There are no ratios.")
@click.option("--lock", help="A file that is locked: together with others while compiling, and alone from the first call on.")
@click.option("--sizes", default="{}", help="Keyword arguments of the model, as JSON.")
@click.option("--renew-above", type=float, help="As for tensile.jit.")
@click.option("--cache", help="A folder for jax's persistent compilation cache.")
@click.option("--state-memory", default="device")
@click.option("--policy", default="auto")
@click.option("--launch", default="auto", help="As for tensile.jit.")
def main(
    model: str,
    batch_size: int,
    budget: str,
    steps: int,
    plain_only: bool,
    without_plain: bool,
    lock: str | None,
    sizes: str,
    renew_above: float | None,
    cache: str | None,
    state_memory: str,
    policy: str,
    launch: str,
) -> None:
    if cache:
        jax.config.update("jax_compilation_cache_dir", cache)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    locked = open(lock, "a") if lock else None  # noqa: SIM115 # until the process ends
    if locked:
        fcntl.flock(locked, fcntl.LOCK_SH)
    built = MODELS[model](batch_size=batch_size, **json.loads(sizes))
    feed = built.batches()
    first_batch = jax.tree.map(jax.numpy.asarray, next(feed))

    began = time.perf_counter()
    plain = None if without_plain else jax.jit(built.step, donate_argnums=0).lower(built.state_shape, first_batch).compile()
    jit_compile_s = time.perf_counter() - began
    jit_peak = 0 if plain is None else peak_of(plain)
    if plain_only:
        print(json.dumps({"jit_peak_bytes": jit_peak, "jit_compile_s": jit_compile_s}))
        return
    unplanned = budget == "none"

    def planned_under(budget_bytes: int | None) -> Any:
        return tensile.jit(
            built.step,
            budget=budget_bytes,
            policy="none" if unplanned else policy,  # pyright: ignore[reportArgumentType] # click gives a str
            state_memory=state_memory,  # pyright: ignore[reportArgumentType] # click gives a str
            renew_above=renew_above,
            launch=launch,  # pyright: ignore[reportArgumentType] # click gives a str
            donate_argnums=0,
        )

    budget_bytes = _least(planned_under, built.state_shape, first_batch) if budget == "least" else _bytes_of(budget, jit_peak)
    step = planned_under(budget_bytes)
    result: dict[str, Any] = {
        "model": model,
        "batch_size": batch_size,
        "budget": budget,
        "budget_bytes": budget_bytes,
        "policy": "none" if unplanned else policy,
        "state_memory": state_memory,
        "launch": launch,
        "device": str(jax.devices()[0].device_kind),
        "jax": jax.__version__,
        "jit_peak_bytes": jit_peak,
        "jit_compile_s": jit_compile_s,
    }
    while True:
        try:
            mine: Any = built.init()
            compiled_plan(step, mine, first_batch)
            if locked and steps:
                fcntl.flock(locked, fcntl.LOCK_EX)
            mine, metrics = step(mine, first_batch)
        except tensile.BudgetTooSmall as error:  # as estimated, or as compiling has shown
            if budget != "least":
                floor = {} if plain is None else {"floor_ratio": error.floor_bytes / jit_peak}
                print(json.dumps({**result, "too_small": error.floor_bytes, **floor}))
                return
            result["budget_bytes"] = budget_bytes = error.floor_bytes
            step = planned_under(budget_bytes)
        else:
            break
    first_loss = float(metrics["loss"])
    first = step.report()
    result["trace_to_plan_s"] = first.trace_s + first.plan_s
    in_use = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    theirs: Any = None
    if steps and plain is not None:
        theirs, expected = plain(built.init(), first_batch)
        result["first_loss_difference"] = abs(first_loss - float(expected["loss"]))
    jit_us: list[float] = []
    mine_us: list[float] = []
    plans: list[int] = []  # how many plans there were before each of these steps
    batches = [jax.tree.map(jax.numpy.asarray, next(feed)) for _ in range(max(steps - 1, 0))]
    for batch in batches * 2:
        if plain is not None:
            began = time.perf_counter()
            theirs, _ = plain(theirs, batch)
            jax.block_until_ready(theirs)
            jit_us.append((time.perf_counter() - began) * 1e6)
        plans.append(step.report().plans)
        began = time.perf_counter()
        mine, _ = step(mine, batch)
        jax.block_until_ready(mine)
        mine_us.append((time.perf_counter() - began) * 1e6)
    plan, report = step.plan(mine, first_batch), step.report()
    result |= {
        "predicted_peak_bytes": plan.peak_bytes,
        "peak_bytes": report.peak_bytes,
        "predicted_over_measured": plan.peak_bytes / report.peak_bytes,
        "floor_bytes": plan.floor_bytes,
        "segments": report.segments,
        "launches": report.launches,
        "barriers": plan.barriers,
        "swapped_bytes": report.swapped_bytes,
        "allocator_peak_bytes": in_use,
        "first_step_us": first.first_step_us,
        "compile_s": first.compile_s,
        "loop_us_per_segment": loop_us_per_segment(step, mine, first_batch),
    }
    if mine_us:
        step_us = statistics.median(mine_us)  # the report's is that of watched iterations, which take longer on a GPU
        result |= {
            "step_us": step_us,
            "predicted_step_us": plan.step_us,
            "predicted_over_measured_time": plan.step_us / step_us,
            "stall_us": report.stall_us,
            "recomputed_us": plan.recomputed_us,
            "steps_us": mine_us,
            "plans_before_steps": plans,
        }
    if plain is not None:
        result |= {
            "peak_ratio": report.peak_bytes / jit_peak,
            "floor_ratio": plan.floor_bytes / jit_peak,
            "compile_ratio": report.compile_s / jit_compile_s,
        }
    if jit_us:
        jit_step_us = statistics.median(jit_us)
        result |= {"jit_step_us": jit_step_us, "time_ratio": result["step_us"] / jit_step_us}
    if mine_us and in_use is not None:
        result["pipelined"] = measured(step, mine, first_batch)
        if plain is not None:
            result["jit_pipelined"] = measured(plain, theirs, first_batch)
    print(json.dumps(result))


def _bytes_of(budget: str, jit_peak: int) -> int | None:
    """The budget in bytes; None if there is none."""
    if budget == "none":
        return None
    return int(float(budget.rstrip("%")) / 100 * jit_peak) if budget.endswith("%") else int(budget)


def _least(planned_under: Callable[[int | None], Any], state: Any, batch: Any) -> int:
    """The smallest budget that the policy can keep, as its refusals name it."""
    budget_bytes = 1
    while True:
        try:
            planned_under(budget_bytes).plan(state, batch)
        except tensile.BudgetTooSmall as error:
            # nothing is compiled here, and what the estimate names may be refused
            budget_bytes = max(error.floor_bytes, int(budget_bytes * _RAISED))
        else:
            return budget_bytes


if __name__ == "__main__":
    main()
