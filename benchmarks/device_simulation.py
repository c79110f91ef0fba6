"""Simulates a device that several jobs share, in simulated time. The real controller decides what runs when.

The device has a compute lane, a lane to the host, and a lane from the host, each of which does one thing at a time, in the order
in which it was asked. A discrete-event simulation passes the ends of launches and copies to `tensile_jax.exec.controller`, and
carries out what the controller instructions. Only the durations are simulated: they are part of the jobs. Times in microseconds.
"""

import heapq
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from tensile_jax.exec.controller.machine import step
from tensile_jax.exec.controller.messages import (
    BatchLoaded,
    Event,
    Issue,
    Park,
    Prepared,
    RunEnded,
    StateMoved,
    Unpark,
    WaitEnded,
)
from tensile_jax.exec.controller.state import JobId, JobRecord, State, StatePlace
from tensile_jax.plan.multi_job.memory_profile import INSTANT, LAUNCH, WAIT, MemoryProfile

_AHEAD = 2  # batches that a job loads ahead


@dataclass(frozen=True, slots=True)
class Work:
    """A job. Move i takes `us[i]` microseconds: a launch on the compute lane, a copy on the lane `lanes[i]`.

    `waits[i]` are the moves that begin the copies for which move i waits. `load_us` is what it takes to load a batch,
    `arrives_us` is when the job comes, and `steps` how many iterations it runs.
    """

    memory: MemoryProfile
    us: tuple[float, ...]
    lanes: tuple[str, ...]
    waits: tuple[tuple[int, ...], ...]
    weight: float = 1.0
    load_us: float = 0.0
    arrives_us: float = 0.0
    steps: int = 10**9


@dataclass(slots=True)
class Run:
    """The results of one simulation. `decisions` has, for every call of `step`, its seconds and the launches that it ordered.

    `peak_bytes` is the most that the controller counts as held, with what each launch in flight needs. `allocated_bytes` is the
    most that is allocated if memory is allocated in the order of launches: what a launch alone needs is free for the next one.
    `first_launch_us` is when the first launch began, and `ended_us` has, for every job, when each of its iterations ended.
    """

    decisions: list[tuple[float, int]] = field(default_factory=list[tuple[float, int]])
    elapsed_us: float = 0.0
    busy_us: float = 0.0
    peak_bytes: int = 0
    allocated_bytes: int = 0
    parks: int = 0
    longest_wait_us: float = 0.0
    deadlocks: int = 0
    first_launch_us: float = -1.0
    ended_us: list[list[float]] = field(default_factory=list[list[float]])


class Simulation:
    """Simulated jobs on one device. It executes the controller's instructions, which take simulated time."""

    def __init__(self, works: Sequence[Work], budget_bytes: int, depth: int) -> None:
        self.works = works
        self.run = Run(ended_us=[[] for _ in works])
        self.now = 0.0
        self.free = {"compute": 0.0, "out": 0.0, "into": 0.0}
        self.copied: list[dict[int, float]] = [{} for _ in works]  # by move, when the copy that it has begun is over
        self.computed = [0.0] * len(works)  # when the job's last launch is over
        self.allocated = [0] * len(works)
        self.wants_since = [-1.0] * len(works)
        self.batches = [0] * len(works)
        self.launches = 0
        self.events: list[tuple[float, int, Event]] = []
        self._posted = 0
        self.state = State(budget_bytes, float("inf"), depth=depth)
        for k, work in enumerate(works):
            self.after(work.arrives_us, Prepared(JobRecord(JobId(k), work.memory, work.weight, steps_left=work.steps)))
            self.after(work.arrives_us + work.load_us, BatchLoaded(JobId(k)))

    def after(self, us: float, event: Event) -> None:
        """Let `event` happen in `us` microseconds."""
        self._posted += 1
        heapq.heappush(self.events, (self.now + us, self._posted, event))

    def tell(self, event: Event) -> None:
        """Pass an event to the controller, and execute its instructions."""
        launches = self.launches
        began = time.perf_counter()
        self.state, instructions = step(self.state, event)
        took = time.perf_counter() - began
        for instruction in instructions:
            if isinstance(instruction, Issue):
                self.do(instruction)
            elif isinstance(instruction, Park | Unpark):
                state_us = self.works[instruction.job].memory.switch_us / 2
                lane = "out" if isinstance(instruction, Park) else "into"
                self.after(self.occupy(lane, state_us) - self.now, StateMoved(instruction.job))
                self.run.parks += isinstance(instruction, Park)
                self._allocate(instruction.job, self.works[instruction.job].memory.holds[0])
        self.run.decisions.append((took, self.launches - launches))
        self.run.peak_bytes = max(self.run.peak_bytes, self.state.held_bytes)

    def _allocate(self, job: int, nbytes: int, needs: int = 0) -> None:
        """The job has `nbytes` from now on, and needed `needs` until now."""
        others = sum(self.allocated) - self.allocated[job]
        self.allocated[job] = nbytes
        self.run.allocated_bytes = max(self.run.allocated_bytes, others + max(nbytes, needs))

    def occupy(self, lane: str, us: float, *, since: float = 0.0) -> float:
        """Occupy the lane for `us` microseconds after its present work, not before `since`, and return when that ends."""
        self.free[lane] = max(self.free[lane], self.now, since) + us
        return self.free[lane]

    def do(self, instruction: Issue) -> None:
        """Execute a run of the job's moves. A copy begins when the launches before it in the run are over."""
        job, begin, end = instruction
        work, copied = self.works[job], self.copied[job]
        kinds = work.memory.kinds[begin:end]
        if begin == 0:
            self.run.longest_wait_us = max(self.run.longest_wait_us, self.now - self.wants_since[job])
            copied.clear()
        compute_us, ready = 0.0, max(self.free["compute"], self.now)  # when the launches so far are over
        for move, kind in enumerate(kinds, start=begin):
            self._allocate(job, work.memory.holds[move + 1], work.memory.needs[move])
            if kind == LAUNCH:
                self.launches += 1
                compute_us += work.us[move]
                ready += work.us[move]
            elif kind == WAIT:
                over = max([copied[start] for start in work.waits[move]], default=0.0)
                compute_us += max(over - ready, 0.0)  # of a run that goes on through its waits
                ready = max(over, ready)
            elif kind == INSTANT and work.lanes[move]:
                computed = compute_us or work.lanes[move] == "out"  # a tensor leaves when it was computed
                copied[move] = self.occupy(work.lanes[move], work.us[move], since=ready if computed else self.now)
        if LAUNCH in kinds:
            if self.run.first_launch_us < 0:
                self.run.first_launch_us = max(self.free["compute"], self.now)
            self.run.busy_us += sum(us for us, kind in zip(work.us[begin:end], kinds, strict=True) if kind == LAUNCH)
            self.computed[job] = self.occupy("compute", compute_us)
            self.after(self.computed[job] - self.now, RunEnded(job, compute_us))
        elif WAIT in kinds:
            over = max([copied[start] for start in work.waits[begin]], default=0.0)
            self.after(max(over - self.now, 0.0), WaitEnded(job))
        if end == len(work.us):
            self.run.ended_us[job].append(max(self.computed[job], self.now))
            self.batches[job] -= 1
            self.wants_since[job] = self.now
            if self.batches[job] == _AHEAD - 1:
                self.after(work.load_us, BatchLoaded(job))

    def until_launches(self, launches: int) -> Run:
        """Run until so many launches were issued, or nothing more can happen."""
        while self.launches < launches and self._next():
            pass
        return self._end()

    def until_all_have_ended(self) -> Run:
        """Run until each job has done its iterations, or nothing more can happen. What is done at the end is to end the last."""
        while any(len(e) < work.steps for e, work in zip(self.run.ended_us, self.works, strict=True)) and self._next():
            pass
        run = self._end()
        run.elapsed_us = max((ended[-1] for ended in run.ended_us if ended), default=self.now)
        return run

    def _next(self) -> bool:
        """Let the next event happen; false if there is none."""
        if not self.events:
            self.run.deadlocks += 1
            return False
        self.now, _, event = heapq.heappop(self.events)
        if isinstance(event, StateMoved):
            record = self.state.record(event.job)
            if record is not None and record.place is StatePlace.TO_HOST:
                self._allocate(event.job, self.works[event.job].memory.parked_bytes)
        if isinstance(event, BatchLoaded):
            job = event.job
            self.batches[job] += 1
            if self.batches[job] == 1:
                self.wants_since[job] = self.now
            if self.batches[job] < _AHEAD:
                self.after(self.works[job].load_us, BatchLoaded(job))
        self.tell(event)
        return True

    def _end(self) -> Run:
        self.run.elapsed_us = self.now
        for job in range(len(self.works)):  # those that wait still
            record = self.state.record(JobId(job))
            if record is not None and not record.position and self.batches[job]:
                self.run.longest_wait_us = max(self.run.longest_wait_us, self.now - self.wants_since[job])
        return self.run
