"""The account of segments: by hand, against a naive count, and against what the plan's own segments run."""

import dataclasses
import random

import pytest

from tensile_jax.ir import Graph
from tensile_jax.plan.result.layout import Contents as PlacedContents
from tensile_jax.plan.result.layout import segments_of
from tensile_jax.plan.search.choice import choice_of
from tensile_jax.plan.search.condensed.condensed_step import Condensed, members
from tensile_jax.plan.search.cost.segment_account import account_of, asked_account_of
from tensile_jax.plan.search.cost.segment_evaluator import BegunSegment, Evaluator
from tensile_jax.plan.search.step_model import StepModel
from tests.builders import PROFILE, graph_of
from tests.plan.search.schedules import model_of, odd_step, random_schedule, wander

CHAIN = graph_of(
    ["a = heavy(x)", "b = heavy(a)", "c = heavy(b)", "y = heavy(c, a)"],
    inputs="x", outputs="y", sizes={"x": 1, "a": 10, "b": 100, "c": 1000, "y": 10_000},
)  # fmt: skip


def model_by_hand(graph: Graph) -> Evaluator:
    """Every place may be a boundary."""
    step = StepModel(graph, PROFILE, state_may_stay_out=False)
    return step.evaluator_for(tuple(range(len(graph.operators) + 1)))


def those(evaluator: Evaluator, graph: Graph, names: str) -> int:
    return sum(1 << evaluator.bit[t.id] for t in graph.tensors if t.name in names.split())


def test_a_segment_holds_its_temporaries_beside_its_results() -> None:
    evaluator = model_by_hand(CHAIN)
    y, a, c = (those(evaluator, CHAIN, name) for name in "yac")
    whole = account_of(evaluator.condensed, 0, 4, 0, y, 0)
    assert whole is not None
    assert whole.late == 10 + 1000  # a and c while y is written; before, all lie in y's buffer
    assert whole.early == 10 + 100 + 1000  # a, b and c while c is written
    middle = account_of(evaluator.condensed, 1, 3, a, c, 0)
    assert middle is not None
    assert (middle.late, middle.early, middle.used, middle.again) == (100, 100, a, 0)


def test_what_is_missing_runs_again_before_it_is_read_or_at_the_beginning() -> None:
    evaluator = model_by_hand(CHAIN)
    a, c, y = (those(evaluator, CHAIN, name) for name in "acy")
    last = account_of(evaluator.condensed, 3, 4, c, y, 0)
    assert last is not None
    assert (last.again, last.used, last.heavy) == (a, c, 2)
    assert last.again_us == evaluator.condensed.recipes[evaluator.bit[1 + 0]].us  # pyright: ignore[reportOptionalMemberAccess,reportArgumentType]
    assert (last.late, last.early) == (10, 10)
    nothing_there = account_of(evaluator.condensed, 3, 4, 0, y, 0)
    assert nothing_there is not None
    assert members(nothing_there.again) == [0, 1, 2]


def test_what_is_wanted_and_not_made_is_computed_at_the_end() -> None:
    evaluator = model_by_hand(CHAIN)
    a, b, c = (those(evaluator, CHAIN, name) for name in "abc")
    found = account_of(evaluator.condensed, 2, 3, b, c | a, 0)
    assert found is not None
    assert (found.again, found.used) == (a, b)


def test_an_update_that_takes_over_memory_has_no_buffer_for_temporaries() -> None:
    graph = graph_of(
        ["g = heavy(w, x)", "v = light(w, g)"], inputs="w x", outputs="v", carried={"w": "v"}, donated="w",
        sizes={"w": 1000, "v": 1000, "g": 1000},
    )  # fmt: skip
    evaluator = model_by_hand(graph)
    w, v = those(evaluator, graph, "w"), those(evaluator, graph, "v")
    taken_over, apart = account_of(evaluator.condensed, 0, 2, w, v, v), account_of(evaluator.condensed, 0, 2, w, v, 0)
    assert taken_over is not None and apart is not None
    assert (taken_over.late, apart.late) == (1000, 1000)
    assert evaluator.aliased(w, v, v) == v and evaluator.aliased(w, w | v, v) == 0


def test_an_effect_is_never_computed_again() -> None:
    first, *others = CHAIN.operators
    evaluator = model_by_hand(dataclasses.replace(CHAIN, operators=(dataclasses.replace(first, effectful=True), *others)))
    assert account_of(evaluator.condensed, 3, 4, those(evaluator, CHAIN, "c"), those(evaluator, CHAIN, "y"), 0) is None


def naive(step: Condensed, begin: int, end: int, there: int, wanted: int) -> tuple[set[int], set[int]] | None:
    """What a segment uses of what is there, and what it computes again."""
    have, used, again = set(members(there)), set[int](), set[int]()

    def need(t: int) -> bool:
        if there >> t & 1:
            used.add(t)
        if t in have:
            return True
        recipe = step.recipes[t]
        if recipe is None or not all(map(need, members(recipe.reads))):
            return False
        again.update(set(members(recipe.makes)) - have)
        have.update(members(recipe.makes))
        return True

    for node in range(begin, end):
        if not all(map(need, members(step.reads[node]))):
            return None
        have.update(members(step.makes[node]))
    return (used, again) if all(map(need, members(wanted))) else None


@pytest.mark.parametrize("seed", range(150))
def test_a_segment_uses_and_computes_again_what_a_naive_search_finds(seed: int) -> None:
    rng, evaluator = random.Random(seed), model_of(odd_step(seed))
    step = evaluator.condensed
    for _ in range(10):
        begin = rng.randrange(len(step.reads))
        end = rng.randrange(begin + 1, len(step.reads) + 1)
        exist = [t for t, made in enumerate(step.made) if made < begin]
        there = sum(1 << t for t in exist if rng.random() < 0.6)
        wanted = sum(1 << t for t, made in enumerate(step.made) if made < end and not there >> t & 1 and rng.random() < 0.3)
        found, expected = account_of(step, begin, end, there, wanted, 0), naive(step, begin, end, there, wanted)
        if expected is None:
            assert found is None
        else:
            assert found is not None
            assert (set(members(found.used)), set(members(found.again))) == expected


@pytest.mark.parametrize("seed", range(150))
def test_an_account_stays_the_same_where_other_tensors_are_there_than_those_that_it_asked_for(seed: int) -> None:
    rng, step = random.Random(seed), model_of(odd_step(seed)).condensed
    for _ in range(10):
        begin = rng.randrange(len(step.reads))
        end = rng.randrange(begin + 1, len(step.reads) + 1)
        exist = sum(1 << t for t, made in enumerate(step.made) if made < begin)
        there = rng.getrandbits(len(step.made)) & exist
        wanted = sum(1 << t for t, made in enumerate(step.made) if made < end and not there >> t & 1 and rng.random() < 0.3)
        found, asked = asked_account_of(step, begin, end, there, wanted, 0)
        for _ in range(3):
            other = there & asked | rng.getrandbits(len(step.made)) & exist & ~asked & ~wanted
            assert account_of(step, begin, end, other, wanted, 0) == found


@pytest.mark.parametrize("seed", range(60))
def test_a_begun_segment_has_the_account_of_each_segment_in_any_order(seed: int) -> None:
    rng, step = random.Random(seed), model_of(odd_step(seed)).condensed
    begin = rng.randrange(len(step.reads))
    there = sum(1 << t for t, made in enumerate(step.made) if made < begin and rng.random() < 0.6)
    begun = BegunSegment(step, begin, there)
    for _ in range(10):
        end = rng.randrange(begin + 1, len(step.reads) + 1)
        wanted = sum(1 << t for t, made in enumerate(step.made) if begin <= made < end and rng.random() < 0.3)
        expected = account_of(step, begin, end, there, wanted, 0)
        again_us = begun.again_us(end)
        if expected is None or again_us is None:
            assert expected is None and again_us is None
            continue
        assert again_us == expected.again_us
        assert begun.account(end, sum(step.us[begin:end]), wanted, 0) == expected
        if rng.random() < 0.3:
            begun.rest()


@pytest.mark.parametrize("seed", range(60))
def test_a_segment_runs_what_the_segment_of_its_plan_runs(seed: int) -> None:
    """The layout finds the contents operator by operator, and shares no code with the account."""
    rng, step = random.Random(seed), odd_step(seed)
    first = random_schedule(model_of(step), rng)
    for schedule in (first, *(schedule for _, schedule in wander(first, rng, 5))):
        layout = choice_of(step, schedule).layout
        assert layout is not None
        bit, operators = schedule.evaluator.bit, step.graph.operators
        for j, placed in enumerate(segments_of(step.liveness, layout)):
            assert isinstance(placed, PlacedContents)
            account = schedule.accounts[j]
            assert {bit[t] for t in placed.inputs if t in bit} == set(members(account.used))
            remade = {bit[t] for p in placed.again for t in operators[p].outputs if t in bit}
            assert set(members(account.again)) == {t for t in remade if not schedule.at[j] >> t & 1}
