"""Every move gives a plan that survives its replay, and moves that are opposites come back."""

import random
from itertools import pairwise

import pytest

from tensile_jax.ir import Graph
from tensile_jax.plan.result.layout import BEGINS, COPIED, MADE, Residency
from tensile_jax.plan.search.cost.segment_evaluator import Evaluator
from tensile_jax.plan.search.moves import residency_moves
from tensile_jax.plan.search.moves.boundary_moves import merged, split
from tensile_jax.plan.search.moves.lowering_moves import lowering
from tensile_jax.plan.search.moves.residency_moves import Gap
from tensile_jax.plan.search.schedule import Schedule
from tensile_jax.plan.search.starts.start_schedules import last_held, start
from tensile_jax.plan.search.step_model import StepModel
from tests.builders import PROFILE, graph_of, tensor_named
from tests.plan.search.schedules import model_of, odd_step, plan_of, possible_moves, random_schedule, wander

UNIT = 2**16
LINES = [f"{new} = heavy({old})" for old, new in pairwise("xabcde")] + ["y = heavy(e, a)"]
GRAPH = graph_of(LINES, inputs="x", outputs="y", sizes=dict.fromkeys("abcdey", UNIT), flops=100_000)
"""Six places in a row; the last one reads `a` again."""


def every_place(graph: Graph, *, state_may_stay_out: bool = False) -> tuple[StepModel, Schedule]:
    """Everything kept while needed, every operator a segment."""
    step = StepModel(graph, PROFILE, state_may_stay_out=state_may_stay_out)
    evaluator = step.evaluator_for(tuple(range(len(graph.operators) + 1)))
    schedule = start(evaluator, range(len(evaluator.places)), last_held(evaluator.condensed, {}))
    assert schedule is not None
    return step, schedule


def bit_of(evaluator: Evaluator, graph: Graph, name: str) -> int:
    return evaluator.bit[tensor_named(graph, name)]


def same(one: Schedule | None, other: Schedule) -> bool:
    return one is not None and (one.cuts, one.residencies, one.peaks) == (other.cuts, other.residencies, other.peaks)


def test_a_tensor_is_dropped_and_kept_again() -> None:
    _, schedule = every_place(GRAPH)
    a = bit_of(schedule.evaluator, GRAPH, "a")
    assert schedule.residencies[a] == (Residency(1, 5, MADE, False),)
    gap = Gap(a, 0, 1, 5)
    assert gap in set(residency_moves.gaps_at(schedule, 3))
    dropped = residency_moves.drop(schedule, gap, keep_sources=False)
    assert dropped is not None
    assert dropped.residencies[a] == (Residency(1, 1, MADE, False),)
    assert dropped.accounts[5].again == 1 << a
    assert same(residency_moves.keep(dropped, a, 5), schedule)


def test_a_tensor_is_swapped_and_stays_again() -> None:
    step, schedule = every_place(GRAPH)
    a = bit_of(schedule.evaluator, GRAPH, "a")
    gap = Gap(a, 0, 1, 5)
    swapped = residency_moves.swap(schedule, gap, 3, 5)
    assert swapped is not None
    assert swapped.residencies[a] == (Residency(1, 2, MADE, True), Residency(5, 5, COPIED, False))
    kinds = [(e.kind, e.trigger, e.until) for e in plan_of(step, swapped).events if e.kind.startswith("swap")]
    assert kinds == [("swap_out", 1, 3), ("swap_in", 4, 5)]
    shifted = residency_moves.shift(swapped, a, 0, 2, 4)
    assert shifted is not None
    assert shifted.residencies[a] == (Residency(1, 1, MADE, True), Residency(4, 5, COPIED, False))
    assert same(residency_moves.stay(shifted, a, 0), schedule)


def test_segments_are_merged_and_split_again() -> None:
    _, schedule = every_place(GRAPH)
    one = merged(schedule, 3)
    assert one is not None
    assert one.cuts == [0, 1, 2, 4, 5, 6] and one.count == schedule.count - 1
    assert same(split(one, 2, 3), schedule)


STATE = graph_of(
    ["a = heavy(x)", "b = heavy(a, w)", "g = heavy(b)", "v = light(w, g)", "y = heavy(b)", "z = heavy(y)"],
    inputs="w x", outputs="v z", carried={"w": "v"}, donated="w", sizes=dict.fromkeys("wabgvyz", UNIT), flops=100_000,
)  # fmt: skip


def test_state_is_sent_across_and_kept_again() -> None:
    step, schedule = every_place(STATE, state_may_stay_out=True)
    w, v = bit_of(schedule.evaluator, STATE, "w"), bit_of(schedule.evaluator, STATE, "v")
    assert schedule.residencies[w] == (Residency(0, 3, BEGINS, False),)
    across = residency_moves.send_across(schedule, w, 1, 5)
    assert across is not None
    assert across.residencies[w] == (Residency(1, 3, COPIED, False),)
    assert across.residencies[v] == (Residency(4, 4, MADE, True),)
    kinds = [(e.kind, e.name, e.trigger, e.until) for e in plan_of(step, across).events if e.kind.startswith("swap")]
    assert kinds == [("swap_in", "w", 0, 1), ("swap_out", "v", 3, 5)]
    assert same(residency_moves.keep_across(across, w), schedule)


def test_a_tensor_can_be_dropped_with_what_it_is_computed_from_kept_or_computed_again_too() -> None:
    lines = ["a = heavy(x)", "b = heavy(a)", "c = heavy(b)", "d = heavy(c)", "y = heavy(d, b)"]
    graph = graph_of(lines, inputs="x", outputs="y", sizes=dict.fromkeys("abcdy", UNIT))
    _, schedule = every_place(graph)
    a, b = bit_of(schedule.evaluator, graph, "a"), bit_of(schedule.evaluator, graph, "b")
    gap = Gap(b, 0, 2, 4)
    kept, both = residency_moves.drop(schedule, gap, keep_sources=True), residency_moves.drop(schedule, gap, keep_sources=False)
    assert kept is not None and both is not None
    assert (kept.residencies[a], kept.accounts[4].again) == ((Residency(1, 4, MADE, False),), 1 << b)
    assert (both.residencies[a], both.accounts[4].again) == ((Residency(1, 1, MADE, False),), 1 << a | 1 << b)


@pytest.mark.parametrize("seed", range(60))
def test_any_move_gives_a_plan_that_survives_its_replay(seed: int) -> None:
    rng, step = random.Random(seed), odd_step(seed)
    schedule = random_schedule(model_of(step), rng)
    *_, schedule = schedule, *(later for _, later in wander(schedule, rng, 3))
    for _, new in possible_moves(schedule, rng):
        if new is not None:
            plan_of(step, new)
    for j in range(schedule.count):
        for _, move in lowering(schedule, j, 0.5 * schedule.peak, float("inf")):
            new = move(schedule)
            if new is None:
                continue
            plan_of(step, new)


@pytest.mark.parametrize("seed", range(60))
def test_segments_are_joined_unless_that_is_too_slow_or_exceeds_the_limit(seed: int) -> None:
    rng, step = random.Random(seed), odd_step(seed)
    *_, schedule = (later for _, later in wander(random_schedule(model_of(step), rng), rng, 3))
    for j in range(1, schedule.count):
        joined = merged(schedule, j)
        if joined is None:
            continue
        assert same(merged(schedule, j, limit=joined.peaks[j - 1] + UNIT * 100, upper=joined.cost + 1.0), joined)
        assert merged(schedule, j, upper=0.0) is None
        assert merged(schedule, j, limit=0.0) is None


@pytest.mark.parametrize("seed", range(60))
def test_a_move_leaves_the_schedule_that_it_was_made_from_as_it_was(seed: int) -> None:
    rng, step = random.Random(seed), odd_step(seed)
    schedule = random_schedule(model_of(step), rng)
    before = schedule.copy()
    for _ in possible_moves(schedule, rng):
        assert schedule == before or (schedule.cuts, schedule.residencies, schedule.at, schedule.after, schedule.peaks) == (
            before.cuts, before.residencies, before.at, before.after, before.peaks,
        )  # fmt: skip
