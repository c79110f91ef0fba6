"""The records that a `Runtime` gives to its user: its status, its events, and what it recorded of memory and copies.

    Status  ::= budgets, bytes, link  JobStatus*     a snapshot, for whoever looks
    JobEvent                                         something that happened to a job; all are reported, in order
    Record  ::= Span | Level                         what ran when, and how many bytes lay on the device from when on

A job's life:

    preparing -> queued -> running <-> paused -> finished | failed | cancelled

Sizes in bytes; times in microseconds or seconds since the runtime began, as the names say.
"""

from dataclasses import dataclass, field
from typing import Literal

JobState = Literal["preparing", "queued", "running", "paused", "finished", "failed", "cancelled"]
"""`preparing`: traced, planned, compiled. `queued`: waits for memory. The last three are final."""

FINAL: frozenset[JobState] = frozenset({"finished", "failed", "cancelled"})

EventName = Literal[
    "submitted", "planned", "queued", "started", "step", "renewed", "paused", "resumed", "parked", "checkpointed",
    "checkpoint_failed", "budget", "finished", "failed", "cancelled",
]  # fmt: skip

LaneName = Literal["compute", "out", "into"]
"""What serves one at a time: the device's compute stream, the link to the host, the link to the device."""


@dataclass(frozen=True, slots=True)
class JobStatus:
    """One job, as it stands.

    Attributes:
        step, steps: iterations done, and asked for.
        loss: of the last step; None where there is none.
        steps_per_s: over the last steps that ran; None before the second.
        device_bytes: on the device now; `peak_bytes`: the most that was measured; `planned_bytes`: its plan's peak.
        host_bytes: in pinned host memory now.
        stall_us: per step, waiting for copies.
        swapped_bytes: per step, both ways.
        note: why it waits, or how it failed; empty where there is nothing to say.
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
        """Seconds to its last step at the speed of the last ones; None where that is not known."""
        if not self.steps_per_s or self.state in FINAL:
            return None
        return (self.steps - self.step) / self.steps_per_s


@dataclass(frozen=True, slots=True)
class JobReport:
    """What was measured of a job, beside what its plan had predicted.

    Attributes:
        peak_bytes: its own on the device, live arrays and workspace, in the iterations that were looked at.
        step_us: median time of an iteration from its begin to its end, other jobs' launches in between included; None before
            the first. `predicted_step_us` is that of its plan, alone.
        swapped_bytes: per step, both ways.
        stall_us: per step, waiting for copies.
        passive_swap_ins: tensors that were not there when an iteration began.
        out_of_memory: times the device refused an allocation.
        plans: how many plans it has had.
    """

    step: int
    peak_bytes: int
    predicted_peak_bytes: int
    step_us: float | None
    predicted_step_us: float
    swapped_bytes: int
    stall_us: float
    passive_swap_ins: int
    out_of_memory: int
    segments: int
    plans: int


@dataclass(frozen=True, slots=True)
class Status:
    """A runtime, as it stands. `out_share` and `into_share` are the parts of the last seconds in which each lane was busy."""

    time_s: float
    budget_bytes: int
    host_budget_bytes: int
    device_bytes: int
    peak_bytes: int
    host_bytes: int
    out_share: float
    into_share: float
    jobs: tuple[JobStatus, ...]


@dataclass(frozen=True, slots=True)
class JobEvent:
    """Something that happened. `step` is how many iterations the job had done; `values` are metrics, or sizes in bytes."""

    time_s: float
    kind: EventName
    job: str
    step: int
    note: str = ""
    values: dict[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True, slots=True)
class Span:
    """A lane served a job over `[begin_us, end_us)`: it ran the segment `name`, or copied `nbytes`."""

    lane: LaneName
    job: str
    name: str
    step: int
    begin_us: float
    end_us: float
    nbytes: int


@dataclass(frozen=True, slots=True)
class Level:
    """From `time_us` on, by the controller's account, `jobs` hold so many bytes, out of `budget_bytes`.

    `measured_bytes` is what the live arrays came to, plus the running executable's workspace, where that was looked up.
    """

    time_us: float
    budget_bytes: int
    jobs: dict[str, int]
    measured_bytes: int | None = None

    @property
    def planned_bytes(self) -> int:
        """Of all jobs."""
        return sum(self.jobs.values())


@dataclass(frozen=True, slots=True)
class Record:
    """What a runtime recorded, in order of time."""

    spans: tuple[Span, ...]
    levels: tuple[Level, ...]
