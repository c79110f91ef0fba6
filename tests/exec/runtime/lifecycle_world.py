"""Simulates everything around the lifecycle of one job, without JAX or threads: user code, planner, controller, saver and user.

    World ::= what each of them has done and may do next      hashable: two worlds in which the same can happen are equal

`World.happens` gives the events that are possible now, and `World.perform` performs an instruction. A job's state is represented
by the number of its steps. `World.perform` raises `Broken` at an instruction that is not allowed now. `explore` visits every
(lifecycle, world) that can be reached, and `check` asserts the invariants in each.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, cast

from tensile_jax.exec.actor.feed_events import BatchesEnded, BatchReady, CallbacksMade, UserCodeFailed
from tensile_jax.exec.actor.missing import NO_STATE
from tensile_jax.exec.actor.plans import PlanId, PlanSummary
from tensile_jax.exec.controller.messages import BatchLoaded, Wished
from tensile_jax.exec.controller.state import JobId, Wish
from tensile_jax.exec.runtime import messages
from tensile_jax.exec.runtime.lifecycle import Lifecycle, SaveEnd, step
from tensile_jax.exec.runtime.messages import Event, Instruction
from tensile_jax.plan.multi_job.memory_profile import INSTANT, MemoryProfile

PLAN = PlanSummary(PlanId(0), cast(Any, None), MemoryProfile((INSTANT,), (1,), (1, 1), 0, 1, 1))
BATCHES_FAIL, PREPARE_FAILS, LAUNCH_FAILS, PROCESS_DIES, SAVE_FAILS, FETCH_FAILS = (
    RuntimeError(name) for name in ("batches", "prepare", "launch", "process", "save", "fetch")
)
GIVEN = 0  # the state with which the job was submitted


class Broken(AssertionError):
    """The lifecycle has asked for what must not be, or has left undone what must be."""


@dataclass(frozen=True, slots=True)
class World:
    """Everything around one job.

    Attributes:
        batches: how many batches the user code will load. If `ends`, it then reports that there are no more.
        troubles: the failures that may happen, each once.
        wishes: the requests that the user will make, in order.
        joined, admitted: whether the controller knows the job, and whether it has admitted the job.
        wish, loaded: the wish and the number of batches that the controller was told.
        steps: iterations that the controller has run.
        posts: the events that the metrics thread will post, in order.
        saved: the numbers of steps after which a checkpoint was made, or its making failed.
        kept: the numbers of steps after which the job's state was passed on to be saved.
        closed, released: how often the job was closed, and how often its folder was released.
        lost: whether a failure has destroyed the job's state.
    """

    batches: int
    ends: bool = False
    troubles: frozenset[str] = frozenset()
    wishes: tuple[Wish, ...] = ()
    drawn: int = 0
    stopped: bool = False
    called_back: bool = False
    preparing: bool = False
    joined: bool = False
    gone: bool = False
    explains: bool = False
    admitted: bool = False
    wish: Wish = "run"
    pause_reported: bool = False
    loaded: int = 0
    steps: int = 0
    posts: tuple[messages.Paused | messages.Released | messages.Lost | None, ...] = ()  # None: a step has ended
    saving: bool = False
    checkpointed: bool = False
    saved: tuple[int, ...] = ()
    kept: tuple[int, ...] = ()
    delivered: int = 0
    closed: int = 0
    released: int = 0
    lost: bool = False
    ended_as: tuple[str, ...] = ()

    def without(self, trouble: str) -> "World":
        """The same world, in which that failure no longer happens."""
        return replace(self, troubles=self.troubles - {trouble})

    # -- what can happen --------------------------------------------------------------------------------------------------------

    def happens(self, life: Lifecycle) -> Iterator[tuple[Event, "World"]]:
        """Every event that is possible now, with the world after it."""
        if self.wishes and not life.has_ended:
            yield messages.UserWished(self.wishes[0]), replace(self, wishes=self.wishes[1:])
        yield from self._user_code()
        if self.preparing:
            if life.phase is None and not life.is_given_up:
                yield messages.Preparing("planning", 0, 2), self
            yield messages.Planned(PLAN, "", {}), replace(self, preparing=False)
            if "prepare" in self.troubles:
                yield messages.PreparationFailed(PREPARE_FAILS), replace(self.without("prepare"), preparing=False)
        if "process" in self.troubles and not self.closed:
            yield messages.ProcessDied(PROCESS_DIES), replace(self.without("process"), preparing=False, stopped=True, lost=True)
        if self.joined and not self.gone:
            yield from self._controller(life)
        if self.posts:
            yield self.posts[0] or messages.Stepped(None, {}), replace(self, posts=self.posts[1:])
        if self.saving:
            yield from self._saver(life)

    def _user_code(self) -> Iterator[tuple[Event, "World"]]:
        if self.stopped:
            if not self.called_back:
                yield CallbacksMade(), replace(self, called_back=True)
            return
        if self.drawn < self.batches:
            yield BatchReady(self.drawn), replace(self, drawn=self.drawn + 1)
        elif self.ends:
            yield BatchesEnded(self.drawn), replace(self, ends=False)
        if "batches" in self.troubles:
            yield UserCodeFailed(BATCHES_FAIL, "batches"), replace(self.without("batches"), batches=self.drawn, ends=False)

    def _controller(self, life: Lifecycle) -> Iterator[tuple[Event, "World"]]:
        if self.explains and not self.admitted:
            yield messages.Pending("", {}), replace(self, explains=False)
        if self.wish == "run" and not self.admitted:
            yield messages.Admitted(), replace(self, admitted=True)
        if self.admitted and "waits" in self.troubles:
            yield messages.CannotRunNow("", {}), self.without("waits")
        if self.admitted and life.state == "queued":
            yield messages.BudgetSuffices(), self
        done = self.steps >= life.steps
        if self.wish == "run" and self.admitted and self.loaded and not done:
            yield (
                messages.Parked(),
                replace(self, steps=self.steps + 1, loaded=self.loaded - 1, posts=(*self.posts, None)),
            )
        if self.wish == "stop" or done:
            yield messages.Parked(), self._last(messages.Released(self.steps, self.steps))
        elif self.wish == "pause" and not self.pause_reported:
            after = replace(self, pause_reported=True, kept=(*self.kept, self.steps))
            yield messages.Parked(), replace(after, posts=(*self.posts, messages.Paused(self.steps, self.steps)))
        elif self.wish == "run" and "checkpoint" in self.troubles:  # the controller has it paused for one
            after = replace(self.without("checkpoint"), wish="pause", pause_reported=True, kept=(*self.kept, self.steps))
            yield messages.Parked(), replace(after, posts=(*self.posts, messages.Paused(self.steps, self.steps)))
        for trouble, kept in (("launch", None), ("batch", self.steps)):  # with its state, and between two iterations
            if trouble in self.troubles:
                yield messages.Parked(), self.without(trouble)._last(messages.Lost(LAUNCH_FAILS, kept, self.steps))

    def _last(self, event: messages.Released | messages.Lost) -> "World":
        kept = self.kept if event.kept is None else (*self.kept, event.kept)
        return replace(self, gone=True, posts=(*self.posts, event), kept=kept, lost=self.lost or event.kept is None)

    def _saver(self, life: Lifecycle) -> Iterator[tuple[Event, "World"]]:
        if not life.saves:
            raise Broken("the saver was started, and there is nothing to save")
        one = life.saves[0]
        last = len(life.saves) == 1
        if life.makes_checkpoints and one.steps is not None and not self.checkpointed:
            end = isinstance(one, SaveEnd)
            after = replace(self, saved=(*self.saved, one.steps), checkpointed=end, saving=end or not last)
            yield messages.CheckpointMade(one.steps, "", None), after
            if "save" in self.troubles:
                yield messages.CheckpointMade(one.steps, "", SAVE_FAILS), after.without("save")
            return
        if not isinstance(one, SaveEnd):
            raise Broken(f"{one} of a job that makes no checkpoints")
        after = replace(self, checkpointed=False, saving=not last)
        yield messages.StateFetched(GIVEN if one.kept is None else one.kept, None), after
        if "fetch" in self.troubles:
            yield messages.StateFetched(NO_STATE, FETCH_FAILS), replace(after.without("fetch"), lost=True)

    # -- what is carried out ----------------------------------------------------------------------------------------------------

    def perform(self, instruction: Instruction) -> "World":
        """The world after the instruction is performed, or, if that takes time, after its execution has begun."""
        match instruction:
            case messages.StartPreparing() if not self.preparing and not self.joined:
                return replace(self, preparing=True)
            case messages.JoinController(record) if not self.joined:
                return replace(self, joined=True, explains=True, wish=record.wish, loaded=record.batches)
            case messages.TellController(BatchLoaded()) if self.joined:
                return replace(self, loaded=self.loaded + 1)
            case messages.TellController(Wished(_, wish)) if self.joined:
                return self if self.wish == "stop" else replace(self, wish=wish, pause_reported=False)
            case messages.LoseJob(error) if self.joined:
                return self if self.gone else self._last(messages.Lost(error, None, self.steps))
            case messages.ExplainWait() if self.joined:
                return replace(self, explains=True)
            case messages.StartSaving() if not self.saving:
                return replace(self, saving=True)
            case messages.StopFeed():
                return replace(self, stopped=True)
            case messages.Deliver(steps) if steps == self.delivered + 1:
                return replace(self, delivered=steps)
            case messages.Close():
                return replace(self, stopped=True, closed=self.closed + 1)
            case messages.ReleaseFolder():
                return replace(self, released=self.released + 1)
            case messages.Report(kind) if kind in ("finished", "failed", "cancelled"):
                return replace(self, ended_as=(*self.ended_as, kind))
            case messages.Report() | messages.ShareState():
                return self
            case _:
                raise Broken(f"{instruction} must not be now: {self}")


Node = tuple[Lifecycle, World]


def react(life: Lifecycle, world: World, event: Event) -> Node:
    """Lifecycle and world after the lifecycle's step for `event`, which has happened in the world."""
    after, instructions = step(life, event)
    for instruction in instructions:
        late = isinstance(instruction, messages.ReleaseFolder) or (
            isinstance(instruction, messages.Report) and instruction.kind in ("checkpointed", "checkpoint_failed")
        )
        if life.has_ended and not late:
            raise Broken(f"{instruction} after the end")
        world = world.perform(instruction)
    check(after, world)
    return after, world


def check(life: Lifecycle, world: World) -> None:
    """What must hold in every node."""
    if bool(life.saves) != world.saving:
        raise Broken(f"{life.saves} are to be saved, and the saver is {'' if world.saving else 'not '}at work")
    if life.has_ended and (world.ended_as != (life.state,) or world.closed != 1):
        raise Broken(f"the job is {life.state}; it was reported {world.ended_as} and closed {world.closed} times")
    if not life.has_ended and (world.ended_as or world.closed):
        raise Broken(f"the job is {life.state}; it was reported {world.ended_as} and closed {world.closed} times")
    if world.released != life.is_over:
        raise Broken(f"the folder was released {world.released} times, and the job is {'' if life.is_over else 'not '}over")
    if list(world.saved) != sorted(world.saved):
        raise Broken(f"checkpoints are made in the order {world.saved}")


def check_end(life: Lifecycle, world: World) -> None:
    """Nothing more can happen: the job is paused for good, or it has ended, and nothing of it is lost."""
    if not life.is_over:
        if life.state == "paused" and life.wish == "pause":
            return
        raise Broken(f"nothing more happens, and the job is {life}")
    if life.makes_checkpoints and world.saved != world.kept:
        raise Broken(f"the states after {world.kept} steps were handed over, and {world.saved} were saved")
    handed: Any = world.kept[-1] if world.joined and world.kept else GIVEN
    if life.result != handed and not (world.lost and life.result is NO_STATE):
        raise Broken(f"the last state was {handed}, and what was handed back is {life.result}")
    if life.state == "finished" and world.delivered != life.done:
        raise Broken(f"{life.done} steps are done, and {world.delivered} callbacks were asked for")


def explore(world: World, steps: int, *, makes_checkpoints: bool, most: int = 400_000) -> frozenset[str]:
    """The ends of a job in every node that can be reached, each node checked; raises `Broken` with the events that led there."""
    begun = react(Lifecycle(JobId(0), "job", steps, makes_checkpoints=makes_checkpoints), world, messages.Submitted(""))
    came: dict[Node, tuple[Node, Event] | None] = {begun: None}
    todo, ends = [begun], set[str]()
    for node in todo:  # grows
        life, here = node
        possible = list(here.happens(life))
        if not possible:
            _with_story(came, node, lambda life=life, here=here: check_end(life, here))
            ends.add(life.state)
        for event, heard in possible:
            after = _with_story(came, node, lambda life=life, heard=heard, event=event: react(life, heard, event), event)
            if after not in came:
                came[after] = (node, event)
                todo.append(after)
        if len(todo) > most:
            raise Broken(f"more than {most} nodes")
    return frozenset(ends)


def _with_story(came: dict[Node, tuple[Node, Event] | None], node: Node, what: Any, *more: Event) -> Any:
    try:
        return what()
    except Exception as error:
        story = list(more)
        while (before := came[node]) is not None:
            node = before[0]
            story.insert(0, before[1])
        raise Broken(f"{error}\nafter {story}") from error
