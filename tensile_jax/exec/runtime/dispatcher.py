"""Carries out the controller's instructions for all jobs, and reports to the controller what happened.

The controller (`exec/controller/machine.py`) decides which job does what next. The dispatcher begins and ends every iteration,
and issues its moves (launches, copies, waits) in groups, called *runs*. All of this happens under the dispatcher's lock, so
only one of the threads below acts at a time. Whoever holds the lock never waits for the device and never runs user code.

    dispatcher  handles the events that come from outside, in their order: batches, requests, plans, failures
    launches    takes the runs with launches in the order of their instructions, waits for each, and measures how long it took.
                On a GPU, the moves of a run are already issued by then: the thread that handles an event issues them all at
                once, under the lock. This is possible because a GPU allocates memory in the order of launches, so a launch can
                be issued before earlier ones have ended and freed their memory. On a CPU, a launch takes its memory when it is
                issued. So the launches' thread carries out the moves itself, one after another. When a run is over, the
                launches' thread handles that event: it ends the iteration and begins the next one, without waking another
                thread
    copies      several threads, which wait for copies: for those that a job's move needs, for those of a whole state (parking
                and unparking), and, in watched iterations (which are measured), for those whose times are recorded. When such a
                wait is over, they handle the event
    metrics     one thread, which reads the metrics of each step, in the order of the steps, and posts them for the job.
                After a job's last metrics it posts that the job is paused, has ended, or is lost

A run is recorded as one span, and its end is one event. In a watched iteration, the moves of a run are issued one by one instead,
so that each launch has a span of its own, and live bytes are read after it.

Each job has an *actor*, the object that holds its state and its compiled plan (`exec/actor/actor.py`). An exception from an
actor fails only that job. Any other exception under the lock is an error of this project. All jobs then fail, so that no thread
waits for them forever.

A runtime ends when nobody holds a reference to it and its jobs have ended. Therefore the dispatcher's threads hold no reference
to the runtime or to its store, the object that holds all jobs of the runtime (`store.py`). They post the events of a job's
lifecycle (`messages.py`) under the job's number. Times are in microseconds.
"""

import queue
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

from tensile_jax.exec.actor.actor import StateSnapshot, Wait
from tensile_jax.exec.controller import machine as controller
from tensile_jax.exec.controller.messages import (
    Admit,
    AdoptPlan,
    ApplyBudget,
    DeclinePlan,
    Event,
    Instruction,
    Issue,
    JobLost,
    Park,
    Release,
    ReportPaused,
    RunEnded,
    StateMoved,
    Unpark,
    WaitEnded,
)
from tensile_jax.exec.controller.state import JobId, State
from tensile_jax.exec.runtime import messages
from tensile_jax.exec.runtime.dispatched_job import DispatchedJob, Iteration
from tensile_jax.exec.runtime.job_measurements import JobMeasurements, numbers_of
from tensile_jax.exec.runtime.lane import Lane
from tensile_jax.exec.runtime.recorder import Recorder
from tensile_jax.plan.multi_job.memory_profile import LAUNCH, WAIT
from tensile_jax.plan_format import Plan
from tensile_jax.runtime_records import LaneName, Span

_COPY_THREADS = 16


class _Part(NamedTuple):
    """A run, or a part of it, that was issued at `issued` and has launches or waits for copies.

    `wait` waits for it, and `looks` read live bytes. `label` names its launches; None if it has none.
    """

    wait: Wait
    label: str | None
    issued: float
    looks: Sequence[Wait]


class Dispatcher:
    """The dispatcher's lock, and the threads that take it.

    `state` is the controller's state. Any thread may read it: the attribute is assigned a new state, and no state is changed.

    Args:
        post: called with a job's number and an event of its lifecycle (`messages.py`). Must return at once.
        applied: called under the dispatcher's lock with a budget that was applied. Must return at once.
        look_always: whether live bytes are read at every launch; otherwise only in the iterations that are watched.
    """

    def __init__(
        self,
        state: State,
        post: Callable[[JobId, messages.Event], None],
        applied: Callable[[int], None],
        *,
        look_always: bool = False,
    ) -> None:
        self.state = state
        self.recorder = Recorder()
        self.peak_bytes = 0  # measured
        self.began = time.perf_counter()
        self.decided_us = 0.0  # CPU time that was spent in the controller
        self.launches = 0
        self.measured: dict[JobId, JobMeasurements] = {}  # of all jobs, also of those that have ended
        self._post = post
        self._applied = applied
        self._look_always = look_always
        self._deciding = threading.Lock()  # taken before the store's lock, never while that is held
        self._inbox: queue.SimpleQueue[Event | Callable[[], None] | None] = queue.SimpleQueue()
        self._jobs: dict[JobId, DispatchedJob] = {}
        self._in_order = state.depth > 1  # the device allocates memory in the order of launches
        self._lane = Lane("tensile-launches")
        self._copies = ThreadPoolExecutor(_COPY_THREADS, "tensile-copies")
        self._metrics = Lane("tensile-metrics")
        self._thread = threading.Thread(target=self._run, name="tensile-dispatcher", daemon=True)
        self._lane_free = 0.0
        self._for_metrics: list[Callable[[], None]] = []  # for the metrics' thread, once the present instructions are carried out

    def start(self) -> None:
        """Start the dispatcher's thread."""
        self._thread.start()

    def stop(self) -> None:
        """End all threads once everything in the queue is done, and wait for that. All jobs must have ended."""
        self.end()
        self._thread.join()
        self._lane.join()
        self._copies.shutdown()
        self._metrics.join()

    def end(self) -> None:
        """Let the thread end once everything in the queue is done, and after the ends of the last runs in flight are reported.

        Takes no lock, so a finalizer may call it in any thread.
        """
        self._inbox.put(None)

    def abandon(self) -> None:
        """End without waiting for launches and copies that are under way."""
        self.end()
        self._lane.abandon()
        self._inbox.put(None)  # instead of the one that the launches' thread would send
        self._copies.shutdown(wait=False, cancel_futures=True)
        self._metrics.abandon()

    def tell(self, event: Event) -> None:
        """Queue an event for the controller. May be called in any thread."""
        self._inbox.put(event)

    def call(self, what: Callable[[], None]) -> None:
        """Queue `what`, to be called under the dispatcher's lock. May be called in any thread."""
        self._inbox.put(what)

    def fail(self, job: JobId, error: BaseException) -> None:
        """End the job as failed with `error`. May be called in any thread. Does nothing if the job has ended."""
        self.call(lambda: self._lose(job, error))

    def join(self, job: JobId, entry: DispatchedJob) -> None:
        """Register a job, before the controller is sent its `Prepared` event. Called under the dispatcher's lock."""
        self.measured[job] = entry.measured
        self.recorder.names[job] = entry.name
        self._jobs[job] = entry

    def use_instead(self, job: JobId, plan: Plan) -> None:
        """A pending job has this plan instead of the one before. Called under the dispatcher's lock."""
        if (entry := self._jobs.get(job)) is not None:
            entry.use_instead(plan)

    def renewed(self, job: JobId) -> None:
        """The new plan that `Drifted` has asked for was made, or could not be made. May be called in any thread."""

        def renewed() -> None:
            if (entry := self._jobs.get(job)) is not None:
                entry.renewed()

        self.call(renewed)

    def now(self) -> float:
        """Microseconds since the dispatcher was made."""
        return (time.perf_counter() - self.began) * 1e6

    # -- the thread -------------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        ending = False
        while True:
            event = self._inbox.get()
            if event is None:
                if ending:
                    self._metrics.end()
                    return
                # The state of a job can be on the host before the end of the job's last run is reported.
                self._lane.put(self.end)
                self._lane.end()
                ending = True
                continue
            self._decide(event)
            del event  # drop what it refers to before the next event comes

    def _decide(self, event: Event | Callable[[], None]) -> None:
        """Take the lock, and handle an event or call a function. Called in threads that never hold the store's lock."""
        with self._deciding:
            try:
                if callable(event):
                    event()
                else:
                    self.handle(event)
            except Exception as error:  # an error of this project
                state = self.state
                self.state = State(state.budget_bytes, state.host_budget_bytes, state.depth)
                for job in tuple(self._jobs):
                    self._lose(job, error)

    def handle(self, event: Event) -> None:
        """Give one event to the controller and carry out its instructions, now. Called under the dispatcher's lock."""
        began = time.thread_time()  # CPU time of this thread, without the time of other threads
        self.state, instructions = controller.step(self.state, event)
        self.decided_us += (time.thread_time() - began) * 1e6
        for instruction in instructions:
            job = getattr(instruction, "job", None)
            entry = None if job is None else self._jobs.get(job)
            if job is not None and entry is None:
                continue  # the job was lost while earlier instructions were carried out
            try:
                self._carry_out(instruction, entry)
            except Exception as error:
                assert job is not None  # only instructions to an actor raise
                self._lose(job, error)
        if instructions:
            self._record_level()
        if self._for_metrics:  # only now, so that the next run begins before the metrics of the last iteration are read
            for function in self._for_metrics:
                self._metrics.put(function)
            self._for_metrics.clear()

    def _lose(self, job: JobId, error: BaseException) -> None:
        """Forget a job that has failed, and free its device memory.

        The controller is told once the job's runs in flight have ended; only then may other jobs use that memory. A run that the
        launches' thread is carrying out ends early, after the move under way. If the job failed between two iterations, its state
        is still complete and is copied to the host.
        """
        entry = self._jobs.pop(job, None)
        if entry is None:
            return
        rescued = None
        with suppress(Exception):  # if the device is broken, the state cannot be copied
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
            self._metrics.put(partial(self._post, job, messages.Lost(error, kept, entry.steps)))

        self._lane.put(give_back)

    def _carry_out(self, instruction: Instruction, entry: DispatchedJob | None) -> None:
        if isinstance(instruction, ApplyBudget):
            self._applied(instruction.nbytes)
            return
        assert entry is not None  # every other instruction concerns a job
        job, actor = instruction.job, entry.actor
        match instruction:
            case Issue(_, begin, end):
                self._issue(job, entry, begin, end)
            case Park():
                self._move(job, entry, actor.park(), "out")
            case Unpark():
                self._move(job, entry, actor.unpark(), "into")
            case Admit():
                record = self.state.record(job)
                assert record is not None  # it was admitted a moment ago
                actor.use(record.plan)
                entry.use(entry.plan, record.memory, self.now() / 1e6)
                self._post(job, messages.Admitted())
            case AdoptPlan(_, plan):
                actor.use(plan.id)
                entry.use(plan.plan, plan.memory, self.now() / 1e6)
                self._post(job, messages.PlanAdopted(plan, entry.steps))
            case DeclinePlan(_, plan):
                self._post(job, messages.PlanDeclined(plan))
            case ReportPaused():
                kept = actor.state() if entry.saves_pauses else None
                self._for_metrics.append(partial(self._post_last, job, messages.Paused(kept, entry.steps)))
            case Release():
                event = messages.Released(actor.state(), entry.steps)
                actor.free_device_arrays()
                del self._jobs[job]
                self._for_metrics.append(partial(self._post_last, job, event))

    def _issue(self, job: JobId, entry: DispatchedJob, begin: int, end: int) -> None:
        kinds, actor = entry.memory.kinds, entry.actor
        if begin == 0:
            iteration = entry.begin(self.now(), look=self._look_always)
            actor.begin(entry.take_batch(), watch=iteration.watched)
            return
        iteration = entry.iteration
        assert iteration is not None  # the first move of an iteration was issued
        if end == len(kinds):
            actor.issue(begin, end)
            entry.issued(iteration)
            self._for_metrics.append(partial(self._try, self._read, job, actor.take_metrics(), self.now() - iteration.began))
        elif kinds[begin] == WAIT:
            wait = actor.issue(begin, end)
            if wait is None:  # the copies have ended already
                self.tell(WaitEnded(job))
            else:
                self._copies.submit(self._try, self._waited, job, entry, wait)
        else:
            self._issue_run(job, entry, iteration, begin, end)

    def _issue_run(self, job: JobId, entry: DispatchedJob, iteration: Iteration, begin: int, end: int) -> None:
        """Issue a run: as a whole or, in a watched iteration, each of its moves alone."""
        cuts = range(begin, end + 1) if iteration.watched else (begin, end)
        parts = (self._issue_part(job, entry, iteration, a, b) for a, b in pairwise(cuts))
        launches = iteration.memory.kinds[begin:end].count(LAUNCH)
        self.launches += launches
        if self._in_order or not launches or not iteration.watched:
            parts = list(parts)  # otherwise the launches' thread issues them, each when the one before it is over
        if launches:
            iteration.run_issued()
            self._lane.put(partial(self._try, self._launched, job, entry, iteration, parts))

    def _issue_part(self, job: JobId, entry: DispatchedJob, iteration: Iteration, begin: int, end: int) -> _Part | None:
        """Issue the moves `[begin, end)`; None if nothing is to be waited for in the launches' thread."""
        issued, memory = self.now(), iteration.memory
        wait = entry.actor.issue(begin, end)
        launches = memory.kinds[begin:end].count(LAUNCH)
        if not launches:
            if wait is not None and memory.kinds[begin] == WAIT:
                return _Part(wait, None, issued, ())
            if wait is not None:
                self._copies.submit(self._copied, entry, iteration, wait, issued)
            return None
        assert wait is not None
        return _Part(
            wait, iteration.label_next(launches), issued, self._look(job, entry) if iteration.watched and self._in_order else ()
        )

    def _run_over(self, job: JobId, entry: DispatchedJob, iteration: Iteration, us: float) -> None:
        entry.run_over(iteration, us)
        record = self.state.record(job)
        if iteration.followed and record is not None and record.renewal is None:
            reason = entry.follow_latencies(iteration, self.now() / 1e6)
            if reason is not None:
                self._post(job, messages.Drifted(entry.follower.tracked, reason))
        self.handle(RunEnded(job, us))

    def _move(self, job: JobId, entry: DispatchedJob, wait: Wait, lane: LaneName) -> None:
        nbytes = entry.memory.idle_bytes - entry.memory.parked_bytes
        self._copies.submit(self._try, self._moved, job, entry, wait, lane, nbytes)

    # -- in other threads -------------------------------------------------------------------------------------------------------

    def _try(self, what: Callable[..., None], job: JobId, *arguments: Any) -> None:
        """Call `what`, without the dispatcher's lock. If it raises, the job fails."""
        try:
            what(job, *arguments)
        except Exception as error:
            self.fail(job, error)

    def _launched(self, job: JobId, entry: DispatchedJob, iteration: Iteration, parts: Iterable[_Part | None]) -> None:
        """Wait for the parts of a run, and measure them. Called in the launches' thread."""
        us = 0.0
        for part in parts:
            if part is None:
                continue
            began = max(part.issued, self._lane_free) if self._in_order else self.now()
            stall_us = part.wait()
            ended = self._lane_free = self.now()
            if part.label is None:
                entry.measured.add_stall(ended - began)
                continue
            if stall_us is not None:
                entry.measured.add_stall(stall_us)
                began += min(stall_us, ended - began)  # a span is as long as its launches take
            us += ended - began
            self._span("compute", entry, iteration.step, part.label, began, ended)
            iteration.launched(ended - began)
            if iteration.watched:
                with suppress(Exception):  # another job's process may have died since
                    looks = part.looks if self._in_order else self._look(job, entry)
                    watched, *others = [look() for look in looks]
                    self._decide(partial(self._looked, entry, watched, others))
        self._decide(partial(self._run_over, job, entry, iteration, us))

    def _waited(self, job: JobId, entry: DispatchedJob, wait: Wait) -> None:
        began = self.now()
        wait()
        entry.measured.add_stall(self.now() - began)
        self._decide(WaitEnded(job))

    def _copied(self, entry: DispatchedJob, iteration: Iteration, wait: Wait, began: float) -> None:
        """Wait for a copy in order to record its time. An error is ignored here: the move that waits for the copy raises it."""
        with suppress(Exception):
            lane, nbytes = wait()
            self._span(lane, entry, iteration.step, "tensors", began, self.now(), nbytes)

    def _moved(self, job: JobId, entry: DispatchedJob, wait: Wait, lane: LaneName, nbytes: int) -> None:
        began = self.now()
        wait()
        self._span(lane, entry, entry.steps, "state", began, self.now(), nbytes)
        if lane == "out":
            self._post(job, messages.Parked())
        self._decide(StateMoved(job))

    def _read(self, job: JobId, wait: Wait, us: float) -> None:
        metrics = wait()
        values = numbers_of(metrics)
        self.measured[job].add_step(us, values)
        self._post(job, messages.Stepped(metrics, {**values, "step_us": us}))

    def _post_last(self, job: JobId, event: messages.Paused | messages.Released) -> None:
        """Post an event that must come after the job's last metrics, in the metrics thread. If that raises, the job fails."""
        try:
            self._post(job, event)
        except Exception as error:
            self.fail(job, error)
            self._post(job, messages.Lost(error, None, event.steps))

    # -- what is recorded -------------------------------------------------------------------------------------------------------

    def _look(self, job: JobId, entry: DispatchedJob) -> list[Wait]:
        """Functions that read the bytes on the device at the latest launch: one for the job (now, and the most so far), then
        those for the other jobs.

        If the launches' thread carries out the moves, they are called in that thread. Other jobs may then begin or end iterations
        meanwhile.
        """
        others = [one.actor for other, one in self._jobs.copy().items() if other != job]  # others change it, under the lock
        return [entry.actor.watched_bytes(), *(actor.live_bytes() for actor in others)]

    def _looked(self, entry: DispatchedJob, watched: tuple[int, int] | None, others: Sequence[int | None]) -> None:
        """Record the bytes that were found. Called under the dispatcher's lock, before the end of that run is handled."""
        if watched is None:
            return
        own, most = watched
        entry.measured.peak_bytes = max(entry.measured.peak_bytes, most)
        self.peak_bytes = max(self.peak_bytes, most)
        known = [nbytes for nbytes in others if nbytes is not None]
        if len(known) == len(others):
            self.peak_bytes = max(self.peak_bytes, own + sum(known))
            self._record_level(own + sum(known))

    def _record_level(self, measured: int | None = None) -> None:
        if self.recorder.add(self.now(), self.state, measured):
            self._metrics.put(self.recorder.condense)

    def _span(
        self, lane: LaneName, entry: DispatchedJob, step: int, name: str, began: float, ended: float, nbytes: int = 0
    ) -> None:
        self.recorder.spans.append(Span(lane, entry.name, name, step, began, ended, nbytes))


def _forget_frames(error: BaseException | None) -> None:
    """Clear the local variables of an error's traceback: the arrays among them would live as long as the error is kept."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
