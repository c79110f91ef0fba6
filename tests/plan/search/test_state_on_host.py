"""State that a finished plan sends to the host between its uses."""

import random

import pytest

from tensile_jax.plan import CompiledSizes, Goal, Planner
from tensile_jax.plan.policies.segments import Decision, choice_with
from tensile_jax.plan.result.layout import COPIED, Residency
from tensile_jax.plan.search.choice import whole_peak
from tensile_jax.plan.search.state_on_host import keep_state_out
from tensile_jax.plan.search.step_model import StepModel
from tests.builders import PROFILE, graph_of, slow_but, tensor_named, training_graph, with_link
from tests.plan.search.schedules import odd_graph
from tests.test_properties import found_on_host, left_on_host, planned

UNIT = 2**16
GRAPH = graph_of(
    ["a = heavy(x)", "b = heavy(a)", "c = heavy(b, w)", "v = light(w, c)", "d = heavy(c)", "e = heavy(d)", "y = heavy(e)"],
    inputs="w x", outputs="v y", carried={"w": "v"}, donated="w", sizes=dict.fromkeys("wabcvdey", UNIT), flops=1_000_000,
)  # fmt: skip


def test_copies_are_as_late_as_there_is_time_before_the_first_need_and_as_early_as_there_is_time_after_the_update() -> None:
    """An operator takes 10,001 us, and a copy 13,107 us at 5 bytes per microsecond: longer than one segment, not than two."""
    step = StepModel(GRAPH, with_link(5.0), state_may_stay_out=True)
    inside = choice_with(Decision(step.base, {}, ()), range(8))
    w, v = tensor_named(GRAPH, "w"), tensor_named(GRAPH, "v")
    outside = keep_state_out(step, inside, {w})
    assert outside.layout is not None
    assert outside.layout.residencies[w] == (Residency(0, 3, COPIED, False),)
    assert outside.layout.residencies[v][0].leaves
    plan = planned(step, outside, "any")
    assert plan.stall_us == 0
    assert found_on_host(plan) == left_on_host(plan, GRAPH) == {w}
    quick = StepModel(GRAPH, with_link(100.0), state_may_stay_out=True)
    sooner = keep_state_out(quick, inside, {w}).layout
    assert sooner is not None
    assert sooner.residencies[w] == (Residency(1, 3, COPIED, False),)
    assert sooner.residencies[v] == (Residency(4, 4, inside.layout.residencies[v][0].arrival, True),)  # pyright: ignore[reportOptionalMemberAccess]


@pytest.mark.parametrize("seed", slow_but(range(40), *range(10)))
def test_any_state_of_any_plan_can_be_sent_out_and_no_segment_then_holds_more(seed: int) -> None:
    rng = random.Random(seed)
    graph = odd_graph(rng) if seed % 2 else training_graph(rng.randint(2, 6), weight=100_000)
    planner = Planner(graph, PROFILE, state_memory="any")
    least = planner.floor_bytes(CompiledSizes())
    limit = int(least + rng.random() * (whole_peak(planner.model, CompiledSizes()) - least))
    found = planner.plan(Goal(limit), CompiledSizes())
    assert found is not None
    offered = [t for t, _ in planner.may_be_offloaded(found.choice)]
    for _ in range(3):
        chosen = rng.sample(offered, rng.randint(0, len(offered)))
        if not chosen:
            continue
        choice = planner.offload_state(found.choice, chosen)
        plan = planner.plan_of(choice, Goal(float("inf")), CompiledSizes())
        assert plan is not None, planner.faults
        assert found_on_host(plan) == left_on_host(plan, planner.graph) >= set(chosen)
        assert all(a.device_bytes <= b.device_bytes for a, b in zip(plan.segments, found.plan.segments, strict=True))
        assert not set(chosen) & {t for t, _ in planner.may_be_offloaded(choice)}
