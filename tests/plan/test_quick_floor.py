"""The floor that a plan names is found without a search for each new size, and has a plan."""

from dataclasses import replace

import pytest

from tensile_jax.plan import CompiledSizes, Goal, Planner
from tests.plan.small_steps import small_step

NOTHING = CompiledSizes()


def with_larger_segments(planner: Planner) -> CompiledSizes:
    """The sizes after compiling a plan whose segments need half as much again as was expected, and some bytes."""
    found = planner.plan(Goal(float(planner.floor_bytes(NOTHING))), NOTHING)
    assert found is not None
    if found.choice.layout is None:
        return replace(NOTHING, whole=found.plan.peak_bytes + 100)
    needed = [int(1.5 * segment.workspace_bytes) + 100 for segment in found.plan.segments]
    return planner.with_measured(found.choice, needed, NOTHING)


@pytest.mark.parametrize("seed", range(0, 60, 3))
def test_a_quick_floor_has_a_plan_and_does_not_depend_on_what_was_asked_before(seed: int) -> None:
    graph, profile = small_step(seed, most=30)
    planner = Planner(graph, profile)
    sizes = with_larger_segments(planner)
    quick = planner.quick_floor(sizes)
    assert planner.floor_bytes(sizes) <= quick
    assert planner.plan(Goal(float(quick)), sizes) is not None
    assert Planner(graph, profile).quick_floor(sizes) == quick


def test_a_quick_floor_seeks_the_lowest_plan_once(monkeypatch: pytest.MonkeyPatch) -> None:
    planner = Planner(*small_step(3, most=30))
    sizes = with_larger_segments(planner)
    planner.quick_floor(NOTHING)
    monkeypatch.setattr(Planner, "lowest_choice", lambda self, measured: pytest.fail("sought again"))
    planner.quick_floor(sizes)
