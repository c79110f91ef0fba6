"""What `tensile plan JOBS.toml` finds: every job's plan beside the others, as a table and as JSON. All of it is predicted.

    rest of a job       what it holds between iterations, the others' being what a job's plan must leave room for
    serial peak         max over jobs of (its peak + the others' rest): one iteration after the other, all states on the device
    least budget used   max over jobs of (its peak + what the others leave when their state is on the host)

A job that cannot be planned beside the others at rest is planned for the whole budget: then states take turns on the device.
"""

from dataclasses import dataclass
from typing import Any

import msgspec
from rich.table import Table

from tensile_jax.cli.units import format_us
from tensile_jax.plan_format import format_bytes


@dataclass(frozen=True, slots=True)
class PlannedJob:
    """One job.

    Attributes:
        peak_bytes, idle_bytes, parked_bytes: on the device at most, between iterations, and with its state on the host.
        host_bytes: in host memory at most.
        floor_bytes: the least peak that it can be planned for.
        step_us: of its step; `switch_us`: to send its state to the host and fetch it again.
        kept_out_tensors: how many of its state are on the host between their uses, so that others have room.
        beside_others: it is planned for what is left beside the others at rest.
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
        serial_peak_bytes, peak_sum_bytes: as above, and all peaks added up.
        round_us: one iteration of each job.
        take_turns: some states must leave the device for other jobs.
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


def jobs_plan_schema() -> dict[str, Any]:
    """The JSON Schema (2020-12) of what `tensile plan JOBS.toml -o` writes."""
    schema = msgspec.json.schema(JointPlan)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "tensile plan JOBS.toml", **schema}


def plan_table(joint: JointPlan) -> Table:
    """A row for each job."""
    title = f"{len(joint.jobs)} {'job' if len(joint.jobs) == 1 else 'jobs'} on {joint.device_profile} (predicted)"
    known = all(job.jit_peak_bytes is not None for job in joint.jobs)
    table = Table(title=title, title_justify="left", title_style="bold", box=None, padding=(0, 1, 0, 0))
    table.add_column("job", no_wrap=True, min_width=8)
    for name in ("peak", "at rest", "least", *(("plain jit",) if known else ()), "step time", "swapped", "segments"):
        table.add_column(name, justify="right", no_wrap=True)
    for job in joint.jobs:
        table.add_row(
            job.name,
            format_bytes(job.peak_bytes),
            format_bytes(job.idle_bytes),
            format_bytes(job.floor_bytes),
            *((format_bytes(job.jit_peak_bytes or 0),) if known else ()),
            format_us(job.step_us),
            format_bytes(job.swapped_bytes),
            str(job.segments),
        )
    return table


def joint_lines(joint: JointPlan) -> list[str]:
    """What is said below the table."""
    budget = format_bytes(joint.budget_bytes)
    lines = [
        f"Budget: {budget}. The highest job beside the others at rest: {format_bytes(joint.serial_peak_bytes)}; all peaks "
        f"added up: {format_bytes(joint.peak_sum_bytes)}.",
        f"One step of each job: {format_us(joint.round_us)}, when the device is never idle.",
    ]
    out = [job for job in joint.jobs if job.kept_out_tensors]
    if out:
        what = ", ".join(f"{job.kept_out_tensors} tensors of {job.name}'s state" for job in out)
        lines.append(f"While other jobs run, {what} are in host memory, so that all have room.")
    if joint.take_turns:
        lines.append("The jobs' states do not fit on the device at once: they take turns, and wait in host memory meanwhile.")
    return lines
