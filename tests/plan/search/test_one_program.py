"""A plan that becomes one executable is searched for as one: by what such an executable holds and asks the allocator for."""

import pickle
from dataclasses import replace

import pytest

from tensile_jax.plan import CompiledSizes, DeviceProfile, Goal, Planner
from tensile_jax.plan.result.joined import as_programs, can_be_joined
from tensile_jax.plan.result.layout import BEGINS, COPIED, MADE, Residency
from tensile_jax.plan.search.moves import residency_moves
from tensile_jax.plan.search.moves.residency_moves import Gap
from tensile_jax.plan.search.schedule import Schedule
from tensile_jax.plan.search.starts.start_schedules import last_held, start
from tensile_jax.plan.search.step_model import StepModel
from tensile_jax.plan_format import Plan
from tests.builders import PROFILE, graph_of, tensor_named, training_graph, with_link

NOTHING = CompiledSizes()
UNIT = 2**16
STATE = graph_of(
    ["a = heavy(x, w)", "b = heavy(a)", "c = heavy(b)", "d = heavy(c, w)", "v = light(w, d)", "y = heavy(d)"],
    inputs="x w", outputs="v y", carried={"w": "v"}, donated="w", sizes=dict.fromkeys("wabcdvy", UNIT), flops=100_000,
)  # fmt: skip
"""The first and the fourth place read `w`, and the fifth makes its update `v`."""


def planned(planner: Planner, share: float) -> Plan:
    least = planner.floor_bytes(NOTHING)
    found = planner.plan(Goal(least + share * (planner.whole_peak_bytes(NOTHING) - least)), NOTHING)
    assert found is not None and not found.plan.whole
    return found.plan


def swapped_bytes(plan: Plan) -> int:
    return plan.swapped_out_bytes + plan.swapped_in_bytes


@pytest.mark.parametrize("link", [100.0, 1000.0])
def test_every_copy_of_a_plan_for_one_program_frees_memory_in_it(link: float) -> None:
    copies = idle = 0
    for layers in (3, 6):
        apart = Planner(training_graph(layers, weight=300_000), with_link(link), state_memory="any")
        for share in (0.02, 0.1, 0.3, 0.5):
            plan = planned(apart.of_one_program(), share)
            assert can_be_joined(plan, apart.graph, "chain")
            assert swapped_bytes(as_programs(plan, apart.graph, "chain", PROFILE)) == swapped_bytes(plan)
            copies += swapped_bytes(plan)
            other = planned(apart, share)
            idle += swapped_bytes(other) - swapped_bytes(as_programs(other, apart.graph, "chain", PROFILE))
    assert copies and idle  # plans of segments have copies of which a program would be none the smaller


def test_a_plan_for_one_program_leaves_nothing_to_the_allocator_between_its_segments() -> None:
    profile = replace(PROFILE, allocator="best_fit")
    apart = Planner(training_graph(6, weight=70_000), profile)
    together = apart.of_one_program()
    limit = (apart.floor_bytes(NOTHING) + apart.whole_peak_bytes(NOTHING)) / 2
    assert together.whole_peak_bytes(NOTHING) == apart.whole_peak_bytes(NOTHING)
    for planner in (apart, together):
        found = planner.plan(Goal(limit), NOTHING)
        assert found is not None and found.plan.peak_bytes <= limit
        assert (found.plan.allocator_bytes is None) == (planner is together)


def test_boundaries_within_one_program_cost_no_launch() -> None:
    slow: DeviceProfile = replace(PROFILE, launch_us=10_000.0)
    apart = Planner(training_graph(6, weight=70_000), slow)
    together = planned(apart.of_one_program(), 0.2)
    assert together.launch_us * len(together.segments) < 1.0 < slow.launch_us <= planned(apart, 0.2).launch_us


def schedule_of_one_program() -> tuple[Schedule, int, int]:
    """Every operator a segment, all state on the device; and the bits of `w` and `v`."""
    step = StepModel(STATE, PROFILE, state_may_stay_out=True).as_one_program()
    evaluator = step.evaluator_for(tuple(range(len(STATE.operators) + 1)))
    schedule = start(evaluator, range(len(evaluator.places)), last_held(evaluator.condensed, {}))
    assert schedule is not None
    return schedule, evaluator.bit[tensor_named(STATE, "w")], evaluator.bit[tensor_named(STATE, "v")]


def test_state_is_swapped_within_a_program_only_while_it_rests_in_host_memory() -> None:
    schedule, w, v = schedule_of_one_program()
    assert not schedule.may_be_swapped(w) and not schedule.may_be_swapped(v)
    across = residency_moves.send_across(schedule, w, 0, 6)
    assert across is not None
    assert across.may_be_swapped(w) and across.may_be_swapped(v)
    away = residency_moves.swap(across, Gap(w, 0, 0, 3), 1, 3)
    assert away is not None
    assert away.residencies[w] == (Residency(0, 0, COPIED, True), Residency(3, 4, COPIED, False))
    back = residency_moves.keep_across(away, w)
    assert back is not None
    assert back.residencies[w] == schedule.residencies[w] == (Residency(0, 4, BEGINS, False),)
    assert back.residencies[v] == schedule.residencies[v] == (Residency(5, 6, MADE, False),)


def test_the_model_of_one_program_is_made_once() -> None:
    step = StepModel(STATE, PROFILE, state_may_stay_out=True)
    assert step.as_one_program() is step.as_one_program() is step.as_one_program().as_one_program()
    assert step.as_one_program().with_host_limit(UNIT).in_one_program and not step.in_one_program
    again: Planner = pickle.loads(pickle.dumps(Planner(STATE, PROFILE).of_one_program()))
    assert again.model.in_one_program and again.across_iterations().model.in_one_program
