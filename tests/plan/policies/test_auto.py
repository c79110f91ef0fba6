"""`auto` is at least as fast as the paper's own policy, wherever that has a plan, and has one where another search has one."""

from dataclasses import replace
from typing import Any

import pytest

from tensile_jax.plan import CompiledSizes
from tensile_jax.plan.planner import Goal, Planner
from tensile_jax.plan.policies import auto as policy
from tensile_jax.plan.search.choice import peak_of, schedule_of
from tensile_jax.plan.search.schedule import Schedule
from tensile_jax.plan.search.search import fast, fastest
from tensile_jax.plan_format import Plan
from tests.builders import PROFILE, training_graph
from tests.plan.small_steps import small_step


@pytest.mark.parametrize("seed", range(0, 120, 3))
def test_auto_is_not_slower_than_tensile_with_state_outside_between_iterations(seed: int) -> None:
    graph, profile = small_step(seed, most=40)
    planner, nothing = Planner(graph, profile, state_memory="any"), CompiledSizes()
    tensile = planner.with_policy("tensile")
    lowest, whole = tensile.floor_bytes(nothing), planner.whole_peak_bytes(nothing)
    for limit in (lowest, (lowest + whole) // 2):
        theirs, ours = tensile.plan(Goal(limit), nothing), planner.plan(Goal(limit), nothing)
        if theirs is None:  # the step fits whole, and the limit is lower than what the policy can do with segments
            continue
        assert ours is not None
        fewer = max(0, len(theirs.plan.segments) - len(ours.plan.segments))  # each counts for 0.004 of the step, to be compiled
        assert ours.plan.step_us <= 1.01 * (theirs.plan.step_us + fewer * 0.004 * planner.model.whole_us)


def test_a_plan_that_is_found_quickly_is_taken_where_others_turn_out_to_be_above_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    planner, nothing = Planner(training_graph(6, activation=100_000), PROFILE), CompiledSizes()
    step = planner.model
    whole, floor = planner.whole_peak_bytes(nothing), planner.floor_bytes(nothing)
    limit = float((whole + floor) // 2)

    def above(*_: object) -> Schedule | None:
        return fastest(step, 0.99 * whole, nothing)

    monkeypatch.setattr(policy, "_fastest", above)
    monkeypatch.setattr(policy, "repair", lambda *_: None)
    quick, choice = fast(step, limit, nothing), policy.auto(step, limit, nothing)
    assert quick is not None and choice is not None and choice.layout is not None
    assert peak_of(step, choice, nothing) <= limit
    assert schedule_of(step, choice.layout, nothing).step_us == pytest.approx(quick.step_us)


def test_segments_that_need_more_than_expected_are_lowered_by_just_that(monkeypatch: pytest.MonkeyPatch) -> None:
    planner, nothing = Planner(training_graph(8, activation=100_000), PROFILE), CompiledSizes()
    step, more = planner.model, 40_000
    limit = 0.8 * planner.whole_peak_bytes(nothing)
    predicted, needed = policy.predicted_plan, list[float]()

    def with_more(*args: Any) -> Plan:
        """The first segment needs more than the search knows."""
        plan = predicted(*args)
        first, *others = plan.segments
        segments = (replace(first, device_bytes=first.device_bytes + more), *others)
        return replace(plan, segments=segments, peak_bytes=max(segment.device_bytes for segment in segments))

    def fast_enough(*args: Any) -> Schedule | None:
        needed.append(args[1])
        return fastest(*args)

    monkeypatch.setattr(policy, "predicted_plan", with_more)
    monkeypatch.setattr(policy, "fastest", fast_enough)
    choice = policy.auto(step, limit, nothing)
    assert choice is not None and needed == [limit]  # it was repaired, and not sought again
    assert limit - 200_000 <= with_more(step, choice, nothing).peak_bytes <= limit


@pytest.mark.parametrize("seed", (3, 8, 10, 11))
def test_memory_that_the_allocator_leaves_unused_makes_plans_faster(seed: int) -> None:
    """What the quick plan has handed out unasked only says where the search begins: its plan has less handed out."""
    graph, profile = small_step(seed, most=40)
    planner, nothing = Planner(graph, replace(profile, allocator="best_fit")), CompiledSizes()
    step = planner.model
    limit = (planner.floor_bytes(nothing) + planner.whole_peak_bytes(nothing)) / 2
    quick = fast(step, limit, nothing)
    assert quick is not None
    unasked = policy.predicted_plan(step, policy.choice_of(step, quick), nothing).allocator_bytes
    assert unasked
    begun = fastest(step, limit - unasked, nothing)
    assert begun is not None
    assert peak_of(step, policy.choice_of(step, begun), nothing) < 0.9 * limit

    choice = policy.auto(step, limit, nothing)

    assert choice is not None and choice.layout is not None
    assert peak_of(step, choice, nothing) <= limit
    assert schedule_of(step, choice.layout, nothing).step_us < 0.99 * begun.step_us
