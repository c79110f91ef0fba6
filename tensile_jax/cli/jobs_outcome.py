"""What `tensile run JOBS.toml` ends with, as one table or one JSON object. Bytes and seconds, as the names say."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from rich.table import Table

from tensile_jax.cli.units import format_share
from tensile_jax.plan_format import format_bytes
from tensile_jax.runtime_records import JobState


@dataclass(frozen=True, slots=True)
class JobOutcome:
    """One job.

    Attributes:
        state, note: how it ended, and why.
        steps_done, loss_first, loss_last, time_s: earlier parts of a resumed run are counted in; `time_s` is from its
            submission to its end, so it holds what it waited for others.
        peak_bytes: measured, of the job alone; `planned_peak_bytes`: its last plan's; `jit_peak_bytes`: plain jit's.
        test_accuracy: of a model that has a test set, once it has finished.

    What was not measured, or is no number, is null.
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
    test_accuracy: float | None


@dataclass(frozen=True, slots=True)
class JobsOutcome:
    """A run. `peak_bytes` is measured, of all jobs together; `troubles` are what its folder could not take."""

    folder: str
    device: str
    interrupted: bool
    budget_bytes: int
    host_budget_bytes: int | None
    peak_bytes: int
    time_s: float
    troubles: tuple[str, ...]
    jobs: tuple[JobOutcome, ...]

    @property
    def failed(self) -> tuple[JobOutcome, ...]:
        """The jobs that failed."""
        return tuple(job for job in self.jobs if job.state == "failed")


def jobs_outcome_schema() -> dict[str, Any]:
    """The JSON Schema (2020-12) of what `tensile run JOBS.toml --json` prints."""
    schema = msgspec.json.schema(JobsOutcome)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "tensile run JOBS.toml", **schema}


def jobs_table(outcome: JobsOutcome) -> Table:
    """A row for each job; narrow enough for a terminal of 80 columns, where names are cut off before figures."""
    tested = any(job.test_accuracy is not None for job in outcome.jobs)
    title = f"{len(outcome.jobs)} {'job' if len(outcome.jobs) == 1 else 'jobs'} on {outcome.device}"
    table = Table(title=title, title_justify="left", title_style="bold", box=None, padding=(0, 1, 0, 0))
    table.add_column("job", no_wrap=True, min_width=8)
    for name in ("steps", "loss", "peak", "planned", "time", *(["test"] if tested else [])):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("ended", no_wrap=True, min_width=len("cancelled"))
    for job in outcome.jobs:
        table.add_row(
            job.name,
            f"{job.steps_done}/{job.steps_asked}",
            losses(job.loss_first, job.loss_last),
            size(job.peak_bytes),
            size(job.planned_peak_bytes),
            f"{job.time_s:.1f} s",
            *([percent(job.test_accuracy)] if tested else []),
            job.state,
            style="red" if job.state == "failed" else "",
        )
    return table


def device_line(outcome: JobsOutcome) -> str:
    """The shared peak against the budget and, where it is known, against plain jit."""
    line = (
        f"Together: {format_bytes(outcome.peak_bytes)} at most of {format_bytes(outcome.budget_bytes)} "
        f"({format_share(outcome.peak_bytes, outcome.budget_bytes)} of the budget), {outcome.time_s:.1f} s"
    )
    peaks = [job.jit_peak_bytes for job in outcome.jobs]
    known = [peak for peak in peaks if peak is not None]
    if known and len(known) == len(peaks):
        line += f"; plain jit's peaks come to {format_bytes(sum(known))}"
    return line


def end_lines(outcome: JobsOutcome) -> Sequence[str]:
    """What is said below the table: where things are, how to go on."""
    lines = [device_line(outcome)]
    if outcome.interrupted:
        lines.append(f"Interrupted; go on with: tensile run --resume {outcome.folder}")
    for job in outcome.jobs:
        log = f"; see {outcome.folder}/jobs/{job.name}/log.txt" if job.state == "failed" else ""
        if job.note or log:
            lines.append(f"{job.name} {job.state}: {job.note or 'without a reason'}{log}")
    return [*lines, f"Run folder: {outcome.folder}"]


def losses(first: float | None, last: float | None) -> str:
    """From the first to the last.

    >>> losses(10.33612, 2.19357), losses(0.5, None), losses(None, None)
    ('10.34 -> 2.194', '0.5 -> ?', '')
    """
    if first is None:
        return ""
    return f"{first:.4g} -> {'?' if last is None else format(last, '.4g')}"


def size(nbytes: int | None) -> str:
    """Bytes that may not have been measured."""
    return "" if not nbytes else format_bytes(nbytes)


def percent(accuracy: float | None) -> str:
    """An accuracy that may not have been measured."""
    return "" if accuracy is None else f"{accuracy:.2%}"
