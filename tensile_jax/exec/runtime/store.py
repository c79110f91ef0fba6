"""Defines the store of a runtime: one `StoredJob` for each job, the log of events, and the lock that protects both.

The `Runtime` shares its store with the planner and the saver (which writes checkpoints). A `StoredJob` changes only by its own
methods. The planner calls those methods that concern tracing and plans. Every event in the life of a job goes to
`StoredJob.handle`, which calls `lifecycle.step`.
"""

import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from tensile_jax.exec.actor.actor import Actor
from tensile_jax.exec.actor.feed import Feed
from tensile_jax.exec.actor.missing import NO_BATCH
from tensile_jax.exec.actor.plans import PlanSummary
from tensile_jax.exec.checkpoint.checkpoints import Checkpoints
from tensile_jax.exec.checkpoint.folder_lock import FolderLock
from tensile_jax.exec.controller.state import JobId
from tensile_jax.exec.runtime import lifecycle
from tensile_jax.exec.runtime.lifecycle import Lifecycle
from tensile_jax.exec.runtime.messages import Event, Instruction
from tensile_jax.exec.runtime.stages import Stages
from tensile_jax.exec.runtime.submission import Submission, name_of, refuse_unfit_name
from tensile_jax.plan_format import Plan
from tensile_jax.runtime_records import EventName, JobEvent, Stage
from tensile_jax.tracebacks import hides_frames

Post = Callable[[JobId, Event], None]
"""Tells a runtime what has happened to one of its jobs. May be called in any thread."""

_KEPT_EVENTS = 100_000


@dataclass(slots=True, eq=False)
class StoredJob:
    """What a runtime keeps of a job. The fields from `life` on change only while the store's lock is held.

    Attributes:
        lock: the lock of the folder of the job's checkpoints. It is held until nothing more is written there.
        life: how far the job is in its life.
        first_batch: the job's first batch, which is drawn for tracing, until the first iteration uses it.
        tracing: the thread in which the job's step is traced.
        waits_for: the job for whose end this job's user code waits now.
        in_use: the plan in use; None before there is one. The next one, if there is one, is the controller's `JobRecord.renewal`.
        base: the latest plan without state that is kept in host memory for the sake of other jobs. Other plans are based on it.
        preparing_s: how long planning and compiling the first plan took, in seconds.
        plans: (steps, plan) for every plan that was used: how many steps were done when the plan came into use.
    """

    asked: Submission
    actor: Actor
    feed: Feed
    checkpoints: Checkpoints | None
    lock: FolderLock | None
    life: Lifecycle
    first_batch: Any = NO_BATCH
    tracing: threading.Thread | None = None
    waits_for: "StoredJob | None" = None
    in_use: PlanSummary | None = None
    base: PlanSummary | None = None
    preparing_s: float = 0.0
    plans: list[tuple[int, Plan]] = field(default_factory=list[tuple[int, Plan]])

    @property
    def number(self) -> JobId:
        """The job's number in the controller."""
        return self.life.job

    @property
    def name(self) -> str:
        """The job's name."""
        return self.asked.name

    # -- what becomes known of it ------------------------------------------------------------------------------------------------

    def begin_tracing(self, trace: Callable[["StoredJob"], None]) -> None:
        """Draw the first batch, and call `trace` in a thread of its own.

        Raises:
            RuntimeError: the system starts no more threads.
        """
        self.first_batch = self.feed.take()
        self.tracing = threading.Thread(target=trace, args=(self,), name=f"tensile-{self.name}-trace", daemon=True)
        self.tracing.start()

    def drop_first_batch(self) -> None:
        """The job ends before its first iteration."""
        self.first_batch = NO_BATCH

    def handle(self, event: Event) -> Sequence[Instruction]:
        """Give an event to the job's lifecycle: what is to be done."""
        self.life, instructions = lifecycle.step(self.life, event)
        return instructions

    def use_first(self, plan: PlanSummary, preparing_s: float) -> None:
        """The job has its first plan, which it took so many seconds to make."""
        self.preparing_s, self.base = preparing_s, plan
        self.use(plan, self.life.done)

    def use(self, plan: PlanSummary, steps: int) -> None:
        """The job uses this plan from now on, after `steps` steps."""
        self.in_use = plan
        self.plans.append((steps, plan.plan))

    def use_instead(self, plan: PlanSummary) -> None:
        """The job, which has not begun to run, uses this plan instead of the one before."""
        self.in_use, self.plans = plan, [(self.life.done, plan.plan)]

    def rest_on(self, plan: PlanSummary) -> None:
        """Other plans are based on this one from now on."""
        self.base = plan

    def take_batch(self) -> Any:
        """The next batch. It must have been reported to the controller as loaded."""
        first, self.first_batch = self.first_batch, NO_BATCH
        return self.feed.take() if first is NO_BATCH else first

    def runs_in_this_thread(self) -> bool:
        """Whether the calling thread runs this job's user code."""
        return self.feed.is_current or self.tracing is threading.current_thread()


class Store:
    """The jobs and the events. `changed` is the lock, and a condition that is notified of every event.

    Args:
        now_us: returns the microseconds since the runtime began.
    """

    def __init__(self, now_us: Callable[[], float]) -> None:
        self.changed = threading.Condition(threading.RLock())
        self.jobs: dict[JobId, StoredJob] = {}
        self.closed = False
        self._now_us = now_us
        self._numbers = itertools.count()
        self._reserved: set[str] = set()  # names of jobs that are being submitted
        self._events: deque[JobEvent] = deque(maxlen=_KEPT_EVENTS)
        self._stages = Stages()
        self._reported = 0

    # -- jobs -------------------------------------------------------------------------------------------------------------------

    def new_number(self) -> JobId:
        """A number that no job has had."""
        return JobId(next(self._numbers))

    def named(self, name: str) -> StoredJob:
        """The job of that name. Raises ValueError: there is none."""
        with self.changed:
            for job in self.jobs.values():
                if job.name == name:
                    return job
            known = ", ".join(job.name for job in self.jobs.values()) or "none"
        raise ValueError(f"job {name!r} is not known. There are: {known}.")

    def others(self, job: StoredJob) -> list[StoredJob]:
        """All other jobs that have not ended. The lock must be held."""
        return [one for one in self.jobs.values() if one is not job and not one.life.has_ended]

    def reserve(self, name: str | None, step: Any) -> str:
        """The name of a new job: `name`, or, if that is None, a name made from its step. It stays taken until `unreserve`.

        Raises:
            ValueError: the name is taken, or is not fit for a name.
            TypeError: the name is no text.
            RuntimeError: the runtime is closed.
        """
        if name is not None:
            refuse_unfit_name(name)
        with self.changed:
            if self.closed:
                raise RuntimeError("The runtime is closed. Submit jobs inside its with block.")
            taken = {job.name for job in self.jobs.values()} | self._reserved
            if name is None:
                stem = name_of(step)
                name = next(n for n in itertools.chain([stem], (f"{stem}-{k}" for k in itertools.count(2))) if n not in taken)
            elif name in taken:
                raise ValueError(f"name={name!r} is taken by another job of this runtime. Give each job a name of its own.")
            self._reserved.add(name)
        return name

    def unreserve(self, name: str) -> None:
        """End the reservation of a name: its job is among the runtime's jobs now, or was refused."""
        with self.changed:
            self._reserved.discard(name)
            self.changed.notify_all()

    def all_ended(self) -> bool:
        """Whether every job has ended, nothing is being saved, and no job is being submitted. The lock must be held."""
        return not self._reserved and all(job.life.is_over for job in self.jobs.values())

    # -- events -----------------------------------------------------------------------------------------------------------------

    def report(
        self, kind: EventName, job: str = "", steps: int = 0, note: str = "", values: dict[str, float] | None = None
    ) -> None:  # fmt: skip
        """Add an event to the log."""
        with self.changed:
            event = JobEvent(self._now_us() / 1e6, kind, job, steps, note, values or {})
            self._events.append(event)
            self._stages.add(event)
            self._reported += 1
            self.changed.notify_all()

    def stages(self) -> tuple[Stage, ...]:
        """What each job went through before its first iteration, until now."""
        with self.changed:
            return self._stages.until(self._now_us())

    def close(self) -> None:
        """Take no more jobs."""
        self.closed = True

    @hides_frames
    def follow(self, *, until_closed: bool) -> Iterator[JobEvent]:
        """Every event from the first on, as it happens, until all jobs have ended and, if `until_closed`, the runtime is closed.

        Raises:
            RuntimeError: this would wait in a thread that runs a job's user code.
        """
        seen = 0

        def over() -> bool:
            return self.all_ended() and (self.closed or not until_closed)

        while True:
            with self.changed:
                if self._reported <= seen and not over():
                    self.refuse_to_wait("events()", "Follow the events in another thread, or outside of the callback")
                self.changed.wait_for(lambda seen=seen: self._reported > seen or over())
                fresh = self._reported - seen
                if not fresh:
                    return
                kept = list(itertools.islice(reversed(self._events), fresh))[::-1]
                seen = self._reported
            yield from kept

    # -- waiting ----------------------------------------------------------------------------------------------------------------

    def refuse_to_wait(self, call: str, remedy: str) -> None:
        """Raises RuntimeError in a thread that runs a job's user code: the job does not end before that code returns."""
        job = self._job_of_this_thread()
        if job is not None:
            raise RuntimeError(
                f"{call} waits until every job has ended, but was called by the code of {job.name!r} (its on_step, its batches "
                f"or its step), for which that job waits: it would never return. {remedy}."
            )

    def wait_for_end(self, job: StoredJob, timeout_s: float | None) -> bool:
        """Wait until the job has ended, at most `timeout_s` seconds. Returns whether it has ended.

        Raises:
            RuntimeError: a job's user code waits, without a timeout, for that job itself or for a job that waits for it.
        """
        with self.changed:
            if job.life.has_ended:
                return True
            waiter = self._job_of_this_thread() if timeout_s is None else None
            if waiter is not None:
                _refuse_circle(waiter, job)
                waiter.waits_for = job
            try:
                return self.changed.wait_for(lambda: job.life.has_ended, timeout_s)
            finally:
                if waiter is not None:
                    waiter.waits_for = None

    def _job_of_this_thread(self) -> StoredJob | None:
        with self.changed:
            return next((job for job in self.jobs.values() if job.runs_in_this_thread()), None)


def _refuse_circle(waiter: StoredJob, other: StoredJob) -> None:
    """Raises RuntimeError if `waiter` would wait for itself: `other`, whose end it is to await, is `waiter` or waits for it."""
    circle, job = [waiter.name], other
    while job is not waiter:
        if job.waits_for is None:
            return
        circle.append(job.name)
        job = job.waits_for
    story = "itself" if other is waiter else " -> ".join((*circle, waiter.name))
    raise RuntimeError(
        f"The code of {waiter.name!r} (its on_step, its batches or its step) waits for the end of {story}, and that job ends "
        "only when this code has returned: it would never return. Wait outside of the callback, or with timeout_s; on_step "
        "is given the metrics, and cancel() ends a job after its iteration."
    )
