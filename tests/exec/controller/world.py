"""Simulates everything around the controller, without JAX: the jobs, their states, launches and copies, and the user.

    World ::= Body* runs late scripts         hashable: two worlds in which the same can happen are equal

`World.happens` gives the events that are possible now, and `World.obey` executes an instruction of the controller. From the
executed instructions alone, the world keeps its own account of where every state is and how many bytes are on the device. It
raises `Broken` if the controller gives an instruction that it must never give:

    - a run out of order, or longer than a run may be, or while the job's state is not on the device or is being copied
    - more runs with launches at once than allowed
    - an instruction after which more bytes are on the device or the host than the budgets allow, even for a moment: at every
      move of a run, and at every moment until its end is reported, whatever other jobs do meanwhile
    - parking a job in the middle of an iteration
    - a new plan for a job whose state is on the device
    - any instruction for a job after its `Release`
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, cast

from tensile_jax.exec.actor.plans import PlanId, PlanSummary
from tensile_jax.exec.controller.messages import (
    Admit,
    AdoptPlan,
    ApplyBudget,
    BatchLoaded,
    BudgetRequested,
    DeclinePlan,
    Event,
    Instruction,
    Issue,
    JobLost,
    Park,
    PlanRenewed,
    Prepared,
    Release,
    ReportPaused,
    RunEnded,
    StateMoved,
    Unpark,
    WaitEnded,
    Wished,
)
from tensile_jax.exec.controller.state import JobId, JobRecord, Wish
from tensile_jax.plan.multi_job.memory_profile import INSTANT, LAUNCH, WAIT, MemoryProfile


class Broken(AssertionError):
    """The controller has ordered what it must not order, or left undone what it must do."""


def memory(
    kinds: str, *steps: int, parked: int = 0, us: float = 1.0, switch_us: float = 0.0, host: int | None = None
) -> MemoryProfile:
    """A profile: `kinds` has a letter (I, L, W) per move, `steps` are bytes (hold, need, ..., hold), a launch takes `us`."""
    holds, needs = steps[::2], steps[1::2]
    letters = {"I": INSTANT, "L": LAUNCH, "W": WAIT}
    return MemoryProfile(
        tuple(letters[k] for k in kinds), needs, holds, parked, holds[0], holds[0] if host is None else host, us, switch_us
    )


@dataclass(frozen=True, slots=True)
class Body:
    """One job. `here` says whether its state is on the device, `moving` whether the state is being copied in either direction.

    `saving` says whether it is paused for a checkpoint, and will be told to run again.
    """

    job: JobId
    memory: MemoryProfile
    steps: int
    loads: int
    wish: Wish = "run"
    admitted: bool = False
    here: bool = False
    moving: bool = False
    waiting: bool = False
    position: int = 0
    loaded: int = 0
    renewal: PlanSummary | None = None
    pause_reported: bool = False
    checkpoint_every: int = 0
    checkpoint_at: int = -1
    saving: bool = False

    @property
    def device_bytes(self) -> int:
        """The bytes that the job holds on the device, without the transient bytes of runs in flight."""
        if not self.admitted:
            return 0
        if self.moving:
            return self.memory.holds[0]
        return self.memory.holds[self.position] if self.here else self.memory.parked_bytes

    @property
    def wants(self) -> bool:
        """Whether the job is ready to begin an iteration."""
        ready = self.position == 0 and self.loaded > 0 and self.steps > 0
        return ready and self.wish == "run" and self.renewal is None and not self.checkpoint_due

    @property
    def checkpoint_due(self) -> bool:
        """Whether the job must pause for a checkpoint before it does another step."""
        return self.steps == self.checkpoint_at


@dataclass(frozen=True, slots=True)
class World:
    """The world at one moment.

    Attributes:
        runs: (job, bytes that the run needs beyond what the job holds, microseconds) of each run in flight, in order.
        late: events of jobs that died, which arrive after the death.
        scripts: sequences of events that users or jobs still cause.
        asked: the budget that was requested and not yet applied.
        ends: for every job that is gone, how it ended.
    """

    budget: int
    host_budget: float
    depth: int
    bodies: tuple[Body, ...] = ()
    runs: tuple[tuple[JobId, int, float], ...] = ()
    late: tuple[Event, ...] = ()
    scripts: tuple[tuple[Event, ...], ...] = ()
    asked: int | None = None
    ends: tuple[tuple[JobId, str], ...] = ()

    @property
    def device_bytes(self) -> int:
        """The bytes on the device now: those that all jobs hold, and those that the oldest run in flight needs in addition."""
        return sum(b.device_bytes for b in self.bodies) + (self.runs[0][1] if self.runs else 0)

    @property
    def host_bytes(self) -> int:
        """The most that the admitted jobs can have on the host."""
        return sum(b.memory.host_bytes for b in self.bodies if b.admitted)

    @property
    def underway(self) -> bool:
        """Whether a run or a copy is under way."""
        return bool(self.runs) or any(b.waiting or b.moving for b in self.bodies)

    def body(self, job: JobId) -> Body | None:
        """The job, if it is not gone."""
        return next((b for b in self.bodies if b.job == job), None)

    def could_run(self, body: Body, budget: int | None = None) -> bool:
        """Whether the job could run an iteration if all others were parked."""
        others = sum(b.memory.parked_bytes for b in self.bodies if b.admitted and b is not body)
        return others + body.memory.peak_bytes <= (self.budget if budget is None else budget)

    def with_body(self, body: Body) -> "World":
        """The same, with the job as it is now."""
        return replace(self, bodies=tuple(body if b.job == body.job else b for b in self.bodies))

    # -- what can happen --------------------------------------------------------------------------------------------------------

    def completions(self) -> Iterator[tuple[Event, "World"]]:
        """The events by which work under way may end next: runs end in order, and copies at any time."""
        if self.runs:
            job, _, us = self.runs[0]
            yield RunEnded(job, us), replace(self, runs=self.runs[1:])
        for body in self.bodies:
            if body.waiting:
                yield WaitEnded(body.job), self.with_body(replace(body, waiting=False, position=body.position + 1))
            if body.moving:
                yield StateMoved(body.job), self.with_body(replace(body, moving=False))

    def happens(self) -> Iterator[tuple[Event, "World"]]:
        """Every event that may come now, and the world in which it has come."""
        yield from self.completions()
        for body in self.bodies:
            if body.loads:
                yield BatchLoaded(body.job), self.with_body(replace(body, loads=body.loads - 1, loaded=body.loaded + 1))
            if body.saving:
                yield Wished(body.job, "run"), self.receive(Wished(body.job, "run"))
        for event in dict.fromkeys(self.late):
            late = list(self.late)
            late.remove(event)
            yield event, replace(self, late=tuple(late))
        for k, script in enumerate(self.scripts):
            if script:
                scripts = (*self.scripts[:k], script[1:], *self.scripts[k + 1 :])
                yield script[0], replace(self, scripts=scripts).receive(script[0])

    def receive(self, event: Event) -> "World":
        """The world after an event that the user or a job has caused."""
        if isinstance(event, Prepared):
            record = event.record
            body = Body(
                record.job, record.memory, record.steps_left, record.steps_left,
                checkpoint_every=record.checkpoint_every, checkpoint_at=record.checkpoint_at,
            )  # fmt: skip
            return replace(self, bodies=(*self.bodies, body))
        if isinstance(event, BudgetRequested):
            return replace(self, asked=event.nbytes)
        body = self.body(event.job)
        if isinstance(event, JobLost):
            runs = tuple(one for one in self.runs if one[0] != event.job)
            late: list[Event] = [RunEnded(job, us) for job, _, us in self.runs if job == event.job]
            if body is not None:
                late += [WaitEnded(event.job)] * body.waiting + [StateMoved(event.job)] * body.moving + [BatchLoaded(event.job)]
            after = self if body is None else self.gone(body, "died")
            return replace(after, runs=runs, late=(*self.late, *late))
        if body is None:
            return self
        if isinstance(event, Wished):
            wish = "stop" if body.wish == "stop" else event.wish
            return self.with_body(replace(body, wish=wish, pause_reported=False, saving=False))
        if isinstance(event, PlanRenewed):
            if not body.admitted:  # no instruction answers
                return self.with_body(replace(body, memory=event.plan.memory))
            return self.with_body(replace(body, renewal=event.plan))
        raise AssertionError(f"a world of these tests is never told {event}")

    def gone(self, body: Body, how: str) -> "World":
        """The world without the job."""
        bodies = tuple(b for b in self.bodies if b.job != body.job)
        return replace(self, bodies=bodies, ends=tuple(sorted((*self.ends, (body.job, how)))))

    # -- what is carried out ----------------------------------------------------------------------------------------------------

    def obey(self, instruction: Instruction) -> "World":
        """The world after the instruction is executed, or, if that takes time, after its execution has begun."""
        if isinstance(instruction, ApplyBudget):
            after = self._apply(instruction.nbytes)
        else:
            body = self.body(instruction.job)
            if body is None:
                raise Broken(f"{instruction}, but the job is gone")
            after = (
                self._do(body, instruction.begin, instruction.end)
                if isinstance(instruction, Issue)
                else self._say(body, instruction)
            )
        if after.device_bytes > after.budget:
            raise Broken(f"{instruction} brings {after.device_bytes} bytes on the device, of {after.budget}")
        if after.host_bytes > after.host_budget:
            raise Broken(f"{instruction} brings {after.host_bytes} bytes on the host, of {after.host_budget}")
        return after

    def _apply(self, nbytes: int) -> "World":
        if self.asked is None:
            raise Broken(f"{nbytes} bytes of budget, for which nobody asked")
        if nbytes != self.asked:
            if nbytes != self.budget or any(b.here and b.memory.idle_bytes > b.memory.parked_bytes for b in self.bodies):
                raise Broken(f"{self.asked} bytes of budget refused, though they can be had")
        elif nbytes < self.budget and (self.underway or any(b.position for b in self.bodies)):
            raise Broken(f"a budget of {nbytes} bytes while something is under way")
        return replace(self, budget=nbytes, asked=None)

    def _do(self, body: Body, begin: int, end: int) -> "World":
        own = [one for one in self.runs if one[0] == body.job]
        if not body.here or body.moving or body.waiting or begin != body.position or (own and self.depth == 1):
            raise Broken(f"moves {begin} to {end} of {body}, with {own} in flight")
        if begin == 0 and (not body.wants or self.asked is not None):
            raise Broken(f"an iteration of {body}, which must not begin now")
        memory = body.memory
        kinds = memory.kinds[begin:end]
        through = LAUNCH in kinds and kinds[0] != WAIT and self.depth == 1 and sum(b.admitted for b in self.bodies) == 1
        alone = begin == 0 or end == len(memory.kinds) or (WAIT in kinds and not through)
        if not kinds or end > len(memory.kinds) or (alone and len(kinds) > 1):
            raise Broken(f"moves {begin} to {end} of {body}, which are no run")
        others = sum(b.device_bytes for b in self.bodies) - body.device_bytes
        transients = [need for _, need, _ in self.runs]
        for move in range(begin, end):
            self._check_move(memory, move, others, transients)
            if kinds[move - begin] == LAUNCH and self.depth > 1:  # the moves after it are carried out while it runs
                transients.append(memory.needs[move] - memory.holds[move + 1])
        if memory.kinds[begin] == WAIT:
            return self.with_body(replace(body, waiting=True))
        position, steps, loaded = end, body.steps, body.loaded
        if position == len(memory.kinds):
            position, steps, loaded = 0, steps - 1, loaded - 1
        after = self.with_body(replace(body, position=position, steps=steps, loaded=loaded))
        if LAUNCH in kinds:
            most = max([max(memory.needs[begin:end]) - memory.holds[end], *transients[len(self.runs) :]])
            after = replace(after, runs=(*self.runs, (body.job, most, memory.step_us * kinds.count(LAUNCH))))
            if len(after.runs) > self.depth:
                raise Broken(f"{len(after.runs)} runs in flight")
        return after

    def _check_move(self, memory: MemoryProfile, move: int, others: int, transients: list[int]) -> None:
        """Assert that there is memory for a move while other jobs hold `others` bytes and the oldest of the launches runs."""
        launches, need = memory.kinds[move] == LAUNCH, memory.needs[move]
        needed = [others + need]  # a launch runs when those before it are over
        if transients:
            needed.append(others + (memory.holds[move + 1] if launches else need) + max(transients))
        if max(needed) > self.budget:
            raise Broken(f"move {move} brings {max(needed)} bytes on the device, of {self.budget}")

    def _say(self, body: Body, instruction: Instruction) -> "World":
        away = not body.here and not body.moving
        between = body.position == 0 and not body.waiting and not body.moving
        own = self.depth == 1 and any(one[0] == body.job for one in self.runs)
        match instruction:
            case Admit() if not body.admitted and body.wish == "run":
                return self.with_body(replace(body, admitted=True))
            case Park() if body.here and between and not own:
                return self.with_body(replace(body, here=False, moving=True))
            case Unpark() if body.admitted and away and body.wants:
                return self.with_body(replace(body, here=True, moving=True))
            case AdoptPlan(_, plan) if body.admitted and away and body.renewal == plan:
                return self.with_body(replace(body, memory=plan.memory, renewal=None))
            case DeclinePlan(_, plan) if body.admitted and away and body.renewal == plan:
                return self.with_body(replace(body, renewal=None))
            case ReportPaused() if away and body.checkpoint_due and body.wish != "stop":
                at, saving = body.checkpoint_at - body.checkpoint_every, body.wish == "run"
                return self.with_body(replace(body, wish="pause", pause_reported=True, checkpoint_at=at, saving=saving))
            case ReportPaused() if away and body.wish == "pause" and not body.pause_reported:
                return self.with_body(replace(body, pause_reported=True))
            case Release() if away and (body.wish == "stop" or body.steps == 0):
                return self.gone(body, "stopped" if body.steps else "finished")
            case _:
                raise Broken(f"{instruction} for {body}")


def offer(memory: MemoryProfile, id: int = 1) -> PlanSummary:
    """A plan that a job is offered. Nothing of it but its memory profile matters here."""
    return PlanSummary(PlanId(id), cast(Any, None), memory)


def record(job: int, memory: MemoryProfile, *, steps: int = 2, weight: float = 1.0, checkpoint_every: int = 0) -> JobRecord:
    """The record of a job that has just been prepared."""
    at = steps - checkpoint_every if checkpoint_every else -1
    return JobRecord(JobId(job), memory, weight, steps, checkpoint_every=checkpoint_every, checkpoint_at=at)
