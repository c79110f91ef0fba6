"""Model checking of the controller: explores everything that can happen to a small set of jobs, breadth first.

    node   (State, World): the state of the controller, with virtual times relative to its clock, and the world (`world.py`)
    edge   an event that is possible in the node, the controller's `step`, and the execution of its instructions

`check` asserts the invariants in every node. `explore` also asserts that the graph has no cycle: then every path ends, and jobs
are not parked and unparked forever. If jobs never end, the graph has cycles; `longest_waits` then finds the largest number of
iterations of other jobs that can begin while one job waits for its own.
"""

import random
from collections.abc import Iterable
from dataclasses import dataclass, replace

from tensile_jax.exec.controller.machine import step
from tensile_jax.exec.controller.messages import BatchLoaded, BudgetRequested, Event, Issue, Prepared
from tensile_jax.exec.controller.state import JobId, JobRecord, State
from tests.exec.controller.world import Body, Broken, World

Node = tuple[State, World]
_Ages = tuple[tuple[tuple[type, JobId], int], ...]
_ENDLESS_STEPS = 3


@dataclass(frozen=True, slots=True)
class Explored:
    """The number of nodes, and the ends of the jobs in the nodes from which nothing more can happen."""

    nodes: int
    ends: frozenset[tuple[tuple[JobId, str], ...]]


def check(state: State, world: World) -> None:
    """What must hold in every node."""
    bodies = {b.job: b for b in world.bodies}
    held = sum(b.device_bytes for b in world.bodies) + max([need for _, need, _ in world.runs], default=0)
    if not state.held_bytes == held <= state.budget_bytes == world.budget:
        raise Broken(f"{state.held_bytes} bytes by account, {held} in the world, of {state.budget_bytes}")
    sums = (sum(s.settled_bytes for s in state.records), sum(s.memory.parked_bytes for s in state.records))
    if sums != (state.settled_bytes, state.parked_bytes):
        raise Broken(f"{state.settled_bytes} and {state.parked_bytes} bytes by account, {sums} in the records")
    if {s.job for s in (*state.records, *state.pending)} != bodies.keys():
        raise Broken(f"records {state.records} and {state.pending} for {world.bodies}")
    for s in state.records:
        b = bodies[s.job]
        known = (s.memory, s.position, s.steps_left, s.batches, s.wish, s.renewal, s.checkpoint_at)
        if known != (b.memory, b.position, b.steps, b.loaded, b.wish, b.renewal, b.checkpoint_at):
            raise Broken(f"{s} for {b}")
    if not world.underway:
        _check_quiet(state, world)


def _check_quiet(state: State, world: World) -> None:
    """Nothing is under way: assert that no job could do something that it has not done."""
    if world.asked is not None:
        raise Broken(f"a budget of {world.asked} bytes is asked for, and nothing happens")
    for b in world.bodies:
        stuck = b.position > 0 or b.wish == "stop" or b.steps == 0
        stuck |= b.wish == "pause" and (b.here or not b.pause_reported)
        stuck |= b.renewal is not None or (b.checkpoint_due and b.admitted)
        stuck |= b.admitted and b.wants and world.could_run(b)
        if stuck:
            raise Broken(f"nothing is under way, and yet nothing is done for {b}")
    pending = [b for b in world.bodies if not b.admitted and b.wish == "run"]
    if pending and all(admissible(world, b) for b in pending):
        raise Broken(f"nothing is under way, and yet none is admitted of {pending}")


def admissible(world: World, body: Body) -> bool:
    """Whether this job, and all jobs that can run now, could run if this job were admitted."""
    after = world.with_body(replace(body, admitted=True))
    if after.host_bytes > world.host_budget:
        return False
    before = {b.job for b in world.bodies if b.admitted and world.could_run(b)} | {body.job}
    return all(after.could_run(b) for b in after.bodies if b.job in before)


def react(state: State, world: World, event: Event) -> tuple[State, World, tuple[int, ...]]:
    """State and world after the controller's step for `event`, which the world has seen; and the jobs that began an iteration."""
    after, instructions = step(state, event)
    began: list[int] = []
    for instruction in instructions:
        world = world.obey(instruction)
        if isinstance(instruction, Issue) and instruction.begin == 0:
            began.append(instruction.job)
    check(after, world)
    return after, world, tuple(began)


def begin(world: World, records: Iterable[JobRecord]) -> Node:
    """The node in which these jobs were prepared, one after another."""
    state = State(world.budget, world.host_budget, depth=world.depth)
    for one in records:
        event = Prepared(one)
        state, world, _ = react(state, world.receive(event), event)
    return state, world


def _normal(state: State, *, endless: bool) -> State:
    """An equivalent state: virtual times are relative to the clock; if `endless`, the steps and batches left are constants."""
    records = [replace(s, virtual_us=max(s.virtual_us - state.clock_us, 0.0)) for s in state.records]
    if endless:
        records = [replace(s, steps_left=_ENDLESS_STEPS, batches=2) for s in records]
    return replace(state, records=tuple(records), clock_us=0.0)


def _endless(world: World) -> World:
    """The world with as many steps and batches to come as before."""
    return replace(world, bodies=tuple(replace(b, steps=_ENDLESS_STEPS, loads=0, loaded=2) for b in world.bodies))


def explore(world: World, records: Iterable[JobRecord], *, most: int = 1_000_000) -> Explored:
    """Every node that can be reached, each checked; raises `Broken` with the events that led there."""
    state, at = begin(world, records)
    first = (_normal(state, endless=False), at)
    index: dict[Node, int] = {first: 0}
    nodes: list[Node] = [first]
    came: list[tuple[int, Event | None]] = [(-1, None)]
    after: list[list[int]] = []
    for here, (state, at) in enumerate(nodes):  # grows
        out: list[int] = []
        for event, heard in at.happens():
            try:
                then_state, then, _ = react(state, heard, event)
            except Exception as error:
                raise Broken(f"{error}\nafter {_story(came, here)} and {event}") from error
            node = (_normal(then_state, endless=False), then)
            known = index.setdefault(node, len(nodes))
            if known == len(nodes):
                nodes.append(node)
                came.append((here, event))
            out.append(known)
        after.append(out)
        if len(nodes) > most:
            raise Broken(f"more than {most} nodes")
    left = without_ends(after)
    if left:
        raise Broken(f"{len(left)} nodes lie on or before a cycle; the first after {_story(came, min(left))}")
    return Explored(len(nodes), frozenset(at.ends for (_, at), out in zip(nodes, after, strict=True) if not out))


def _story(came: list[tuple[int, Event | None]], here: int) -> list[Event]:
    """The events that led there."""
    events: list[Event] = []
    while here:
        here, event = came[here]
        assert event is not None
        events.append(event)
    return events[::-1]


def without_ends(after: list[list[int]]) -> list[int]:
    """The nodes from which a cycle can be reached."""
    before: list[list[int]] = [[] for _ in after]
    for node, nexts in enumerate(after):
        for one in nexts:
            before[one].append(node)
    open_ways = [len(nexts) for nexts in after]
    ended = [node for node, count in enumerate(open_ways) if not count]
    for node in ended:  # grows
        for one in before[node]:
            open_ways[one] -= 1
            if not open_ways[one]:
                ended.append(one)
    return [node for node, count in enumerate(open_ways) if count]


def longest_waits(world: World, records: Iterable[JobRecord], *, overtakes: int, most: int = 1_000_000) -> dict[JobId, int]:
    """For jobs that never end and always have a batch: the most iterations of others that can begin between two of each job.

    A run or copy ends before more than `overtakes` others that are under way end. Raises `Broken` if a job can wait forever.
    """
    state, at = begin(world, records)
    for body in at.bodies:
        for _ in range(2):
            now = at.body(body.job)
            assert now is not None
            state, at, _ = react(state, at.with_body(replace(now, loaded=now.loaded + 1)), BatchLoaded(body.job))
    first: tuple[State, World, _Ages] = (_normal(state, endless=True), _endless(at), ())
    index: dict[tuple[State, World, _Ages], int] = {first: 0}
    nodes: list[tuple[State, World, _Ages]] = [first]
    after: list[list[tuple[int, tuple[int, ...]]]] = []
    for state, at, ages in nodes:  # grows
        out: list[tuple[int, tuple[int, ...]]] = []
        age = dict(ages)
        possible = list(at.completions())
        oldest = max([age.get(_name(event), 0) for event, _ in possible])
        for event, heard in possible:
            if oldest >= overtakes and age.get(_name(event), 0) < oldest:
                continue
            try:
                then_state, then, began = react(state, heard, event)
            except Exception as error:
                raise Broken(f"{error}\nin {state} at {event}") from error
            older = tuple((_name(other), age.get(_name(other), 0) + 1) for other, _ in possible if other is not event)
            node = (_normal(then_state, endless=True), _endless(then), older)
            known = index.setdefault(node, len(nodes))
            if known == len(nodes):
                nodes.append(node)
            out.append((known, began))
        after.append(out)
        if len(nodes) > most:
            raise Broken(f"more than {most} nodes")
    return {body.job: _longest(after, body.job) for body in at.bodies}


def _name(event: Event) -> tuple[type, JobId]:
    """A name for a thing that is under way for a job: the oldest of its runs, its wait, or the copy of its state."""
    assert not isinstance(event, Prepared | BudgetRequested)
    return type(event), event.job


def _longest(after: list[list[tuple[int, tuple[int, ...]]]], job: int) -> int:
    """The most iterations that begin on a path on which no iteration of `job` begins."""
    ways = [[(to, len(began)) for to, began in out if job not in began] for out in after]
    if without_ends([[to for to, _ in out] for out in ways]):
        raise Broken(f"job {job} can wait for ever")
    most = [-1] * len(ways)
    for start in range(len(ways)):
        todo = [start]
        while todo:
            node = todo[-1]
            if most[node] >= 0:
                todo.pop()
                continue
            open_ways = [to for to, _ in ways[node] if most[to] < 0]
            if open_ways:
                todo += open_ways
                continue
            most[node] = max([count + most[to] for to, count in ways[node]], default=0)
            todo.pop()
    return max(most)


def wander(world: World, records: Iterable[JobRecord], rng: random.Random) -> tuple[State, World, list[int]]:
    """One random path to its end; and the jobs whose iterations began, in instruction."""
    state, at = begin(world, records)
    story: list[Event] = []
    order: list[int] = []
    while True:
        possible = list(at.happens())
        if not possible:
            return state, at, order
        event, heard = rng.choice(possible)
        story.append(event)
        try:
            state, at, began = react(state, heard, event)
        except Exception as error:
            raise Broken(f"{error}\nafter {story}") from error
        order += began
