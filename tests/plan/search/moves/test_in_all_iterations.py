"""Moves that are made in all iterations of a loop give plans that survive their replay, and leave iterations alike."""

import dataclasses
import random
from collections.abc import Iterator

import pytest

from tensile_jax.ir import Graph
from tensile_jax.plan import CompiledSizes
from tensile_jax.plan.search.alike_iterations import alike, possible_in_all
from tensile_jax.plan.search.iterations import Iterations
from tensile_jax.plan.search.moves import residency_moves
from tensile_jax.plan.search.moves.addressed_moves import Move, merge_at
from tensile_jax.plan.search.moves.in_all_iterations import InAllIterations
from tensile_jax.plan.search.moves.local_search import changes, improve, repair
from tensile_jax.plan.search.moves.lowering_moves import lowering
from tensile_jax.plan.search.schedule import Schedule
from tensile_jax.plan.search.search import fast
from tensile_jax.plan.search.starts.start_schedules import last_held, start
from tensile_jax.plan.search.step_model import StepModel
from tests.builders import PROFILE, graph_of, tensor_named
from tests.plan.search.schedules import plan_of

UNIT = 2**16
LAYERS = 6


def layered(layers: int = LAYERS, *, activations: int = 3) -> Graph:
    """Layers in an opened loop, and their backward pass in another, with state that each layer updates."""
    forward = [[f"a{i} = heavy(x{i}, w{i})", f"b{i} = light(a{i})", f"x{i + 1} = heavy(b{i})"] for i in range(layers)]
    backward = [
        [
            f"e{i} = heavy(d{i + 1}, b{i}, w{i})",
            f"g{i} = heavy(e{i}, x{i})",
            f"d{i} = light(e{i}, a{i})",
            f"n{i} = light(w{i}, g{i})",
        ]
        for i in range(layers)
    ]
    bodies = [(0, i, lines) for i, lines in enumerate(forward)]
    bodies += [(2, layers - 1 - i, lines) for i, lines in reversed(list(enumerate(backward)))]
    lines = [line for _, _, those in bodies[:layers] for line in those]
    lines += [f"d{layers} = heavy(x{layers})", *(line for _, _, those in bodies[layers:] for line in those)]
    names = [f"{letter}{i}" for i in range(layers + 1) for letter in "abxdegwn"]
    states = {f"w{i}": f"n{i}" for i in range(layers)}
    graph = graph_of(
        lines, sizes={name: UNIT * (activations if name[0] in "abx" else 1) for name in names}, inputs=" ".join(["x0", *states]),
        outputs=" ".join(states.values()), carried=states, donated=" ".join(states), flops=100_000,
    )  # fmt: skip
    where = [((loop, k), (i,)) for loop, i, those in bodies[:layers] for k in range(len(those))]
    where += [((), ()), *(((loop, k), (i,)) for loop, i, those in bodies[layers:] for k in range(len(those)))]
    operators = (
        dataclasses.replace(op, position=position, iterations=iterations)
        for op, (position, iterations) in zip(graph.operators, where, strict=True)
    )
    return dataclasses.replace(graph, operators=tuple(operators))


LAYERED = layered()
LETTERS = "ab"


def cut_once() -> tuple[StepModel, Schedule]:
    """Every iteration is a segment, and all that is read later is kept."""
    model = StepModel(LAYERED, PROFILE, state_may_stay_out=False)
    evaluator = model.evaluator_for(tuple(range(len(model.graph.operators) + 1))).with_measured(CompiledSizes())
    operators = model.graph.operators
    cuts = [p for p, op in enumerate(operators) if not op.iterations or op.position[-1] == 0] + [len(operators)]
    schedule = start(evaluator, cuts, last_held(evaluator.condensed, {}))
    assert schedule is not None and are_alike(schedule)
    return model, schedule


def moves_of(schedule: Schedule) -> Iterator[Move]:
    limit = 0.8 * schedule.peak
    for j in range(schedule.count):
        yield from (move for _, move in lowering(schedule, j, limit, float("inf")))
    yield from (change.move for change in changes(schedule))


def are_alike(schedule: Schedule) -> bool:
    model = StepModel(LAYERED, PROFILE, state_may_stay_out=False)
    return Iterations(model).are_alike([schedule.evaluator.places[cut] for cut in schedule.cuts])


@pytest.mark.parametrize("seed", range(12))
def test_random_moves_in_all_iterations_keep_plans_valid_and_cuts_alike(seed: int) -> None:
    model, schedule = cut_once()
    elsewhere, rng = InAllIterations(Iterations(model), schedule.evaluator), random.Random(seed)
    made = 0
    for _ in range(12):
        several = list(moves_of(schedule))
        for move in rng.sample(several, min(8, len(several))):
            after = move(schedule)
            both = None if after is None else elsewhere(schedule, move, after)
            if both is not None:
                plan_of(model, both)
                assert are_alike(both), move
                schedule, made = both, made + 1
                break
    assert made >= 8


def dropped(schedule: Schedule, letter: str) -> list[bool]:
    """Whether each layer's tensor of this letter is computed again."""
    bits = (schedule.evaluator.bit[tensor_named(LAYERED, f"{letter}{i}")] for i in range(LAYERS))
    return [any(account.again >> t & 1 for account in schedule.accounts) for t in bits]


def test_a_tensor_that_is_dropped_in_one_iteration_is_dropped_in_all() -> None:
    model, schedule = cut_once()
    elsewhere = InAllIterations(Iterations(model), schedule.evaluator)
    seen = 0
    for move in moves_of(schedule):
        after = move(schedule)
        both = None if after is None else elsewhere(schedule, move, after)
        for letter in LETTERS if both is not None and move.function is residency_moves.drop else ():
            assert both is not None
            inner = dropped(both, letter)[1:-1]  # the last layer has no gap between its two passes
            assert len(set(inner)) == 1, (move, letter)
            seen += any(inner)
    assert seen


def test_a_swap_is_made_in_every_iteration_whose_gap_is_long_enough() -> None:
    model, schedule = cut_once()
    elsewhere = InAllIterations(Iterations(model), schedule.evaluator)
    moves = [move for move in moves_of(schedule) if move.function is residency_moves.swap]
    several = 0
    for move in moves:
        after = move(schedule)
        both = None if after is None else elsewhere(schedule, move, after)
        if both is None or after is None:
            continue
        assert both.swapped >= after.swapped
        several += len(both.swapped) > 1
        names = {LAYERED.tensors[both.evaluator.condensed.tensors[t][0]].name[0] for t in both.swapped}
        assert len(names) == 1  # tensors of one kind, each of its own layer
    assert several


@pytest.mark.parametrize("share", [0.9, 0.8, 0.7, 0.6])
def test_a_repair_in_all_iterations_leaves_them_alike(share: float) -> None:
    model, schedule = cut_once()
    limit = share * schedule.peak
    repaired = repair(schedule, limit, 100, elsewhere=InAllIterations(Iterations(model), schedule.evaluator))
    assert repaired is not None and repaired.peak <= limit
    plan_of(model, repaired)
    assert are_alike(repaired)
    single = repair(schedule, limit, 100)
    assert single is not None and repaired.cost <= 1.2 * single.cost


def test_iterations_are_planned_alike_where_no_minimum_cut_leads_to_such_a_plan() -> None:
    model = StepModel(LAYERED, PROFILE, state_may_stay_out=False)
    measured = CompiledSizes()
    whole = StepModel(LAYERED, PROFILE, state_may_stay_out=False)
    found = 0
    for percent in range(40, 95, 5):
        limit = percent / 100 * peak_kept(whole)
        schedule = alike(model, limit, measured)
        if schedule is None:
            continue
        found += 1
        assert schedule.peak <= limit
        plan_of(model, schedule)
        other = fast(model, limit, measured)
        assert other is None or schedule.cost <= 1.25 * other.cost
    assert found >= 6


def peak_kept(model: StepModel) -> int:
    evaluator = model.evaluator.with_measured(CompiledSizes())
    schedule = start(evaluator, [0, len(evaluator.places) - 1], last_held(evaluator.condensed, {}))
    assert schedule is not None
    return schedule.peak


def test_boundaries_are_possible_in_all_iterations_or_in_none() -> None:
    model, _ = cut_once()
    assert Iterations(model).are_alike(possible_in_all(model))
    assert set(possible_in_all(model)) >= {0, len(model.graph.operators)}


def test_iterations_are_not_joined() -> None:
    _, schedule = cut_once()
    elsewhere = InAllIterations(Iterations(StepModel(LAYERED, PROFILE, state_may_stay_out=False)), schedule.evaluator)
    for cut in schedule.cuts[1:-1]:
        after = merge_at(schedule, cut)
        operator = LAYERED.operators[schedule.evaluator.places[cut]]
        if after is not None and operator.iterations:
            assert elsewhere(schedule, Move(merge_at, (cut,)), after) is None
    limit = 2.0 * schedule.peak
    improved = improve(schedule, limit, 4000, elsewhere=elsewhere)
    assert improved.count >= 2 * LAYERS
