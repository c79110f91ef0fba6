"""The peak of a plan is that of the device's allocator, and is held against the limit."""

from dataclasses import replace
from typing import Literal

import pytest

from tensile_jax.plan import CompiledSizes, Goal, Planner
from tensile_jax.plan.result.allocator_replay import in_use
from tensile_jax.plan.result.check import check
from tensile_jax.plan.result.instructions import decode
from tensile_jax.plan.result.joined import as_programs, can_be_joined, joined, programs_of
from tensile_jax.plan.result.memory_curve import resident_bytes
from tensile_jax.plan_format import Barriers, Plan, contradictions, unasked_bytes
from tests.builders import PROFILE, training_graph
from tests.plan.small_steps import small_step

NOTHING = CompiledSizes()
Kind = Literal["best_fit", "growing"]


def planner_of(kind: Literal["exact", "best_fit", "growing"], seed: int = 0) -> Planner:
    graph, profile = small_step(seed)
    return Planner(graph, replace(profile, allocator=kind))


def peak_by_replay(plan: Plan, planner: Planner, *, grows: bool) -> int:
    workspaces = [s.workspace_bytes for s in plan.segments]
    found = in_use(decode(plan, planner.graph), planner.graph, workspaces, grows=grows)
    return max(found.at_begin, *found.segments, found.at_end)


@pytest.mark.parametrize("kind", ["best_fit", "growing"])
@pytest.mark.parametrize("seed", range(12))
def test_plans_keep_their_limit_and_the_smallest_limit_has_a_plan_by_the_allocators_account(kind: Kind, seed: int) -> None:
    planner = planner_of(kind, seed)
    floor, whole = planner.floor_bytes(NOTHING), planner.whole_peak_bytes(NOTHING)
    for limit in (floor, (floor + whole) // 2, whole):
        found = planner.plan(Goal(limit), NOTHING)
        assert found is not None
        plan = found.plan
        check(plan, planner.graph)
        assert not list(contradictions(plan))
        assert plan.peak_bytes <= limit
        if not plan.whole:
            assert plan.peak_bytes == peak_by_replay(plan, planner, grows=kind == "growing")
            assert plan.allocator_bytes == unasked_bytes(plan.segments)
            assert all(s.device_bytes >= s.resident_bytes + s.workspace_bytes + s.allocator_bytes for s in plan.segments)


@pytest.mark.parametrize("form", ["inputs", "chain"])
def test_a_plan_of_programs_states_what_its_segments_state(form: Barriers) -> None:
    joinable = 0
    for seed in range(24):
        planner = planner_of("best_fit", seed)
        found = planner.plan(Goal(planner.floor_bytes(NOTHING)), NOTHING)
        assert found is not None
        if can_be_joined(found.plan, planner.graph, form):
            joinable += 1
            plan = as_programs(found.plan, planner.graph, form, planner.model.profile)
            assert not list(contradictions(replace(plan, budget_bytes=None)))  # a program may need more than its segments
    assert joinable > 5


def test_where_the_allocator_hands_out_what_it_is_asked_for_nothing_is_added() -> None:
    planner = planner_of("exact")
    found = planner.plan(Goal(planner.floor_bytes(NOTHING)), NOTHING)
    assert found is not None
    plan = found.plan
    at_begin, *resident, at_end = resident_bytes(decode(plan, planner.graph), planner.graph)
    needed = [held + s.workspace_bytes for held, s in zip(resident, plan.segments, strict=True)]
    assert plan.allocator_bytes is None
    assert {s.allocator_bytes for s in plan.segments} == {0}
    assert plan.peak_bytes == max(at_begin, *needed, at_end)
    assert "allocator" not in str(plan)


def test_the_printed_plan_names_what_the_allocator_hands_out() -> None:
    planner = planner_of("growing")
    found = planner.plan(Goal(planner.floor_bytes(NOTHING)), NOTHING)
    assert found is not None
    assert "of it unasked for by the allocator" in str(found.plan)


def test_plain_jits_peak_is_by_the_same_account() -> None:
    exact, growing = (Planner(training_graph(), replace(PROFILE, allocator=kind)) for kind in ("exact", "growing"))
    measured = CompiledSizes(whole=10**7)
    peak = growing.whole_peak_bytes(measured)
    assert exact.whole_peak_bytes(measured) == 10**7 < peak
    found = growing.plan(Goal(peak), measured)
    assert found is not None and found.plan.whole
    assert (found.plan.peak_bytes, found.plan.allocator_bytes) == (peak, peak - 10**7)
    below = growing.plan(Goal(peak - 1), measured)
    assert below is None or not below.plan.whole


def test_the_peak_of_programs_is_by_the_allocators_account() -> None:
    planner = planner_of("best_fit", 3)
    found = planner.plan(Goal(planner.floor_bytes(NOTHING)), NOTHING)
    assert found is not None and len(found.plan.segments) > 1
    plan, graph, profile = found.plan, planner.graph, planner.model.profile
    programs = programs_of(plan, graph)
    one = joined(plan, programs, graph, profile, [1000] * len(programs))
    check(one, graph)
    assert one.peak_bytes == peak_by_replay(one, planner, grows=False)
    assert one.allocator_bytes == unasked_bytes(one.segments) > 0  # 1000 bytes of workspace take 1024
