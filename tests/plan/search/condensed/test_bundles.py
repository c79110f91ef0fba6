"""A bundled step describes the same step: every tensor is in one bundle or inside a stretch, and its schedules are plans."""

import random
from itertools import combinations, pairwise

import pytest

from tensile_jax.plan import CompiledSizes
from tensile_jax.plan.policies.auto import auto, floor_bytes
from tensile_jax.plan.search import step_model
from tensile_jax.plan.search.choice import LEAST, choice_of, peak_of, predicted_plan, schedule_of
from tensile_jax.plan.search.condensed import possible_boundaries
from tensile_jax.plan.search.condensed.bundles import bundled
from tensile_jax.plan.search.condensed.condensed_step import Condensed, members
from tensile_jax.plan.search.cost.segment_account import SegmentAccount, account_of
from tensile_jax.plan.search.schedule import Schedule
from tensile_jax.plan.search.search import fastest, least
from tensile_jax.plan.search.step_model import PRICES, StepModel
from tests.builders import PROFILE, training_graph
from tests.plan.search.schedules import odd_step, plan_of, random_schedule, wander

NOTHING = CompiledSizes()


@pytest.fixture(autouse=True)
def long_stretches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step is bundled, and has few possible boundaries."""
    monkeypatch.setattr(step_model, "MOST_TENSORS", 0)
    monkeypatch.setattr(possible_boundaries, "_MOST", 6)


def deep_step(layers: int, *, state_may_stay_out: bool) -> StepModel:
    return StepModel(training_graph(layers, weight=100_000), PROFILE, state_may_stay_out=state_may_stay_out)


STEPS = [lambda seed=seed, most=most: odd_step(seed, most=most) for most in (14, 100) for seed in range(20)]
STEPS += [lambda out=out, layers=layers: deep_step(layers, state_may_stay_out=out) for out in (False, True) for layers in (5, 30)]


def steps_of(condensed: Condensed) -> list[int]:
    """By node of the condensed step, its stretch."""
    return [i for i, (a, b) in enumerate(pairwise(condensed.boundaries)) for _ in range(a, b)]


@pytest.mark.parametrize("make", STEPS)
def test_every_tensor_is_in_one_bundle_or_needed_in_one_stretch_only(make) -> None:
    step = make()
    fine, coarse = step.evaluator.condensed, step.search_evaluator.condensed
    stretch = steps_of(fine)
    where = {t: i for i, those in enumerate(coarse.tensors) for t in those}
    assert sum(map(len, coarse.tensors)) == len(where)
    for i, (t,) in enumerate(fine.tensors):
        needed = {stretch[node] for node, read in enumerate(fine.reads) if read >> i & 1}
        if t in where:
            bundle = where[t]
            assert coarse.made[bundle] == (stretch[fine.made[i]] if fine.made[i] >= 0 else -1)
            for one, other in zip(
                (fine.at_begin, fine.at_end, fine.movable, fine.written, fine.written_as_made),
                (coarse.at_begin, coarse.at_end, coarse.movable, coarse.written, coarse.written_as_made),
                strict=True,
            ):
                assert one >> i & 1 == other >> bundle & 1
            nodes = {node for node, read in enumerate(coarse.reads) if read >> bundle & 1}
            assert needed - {coarse.made[bundle]} <= nodes
        else:
            assert needed <= {stretch[fine.made[i]]}
            assert not (fine.at_end | fine.at_begin) >> i & 1
    for bundle, those in enumerate(coarse.tensors):
        assert coarse.nbytes[bundle] == sum(fine.nbytes[step.evaluator.bit[t]] for t in those)
    for old, new in fine.aliases.items():
        assert coarse.aliases[where[fine.tensors[old][0]]] == where[fine.tensors[new][0]]
    assert {(where[fine.tensors[old][0]], where[fine.tensors[new][0]]) for old, new in fine.pairs} == set(coarse.pairs)
    assert sum(coarse.us) == pytest.approx(sum(fine.us))
    assert sum(coarse.heavy) == sum(fine.heavy)


@pytest.mark.parametrize("make", STEPS)
def test_recipes_run_what_their_members_need_from_what_they_read(make) -> None:
    """What a recipe reads and makes suffices to compute all members again, in the time that it states."""
    step = make()
    fine, coarse = step.evaluator.condensed, step.search_evaluator.condensed
    for bundle, recipe in enumerate(coarse.recipes):
        those = [step.evaluator.bit[t] for t in coarse.tensors[bundle]]
        if recipe is None:
            assert coarse.made[bundle] < 0 or any(fine.recipes[t] is None for t in ancestors_in_stretch(fine, those))
            continue
        assert recipe.reads < 1 << bundle
        have = {step.evaluator.bit[t] for b in members(recipe.reads) for t in coarse.tensors[b]}
        ran: set[int] = set()
        waiting = those[:]
        while waiting:
            t = waiting.pop()
            if t in have or t in ran:
                continue
            found = fine.recipes[t]
            assert found is not None
            ran |= set(members(found.makes)) - have
            waiting += members(found.reads)
        assert recipe.us == pytest.approx(
            sum(us for _, us in {(fine.recipes[t].makes, fine.recipes[t].us) for t in ran if fine.recipes[t]})
        )


def ancestors_in_stretch(fine: Condensed, those: list[int]) -> set[int]:
    stretch = steps_of(fine)
    found: set[int] = set()
    waiting = list(those)
    while waiting:
        t = waiting.pop()
        if t in found or fine.made[t] < 0 or stretch[fine.made[t]] != stretch[fine.made[those[0]]]:
            continue
        found.add(t)
        recipe = fine.recipes[t]
        waiting += members(recipe.reads) if recipe is not None else []
    return found


@pytest.mark.parametrize("make", STEPS)
def test_bundles_need_at_least_as_much_memory(make) -> None:
    """Also where parts of a sum, which XLA does not write, are made in many stretches: all of them live until the sum is read."""
    step = make()
    fine, coarse = step.evaluator.condensed, step.search_evaluator.condensed
    for a, b in combinations(range(len(coarse.boundaries)), 2):
        exact, bundles = whole_segment(fine, a, b), whole_segment(coarse, a, b)
        assert exact is not None
        assert bundles is not None
        assert bundles.late >= exact.late
        assert bundles.early >= exact.early


def whole_segment(step: Condensed, a: int, b: int) -> SegmentAccount | None:
    """What a segment between two boundaries needs, if nothing is dropped or swapped."""
    begin, end = step.boundaries[a], step.boundaries[b]
    there = wanted = 0
    for t, made in enumerate(step.made):
        last = max((node for node, read in enumerate(step.reads) if read >> t & 1), default=made)
        last = len(step.reads) if step.at_end >> t & 1 else last
        if made < begin <= last:
            there |= 1 << t
        elif begin <= made < end <= last:
            wanted |= 1 << t
    return account_of(step, begin, end, there, wanted, 0)


@pytest.mark.parametrize("make", STEPS)
def test_schedules_of_bundles_are_plans(make) -> None:
    """Whatever moves are made, the choice can be computed, and its plan passes the replay."""
    step = make()
    rng = random.Random(len(step.graph.operators))
    schedule = random_schedule(step.search_evaluator, rng)
    replayed(step, schedule)
    for _, other in wander(schedule, rng, 6):
        replayed(step, other)
    replayed(step, least(step, NOTHING))


def replayed(step: StepModel, schedule: Schedule) -> Schedule:
    layout = choice_of(step, schedule).layout
    assert layout is not None
    single = schedule_of(step, layout, NOTHING)
    plan_of(step, single)
    assert predicted_plan(step, choice_of(step, schedule), NOTHING).segments
    return single


@pytest.mark.parametrize("make", STEPS)
def test_what_the_search_finds_keeps_the_limit_down_to_the_floor(make) -> None:
    step = make()
    floor = floor_bytes(step, NOTHING)
    lowest = auto(step, LEAST, NOTHING)
    assert lowest is not None and peak_of(step, lowest, NOTHING) <= floor
    for factor in (1.0, 1.1, 1.5, 2.0):
        choice = auto(step, factor * floor, NOTHING)
        assert choice is not None
        assert peak_of(step, choice, NOTHING) <= factor * floor


@pytest.mark.slow
@pytest.mark.parametrize("state_may_stay_out", [True, False])
def test_a_deep_step_with_equal_layers_is_bundled_and_nearly_as_fast(
    state_may_stay_out: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(possible_boundaries, "_MOST", 24)
    step = deep_step(40, state_may_stay_out=state_may_stay_out)
    assert len(step.search_evaluator.condensed.tensors) < 0.7 * len(step.evaluator.condensed.tensors)
    monkeypatch.setattr(step_model, "MOST_TENSORS", 10**6)
    apart = deep_step(40, state_may_stay_out=state_may_stay_out)
    limit = 1.3 * floor_bytes(step, NOTHING)
    one, other = fastest(step, limit, NOTHING), fastest(apart, limit, NOTHING)
    assert one is not None and other is not None
    assert replayed(step, one).cost <= 1.1 * other.cost


def test_without_common_properties_every_tensor_is_a_bundle_of_its_own() -> None:
    fine = odd_step(3).evaluator.condensed
    apart = bundled(fine, list(range(len(fine.tensors))))
    assert all(len(those) == 1 for those in apart.tensors)
    assert len(PRICES) < 64
