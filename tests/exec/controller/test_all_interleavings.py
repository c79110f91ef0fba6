"""All that can happen to two or three jobs, and some of what can happen to twelve: no overrun, no deadlock, nothing lost.

What is checked in every state is in `explore.check` and in `World.obey`; whoever breaks it raises `Broken`, with the events.
"""

import gc
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from tensile_jax.exec.controller.messages import BudgetRequested, Event, JobLost, PlanRenewed, Prepared, Wished
from tensile_jax.exec.controller.state import JobId, State
from tensile_jax.plan.multi_job.memory_profile import MemoryProfile
from tests.exec.controller import explore as exploring
from tests.exec.controller.explore import explore, longest_waits, wander
from tests.exec.controller.small_worlds import random_world
from tests.exec.controller.world import Broken, World, memory, offer, record

A, B, C = JobId(0), JobId(1), JobId(2)
HILL = memory("ILI", 1, 1, 1, 7, 3, 3, 1)
WAITS = memory("ILWLI", 2, 3, 3, 6, 5, 5, 3, 5, 3, 3, 2)
VALLEY = memory("ILWLI", 2, 3, 3, 8, 3, 3, 1, 8, 3, 3, 2, switch_us=0.0625)  # lower between its hills than at rest
RISING = memory("LLL", 0, 4, 4, 6, 6, 8, 0)
STREAMED = memory("ILWLL", 4, 5, 5, 5, 1, 1, 0, 6, 4, 5, 4)  # its state comes and goes while it runs
CONSTANT = memory("ILL", 4, 4, 4, 6, 3, 6, 4, parked=2, us=2.0, switch_us=0.0625)
LONG = memory("ILILLI", 1, 2, 2, 5, 3, 4, 4, 7, 0, 6, 3, 4, 1)  # a run of four moves, with a valley and two hills in it
RUNS = memory("IILLWLILI", 2, 3, 3, 3, 3, 5, 4, 6, 5, 5, 3, 6, 2, 4, 4, 5, 3, 3, 2)  # a run, a wait, and a run
SHAPES = {
    "hill": HILL, "waits": WAITS, "valley": VALLEY, "rising": RISING, "streamed": STREAMED, "constant": CONSTANT, "long": LONG,
    "runs": RUNS,
}  # fmt: skip
PAIRS = [(a, b) for k, a in enumerate(SHAPES) for b in list(SHAPES)[k:]]

USERS: dict[str, tuple[tuple[Event, ...], ...]] = {
    "pauses and resumes": ((Wished(A, "pause"), Wished(A, "run")),),
    "pauses one and cancels the other": ((Wished(A, "pause"),), (Wished(B, "stop"),)),
    "cancels both": ((Wished(A, "stop"), Wished(A, "run")), (Wished(B, "stop"),)),
    "loses one": ((JobLost(A),),),
    "loses one and pauses it": ((JobLost(B),), (Wished(B, "pause"),)),
    "lowers and raises the budget": ((BudgetRequested(7), BudgetRequested(12)),),
    "lowers it below what must stay": ((BudgetRequested(1), BudgetRequested(8)),),
    "renews": ((PlanRenewed(A, offer(CONSTANT)),),),
    "renews twice": ((PlanRenewed(A, offer(RISING)), PlanRenewed(A, offer(WAITS, 2))),),
    "renews under a lower budget": ((PlanRenewed(A, offer(CONSTANT)),), (BudgetRequested(8),)),
    "pauses and renews": ((Wished(B, "pause"), Wished(B, "run")), (PlanRenewed(B, offer(HILL)),)),
    "has one more": ((Prepared(record(2, CONSTANT, steps=1, weight=2.0)),),),
    "has one more and pauses it": ((Prepared(record(2, HILL, steps=1)), Wished(C, "pause"), PlanRenewed(C, offer(RISING))),),
}


@pytest.fixture(autouse=True)
def no_collection() -> Iterator[None]:
    """Everything is kept to the end anyway, and looking through it takes half of the time."""
    gc.disable()
    yield
    gc.enable()


def least_budget(memories: list[MemoryProfile]) -> int:
    """With which all can run, though one after another."""
    return sum(d.parked_bytes for d in memories) + max(d.rise_bytes for d in memories)


def all_finished(jobs: int) -> frozenset[tuple[tuple[JobId, str], ...]]:
    return frozenset({tuple((JobId(k), "finished") for k in range(jobs))})


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("names", PAIRS, ids=lambda names: "+".join(names))
def test_two_jobs_finish_whatever_comes_first(names: tuple[str, str], depth: int) -> None:
    memories = [SHAPES[name] for name in names]
    for more in (0, 2, 4):
        world = World(least_budget(memories) + more, 100, depth)
        records = [record(k, d, weight=1.0 + k) for k, d in enumerate(memories)]
        assert explore(world, records).ends == all_finished(2)


@pytest.mark.parametrize(("depth", "more"), [(1, 0), (1, 3), pytest.param(2, 2, marks=pytest.mark.slow)])
def test_three_jobs_finish_whatever_comes_first(depth: int, more: int) -> None:
    memories = [WAITS, CONSTANT, HILL]
    records = [record(k, d, steps=1) for k, d in enumerate(memories)]
    assert explore(World(least_budget(memories) + more, 100, depth), records).ends == all_finished(3)


def test_no_job_is_parked_and_brought_back_for_ever_while_another_makes_room() -> None:
    """The third needs both others away; the first used to come back as soon as it had gone."""
    records = [record(k, d) for k, d in enumerate([WAITS, replace(WAITS), HILL])]
    assert explore(World(8, 100, 1), records).ends == all_finished(3)


@pytest.mark.slow
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("names", [("waits", "valley", "hill"), ("streamed", "rising", "constant"), ("waits", "waits", "hill")])
def test_three_jobs_of_two_steps_finish_whatever_comes_first(names: tuple[str, ...], depth: int) -> None:
    memories = [SHAPES[name] for name in names]
    for more in (0, 2):
        records = [record(k, d) for k, d in enumerate(memories)]
        assert explore(World(least_budget(memories) + more, 100, depth), records).ends == all_finished(3)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("user", USERS)
def test_whatever_a_user_does_and_whenever(user: str, depth: int) -> None:
    steps = 1 if depth == 2 or len(USERS[user]) > 1 or user.startswith("has") else 2
    records = [record(0, WAITS, steps=steps), record(1, VALLEY, steps=steps)]
    found = explore(World(10, 100, depth, scripts=USERS[user]), records)
    ends = {how for jobs in found.ends for _, how in jobs}
    assert ends >= ({"finished", "stopped"} if "cancel" in user else {"finished", "died"} if "loses" in user else {"finished"})


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("user", ["nothing", "pauses and resumes", "cancels both", "loses one", "renews"])
def test_jobs_that_pause_for_checkpoints_run_on_whatever_a_user_does(user: str, depth: int) -> None:
    """Whoever asks a job to run before it has paused for its checkpoint does not keep it from pausing."""
    records = [record(0, WAITS, steps=2, checkpoint_every=1), record(1, HILL, steps=1, checkpoint_every=1)]
    found = explore(World(10, 100, depth, scripts=USERS.get(user, ())), records)
    assert found.ends >= (all_finished(2) if user == "nothing" else frozenset())
    ends = {how for jobs in found.ends for _, how in jobs}
    assert "finished" in ends and (user != "nothing" or ends == {"finished"})


@pytest.mark.parametrize("seed", [*range(24), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(24, 400))])
def test_random_jobs_and_users(seed: int) -> None:
    rng = random.Random(seed)
    jobs = rng.choice([1, 2, 2, 2, 3])
    world, records = random_world(rng, jobs, scripts=rng.randint(0, 2 if jobs < 3 else 1), steps=2 if jobs < 3 else 1)
    assert explore(world, records).nodes > 0


@pytest.mark.parametrize("seeds", [range(300), pytest.param(range(300, 6000), marks=pytest.mark.slow)], ids=["few", "many"])
def test_some_of_what_can_happen_to_twelve_jobs(seeds: range) -> None:
    begun = 0
    for seed in seeds:
        rng = random.Random(seed)
        world, records = random_world(rng, rng.randint(4, 12), scripts=rng.randint(0, 6), steps=4)
        begun += len(wander(world, records, rng)[2])
    assert begun > 10 * len(seeds)


@pytest.mark.parametrize(
    ("budget", "depth", "overtakes", "names", "waits"),
    [
        (8, 1, 1, "waits waits", {A: 1, B: 1}),
        (8, 1, 2, "waits hill", {A: 2, B: 1}),
        (9, 1, 2, "waits waits hill", {A: 7, B: 10, C: 4}),
        (10, 2, 1, "waits waits hill", {A: 9, B: 9, C: 5}),
        (8, 1, 2, "hill hill hill", {A: 15, B: 15, C: 15}),
        (9, 1, 2, "valley hill hill", {A: 20, B: 14, C: 14}),
        (10, 1, 2, "valley streamed hill", {A: 5, B: 12, C: 4}),
        pytest.param(9, 2, 3, "valley hill streamed", {A: 26, B: 8, C: 17}, marks=pytest.mark.slow),
    ],
)
def test_how_many_iterations_of_others_begin_at_most_between_two_of_a_job(
    budget: int, depth: int, overtakes: int, names: str, waits: dict[JobId, int]
) -> None:
    records = [record(k, SHAPES[name]) for k, name in enumerate(names.split())]
    assert longest_waits(World(budget, 100, depth), records, overtakes=overtakes) == waits


def test_the_check_finds_an_overrun(monkeypatch: pytest.MonkeyPatch) -> None:
    real = exploring.step

    def generous(state: State, event: Event) -> tuple[State, list[object]]:
        after, instructions = real(replace(state, budget_bytes=state.budget_bytes + 1), event)
        return replace(after, budget_bytes=after.budget_bytes - 1), list(instructions)

    monkeypatch.setattr(exploring, "step", generous)
    with pytest.raises(Broken, match="bytes on the device, of 8"):
        explore(World(8, 100, 1), [record(0, WAITS), record(1, HILL)])
