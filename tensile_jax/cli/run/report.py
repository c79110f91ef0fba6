"""Defines the results that a command reports at its end, as records that are written as one JSON object, and as tables.

    Outcome      `tensile run MODEL`       measured for one model
    JobsOutcome  `tensile run JOBS.toml`   measured for several jobs under one budget
    JointPlan    `tensile plan JOBS.toml`  predicted for several jobs under one budget
    PlainJob     `tensile demo`            measured for one model under plain `jax.jit`

The name of a value ends in its unit: bytes, microseconds (`_us`) or seconds (`_s`). A value that was not measured, or is NaN or
infinite, is null. A job is *at rest* between two of its iterations.
"""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table

from tensile_jax.cli.formatting import format_accuracy, format_losses, format_share, format_us, job_table
from tensile_jax.runtime_records import JobState
from tensile_jax.units import format_bytes, times_plain_jit

# -- one model ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Outcome:
    """A finished or interrupted training of one model.

    `peak_bytes`, `step_us`, `stall_us`, `recomputed_us` are measured; `predicted_...` are the plan's, but
    `predicted_jit_step_us`, which is plain jit's, and null where a saved plan does not say it. `step_us` is the median without
    the first step.
    """

    model: str
    parameters: int
    batch_size: int
    image_size: int | None
    sequence_length: int | None
    device: str
    policy: str
    state_memory: str
    steps_asked: int
    steps_done: int
    interrupted: bool
    budget_bytes: int | None
    peak_bytes: int
    predicted_peak_bytes: int
    jit_peak_bytes: int | None
    step_us: float | None
    predicted_step_us: float
    predicted_jit_step_us: float | None
    stall_us: float
    swapped_bytes: int
    passive_swap_ins: int
    recomputed_us: float
    out_of_memory: int
    segments: int
    distinct_segments: int
    trace_s: float
    plan_s: float
    compile_s: float
    loss_first: float | None
    loss_last: float | None
    test_accuracy: float | None


def outcome_table(outcome: Outcome) -> Table:
    """A table of two columns: the name of a value, and the value."""
    o = outcome
    jit = "" if o.jit_peak_bytes is None else f", {format_share(o.peak_bytes, o.jit_peak_bytes)} of plain jit's"
    plain_us = o.predicted_jit_step_us
    over = f", {times_plain_jit(o.predicted_step_us, plain_us)}" if plain_us else ""
    first, last = ("none" if loss is None else f"{loss:.4f}" for loss in (o.loss_first, o.loss_last))
    rows = {
        "steps": f"{o.steps_done} of {o.steps_asked} (interrupted)" if o.interrupted else str(o.steps_done),
        "peak measured": f"{format_bytes(o.peak_bytes)}{jit}",
        "peak predicted": format_bytes(o.predicted_peak_bytes),
        "budget": "none" if o.budget_bytes is None else format_bytes(o.budget_bytes),
        "step measured": "one step is too few to tell" if o.step_us is None else format_us(o.step_us),
        "step predicted": format_us(o.predicted_step_us) + over,
        **({"plain jit predicted": format_us(plain_us)} if plain_us else {}),
        "waiting for copies": f"{format_us(o.stall_us)} a step",
        "swapped": f"{format_bytes(o.swapped_bytes)} a step, both ways",
        "recomputed": f"{format_us(o.recomputed_us)} a step",
        "segments": str(o.segments) if o.segments > 1 else "1: the step runs whole, as plain jit",
        "compiling": f"{o.compile_s:.1f} s",
        "loss": f"{first} -> {last}",
    }
    if o.out_of_memory:
        rows["out of memory"] = f"{o.out_of_memory} times, recovered"
    if o.test_accuracy is not None:
        rows["test accuracy"] = format_accuracy(o.test_accuracy)
    table = Table("", f"{o.model} on {o.device}, batch {o.batch_size}", title_justify="left")
    for name, value in rows.items():
        table.add_row(name, value)
    return table


@dataclass(frozen=True, slots=True)
class PlainJob:
    """A job that was trained with plain `jax.jit`, to be compared with.

    `peak_bytes` is XLA's figure; `time_s` is from the job's compiling to its last step, without the test. `step_us` is the median
    without the first step; None if there was one step only. `first_step_s` lasts from the begin of tracing to the end of the
    first step.
    """

    name: str
    peak_bytes: int
    compile_s: float
    first_step_s: float
    time_s: float
    step_us: float | None
    loss_first: float
    loss_last: float
    test_accuracy: float | None


# -- several jobs -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class JobOutcome:
    """One job.

    Attributes:
        state, note: how it ended, and why.
        steps_done, loss_first, loss_last, time_s: of all parts of a resumed run together. `time_s` lasts from the submission of
            the job to its end, so it includes the time in which the job waited for others.
        peak_bytes: measured, of the job alone.
        planned_peak_bytes: of the job's last plan.
        jit_peak_bytes: of plain jit.
        step_us: measured, the median of the last steps; it includes other jobs' launches. None if there was no step in this part
            of the run.
        predicted_step_us, predicted_jit_step_us: of the last plan and of plain jit, without other jobs.
        test_accuracy: None unless the model has a test set and the job has finished.
    """

    name: str
    model: str | None
    entrypoint: str | None
    state: JobState
    note: str
    steps_asked: int
    steps_done: int
    loss_first: float | None
    loss_last: float | None
    peak_bytes: int | None
    planned_peak_bytes: int | None
    jit_peak_bytes: int | None
    time_s: float
    step_us: float | None
    predicted_step_us: float | None
    predicted_jit_step_us: float | None
    test_accuracy: float | None


@dataclass(frozen=True, slots=True)
class JobsOutcome:
    """A run.

    Attributes:
        peak_bytes: measured, of all jobs together; None of a run that was killed.
        troubles: the files that could not be written.
    """

    folder: str
    device: str
    interrupted: bool
    budget_bytes: int
    host_budget_bytes: int | None
    peak_bytes: int | None
    time_s: float
    troubles: tuple[str, ...]
    jobs: tuple[JobOutcome, ...]


def jobs_table(outcome: JobsOutcome) -> Table:
    """A row for each job."""
    tested = any(job.test_accuracy is not None for job in outcome.jobs)
    timed = any(job.step_us is not None for job in outcome.jobs)
    columns = ("steps", "loss", "peak", *(("step", "plain\njit") if timed else ()), "time", *(["test"] if tested else []))
    caption = "step: measured, other jobs' launches included; plain jit: its step, predicted" if timed else None
    table = job_table(len(outcome.jobs), outcome.device, *columns, caption=caption)
    table.add_column("ended", no_wrap=True, min_width=len("cancelled"))
    for job in outcome.jobs:
        table.add_row(
            job.name,
            f"{job.steps_done}/{job.steps_asked}",
            format_losses(job.loss_first, job.loss_last),
            format_bytes(job.peak_bytes) if job.peak_bytes else "",
            *(format_us(float(f"{us:.3g}")) if us else "" for us in (job.step_us, job.predicted_jit_step_us) if timed),
            f"{job.time_s:.1f} s",
            *([format_accuracy(job.test_accuracy)] if tested else []),
            job.state,
            style="red" if job.state == "failed" else "",
        )
    return table


def jobs_lines(outcome: JobsOutcome) -> Sequence[str]:
    """The lines below the table: the shared peak beside budget and plain jit, the command to resume, the run folder."""
    if outcome.peak_bytes is None:
        together = f"Together: the peak is not known; the budget is {format_bytes(outcome.budget_bytes)}; {outcome.time_s:.1f} s"
    else:
        together = (
            f"Together: {format_bytes(outcome.peak_bytes)} at most of {format_bytes(outcome.budget_bytes)} "
            f"({format_share(outcome.peak_bytes, outcome.budget_bytes)} of the budget), {outcome.time_s:.1f} s"
        )
    known = [job.jit_peak_bytes for job in outcome.jobs if job.jit_peak_bytes is not None]
    if known and len(known) == len(outcome.jobs):
        together += f"; plain jit's peaks come to {format_bytes(sum(known))}"
    lines = [together]
    if any(job.state != "finished" for job in outcome.jobs):
        why = "Interrupted" if outcome.interrupted else "Not all jobs have finished"
        lines.append(f"{why}; go on with: tensile run --resume {shlex.quote(outcome.folder)}")
    lines += [f"{job.name}: planned {planned}" for job in outcome.jobs if (planned := _planned(job))]
    for job in outcome.jobs:
        log = f"; see {outcome.folder}/jobs/{job.name}/log.txt" if job.state == "failed" else ""
        if job.note or log:
            lines.append(f"{job.name} {job.state}: {job.note or 'without a reason'}{log}")
    return [*lines, f"Run folder: {outcome.folder}"]


def _planned(job: JobOutcome) -> str:
    """What the job's last plan predicts; empty if that is not known."""
    parts = [] if not job.planned_peak_bytes else [f"for {format_bytes(job.planned_peak_bytes)}"]
    if job.predicted_step_us is not None:
        parts.append(f"to take {format_us(job.predicted_step_us)} a step without other jobs")
        if job.predicted_jit_step_us:
            parts.append(f"{times_plain_jit(job.predicted_step_us, job.predicted_jit_step_us)}, predicted")
    return ", ".join(parts)


# -- several jobs, planned ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PlannedJob:
    """One job.

    Attributes:
        peak_bytes: the most on the device.
        idle_bytes: on the device between iterations.
        parked_bytes: on the device while the job's state is on the host.
        host_bytes: the most in host memory.
        floor_bytes: the smallest peak for which there is a plan.
        step_us: the time of a step.
        switch_us: the time to copy the job's state to the host and back.
        kept_out_tensors: the number of state tensors that are on the host between their uses, so that other jobs have room.
        beside_others: whether the plan fits into the memory that the other jobs leave free while they are at rest. Otherwise the
            job is planned for the whole budget, and the states of other jobs are copied to the host while it runs.
    """

    name: str
    model: str | None
    entrypoint: str | None
    peak_bytes: int
    idle_bytes: int
    parked_bytes: int
    host_bytes: int
    floor_bytes: int
    jit_peak_bytes: int | None
    step_us: float
    switch_us: float
    swapped_bytes: int
    segments: int
    kept_out_tensors: int
    beside_others: bool


@dataclass(frozen=True, slots=True)
class JointPlan:
    """All jobs under one budget.

    Attributes:
        serial_peak_bytes: the maximum over jobs of (the job's peak + the memory of the other jobs at rest). This is the peak if
            iterations run one after the other and all states are on the device.
        peak_sum_bytes: the sum of all peaks.
        round_us: the time of one iteration of each job.
        take_turns: whether some states must leave the device while other jobs run.
    """

    file: str
    device_profile: str
    budget_bytes: int
    host_budget_bytes: int | None
    host_bytes: int
    serial_peak_bytes: int
    peak_sum_bytes: int
    round_us: float
    take_turns: bool
    jobs: tuple[PlannedJob, ...]


def plan_table(joint: JointPlan) -> Table:
    """A row for each job."""
    known = all(job.jit_peak_bytes is not None for job in joint.jobs)
    columns = ("peak", "at rest", "least", *(("plain jit",) if known else ()), "step time", "swapped", "segments")
    table = job_table(len(joint.jobs), f"{joint.device_profile} (predicted)", *columns)
    for job in joint.jobs:
        sizes = (job.peak_bytes, job.idle_bytes, job.floor_bytes, *((job.jit_peak_bytes or 0,) if known else ()))
        costs = (format_us(job.step_us), format_bytes(job.swapped_bytes), str(job.segments))
        table.add_row(job.name, *map(format_bytes, sizes), *costs)
    return table


def plan_lines(joint: JointPlan) -> list[str]:
    """The lines below the table."""
    lines = [
        f"Budget: {format_bytes(joint.budget_bytes)}. The highest job beside the others at rest: "
        f"{format_bytes(joint.serial_peak_bytes)}; all peaks added up: {format_bytes(joint.peak_sum_bytes)}.",
        f"One step of each job: {format_us(joint.round_us)}, when the device is never idle.",
    ]
    out = [job for job in joint.jobs if job.kept_out_tensors]
    if out:
        what = ", ".join(f"{job.kept_out_tensors} tensors of {job.name}'s state" for job in out)
        lines.append(f"While other jobs run, {what} are in host memory, so that all have room.")
    if joint.take_turns:
        lines.append("The jobs' states do not fit on the device at once: they take turns, and wait in host memory meanwhile.")
    return lines
