"""Measures one training step under one budget in a process of its own: the steps of plain jit and of the planned step alternate.

    python -m benchmarks.case resnet50 --batch-size 8 --budget 50% --steps 5
    python -m benchmarks.case lstm --budget 50%

Prints one JSON object with times, peaks, and differences between prediction and measurement. The planned step runs before plain
jit does, with one state and one batch on the device. If the device's allocator says how much was in use, `allocator_peaks` are
the most bytes after each of these first steps, and `allocator_peak_bytes` is the last of them. In that is what XLA tried kernels
with, if it compiled here. With `--pipelined`, steps that are not waited for are measured, too, and how long a GPU is busy in
them: `pipelined` and `jit_pipelined` hold what `device_time.py` says.

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
from benchmarks.process_settings import ALLOCATORS, set_up
from benchmarks.training_steps import training_step
from tensile_jax.exec.compiling.compiler import peak_of

_RAISED = 1.005  # how much more is tried if the budget that a refusal names is refused


@click.command()
@click.argument("model")
@click.option("--batch-size", type=int, help="Of a model; a workload has none.")
@click.option(
    "--budget",
    help='Such as "50%", or bytes; "least" for the smallest that the policy can keep; "none" for the segments without events.',
    required=True,
)
@click.option("--steps", type=int, default=5, help="Steps of each, alternating; 0 compiles and runs the planned step once.")
@click.option("--alone", type=click.IntRange(1), default=1, help="Steps before those, of the planned step without plain jit's.")
@click.option(
    "--plain-only", is_flag=True, help="Compile plain jit's step, run it --alone times unless --steps is 0, and no other."
)
@click.option("--pipelined", is_flag=True, help="Measure steps that are not waited for, too.")
@click.option("--without-plain", is_flag=True, help="Do nothing with plain jit; the budget is in bytes. There are no ratios.")
@click.option("--lock", help="A file that is locked: together with others while compiling, and alone from the first call on.")
@click.option("--sizes", default="{}", help="Keyword arguments of the model, as JSON.")
@click.option("--renew-above", type=float, help="As for tensile.jit.")
@click.option("--cache", help="A folder for jax's persistent compilation cache.")
@click.option("--state-memory", default="device")
@click.option("--policy", default="auto")
@click.option("--launch", default="auto", help="As for tensile.jit.")
@click.option("--state-layout", default="row_major", help="As for tensile.jit.")
@click.option(
    "--allocator", type=click.Choice(list(ALLOCATORS)), help="JAX's allocator on a GPU; as the environment says, if not given."
)
@click.option("--xla-flags", default="", help="More flags of XLA's, for both steps.")
def main(
    model: str,
    batch_size: int | None,
    budget: str,
    steps: int,
    alone: int,
    plain_only: bool,
    pipelined: bool,
    without_plain: bool,
    lock: str | None,
    sizes: str,
    renew_above: float | None,
    cache: str | None,
    state_memory: str,
    policy: str,
    launch: str,
    state_layout: str,
    allocator: str | None,
    xla_flags: str,
) -> None:
    set_up(cache, xla_flags, allocator, shared=not steps)
    locked = open(lock, "a") if lock else None  # noqa: SIM115 # until the process ends
    if locked:
        fcntl.flock(locked, fcntl.LOCK_SH)
    built = training_step(model, batch_size, json.loads(sizes))
    feed = built.batches()
    first_batch = jax.tree.map(jax.numpy.asarray, next(feed))

    began = time.perf_counter()
    plain = None if without_plain else jax.jit(built.step, donate_argnums=0).lower(built.state_shape, first_batch).compile()
    jit_compile_s = time.perf_counter() - began
    jit_peak = 0 if plain is None else peak_of(plain)
    if plain_only:
        assert plain is not None, "--plain-only and --without-plain exclude each other."
        peaks = _run_alone(plain, built.init(), first_batch, alone)[2] if steps else []
        about = {"device": str(jax.devices()[0].device_kind), "jax": jax.__version__}
        print(json.dumps({**about, "jit_peak_bytes": jit_peak, "jit_compile_s": jit_compile_s, "allocator_peaks": peaks}))
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
            state_layout=state_layout,  # pyright: ignore[reportArgumentType] # click gives a str
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
            first = step.report()
            peaks = _peaks_in_use()
            mine, _, later = _run_alone(step, mine, first_batch, alone - 1)
            peaks += later
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
    result["trace_to_plan_s"] = first.trace_s + first.plan_s
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
        "planned_allocator_bytes": plan.allocator_bytes,
        "peak_bytes": report.peak_bytes,
        "predicted_over_measured": plan.peak_bytes / report.peak_bytes,
        "floor_bytes": plan.floor_bytes,
        "segments": report.segments,
        "launches": report.launches,
        "barriers": plan.barriers,
        "laid_out": len(plan.layouts or ()),
        "notes": list(plan.notes),
        "swapped_bytes": report.swapped_bytes,
        "allocator_peaks": peaks,
        "allocator_peak_bytes": peaks[-1] if peaks else None,
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
    if mine_us and pipelined:
        result["pipelined"] = measured(step, mine, first_batch)
        if plain is not None:
            result["jit_pipelined"] = measured(plain, theirs, first_batch)
    print(json.dumps(result))


def _run_alone(step: Callable[..., Any], state: Any, batch: Any, steps: int) -> tuple[Any, Any, list[int]]:
    """The state after so many steps, the last metrics, and the most bytes that were in use after each step."""
    metrics: Any = None
    peaks: list[int] = []
    for _ in range(steps):
        state, metrics = step(state, batch)
        jax.block_until_ready(state)
        peaks += _peaks_in_use()
    return state, metrics, peaks


def _peaks_in_use() -> list[int]:
    """The most bytes that the allocator had in use, if it says so."""
    stats = jax.devices()[0].memory_stats() or {}
    return [stats["peak_bytes_in_use"]] if "peak_bytes_in_use" in stats else []


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
