"""`auto` is at least as fast as the paper's own policy, wherever that has a plan."""

import pytest

from tensile_jax.plan import Measured
from tensile_jax.plan.planner import Goal, Planner
from tests.plan.small_steps import small_step


@pytest.mark.parametrize("seed", range(0, 120, 3))
def test_auto_is_not_slower_than_tensile_with_state_outside_between_iterations(seed: int) -> None:
    graph, profile = small_step(seed, most=40)
    planner, nothing = Planner(graph, profile, state_memory="any"), Measured()
    tensile = planner.with_policy("tensile")
    lowest, whole = tensile.floor_bytes(nothing), planner.whole_peak_bytes(nothing)
    for limit in (lowest, (lowest + whole) // 2):
        theirs, ours = tensile.plan(Goal(limit), nothing), planner.plan(Goal(limit), nothing)
        if theirs is None:  # the step fits whole, and the limit is lower than what the policy can do with segments
            continue
        assert ours is not None and ours.plan.step_us <= 1.01 * theirs.plan.step_us
