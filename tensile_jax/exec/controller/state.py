"""Defines the state of the controller, which decides what each job does next: `State`, with one `JobRecord` for each job that has
not ended.

Both are immutable, and use no JAX, clock or thread. Sizes are in bytes, times in microseconds.
"""

from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Literal, NewType

from tensile_jax.exec.actor.plans import PlanId, PlanSummary
from tensile_jax.plan.multi_job.memory_profile import MemoryProfile
from tensile_jax.story import Story

JobId = NewType("JobId", int)
Wish = Literal["run", "pause", "stop"]
"""What the user wants of a job."""


class StatePlace(IntEnum):
    """Where a job's state is: on the host, on the device, or being copied. In an iteration the state counts as on the device."""

    ON_HOST = 0
    TO_DEVICE = 1
    ON_DEVICE = 2
    TO_HOST = 3


@dataclass(frozen=True, slots=True)
class JobRecord:
    """One job, admitted or pending.

    Attributes:
        memory: the memory profile of one iteration of the job's plan.
        plan: the id of that plan.
        weight: the job's priority: its share of the device's time in proportion to the weights of the other jobs.
        position: the index of the next move of the iteration under way; 0 between iterations.
        busy: whether a run or a copy of the job must end before the job's next move can be issued.
        batches: how many batches are loaded, including the one of the iteration under way.
        renewal: a new plan, which is put to use once the job's state is on the host; None if there is none.
        pause_reported: whether the job is paused and `ReportPaused` was among the instructions.
        virtual_us: the job's compute time divided by its weight. A value below `State.clock_us` counts as `State.clock_us`.
        overtaken: how many iterations of other jobs began while this job waited for memory, either as the first in turn or in the
            middle of an iteration. `fair_share.py` says when the count is set to zero.
        checkpoint_every: after each so many steps the job is paused for a checkpoint; zero: never.
        checkpoint_at: the number of steps left at which the job is next paused for a checkpoint; below zero: at none.
    """

    job: JobId
    memory: MemoryProfile
    weight: float
    steps_left: int
    wish: Wish = "run"
    place: StatePlace = StatePlace.ON_HOST
    position: int = 0
    busy: bool = False
    batches: int = 0
    renewal: PlanSummary | None = None
    pause_reported: bool = False
    virtual_us: float = 0.0
    overtaken: int = 0
    plan: PlanId = PlanId(0)
    checkpoint_every: int = 0
    checkpoint_at: int = -1

    @property
    def held_bytes(self) -> int:
        """The bytes that the job holds on the device, without the transient bytes of its runs in flight."""
        if self.place is StatePlace.ON_DEVICE:
            return self.memory.holds[self.position]
        return self.memory.parked_bytes if self.place is StatePlace.ON_HOST else self.memory.holds[0]

    @property
    def settled_bytes(self) -> int:
        """The bytes that the job will hold on the device once its iteration is over."""
        return self.memory.parked_bytes if self.place is StatePlace.ON_HOST else self.memory.idle_bytes

    def at(self, position: int, *, busy: bool) -> "JobRecord":
        """This record at another position. The fields are written out, since `dataclasses.replace` takes twice as long."""
        return JobRecord(
            self.job, self.memory, self.weight, self.steps_left, self.wish, self.place, position, busy, self.batches,
            self.renewal, self.pause_reported, self.virtual_us, self.overtaken, self.plan, self.checkpoint_every,
            self.checkpoint_at,
        )  # fmt: skip

    def after_run(self, virtual_us: float, *, busy: bool) -> "JobRecord":
        """The record after one of the job's runs has ended."""
        return JobRecord(
            self.job, self.memory, self.weight, self.steps_left, self.wish, self.place, self.position, busy, self.batches,
            self.renewal, self.pause_reported, virtual_us, self.overtaken, self.plan, self.checkpoint_every,
            self.checkpoint_at,
        )  # fmt: skip

    @property
    def is_ready(self) -> bool:
        """Whether the job would begin an iteration if there were memory."""
        ready = self.position == 0 and self.batches > 0 and self.steps_left > 0
        return ready and self.wish == "run" and self.renewal is None and not self.checkpoint_due

    @property
    def checkpoint_due(self) -> bool:
        """Whether the job is to be paused for a checkpoint once its iteration is over."""
        return self.steps_left == self.checkpoint_at

    def with_pause_reported(self) -> "JobRecord":
        """The record after `ReportPaused`. A job that was paused for a checkpoint runs again when it is told to."""
        if not self.checkpoint_due:
            return replace(self, pause_reported=True)
        return replace(self, wish="pause", pause_reported=True, checkpoint_at=self.checkpoint_at - self.checkpoint_every)


@dataclass(frozen=True, slots=True)
class State:
    """Everything that the controller knows. A `State` begins without jobs; only `machine.step` adds them.

    Attributes:
        depth: the most runs with launches that may be in flight at once: issued and not yet over.
        records: the admitted jobs.
        pending: the jobs that wait to be admitted.
        in_flight: (job, transient bytes) of each run in flight, in order of issue.
        next_budget_bytes: a budget that was requested and is not applied yet; None if there is none.
        clock_us: the least virtual time of the jobs that contended for the device when an iteration last began.
        jobs_bytes: the sum of `held_bytes` over the records.
        settled_bytes: the sum of `settled_bytes` over the records: what the jobs hold once their iterations are over.
        parked_bytes: the sum of `memory.parked_bytes` over the records: what the jobs would hold if all were parked.
        story: the last events.
    """

    budget_bytes: int
    host_budget_bytes: float
    depth: int = 1
    records: tuple[JobRecord, ...] = ()
    pending: tuple[JobRecord, ...] = ()
    in_flight: tuple[tuple[JobId, int], ...] = ()
    next_budget_bytes: int | None = None
    clock_us: float = 0.0
    jobs_bytes: int = 0
    settled_bytes: int = 0
    parked_bytes: int = 0
    story: Story = field(default=Story(), compare=False, repr=False)

    @property
    def held_bytes(self) -> int:
        """The bytes that are accounted for on the device: `jobs_bytes` and the most transient bytes of a run in flight."""
        return self.jobs_bytes + max([transient for _, transient in self.in_flight], default=0)

    def record(self, job: JobId) -> JobRecord | None:
        """The record of a job, admitted or pending; None if there is none."""
        return next((r for r in (*self.records, *self.pending) if r.job == job), None)
