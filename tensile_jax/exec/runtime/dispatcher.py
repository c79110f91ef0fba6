"""Carries out what the controller says, for all jobs, in that order; and tells it what has happened.

One thread issues every launch and every copy for a device: on a GPU the order of issue is the schedule. It never waits for the
device and never runs a user's code. Three kinds of threads wait in its place and put an event into its inbox when they are
through:

    launches    one thread, in order of launch: when did each end, and how long did it take
    copies      several, for LEAVE, AWAIT and states on their way
    metrics     one thread, in order of steps: reads what a step returned beside its state, and hands it to the job; says after
                that that a job rests or has ended

Whatever an actor raises costs its own job only. Should anything else raise, all jobs fail with it: nobody waits for ever.
"""

import queue
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from tensile_jax.exec.actor.actor import Actor, Kept, Wait
from tensile_jax.exec.controller import machine as controller
from tensile_jax.exec.controller.events import Died, Ended, Event, Moved, Renewed, Waited, Wished
from tensile_jax.exec.controller.orders import Admit, Adopt, Apply, Decline, Dismiss, Do, Order, Park, Rest, Unpark
from tensile_jax.exec.controller.state import JobId, State
from tensile_jax.exec.runtime.recorder import Recorder
from tensile_jax.plan.multi_job.memory_profile import LAUNCH, WAIT, MemoryProfile
from tensile_jax.runtime_records import LaneName, Level, Span

_COPY_THREADS = 16
_WATCHED_FIRST = 3  # iterations of each plan whose live bytes are looked at; then every so many
_WATCHED_EVERY = 50


class Listener(Protocol):
    """Who is told, in the dispatcher's thread, what became of a job. Must return at once."""

    def admitted(self, job: JobId) -> None: ...
    def stepped(self, job: JobId, metrics: Any, *, us: float) -> None: ...  # in the metrics thread
    def moved(self, job: JobId, lane: LaneName) -> None: ...  # in another thread
    def rested(self, job: JobId, state: Kept, *, steps: int) -> None: ...  # in the metrics thread, after the last metrics
    def renewed(self, job: JobId, *, steps: int) -> None: ...
    def declined(self, job: JobId, demand: MemoryProfile) -> None: ...
    def dismissed(self, job: JobId, state: Kept, *, steps: int) -> None: ...  # in the metrics thread, after the last metrics
    def died(self, job: JobId, error: BaseException, state: Kept | None, *, steps: int) -> None: ...
    def applied(self, nbytes: int) -> None: ...


@dataclass(slots=True)
class Tally:
    """What was measured of a job: the most bytes of its own at a watched launch, and microseconds of waiting for copies."""

    peak_bytes: int = 0
    stall_us: float = 0.0


@dataclass(slots=True)
class _Hand:
    """An admitted or queued job as the dispatcher knows it."""

    name: str
    actor: Actor
    take_batch: Callable[[], Any]
    demand: MemoryProfile
    rest_every: int | None
    steps: int
    tally: Tally
    began: float = 0.0
    segment: int = 0  # the next one to be launched
    since_plan: int = 0
    watched: bool = False
    rest_due: bool = False  # it rests for its checkpoint after this iteration, whatever the user wishes meanwhile


class Dispatcher:
    """The thread. `state` may be read from any thread; it is replaced, never changed."""

    def __init__(self, state: State, listener: Listener, *, look_always: bool = False) -> None:
        self.state = state
        self.recorder = Recorder()
        self.peak_bytes = 0  # measured
        self.began = time.perf_counter()
        self.decided_us = 0.0  # of this thread's own time, in the controller
        self.launches = 0
        self._listener = listener
        self._look_always = look_always
        self._inbox: queue.SimpleQueue[Event | Callable[[], None] | None] = queue.SimpleQueue()
        self._hands: dict[JobId, _Hand] = {}
        self._renewals: dict[JobId, MemoryProfile] = {}
        self.tallies: dict[JobId, Tally] = {}  # of all jobs that ever were
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

    def join(
        self,
        job: JobId,
        name: str,
        actor: Actor,
        take_batch: Callable[[], Any],
        demand: MemoryProfile,
        *,
        steps: int,
        rest_every: int | None,
    ) -> None:
        """`actor` is the one for `job`, of which `Prepared` will tell next. In the dispatcher's thread.

        `steps` are done already. With `rest_every` the job rests after each so many steps.
        """
        self._hands[job] = _Hand(name, actor, take_batch, demand, rest_every, steps, self.tallies.setdefault(job, Tally()))

    def renew(self, job: JobId, demand: MemoryProfile) -> None:
        """What `Adopt` will bring, or `Admit`, if it still waits: told at once. In the dispatcher's thread."""
        if job in self._hands:
            self._renewals[job] = demand
            self.handle(Renewed(job, demand))

    def now(self) -> float:
        """Microseconds since the beginning."""
        return (time.perf_counter() - self.began) * 1e6

    def seated(self, job: JobId) -> bool:
        """Whether the job has left the queue."""
        return any(seat.job == job for seat in self.state.seats)

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
                for job in tuple(self._hands):
                    self._lose(job, error)
            del event  # and what it names, before the next one comes

    def _is_too_soon(self, event: Event) -> bool:
        """Whether it is the wish to run of a job that must rest first; that wish is looked up when it rests."""
        hand = self._hands.get(event.job) if isinstance(event, Wished) and event.wish == "run" else None
        return hand is not None and hand.rest_due

    def handle(self, event: Event) -> None:
        """One event, at once. In the dispatcher's thread."""
        began = time.thread_time()  # of the decision, not of what else the machine does meanwhile
        self.state, orders = controller.step(self.state, event)
        self.decided_us += (time.thread_time() - began) * 1e6
        for order in orders:
            job = getattr(order, "job", None)
            hand = None if job is None else self._hands.get(job)
            if job is not None and hand is None:
                continue  # it died on the way here
            try:
                self._obey(order, hand)
            except Exception as error:
                assert job is not None  # only actors raise
                self._lose(job, error)
        if orders:
            self._record_level()

    def _lose(self, job: JobId, error: BaseException) -> None:
        """The job is gone, and what it held is given back: once its launches in flight have ended, the others may have that.

        Where it has failed between two iterations its state is still whole, and goes to the host first.
        """
        hand = self._hands.pop(job, None)
        if hand is None:
            return
        self._renewals.pop(job, None)
        rescued = None
        with suppress(Exception):  # a device that is broken gives nothing back
            rescued = hand.actor.rescue()
        hand.actor.drop()
        _forget_frames(error)

        def give_back() -> None:
            kept = None
            if rescued is not None:
                with suppress(Exception):
                    rescued[1]()
                    kept = rescued[0]
            self.call(lambda: bury(kept))

        def bury(kept: Kept | None) -> None:
            self.handle(Died(job))
            self._listener.died(job, error, kept, steps=hand.steps)

        self._lane.submit(give_back)

    def _obey(self, order: Order, hand: _Hand | None) -> None:
        if isinstance(order, Apply):
            self._listener.applied(order.nbytes)
            return
        assert hand is not None  # all others concern a job
        job, actor = order.job, hand.actor
        if isinstance(order, Do):
            self._do(job, hand, order.move)
        elif isinstance(order, Park):
            self._move(job, hand, actor.park(), "out")
        elif isinstance(order, Unpark):
            self._move(job, hand, actor.unpark(), "into")
        elif isinstance(order, Admit):
            actor.admit()
            hand.demand = self._renewals.pop(job, hand.demand)  # it may have been renewed while it waited
            self._listener.admitted(job)
        elif isinstance(order, Adopt):
            actor.adopt()
            hand.demand, hand.since_plan = self._renewals.pop(job), 0
            self._listener.renewed(job, steps=hand.steps)
        elif isinstance(order, Decline):
            self._listener.declined(job, self._renewals.pop(job, hand.demand))
        elif isinstance(order, Rest):
            hand.rest_due = False
            self._metrics.submit(self._say, self._listener.rested, job, actor.state(), hand.steps)
        else:
            assert isinstance(order, Dismiss)
            state = actor.state()
            actor.retire()
            self._hands.pop(job)
            self._metrics.submit(self._say, self._listener.dismissed, job, state, hand.steps)

    def _do(self, job: JobId, hand: _Hand, move: int) -> None:
        demand, actor = hand.demand, hand.actor
        kind, last = demand.kinds[move], len(demand.kinds) - 1
        began = self.now()
        if move == 0:
            hand.watched = self._look_always or hand.since_plan < _WATCHED_FIRST or hand.since_plan % _WATCHED_EVERY == 0
            hand.began, hand.segment = began, 0
            if hand.rest_every is not None and (hand.steps + 1) % hand.rest_every == 0:
                hand.rest_due = True
                self.tell(Wished(job, "pause"))  # heard before this iteration ends
            actor.begin(hand.take_batch(), watch=hand.watched)
            return
        wait = actor.issue(move)
        if kind == LAUNCH:
            assert wait is not None
            self.launches += 1
            looks = self._look(job, hand) if hand.watched else []
            label = demand.labels[hand.segment] if hand.segment < len(demand.labels) else f"move {move}"
            hand.segment += 1
            self._leave_to(self._lane, self._launched, job, hand, wait, label, began, looks)
        elif wait is not None:
            if kind == WAIT:
                self._leave_to(self._copies, self._waited, job, hand, wait)
            else:
                self._copies.submit(self._copied, hand, wait, began)
        elif move == last:
            hand.steps += 1
            hand.since_plan += 1
            self._leave_to(self._metrics, self._read, job, actor.take_metrics(), began - hand.began)

    def _move(self, job: JobId, hand: _Hand, wait: Wait, lane: LaneName) -> None:
        nbytes = hand.demand.idle_bytes - hand.demand.parked_bytes
        self._leave_to(self._copies, self._moved, job, hand, wait, lane, nbytes)

    # -- in other threads -------------------------------------------------------------------------------------------------------

    def _leave_to(self, pool: ThreadPoolExecutor, what: Callable[..., None], job: JobId, *arguments: Any) -> None:
        """`what`, in another thread; should it raise, the job is lost."""

        def work() -> None:
            try:
                what(job, *arguments)
            except Exception as error:
                self.fail(job, error)

        pool.submit(work)

    def _launched(self, job: JobId, hand: _Hand, wait: Wait, label: str, issued: float, looks: Sequence[Wait]) -> None:
        began = max(issued, self._lane_free)
        wait()
        ended = self._lane_free = self.now()
        self._span("compute", hand, label, began, ended, 0)
        if looks:
            with suppress(Exception):  # of another job, which has died since
                found = [look() for look in looks]
                self.call(lambda: self._looked(hand, found))
        self.tell(Ended(job, ended - began))

    def _waited(self, job: JobId, hand: _Hand, wait: Wait) -> None:
        began = self.now()
        wait()
        hand.tally.stall_us += self.now() - began
        self.tell(Waited(job))

    def _copied(self, hand: _Hand, wait: Wait, began: float) -> None:
        """A copy that nobody waits for yet; what goes wrong with it is found out by who does."""
        with suppress(Exception):
            lane, nbytes = wait()
            self._span(lane, hand, "tensors", began, self.now(), nbytes)

    def _moved(self, job: JobId, hand: _Hand, wait: Wait, lane: LaneName, nbytes: int) -> None:
        began = self.now()
        wait()
        self._span(lane, hand, "state", began, self.now(), nbytes)
        self._listener.moved(job, lane)
        self.tell(Moved(job))

    def _read(self, job: JobId, wait: Wait, us: float) -> None:
        self._listener.stepped(job, wait(), us=us)

    def _say(self, call: Callable[..., None], job: JobId, state: Kept, steps: int) -> None:
        """`call` of the listener; should it fail, so does the job."""
        try:
            call(job, state, steps=steps)
        except Exception as error:
            self.fail(job, error)
            self._listener.died(job, error, None, steps=steps)

    # -- what is recorded -------------------------------------------------------------------------------------------------------

    def _look(self, job: JobId, hand: _Hand) -> list[Wait]:
        """What lies on the device right after a launch, by the arrays themselves: of the job, then of the others."""
        return [hand.actor.watched_bytes(), *(one.actor.live_bytes() for other, one in self._hands.items() if other != job)]

    def _looked(self, hand: _Hand, found: Sequence[int | None]) -> None:
        """In the dispatcher's thread, before it hears that the launch is over."""
        watched = found[0]
        if watched is None:
            return
        hand.tally.peak_bytes = max(hand.tally.peak_bytes, watched)
        known = [nbytes for nbytes in found if nbytes is not None]
        if len(known) == len(found):
            self.peak_bytes = max(self.peak_bytes, sum(known))
            self._record_level(sum(known))

    def _record_level(self, measured: int | None = None) -> None:
        state = self.state
        jobs = {self._hands[s.job].name: s.held_bytes for s in state.seats if s.job in self._hands}
        for job, surge in state.in_flight[:1]:
            if job in self._hands:
                name = self._hands[job].name
                jobs[name] = jobs.get(name, 0) + surge
        self.recorder.add_level(Level(self.now(), state.budget_bytes, jobs, measured))

    def _span(self, lane: LaneName, hand: _Hand, name: str, began: float, ended: float, nbytes: int) -> None:
        self.recorder.spans.append(Span(lane, hand.name, name, hand.steps, began, ended, nbytes))


def _forget_frames(error: BaseException | None) -> None:
    """Let go of what the frames of a traceback name: arrays, which would stay as long as the error is kept."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
