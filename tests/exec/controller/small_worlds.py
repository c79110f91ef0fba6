"""Makes small random jobs, and random actions of a user, for the model checking of the controller (`explore.py`)."""

import random
from collections.abc import Callable

from tensile_jax.exec.controller.messages import BudgetRequested, Event, JobLost, PlanRenewed, Prepared, Wished
from tensile_jax.exec.controller.state import JobId, JobRecord
from tensile_jax.plan.multi_job.memory_profile import MemoryProfile
from tests.exec.controller.world import World, memory, offer, record


def random_demand(rng: random.Random) -> MemoryProfile:
    """A profile of one to four moves of any kind and at most 11 bytes, some of which may be held while the job is parked."""
    while True:
        count, idle = rng.randint(1, 4), rng.randint(0, 4)
        kinds = "".join(rng.choice("ILL" if i in (0, count - 1) else "ILLWW") for i in range(count))
        holds = [idle, *(rng.randint(0, 8) for _ in range(count - 1)), idle]
        for i, kind in enumerate(kinds):
            if kind == "W":
                holds[i + 1] = min(holds[i : i + 2])
        if holds[-1] == idle:
            break
    steps = [idle]
    for i, kind in enumerate(kinds):
        need = holds[i] if kind == "W" else max(holds[i : i + 2]) + rng.choice([0, 0, 1, 3])
        steps += [need, holds[i + 1]]
    parked = rng.choice([0, rng.randint(0, min(holds))])
    us, switch_us = rng.choice([1.0, 2.0]), rng.choice([0.0, 0.0625])
    return memory(kinds, *steps, parked=parked, us=us, switch_us=switch_us, host=rng.randint(0, 4))


def random_script(rng: random.Random, jobs: int, budget: int) -> tuple[Event, ...]:
    """What a user does to one of the jobs, or to the budget, one after another; or what a job does."""
    job = JobId(rng.randrange(jobs))
    choices: list[Callable[[], tuple[Event, ...]]] = [
        lambda: (Wished(job, "pause"), Wished(job, "run")),
        lambda: (Wished(job, "pause"),),
        lambda: (Wished(job, "stop"), Wished(job, "run")),
        lambda: (JobLost(job),),
        lambda: (PlanRenewed(job, offer(random_demand(rng))),),
        lambda: (PlanRenewed(job, offer(random_demand(rng))), Wished(job, "pause")),
        lambda: (BudgetRequested(rng.randint(1, budget + 3)),),
        lambda: (BudgetRequested(rng.randint(1, budget)), BudgetRequested(budget)),
    ]
    return rng.choice(choices)()


def late_script(rng: random.Random, job: int) -> tuple[Event, ...]:
    """A job arrives late, and waits, perhaps, for others to go."""
    one = JobId(job)
    prepared = Prepared(record(job, random_demand(rng), steps=1, weight=rng.choice([1.0, 2.0])))
    more: list[tuple[Event, ...]] = [
        (), (Wished(one, "pause"), PlanRenewed(one, offer(random_demand(rng)))), (Wished(one, "stop"),), (JobLost(one),),
    ]  # fmt: skip
    return (prepared, *rng.choice(more))


def random_world(rng: random.Random, jobs: int, *, scripts: int, steps: int) -> tuple[World, list[JobRecord]]:
    """So many jobs under a budget under which at least most could run, and a user with so many intentions."""
    memories = [random_demand(rng) for _ in range(jobs)]
    peaks = [d.peak_bytes for d in memories]
    budget = rng.randint(max(peaks) - 1, max(max(peaks), sum(peaks) // 2) + 1)
    host = sum(d.host_bytes for d in memories)
    host_budget = rng.choice([float("inf"), max(0, host - 1), host + 2])
    events = [random_script(rng, jobs, budget) for _ in range(scripts)]
    budgets = [s for s in events if isinstance(s[0], BudgetRequested)]
    events = [s for s in events if not isinstance(s[0], BudgetRequested)] + [tuple(e for s in budgets for e in s)]
    if rng.random() < 0.5:
        events.append(late_script(rng, jobs))
    world = World(budget, host_budget, rng.choice([1, 2]), scripts=tuple(s for s in events if s))
    records = [
        record(k, d, steps=rng.randint(1, steps), weight=rng.choice([1.0, 2.0]), checkpoint_every=rng.choice([0, 0, 1, 2]))
        for k, d in enumerate(memories)
    ]
    return world, records
