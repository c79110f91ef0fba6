"""What `tensile run` does once its options are read: plan, train, measure."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from tensile_jax.api import PlannedFunction, jit
from tensile_jax.atomic_file import try_to_write
from tensile_jax.cli.options import Limits, ModelChoice
from tensile_jax.cli.outcome import Outcome
from tensile_jax.cli.progress import Live
from tensile_jax.cli.refusal import Refusal, refusing_options
from tensile_jax.cli.train import Training, Watch, train
from tensile_jax.cli.units import format_us
from tensile_jax.exec.step.transfer import to_device
from tensile_jax.installed_models import Model
from tensile_jax.plan_format import Plan, format_bytes


def planned_step(model: Model, limits: Limits, *, live: Live, saved: Plan | None = None) -> PlannedFunction:
    """The model's step under the limits, its compiling shown."""
    with refusing_options():
        return jit(
            model.step,
            budget=limits.budget,
            max_slowdown=limits.max_slowdown,
            policy=limits.policy,
            device_profile=limits.device_profile,
            state_memory=limits.state_memory,
            plan=saved,
            progress=live.tell,
            donate_argnums=0,
        )


def keep_compiled(folder: Path) -> None:
    """From here on, what XLA compiles is kept in the folder for the next run.

    Raises:
        Refusal: it cannot be made or written, of which JAX would only warn, in many lines, at every compilation.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        try_to_write(folder / "compiled")
    except OSError as error:
        raise Refusal.of_path(error, f"--compile-cache={folder} cannot be written", "Name another folder.") from error
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)  # whoever names a folder wants it used


def run_session(
    choice: ModelChoice, limits: Limits, *, steps: int, saved: Plan | None, compile_cache: Path | None, live: Live
) -> tuple[Outcome, Plan]:
    """Train, and say how it went; also the plan that ran last."""
    if compile_cache is not None:
        keep_compiled(compile_cache)
    model = choice.build()
    step = planned_step(model, limits, live=live, saved=saved)
    batches = refused_early(model)
    state = model.init()
    live.wait_for("tracing, planning, compiling")
    training = train(step, state, batches, steps=steps, watch=show_steps(step, model, steps, live), interruptible=True)
    plan = step.plan(model.state_shape, model.batch_shape)
    accuracy = None
    if model.evaluate is not None:
        live.wait_for("measuring test accuracy")
        accuracy = model.evaluate(to_device(training.state))
    return _outcome(choice, model, step, plan, training, steps=steps, accuracy=accuracy), plan


def refused_early(model: Model) -> Iterator[Any]:
    """The model's batches. What is wrong with them is said now, not after compiling."""
    with refusing_options():
        first = next(model.batches())
    del first
    return model.batches()


def show_steps(step: PlannedFunction, model: Model, steps: int, live: Live) -> Watch:
    """Shows each step's loss and time, and the measured peak beside the budget."""

    def watch(done: int, loss: float, us: float) -> None:
        report = step.report()
        plan = step.plan(model.state_shape, model.batch_shape)
        budget = "" if plan.budget_bytes is None else f" of {format_bytes(plan.budget_bytes)}"
        note = f"loss {loss:.4f}, {format_us(us)}, peak {format_bytes(report.peak_bytes)}{budget}"
        live.tell("training", done, steps, note)

    return watch


def _outcome(
    choice: ModelChoice,
    model: Model,
    step: PlannedFunction,
    plan: Plan,
    training: Training,
    *,
    steps: int,
    accuracy: float | None,
) -> Outcome:
    report = step.report()
    return Outcome(
        model=choice.name,
        parameters=model.parameters,
        batch_size=choice.batch_size,
        image_size=model.batch_shape["image"].shape[1] if "image" in model.batch_shape else None,
        sequence_length=model.batch_shape["tokens"].shape[1] if "tokens" in model.batch_shape else None,
        device=jax.devices()[0].device_kind,
        policy=plan.policy,
        state_memory=plan.state_memory,
        steps_asked=steps,
        steps_done=len(training.losses),
        interrupted=training.interrupted,
        budget_bytes=plan.budget_bytes,
        peak_bytes=report.peak_bytes,
        predicted_peak_bytes=plan.peak_bytes,
        jit_peak_bytes=plan.jit_peak_bytes,
        step_us=training.step_us,
        predicted_step_us=plan.step_us,
        stall_us=report.stall_us,
        swapped_bytes=report.swapped_bytes,
        passive_swap_ins=report.passive_swap_ins,
        recomputed_us=report.recomputed_us,
        out_of_memory=report.out_of_memory,
        segments=report.segments,
        distinct_segments=report.distinct_segments,
        trace_s=report.trace_s,
        plan_s=report.plan_s,
        compile_s=report.compile_s,
        loss_first=training.losses[0],
        loss_last=training.losses[-1],
        test_accuracy=accuracy,
    )
