"""The dispatcher: carries out the controller's orders for all jobs, one after another, and tells it what has happened.

One thread issues every launch and every copy for a device: on a GPU the order of issue is the schedule. This thread never waits
for the device and never runs user code. Three kinds of threads wait in its place, and put an event into its inbox when what they
wait for is over:

    launches    one thread, in order of launch: it measures when each launch ended and how long it took
    copies      several, for LEAVE and AWAIT, and for states on their way
    metrics     one thread, in order of steps: it reads what a step returned beside its state and posts that as news of the job;
                after the last metrics it posts that the job is paused, has ended or is lost

Whatever an actor raises costs its own job only. Should anything else raise, all jobs fail with it: nobody waits for ever.

The dispatcher's threads must not keep a runtime that nobody else holds. So they hold neither the runtime nor its store: they post
news (`messages.py`) of a job by its number.
"""

import queue
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from tensile_jax.exec.actor.actor import Actor, StateSnapshot, Wait
from tensile_jax.exec.controller import machine as controller
from tensile_jax.exec.controller.messages import (
    Admit,
    AdoptPlan,
    ApplyBudget,
    DeclinePlan,
    Event,
    Issue,
    JobLost,
    LaunchEnded,
    Order,
    Park,
    PlanRenewed,
    Release,
    ReportPaused,
    StateMoved,
    Unpark,
    WaitEnded,
    Wished,
)
from tensile_jax.exec.controller.state import JobId, State
from tensile_jax.exec.runtime import messages
from tensile_jax.exec.runtime.job_measurements import Measured, numbers_of
from tensile_jax.exec.runtime.recorder import Recorder
from tensile_jax.exec.step.executor import is_watched
from tensile_jax.plan.multi_job.memory_profile import LAUNCH, WAIT, MemoryProfile
from tensile_jax.runtime_records import LaneName, Level, Span

_COPY_THREADS = 16


@dataclass(slots=True)
class DispatchedJob:
    """A job, admitted or pending, as the dispatcher knows it.

    Attributes:
        checkpoint_every: the job pauses after each so many steps; None: never.
        steps: how many are done.
        began: when the iteration under way began; `segment` is the next one to be launched.
        since_plan: how many iterations of the plan in use have ended.
        watched: live bytes are read in this iteration.
        checkpoint_due: the job pauses for its checkpoint after this iteration, whatever the user wishes meanwhile.
    """

    name: str
    actor: Actor
    take_batch: Callable[[], Any]
    demand: MemoryProfile
    checkpoint_every: int | None
    steps: int
    measured: Measured = field(default_factory=Measured)
    began: float = 0.0
    segment: int = 0
    since_plan: int = 0
    watched: bool = False
    checkpoint_due: bool = False


class Dispatcher:
    """The thread. `state` may be read from any thread; it is replaced, never changed.

    Args:
        post: called with a job's number and news of it (`messages.py`). Must return at once.
        applied: called in the dispatcher's thread with the budget that holds from now on. Must return at once.
        look_always: live bytes are looked at at each launch, not at some.
    """

    def __init__(
        self,
        state: State,
        post: Callable[[JobId, messages.News], None],
        applied: Callable[[int], None],
        *,
        look_always: bool = False,
    ) -> None:
        self.state = state
        self.recorder = Recorder()
        self.peak_bytes = 0  # measured
        self.began = time.perf_counter()
        self.decided_us = 0.0  # of this thread's own time, in the controller
        self.launches = 0
        self.measured: dict[JobId, Measured] = {}  # of all jobs that ever were
        self._post = post
        self._applied = applied
        self._look_always = look_always
        self._inbox: queue.SimpleQueue[Event | Callable[[], None] | None] = queue.SimpleQueue()
        self._jobs: dict[JobId, DispatchedJob] = {}
        self._renewals: dict[JobId, MemoryProfile] = {}
        self._lane = ThreadPoolExecutor(1, "tensile-launches")
        self._copies = ThreadPoolExecutor(_COPY_THREADS, "tensile-copies")
        self._metrics = ThreadPoolExecutor(1, "tensile-metrics")
        self._thread = threading.Thread(target=self._run, name="tensile-dispatcher", daemon=True)
        self._lane_free = 0.0

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End once everything in the inbox is done. All jobs must have ended."""
        self.end()
        self._thread.join()
        for pool in (self._lane, self._copies, self._metrics):
            pool.shutdown()

    def end(self) -> None:
        """Let the thread end once everything in the inbox is done. May be called in the middle of anything."""
        self._inbox.put(None)

    def abandon(self) -> None:
        """End without waiting for anything."""
        self.end()
        for pool in (self._lane, self._copies, self._metrics):
            pool.shutdown(wait=False, cancel_futures=True)

    def tell(self, event: Event) -> None:
        """Something has happened; from any thread."""
        self._inbox.put(event)

    def call(self, what: Callable[[], None]) -> None:
        """Run `what` in the dispatcher's thread."""
        self._inbox.put(what)

    def fail(self, job: JobId, error: BaseException) -> None:
        """The job is lost; from any thread. Nothing happens if it has ended."""
        self.call(lambda: self._lose(job, error))

    def join(self, job: JobId, entry: DispatchedJob) -> None:
        """`entry` is the one of `job`, of which `Prepared` will tell next. In the dispatcher's thread."""
        self.measured[job] = entry.measured
        self._jobs[job] = entry

    def renew(self, job: JobId, demand: MemoryProfile) -> None:
        """The job's renewed plan, to be adopted, asks that of memory. In the dispatcher's thread."""
        if job in self._jobs:
            self._renewals[job] = demand
            self.handle(PlanRenewed(job, demand))

    def now(self) -> float:
        """Microseconds since the beginning."""
        return (time.perf_counter() - self.began) * 1e6

    # -- the thread -------------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            event = self._inbox.get()
            if event is None:
                return
            try:
                if callable(event):
                    event()
                elif not self._is_too_soon(event):
                    self.handle(event)
            except Exception as error:  # a mistake of ours
                state = self.state
                self.state = State(state.budget_bytes, state.host_budget_bytes, state.depth)
                for job in tuple(self._jobs):
                    self._lose(job, error)
            del event  # and what it names, before the next one comes

    def _is_too_soon(self, event: Event) -> bool:
        """Whether it is the wish to run of a job that must first pause for its checkpoint; then the wish is looked up."""
        entry = self._jobs.get(event.job) if isinstance(event, Wished) and event.wish == "run" else None
        return entry is not None and entry.checkpoint_due

    def handle(self, event: Event) -> None:
        """One event, at once. In the dispatcher's thread."""
        began = time.thread_time()  # of the decision, not of what else the machine does meanwhile
        self.state, orders = controller.step(self.state, event)
        self.decided_us += (time.thread_time() - began) * 1e6
        for order in orders:
            job = getattr(order, "job", None)
            entry = None if job is None else self._jobs.get(job)
            if job is not None and entry is None:
                continue  # it was lost meanwhile
            try:
                self._carry_out(order, entry)
            except Exception as error:
                assert job is not None  # only actors raise
                self._lose(job, error)
        if orders:
            self._record_level()

    def _lose(self, job: JobId, error: BaseException) -> None:
        """Forget the job, and give back what it held: once its launches in flight have ended, other jobs may have that memory.

        Where the job has failed between two iterations its state is still whole, and is copied to the host first.
        """
        entry = self._jobs.pop(job, None)
        if entry is None:
            return
        self._renewals.pop(job, None)
        rescued = None
        with suppress(Exception):  # a device that is broken gives nothing back
            rescued = entry.actor.save_before_dropping()
        entry.actor.drop()
        _forget_frames(error)

        def give_back() -> None:
            kept = None
            if rescued is not None:
                with suppress(Exception):
                    rescued[1]()
                    kept = rescued[0]
            self.call(lambda: report(kept))

        def report(kept: StateSnapshot | None) -> None:
            self.handle(JobLost(job))
            self._metrics.submit(self._post, job, messages.Lost(error, kept, entry.steps))

        self._lane.submit(give_back)

    def _carry_out(self, order: Order, entry: DispatchedJob | None) -> None:
        if isinstance(order, ApplyBudget):
            self._applied(order.nbytes)
            return
        assert entry is not None  # all others concern a job
        job, actor = order.job, entry.actor
        match order:
            case Issue(_, move):
                self._issue(job, entry, move)
            case Park():
                self._move(job, entry, actor.park(), "out")
            case Unpark():
                self._move(job, entry, actor.unpark(), "into")
            case Admit():
                actor.admit()
                entry.demand = self._renewals.pop(job, entry.demand)  # it may have been renewed while it was pending
                self._post(job, messages.Admitted())
            case AdoptPlan():
                actor.adopt()
                entry.demand, entry.since_plan = self._renewals.pop(job), 0
                self._post(job, messages.PlanAdopted(entry.steps))
            case DeclinePlan():
                self._post(job, messages.PlanDeclined(self._renewals.pop(job, entry.demand)))
            case ReportPaused():
                entry.checkpoint_due = False
                self._metrics.submit(self._post_last, job, messages.Paused(actor.state(), entry.steps))
            case Release():
                news = messages.Released(actor.state(), entry.steps)
                actor.free_device_arrays()
                del self._jobs[job]
                self._metrics.submit(self._post_last, job, news)

    def _issue(self, job: JobId, entry: DispatchedJob, move: int) -> None:
        demand, actor = entry.demand, entry.actor
        kind, last = demand.kinds[move], len(demand.kinds) - 1
        began = self.now()
        if move == 0:
            entry.watched = self._look_always or is_watched(entry.since_plan + 1)
            entry.began, entry.segment = began, 0
            if entry.checkpoint_every is not None and (entry.steps + 1) % entry.checkpoint_every == 0:
                entry.checkpoint_due = True
                self.tell(Wished(job, "pause"))  # heard before this iteration ends
            actor.begin(entry.take_batch(), watch=entry.watched)
            return
        wait = actor.issue(move)
        if kind == LAUNCH:
            assert wait is not None
            self.launches += 1
            looks = self._look(job, entry) if entry.watched else []
            label = demand.labels[entry.segment] if entry.segment < len(demand.labels) else f"move {move}"
            entry.segment += 1
            self._run_in_pool(self._lane, self._launched, job, entry, wait, label, began, looks)
        elif wait is not None:
            if kind == WAIT:
                self._run_in_pool(self._copies, self._waited, job, entry, wait)
            else:
                self._copies.submit(self._copied, entry, wait, began)
        elif move == last:
            entry.steps += 1
            entry.since_plan += 1
            self._run_in_pool(self._metrics, self._read, job, actor.take_metrics(), began - entry.began)

    def _move(self, job: JobId, entry: DispatchedJob, wait: Wait, lane: LaneName) -> None:
        nbytes = entry.demand.idle_bytes - entry.demand.parked_bytes
        self._run_in_pool(self._copies, self._moved, job, entry, wait, lane, nbytes)

    # -- in other threads -------------------------------------------------------------------------------------------------------

    def _run_in_pool(self, pool: ThreadPoolExecutor, what: Callable[..., None], job: JobId, *arguments: Any) -> None:
        """`what`, in another thread; should it raise, the job is lost."""

        def work() -> None:
            try:
                what(job, *arguments)
            except Exception as error:
                self.fail(job, error)

        pool.submit(work)

    def _launched(self, job: JobId, entry: DispatchedJob, wait: Wait, label: str, issued: float, looks: Sequence[Wait]) -> None:
        began = max(issued, self._lane_free)
        wait()
        ended = self._lane_free = self.now()
        self._span("compute", entry, label, began, ended, 0)
        if looks:
            with suppress(Exception):  # of another job, which has died since
                found = [look() for look in looks]
                self.call(lambda: self._looked(entry, found))
        self.tell(LaunchEnded(job, ended - began))

    def _waited(self, job: JobId, entry: DispatchedJob, wait: Wait) -> None:
        began = self.now()
        wait()
        entry.measured.stall_us += self.now() - began
        self.tell(WaitEnded(job))

    def _copied(self, entry: DispatchedJob, wait: Wait, began: float) -> None:
        """A copy that nobody waits for yet; what goes wrong with it is found out by who does."""
        with suppress(Exception):
            lane, nbytes = wait()
            self._span(lane, entry, "tensors", began, self.now(), nbytes)

    def _moved(self, job: JobId, entry: DispatchedJob, wait: Wait, lane: LaneName, nbytes: int) -> None:
        began = self.now()
        wait()
        self._span(lane, entry, "state", began, self.now(), nbytes)
        if lane == "out":
            self._post(job, messages.Parked())
        self.tell(StateMoved(job))

    def _read(self, job: JobId, wait: Wait, us: float) -> None:
        metrics = wait()
        values = numbers_of(metrics)
        self.measured[job].add_step(us, values)
        self._post(job, messages.Stepped(metrics, {**values, "step_us": us}))

    def _post_last(self, job: JobId, news: messages.Paused | messages.Released) -> None:
        """In the metrics thread, after the last metrics. Should that fail, so does the job."""
        try:
            self._post(job, news)
        except Exception as error:
            self.fail(job, error)
            self._post(job, messages.Lost(error, None, news.steps))

    # -- what is recorded -------------------------------------------------------------------------------------------------------

    def _look(self, job: JobId, entry: DispatchedJob) -> list[Wait]:
        """What lies on the device right after a launch, by the arrays themselves: of the job, then of the others."""
        return [entry.actor.watched_bytes(), *(one.actor.live_bytes() for other, one in self._jobs.items() if other != job)]

    def _looked(self, entry: DispatchedJob, found: Sequence[int | None]) -> None:
        """In the dispatcher's thread, before it hears that the launch is over."""
        watched = found[0]
        if watched is None:
            return
        entry.measured.peak_bytes = max(entry.measured.peak_bytes, watched)
        known = [nbytes for nbytes in found if nbytes is not None]
        if len(known) == len(found):
            self.peak_bytes = max(self.peak_bytes, sum(known))
            self._record_level(sum(known))

    def _record_level(self, measured: int | None = None) -> None:
        state = self.state
        jobs = {self._jobs[s.job].name: s.held_bytes for s in state.records if s.job in self._jobs}
        for job, surge in state.in_flight[:1]:
            if job in self._jobs:
                name = self._jobs[job].name
                jobs[name] = jobs.get(name, 0) + surge
        self.recorder.add_level(Level(self.now(), state.budget_bytes, jobs, measured))

    def _span(self, lane: LaneName, entry: DispatchedJob, name: str, began: float, ended: float, nbytes: int) -> None:
        self.recorder.spans.append(Span(lane, entry.name, name, entry.steps, began, ended, nbytes))


def _forget_frames(error: BaseException | None) -> None:
    """Let go of what the frames of a traceback name: arrays, which would stay as long as the error is kept."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
