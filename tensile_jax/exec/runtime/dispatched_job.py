"""Holds what the dispatcher, which begins and ends iterations, knows of one job: its plan, its iterations, and measurements.

Each job has one `Follower` (`plan/drift.py`). The follower says which iterations are *watched*, which means that they are
measured. It learns from the latencies of their segments (the executables of a plan), and says when a new plan is due.

All of this changes only while the dispatcher's lock is held. There are two exceptions: the thread that carries out launches calls
`Iteration.launched` without the lock, and `JobMeasurements` are read and changed by other threads.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tensile_jax.exec.actor.actor import Actor
from tensile_jax.exec.runtime.job_measurements import JobMeasurements
from tensile_jax.plan.drift import Follower
from tensile_jax.plan.multi_job.memory_profile import MemoryProfile
from tensile_jax.plan_format import Plan


@dataclass(slots=True, eq=False)
class Iteration:
    """An iteration of a job. The next one may begin while runs of this one are in flight.

    Attributes:
        step: how many steps of the job were done when it began.
        memory: of the plan under which it runs.
        began: when it began, in microseconds.
        watched: whether live bytes are read, and the moves of its runs are issued one by one.
        followed: whether the latencies of its segments are measured.
        segment: the index of the segment that is launched next.
        segment_us: the latencies of its segments, as far as they have ended, if it is followed.
        in_flight: how many of its runs with launches are issued and not over.
        launched_us: how long the launches took of those that are over.
        all_issued: whether all of its moves are issued.
    """

    step: int
    memory: MemoryProfile
    began: float
    watched: bool
    followed: bool
    segment: int = 0
    segment_us: list[float] = field(default_factory=list[float])
    in_flight: int = 0
    launched_us: float = 0.0
    all_issued: bool = False

    def label_next(self, launches: int) -> str:
        """The name of the next so many segments, which are launched now."""
        labels = self.memory.labels[self.segment : self.segment + launches]
        self.segment += launches
        return labels[0] if len(labels) == 1 else f"{labels[0]} .. {labels[-1]}"

    def run_issued(self) -> None:
        """A run with launches was issued."""
        self.in_flight += 1

    def launched(self, us: float) -> None:
        """The next launch, or the next launches of a run, took so long."""
        if self.followed:
            self.segment_us.append(us)


@dataclass(slots=True)
class DispatchedJob:
    """A job, admitted or pending.

    Attributes:
        memory: the memory profile of the plan in use.
        plan: the plan in use.
        steps: how many steps of the job are done.
        planning_s: how long planning and compiling the first plan took.
        follower: says which iterations of the plan in use are watched, and when their latencies have drifted.
        saves_pauses: whether the state is saved whenever the job has paused.
        renewing: whether a new plan is being made since latencies have drifted.
        iteration: the latest iteration; None before the first one.
    """

    name: str
    actor: Actor
    take_batch: Callable[[], Any]
    memory: MemoryProfile
    plan: Plan
    steps: int
    planning_s: float
    follower: Follower
    saves_pauses: bool = False
    renewing: bool = False
    measured: JobMeasurements = field(default_factory=JobMeasurements)
    iteration: Iteration | None = None

    def use(self, plan: Plan, memory: MemoryProfile, now_s: float) -> None:
        """Begin to run under this plan."""
        self.plan, self.memory, self.follower = plan, memory, self.follower.restarted(now_s)

    def use_instead(self, plan: Plan) -> None:
        """The job, which is pending, has this plan instead of the one before."""
        self.plan = plan

    def begin(self, now: float, *, look: bool) -> Iteration:
        """The next iteration; it is watched at least if `look`."""
        self.follower = follower = self.follower.begun(look=look)
        # the first iteration of a plan is slower
        followed = follower.is_watched and follower.threshold is not None and follower.iterations > 1
        self.iteration = Iteration(self.steps, self.memory, now, follower.is_watched, followed)
        return self.iteration

    def issued(self, iteration: Iteration) -> None:
        """All moves of the iteration are issued."""
        self.steps += 1
        iteration.all_issued = True
        self._follow_pace(iteration)

    def run_over(self, iteration: Iteration, us: float) -> None:
        """A run of the iteration is over, whose launches took so long."""
        iteration.launched_us += us
        iteration.in_flight -= 1
        self._follow_pace(iteration)

    def _follow_pace(self, iteration: Iteration) -> None:
        if not iteration.all_issued or iteration.in_flight or iteration.memory is not self.memory:
            return
        if not iteration.watched:  # the launches of a watched iteration are further apart
            self.follower = self.follower.paced(iteration.launched_us)

    def follow_latencies(self, iteration: Iteration, now_s: float) -> str | None:
        """Called when a run of a followed iteration is over. If a new plan is due, since latencies have drifted: why."""
        us = iteration.segment_us
        if self.renewing or self.plan.whole or iteration.memory is not self.memory or len(us) != len(iteration.memory.labels):
            return None
        self.follower = self.follower.measured(self.plan, us)
        reason = self.follower.reason_to_renew(self.plan, now_s=now_s, planning_s=self.planning_s)
        self.renewing = reason is not None
        return reason

    def renewed(self) -> None:
        """A new plan was made since latencies had drifted, or could not be made."""
        self.renewing, self.follower = False, self.follower.forgetting()
