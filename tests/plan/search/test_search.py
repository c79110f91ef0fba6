"""The search keeps its limit, is the same every time, and has a schedule of least memory."""

import random
from collections.abc import Mapping
from functools import partial

import pytest

from tensile_jax.plan import CompiledSizes
from tensile_jax.plan.policies.auto import auto, floor_bytes
from tensile_jax.plan.result.layout import COPIED
from tensile_jax.plan.search import search
from tensile_jax.plan.search.choice import LEAST, peak_of, whole_peak
from tensile_jax.plan.search.cost.segment_evaluator import Evaluator
from tensile_jax.plan.search.moves.local_search import improve, repair
from tensile_jax.plan.search.search import fastest, least
from tensile_jax.plan.search.step_model import StepModel
from tests.builders import PROFILE, graph_of, training_graph
from tests.plan.search.schedules import model_of, odd_step, plan_of, random_schedule

NOTHING = CompiledSizes()


def starts(step: StepModel, evaluator: Evaluator, limit: float) -> list[search.Start]:
    return list(search._starts(step, evaluator, limit, partial(search.starting, step, evaluator, limit=limit)))


@pytest.mark.parametrize("seed", range(40))
def test_what_is_found_keeps_the_limit_and_there_is_something_from_the_least_peak_up(seed: int) -> None:
    rng, step = random.Random(seed), odd_step(seed)
    lowest = least(step, NOTHING)
    plan_of(step, lowest)
    top = max(lowest.peak, whole_peak(step, NOTHING))
    for part in (0.0, rng.random(), 1.0):
        limit = lowest.peak + part * (top - lowest.peak)
        found = fastest(step, limit, NOTHING)
        assert found is not None
        assert found.peak <= limit
        plan_of(step, found)


@pytest.mark.parametrize("seed", range(20))
def test_the_same_step_gives_the_same_schedule_whatever_was_asked_before(seed: int) -> None:
    limit = 0.5 * (least(odd_step(seed), NOTHING).peak + whole_peak(odd_step(seed), NOTHING))
    asked_before, anew = odd_step(seed), odd_step(seed)
    fastest(asked_before, 2 * limit, NOTHING)
    least(asked_before, NOTHING)
    one, other = fastest(asked_before, limit, NOTHING), fastest(anew, limit, NOTHING)
    assert (one is None) == (other is None)
    if one is not None and other is not None:
        assert (one.cuts, one.residencies, one.cost) == (other.cuts, other.residencies, other.cost)


@pytest.mark.parametrize("seed", range(5))
def test_the_search_begins_at_lower_prices_where_the_others_keep_more_than_the_limit(seed: int) -> None:
    step = odd_step(seed)
    evaluator = model_of(step)

    def keeps(begun: search.Start) -> int:
        return max(map(evaluator.condensed.bytes_of, search._kept(step, evaluator, begun)[1])) + evaluator.condensed.base_bytes

    most = keeps(search._STARTS[0])
    assert tuple(starts(step, evaluator, most)) == search._STARTS
    found = starts(step, evaluator, most - 1)
    assert tuple(found[: len(search._STARTS)]) == search._STARTS
    lower = found[len(search._STARTS) :]
    pairs, mixed, fitting = lower[: 2 * len(search._KEPT)], lower[2 * len(search._KEPT)], lower[2 * len(search._KEPT) + 1 :]
    for part, more, less in zip(search._KEPT, pairs[::2], pairs[1::2], strict=True):
        limit = part * (most - 1)
        assert search._LOWEST_PRICE <= less.price < more.price <= search._STARTS[0].price
        assert keeps(more) > limit
        if less.price > search._LOWEST_PRICE:
            assert keeps(less) <= limit
            assert more.price <= search._APART * less.price
    assert (mixed.price, mixed.higher) == (pairs[-1].price, pairs[-2].price)
    assert keeps(mixed) <= max(search._KEPT[-1] * (most - 1), keeps(pairs[-1]))
    for begun in fitting:
        schedule = search.starting(step, evaluator, begun, most - 1)
        assert schedule is not None and schedule.peak <= most - 1
    assert len(fitting) <= 1


@pytest.mark.parametrize("part", [0.9, 0.7, 0.6])
def test_the_search_begins_with_the_most_that_can_be_kept_without_a_repair(part: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "_STARTS", (search.Start(4.0),))  # which keeps every layer's result
    step = StepModel(training_graph(24), PROFILE, state_may_stay_out=False, host_limit=0)
    evaluator = model_of(step)

    def keeps(begun: search.Start) -> int:
        return max(map(evaluator.condensed.bytes_of, search._kept(step, evaluator, begun)[1]))

    limit = part * keeps(search._STARTS[0])
    *_, of_the_last_part, fitting = starts(step, evaluator, limit)
    schedule = search.starting(step, evaluator, fitting, limit)
    assert schedule is not None and schedule.peak <= limit
    assert keeps(fitting) > keeps(of_the_last_part)


@pytest.mark.parametrize("seed", range(40))
def test_a_repair_ends_under_the_limit_and_an_improvement_stays_there_and_is_no_slower(seed: int) -> None:
    rng, step = random.Random(seed), odd_step(seed)
    schedule = random_schedule(model_of(step), rng)
    limit = 0.8 * schedule.peak
    repaired = repair(schedule, limit, 100)
    if repaired is not None:
        assert repaired.peak <= limit
        better = improve(repaired, limit, 200)
        assert better.peak <= limit
        assert better.cost <= repaired.cost
        plan_of(step, better)


@pytest.mark.parametrize("seed", range(40))
def test_without_swaps_the_least_peak_is_no_higher_than_those_from_which_it_is_sought(seed: int) -> None:
    given = odd_step(seed)
    step = StepModel(given.graph, given.profile, state_may_stay_out=False, host_limit=0)
    evaluator, lowest = model_of(step), least(step, NOTHING)
    plan_of(step, lowest)
    kept = search.starting(step, evaluator, search._LEAST_KEPT, 0.0)
    begun = [search._all_absent(evaluator), *([] if kept is None else [kept])]
    assert lowest.peak <= min(schedule.peak for schedule in begun)
    assert least(StepModel(given.graph, given.profile, state_may_stay_out=False, host_limit=0), NOTHING).cuts == lowest.cuts


@pytest.mark.parametrize("seed", range(40))
def test_no_random_schedule_needs_less_than_the_least_peak_of_steps_whose_tensors_may_all_leave(seed: int) -> None:
    rng, step = random.Random(seed), odd_step(seed)
    evaluator = model_of(step)
    if not step.may_swap or evaluator.condensed.movable != (1 << len(evaluator.condensed.tensors)) - 1:
        return
    lowest = least(step, NOTHING).peak
    for _ in range(5):
        assert random_schedule(evaluator, rng).peak >= lowest


@pytest.mark.parametrize("seed", range(20))
def test_as_little_as_possible_is_the_floor_and_below_it_there_is_nothing(seed: int) -> None:
    step = odd_step(seed)
    floor = floor_bytes(step, NOTHING)
    lowest = auto(step, LEAST, NOTHING)
    assert lowest is not None
    assert peak_of(step, lowest, NOTHING) <= floor
    at_floor = auto(step, float(floor), NOTHING)
    assert at_floor is not None and peak_of(step, at_floor, NOTHING) <= floor
    assert auto(step, 0.5 * floor, NOTHING) is None or floor == 0


@pytest.mark.parametrize("state_may_stay_out", [True, False])
def test_without_swaps_nothing_crosses_the_link(state_may_stay_out: bool) -> None:
    step = StepModel(training_graph(6, weight=100_000), PROFILE, state_may_stay_out=state_may_stay_out, host_limit=0)
    lowest = least(step, NOTHING)
    for limit in (lowest.peak, 0.5 * (lowest.peak + whole_peak(step, NOTHING))):
        found = fastest(step, limit, NOTHING)
        assert found is not None and not found.swapped
        assert not any(r.leaves or r.arrival == COPIED for several in found.residencies for r in several)


@pytest.mark.slow
@pytest.mark.parametrize("layers", [3, 5])
def test_state_that_may_stay_out_never_makes_a_plan_slower(layers: int) -> None:
    """Whatever "device" may do, "any" may do too."""
    graph = training_graph(layers, weight=100_000)
    inside, outside = (StepModel(graph, PROFILE, state_may_stay_out=out) for out in (False, True))
    lowest, top = least(inside, NOTHING).peak, whole_peak(inside, NOTHING)
    for part in (0.0, 0.3, 0.6):
        limit = lowest + part * (top - lowest)
        one, other = fastest(inside, limit, NOTHING), fastest(outside, limit, NOTHING)
        assert one is not None and other is not None
        assert other.cost <= one.cost


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize(
    ("also", "name", "off", "on"),
    [
        pytest.param({}, "_MORE_EVALUATIONS", 0, 2000, id="repairing and improving again"),
        # nothing but the higher limits makes a schedule faster; no schedule counts as slow, and every one does
        pytest.param({"_MORE_EVALUATIONS": 0}, "_SLOW", float("inf"), 0.0, id="higher limits"),
    ],
)
def test_what_is_searched_on_keeps_the_limit_and_makes_no_schedule_slower(
    seed: int, also: Mapping[str, float], name: str, off: float, on: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = odd_step(seed)
    lowest, most = least(step, NOTHING).peak, whole_peak(step, NOTHING)
    monkeypatch.setattr(search, "_NOT_PERTURBED", 0.0)  # no schedule counts as fast
    for constant, value in also.items():
        monkeypatch.setattr(search, constant, value)
    for part in (0.0, 0.05, 0.2, 0.5):
        limit = lowest + part * max(most - lowest, 0)
        monkeypatch.setattr(search, name, off)
        without = fastest(step, limit, NOTHING)
        monkeypatch.setattr(search, name, on)
        found = fastest(step, limit, NOTHING)
        assert found is not None and without is not None
        assert found.peak <= limit
        assert found.cost <= without.cost
        plan_of(step, found)


@pytest.mark.parametrize(("seed", "part"), [(14, 0.1), (17, 0.2)])
def test_repairing_and_improving_again_takes_only_schedules_that_can_be_kept(seed: int, part: float) -> None:
    step = odd_step(seed, most=60)
    lowest, most = least(step, NOTHING).peak, whole_peak(step, NOTHING)
    limit = lowest + part * max(most - lowest, 0)
    schedule = search.fast(step, limit, NOTHING)
    assert schedule is not None
    begun = search.Found(schedule, limit)
    assert search.perturbed(step, begun, lambda _: None) is begun
    offered: list[search.Found] = []
    best = search.perturbed(step, begun, lambda found: (offered.append(found), found)[1])
    assert best.schedule.peak <= limit
    assert best is offered[-1] and best.schedule.cost < schedule.cost
    assert [one.schedule.cost for one in offered] == sorted((one.schedule.cost for one in offered), reverse=True)


def test_a_step_that_holds_nothing_has_no_plan_below_zero() -> None:
    graph = graph_of(["y = heavy(x)", "z = heavy(y)", "w = heavy(z)"], sizes=dict.fromkeys("wxyz", 0), inputs="x", outputs="w")
    step = StepModel(graph, PROFILE, state_may_stay_out=True)
    lowest = least(step, NOTHING)
    assert lowest.peak == 0
    assert repair(lowest, -1, 10) is None
    assert auto(step, -0.5, NOTHING) is None
