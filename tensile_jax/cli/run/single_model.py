"""Trains one model by itself: with `tensile.jit` for `tensile run MODEL`, and with plain `jax.jit` for `tensile demo`.

Several jobs run on a `Runtime`. One model alone does not run on a `Runtime`, because `tensile run MODEL` offers what a runtime
does not have: a state that stays on the device, a saved plan to start from, a run without a budget, the times of tracing and
planning, and the time of each single step.
"""

import gc
import statistics
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax

from tensile_jax.api import jit
from tensile_jax.atomic_file import try_to_write
from tensile_jax.cli.errors import Refusal, refusing_options
from tensile_jax.cli.formatting import format_us
from tensile_jax.cli.jobs_file import JobEntry
from tensile_jax.cli.options import Limits, ModelChoice
from tensile_jax.cli.progress import Phases
from tensile_jax.cli.run.job_source import compile_plain, model_of, shapes_of
from tensile_jax.cli.run.report import Outcome, PlainJob
from tensile_jax.cli.signals import StopRequest, stopping_on_signals
from tensile_jax.exec.transfer import to_device
from tensile_jax.plan_format import Plan
from tensile_jax.units import format_bytes


def keep_compiled(folder: Path | None) -> None:
    """Let JAX keep everything that it compiles from now on in `folder`, for the next run. None: keep nothing.

    Raises:
        Refusal: the folder cannot be made or written. JAX would only warn of this, in many lines, at every compilation.
    """
    if folder is None:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        try_to_write(folder / "compiled")
    except OSError as error:
        raise Refusal.of_path(error, f"--compile-cache={folder} cannot be written", "Name another folder.") from error
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)  # JAX would otherwise skip programs that compile fast


def run_model(choice: ModelChoice, limits: Limits, *, steps: int, saved: Plan | None, phases: Phases) -> tuple[Outcome, Plan]:
    """Train the model under the limits, and return the outcome and the plan of the last step."""
    model = choice.build()
    with refusing_options():
        step = jit(model.step, **asdict(limits), plan=saved, progress=phases.update, donate_argnums=0)
        next(model.batches())  # so that an error in the input is raised before compiling
    state = model.init()
    phases.begin("tracing")

    def watch(done: int, loss: float, us: float) -> None:
        budget = step.plan(model.state_shape, model.batch_shape).budget_bytes
        of_budget = "" if budget is None else f" of {format_bytes(budget)}"
        peak = format_bytes(step.report().peak_bytes)
        phases.update("training", done, steps, f"loss {loss:.4f}, {format_us(us)}, peak {peak}{of_budget}")

    training = _train(step, state, model.batches(), steps=steps, watch=watch, interruptible=True)
    plan = step.plan(model.state_shape, model.batch_shape)
    accuracy = None
    if model.evaluate is not None:
        phases.begin("measuring test accuracy")
        accuracy = model.evaluate(to_device(training.state))
    report = step.report()
    outcome = Outcome(
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
        predicted_jit_step_us=plan.jit_step_us,
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
    return outcome, plan


def run_plain(entry: JobEntry, phases: Phases) -> PlainJob:
    """Train the model of `entry` with plain jit. All of its arrays and executables are freed before this function returns.

    Raises:
        Refusal: the model cannot be made.
    """
    model = model_of(entry)
    assert model is not None
    phases.begin(f"{entry.name}: compiling plain jit")
    began = time.perf_counter()
    plain = compile_plain(shapes_of(entry))
    first_step_s = 0.0

    def watch(done: int, loss: float, us: float) -> None:
        nonlocal first_step_s
        if done == 1:
            first_step_s = time.perf_counter() - began
        phases.update(f"{entry.name}: training with plain jit", done, entry.steps, f"loss {loss:.4f}, {format_us(us)}")

    training = _train(plain.compiled, model.init(), model.batches(), steps=entry.steps, watch=watch)
    found = PlainJob(
        name=entry.name,
        peak_bytes=plain.peak_bytes,
        compile_s=plain.compile_s,
        first_step_s=first_step_s,
        time_s=time.perf_counter() - began,
        step_us=training.step_us,
        loss_first=training.losses[0],
        loss_last=training.losses[-1],
        test_accuracy=None if model.evaluate is None else model.evaluate(training.state),
    )
    del training, plain, model
    gc.collect()
    jax.clear_caches()
    return found


@dataclass(frozen=True, slots=True, eq=False)
class _Training:
    """The last state, and the loss and time of each step. `interrupted` says whether a signal asked the training to end."""

    state: Any
    losses: tuple[float, ...]
    times_us: tuple[float, ...]
    interrupted: bool

    @property
    def step_us(self) -> float | None:
        """The median time of a step without the first one; None if there is no other."""
        return statistics.median(self.times_us[1:]) if len(self.times_us) > 1 else None


def _train(
    step: Callable[..., tuple[Any, Any]],
    state: Any,
    batches: Iterable[Any],
    *,
    steps: int,
    watch: Callable[[int, float, float], None],
    interruptible: bool = False,
) -> _Training:
    """Run `steps` steps from `state`, which is donated. Each step ends before the next one begins, so that it can be timed.

    `watch` is called after each step with the number of steps done, the step's loss, and its time in microseconds.

    If `interruptible`, the first Ctrl-C or SIGTERM after the first step ends the training when the current step has ended. During
    the first step there are no results yet to report, and a signal ends the process at once. Without `interruptible`, a signal
    always does.
    """
    losses: list[float] = []
    times_us: list[float] = []
    stop = StopRequest()
    with ExitStack() as listening:
        for done, batch in zip(range(1, steps + 1), batches, strict=False):
            began = time.perf_counter()
            state, metrics = jax.block_until_ready(step(state, batch))
            times_us.append((time.perf_counter() - began) * 1e6)
            losses.append(float(metrics["loss"]))
            if interruptible and done == 1:
                stop = listening.enter_context(stopping_on_signals())
            watch(done, losses[-1], times_us[-1])
            if stop.asked:
                break
    return _Training(state, tuple(losses), tuple(times_us), stop.asked)
