"""Random steps with all that is odd in a step, random schedules of them, and random moves.

Sizes are such that no tensor is small (`condensed/condensed_step.py`): then the account of a schedule is exact.
"""

import dataclasses
import random
from collections.abc import Iterator

from tensile_jax.ir import Graph
from tensile_jax.plan import CompiledSizes, DeviceProfile
from tensile_jax.plan.analysis.operator_order import order
from tensile_jax.plan.result.build import build_plan
from tensile_jax.plan.result.check import check
from tensile_jax.plan.search.choice import choice_of, workspaces_of
from tensile_jax.plan.search.condensed.condensed_step import members
from tensile_jax.plan.search.cost.segment_evaluator import Evaluator
from tensile_jax.plan.search.moves import residency_moves
from tensile_jax.plan.search.moves.boundary_moves import merged, split
from tensile_jax.plan.search.schedule import Schedule
from tensile_jax.plan.search.starts.start_schedules import last_held, start
from tensile_jax.plan.search.step_model import StepModel
from tensile_jax.plan_format import Plan
from tests.builders import PROFILE, graph_of, header_for

_SIZES = (0, 2_000, 65_536, 100_000, 300_000)


def odd_graph(rng: random.Random, *, most: int = 14) -> Graph:
    """State that is updated, returned as it came or never read; inputs that the caller keeps; constants, keys and effects."""
    states = [f"s{i}" for i in range(rng.randint(1, 3))]
    sizes = {name: rng.choice(_SIZES) for name in ("x", "k", *states)}
    names, lines = ["x", "k", *rng.sample(states, rng.randint(0, len(states)))], list[str]()

    def make(kind: str, reads: list[str], nbytes: int | None = None) -> str:
        made = [f"t{len(lines)}"] + ([f"u{len(lines)}"] if nbytes is None and rng.random() < 0.15 else [])
        lines.append(f"{', '.join(made)} = {kind}({', '.join(dict.fromkeys(reads))})")
        sizes.update({name: rng.choice(_SIZES) if nbytes is None else nbytes for name in made})
        names.extend(made)
        return made[0]

    for _ in range(rng.randint(1, most)):
        kind = rng.choice(("heavy", "heavy", "light", "light", "reduction"))
        make(kind, [*rng.sample(names[-4:], 1), *rng.sample(names, rng.randint(0, min(2, len(names))))])
    carried: dict[str, str] = {}
    for old in states:
        form = rng.choice(("read", "read", "unread", "same"))
        gradient = rng.choice(names[-4:])
        carried[old] = old if form == "same" else make("light", [gradient, *([old] if form == "read" else [])], sizes[old])
        if rng.random() < 0.5:
            make("heavy", [rng.choice(names), carried[old]])
    results = [*carried.values(), *rng.sample(names, rng.randint(0, 2)), names[-1]]
    graph = graph_of(
        lines, sizes=sizes, inputs=" ".join(["x", *states]), constants="k", outputs=" ".join(results), carried=carried,
        donated=" ".join(s for s in ("x", *states) if rng.random() < 0.7), flops=rng.choice((0, 10_000, 1_000_000)),
    )  # fmt: skip
    effects = {p for p in range(len(lines)) if rng.random() < 0.05}
    keys = {p for p in range(len(graph.tensors)) if rng.random() < 0.05}
    return order(
        dataclasses.replace(
            graph,
            operators=tuple(dataclasses.replace(op, effectful=op.id in effects) for op in graph.operators),
            tensors=tuple(dataclasses.replace(t, dtype="key<fry>" if t.id in keys else t.dtype) for t in graph.tensors),
        )
    )


def odd_step(seed: int, *, most: int = 14) -> StepModel:
    """A random step of up to `most` operators and some more on a random device; half of them may leave state on the host."""
    rng = random.Random(seed)
    profile: DeviceProfile = dataclasses.replace(
        PROFILE,
        device_to_host_bytes_per_us=rng.choice((1.0, 50.0, 10_000.0)),
        host_to_device_bytes_per_us=rng.choice((1.0, 50.0, 10_000.0)),
        copy_share=rng.choice((0.0, 0.3)),
        late_weight=rng.choice((0.0, 0.5, 1.0)),
        early_weight=rng.choice((0.0, 0.5, 1.0)),
        fused_reductions=rng.random() < 0.5,
    )
    graph, stays_out, swaps = odd_graph(rng, most=most), rng.random() < 0.5, rng.random() < 0.9
    profile = dataclasses.replace(profile, launch_us=rng.choice((1e-6, PROFILE.launch_us)))
    return StepModel(graph, profile, state_may_stay_out=stays_out, host_limit=float("inf") if swaps else 0)


def random_schedule(evaluator: Evaluator, rng: random.Random) -> Schedule:
    """Some tensors held for a while only, and some boundaries."""
    step = evaluator.condensed
    dropped = {
        t: rng.randint(max(step.made[t], 0), len(step.reads))
        for t, recipe in enumerate(step.recipes)
        if recipe is not None and rng.random() < 0.4
    }
    last = len(step.boundaries) - 1
    cuts = [0, *(b for b in range(1, last) if rng.random() < 0.5), last]
    found = start(evaluator, cuts, last_held(step, dropped))
    assert found is not None
    return found


def possible_moves(schedule: Schedule, rng: random.Random) -> Iterator[tuple[str, Schedule | None]]:
    """Moves of every kind, each at a few places, with their names."""
    evaluator, k = schedule.evaluator, schedule.count
    gaps = list(dict.fromkeys(gap for j in range(k) for gap in residency_moves.gaps_at(schedule, j)))
    for gap in rng.sample(gaps, min(4, len(gaps))):
        yield "drop", residency_moves.drop(schedule, gap, keep_sources=False)
        yield "drop", residency_moves.drop(schedule, gap, keep_sources=True)
        low, high = gap.after + 1, min(gap.before, k)
        if evaluator.condensed.movable >> gap.t & 1 and high > low:
            gone = rng.randint(low, high - 1)
            yield "swap", residency_moves.swap(schedule, gap, gone, rng.randint(gone + 1, high))
    for m in range(k):
        for t in members(schedule.accounts[m].again):
            yield "keep", residency_moves.keep(schedule, t, m)
    for t in sorted(schedule.swapped):
        for number in range(len(schedule.residencies[t]) - 1):
            yield "stay", residency_moves.stay(schedule, t, number)
    for old in evaluator.new_of:
        yield "keep_across", residency_moves.keep_across(schedule, old)
        yield "send_across", residency_moves.send_across(schedule, old, rng.randint(0, k), rng.randint(0, k))
    for j in range(1, k):
        yield "merge", merged(schedule, j)
    for j in range(k):
        inner = range(schedule.cuts[j] + 1, schedule.cuts[j + 1])
        if inner:
            yield "split", split(schedule, j, rng.choice(inner))


def wander(schedule: Schedule, rng: random.Random, steps: int) -> Iterator[tuple[str, Schedule]]:
    """A random sequence of moves, each from the schedule that the one before has made."""
    for _ in range(steps):
        made = [(name, new) for name, new in possible_moves(schedule, rng) if new is not None]
        if not made:
            return
        kind = rng.choice(sorted({name for name, _ in made}))
        name, schedule = rng.choice([(name, new) for name, new in made if name == kind])
        yield name, schedule


def plan_of(step: StepModel, schedule: Schedule) -> Plan:
    """The plan of a schedule, replayed."""
    layout = choice_of(step, schedule).layout
    assert layout is not None
    header = header_for(step.graph, state_memory="any" if step.state_may_stay_out else "device")
    plan = build_plan(layout, step.liveness, [nbytes for nbytes, _ in workspaces_of(schedule)], step.costs, header)
    check(plan, step.graph)
    return plan


def model_of(step: StepModel) -> Evaluator:
    """The condensed step."""
    return step.evaluator.with_measured(CompiledSizes())
