"""Defines what a `Runtime`, which runs several jobs on one device, tells its user: status, events, and a record of memory and
copies.

    Status     ::= JobStatus*               a snapshot: the budgets, the bytes in use, how busy the link is, and the state of
                                            every job
    JobReport                               what was measured of one job
    JobEvent                                something that happened to a job; the runtime reports each when it happens
    Record     ::= Span*  Level*  Stage*    when each launch and copy ran, how many bytes were on the device, and what each job
                                            went through before its first iteration

A job goes through the following states. Until the job ends, it may also be paused and resumed, fail, or be cancelled:

    preparing -> queued -> running -> finished

Sizes are in bytes. Times are in microseconds or seconds since the runtime began, as the names say.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from tensile_jax import html_tables
from tensile_jax.units import format_bytes, format_count, times_plain_jit

JobState = Literal["preparing", "queued", "running", "paused", "finished", "failed", "cancelled"]
"""`preparing`: traced, planned, compiled. `queued`: waits for memory. The last three are final."""

FINAL: frozenset[JobState] = frozenset({"finished", "failed", "cancelled"})

EventName = Literal[
    "submitted", "preparing", "planned", "queued", "started", "step", "renewed", "renewal_failed", "paused", "resumed", "parked",
    "checkpointed", "checkpoint_failed", "budget", "finished", "failed", "cancelled",
    "placed", "lost", "device_joined", "device_lost",
]  # fmt: skip
"""`preparing` comes once for each phase of tracing, planning and compiling, which its note names. The last four come on a cluster
only: a job goes to a device, its device has died, a device comes or has died."""

NO_LIMIT = 2**62
"""The host budget in a status that means "no limit"."""

LaneName = Literal["compute", "out", "into"]
"""What serves one at a time: the device's compute stream, the link to the host, the link to the device."""


@dataclass(frozen=True, slots=True)
class JobStatus:
    """A snapshot of one job.

    Attributes:
        step: how many iterations are done.
        steps: how many iterations the job is to do in all.
        loss: the loss of the last step; None if the step returns none.
        steps_per_s: the speed over the last steps; None before the second step.
        device_bytes: what the job holds on the device now, by the controller's account.
        peak_bytes: the most device memory of the job that was measured.
        planned_bytes: the most device memory that the job needs by its plan.
        host_bytes: the bytes of the job's state in pinned host memory now.
        stall_us: the mean time in a step spent waiting for copies.
        swapped_bytes: what the plan copies in a step, in both directions added up.
        note: what is done to prepare the job, why it waits, or how it failed; may be empty.
    """

    name: str
    state: JobState
    priority: float
    step: int
    steps: int
    loss: float | None
    steps_per_s: float | None
    device_bytes: int
    peak_bytes: int
    planned_bytes: int
    host_bytes: int
    stall_us: float
    swapped_bytes: int
    note: str

    @property
    def eta_s(self) -> float | None:
        """Seconds until the last step at the present speed; None if that is not known or the job has ended."""
        if not self.steps_per_s or self.state in FINAL:
            return None
        return (self.steps - self.step) / self.steps_per_s

    def _repr_html_(self) -> str:
        return html_tables.of_record(self)


@dataclass(frozen=True, slots=True, repr=False)
class JobReport(html_tables.ShownAsText):
    """What was measured of a job, beside what its plan predicts. `print(report)` shows it.

    Attributes:
        step: how many iterations are done.
        peak_bytes: the most device memory of this job, live arrays and workspace, in the iterations in which it was read.
        step_us: the median time of an iteration from its begin to its end, including other jobs' launches in between; None before
            the first iteration has ended.
        predicted_step_us: the time of an iteration by the job's plan, without other jobs.
        predicted_jit_step_us: the time of an iteration of plain jit, without other jobs; None if it is not known.
        swapped_bytes: what the plan copies in a step, in both directions added up.
        stall_us: the mean time in a step spent waiting for copies.
        passive_swap_ins: how many tensors were not on the device when they were needed there.
        out_of_memory: how often the device refused an allocation.
        segments: how many segments the plan has.
        plans: how many plans the job has used.
    """

    name: str
    step: int
    peak_bytes: int
    predicted_peak_bytes: int
    step_us: float | None
    predicted_step_us: float
    predicted_jit_step_us: float | None
    swapped_bytes: int
    stall_us: float
    passive_swap_ins: int
    out_of_memory: int
    segments: int
    plans: int

    def __str__(self) -> str:
        return "\n".join(_job_lines(self))


@dataclass(frozen=True, slots=True)
class Status:
    """A snapshot of a runtime.

    Attributes:
        out_share, into_share: which part of the last three seconds each lane was busy.
        budget_of: if the budget is a share, what it is a share of, in words; otherwise empty.
    """

    time_s: float
    budget_bytes: int
    host_budget_bytes: int
    device_bytes: int
    peak_bytes: int
    host_bytes: int
    out_share: float
    into_share: float
    jobs: tuple[JobStatus, ...]
    budget_of: str = ""

    def _repr_html_(self) -> str:
        return html_tables.of_record(self) + html_tables.of_records(self.jobs)


@dataclass(frozen=True, slots=True)
class JobEvent:
    """Something that happened to a job. `step` is how many iterations it had done; `values` are metrics, or sizes in bytes."""

    time_s: float
    kind: EventName
    job: str
    step: int
    note: str = ""
    values: dict[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True, slots=True)
class Span:
    """One use of a lane by a job, over `[begin_us, end_us)`: the segment `name` ran, or `nbytes` were copied.

    Several segments that ran one after another may share a span, with the name `"FIRST .. LAST"`. Only iterations in which live
    bytes are read have a span for each segment.
    """

    lane: LaneName
    job: str
    name: str
    step: int
    begin_us: float
    end_us: float
    nbytes: int


@dataclass(frozen=True, slots=True)
class Level:
    """The device memory from `time_us` on: `jobs` says how many bytes each job holds, by the controller's account.

    `measured_bytes` are the bytes of all live arrays plus the running executable's workspace; None if they were not read.
    """

    time_us: float
    budget_bytes: int
    jobs: dict[str, int]
    measured_bytes: int | None = None

    @property
    def planned_bytes(self) -> int:
        """The bytes that all jobs hold, by the controller's account."""
        return sum(self.jobs.values())


StageName = Literal["preparing", "compiling", "queued"]
"""What a job does before its first iteration. `preparing` is all but compiling: first batch, tracing, planning."""


@dataclass(frozen=True, slots=True)
class Stage:
    """What a job did before its first iteration, over `[begin_us, end_us)`.

    Attributes:
        note: what exactly it did, or why it waited.
        ended: how the job ended at `end_us`; None if it went on.
    """

    name: StageName
    job: str
    note: str
    begin_us: float
    end_us: float
    ended: Literal["finished", "failed", "cancelled"] | None = None


@dataclass(frozen=True, slots=True)
class Record:
    """What a runtime recorded, in order of time. Records that older versions wrote have no stages."""

    spans: tuple[Span, ...]
    levels: tuple[Level, ...]
    stages: tuple[Stage, ...] = ()


def _job_lines(report: JobReport) -> Iterator[str]:
    """The screen that printing a job's report shows: one headline, and each time in words."""
    plain_us = report.predicted_jit_step_us
    over = f"{times_plain_jit(report.predicted_step_us, plain_us)}, predicted, both without other jobs" if plain_us else ""
    yield f"Job {report.name!r}: {over or 'the time of plain jit is not known'}"
    yield f"  peak            {format_bytes(report.peak_bytes)} measured, {format_bytes(report.predicted_peak_bytes)} predicted"
    yield "  a step takes"
    times = {
        "measured from its begin to its end, with other jobs' launches in between": report.step_us,
        "predicted by the plan, without other jobs": report.predicted_step_us,
        "predicted of plain jit, without other jobs": plain_us,
    }
    yield from (f"    {f'{us / 1e3:.1f} ms':>12}  {words}" for words, us in times.items() if us is not None)
    yield f"  in it           {report.stall_us / 1e3:.1f} ms of waiting for copies"
    yield f"  copies          {format_bytes(report.swapped_bytes)} a step, both directions added up"
    plans = f"{format_count(report.segments, 'segment')} in the plan, {format_count(report.plans, 'plan')} used"
    yield f"  so far          {format_count(report.step, 'step')}, {plans}"
    if report.out_of_memory:
        yield f"  out of memory   {format_count(report.out_of_memory, 'allocation')} refused by the device; the step recovered"
    if report.passive_swap_ins:
        yield f"  late copies     {format_count(report.passive_swap_ins, 'tensor')} copied to the device when needed there"
