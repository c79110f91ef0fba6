"""What is on the device in each segment of a plan adds up to what the plan states."""

import dataclasses
from typing import Any

import pytest
from tensile_models.mlp import mlp

import tensile_jax as tensile
from tensile_jax.plan_residency import at_peak, on_device, residents, stays
from tests.builders import slow_if
from tests.cli.plans import BIG, KIB, PARAMETER, PLAN


def test_the_rows_of_a_plan_are_those_counted_by_hand() -> None:
    assert residents(PLAN) == [{PARAMETER, BIG}, {PARAMETER, BIG}]
    assert [(row.role, row.nbytes) for row in at_peak(PLAN)] == [
        ("activation", 4 * KIB), ("workspace", 4 * KIB), ("parameter", 2 * KIB),
    ]  # fmt: skip
    assert [(stay.tensor.id, stay.first, stay.last) for stay in stays(PLAN)] == [(PARAMETER, 0, 1), (BIG, 0, 1)]


def test_what_joining_segments_adds_is_a_row_of_its_own() -> None:
    joined = dataclasses.replace(PLAN, peak_bytes=11 * KIB)
    rows = at_peak(joined)
    assert sum(row.nbytes for row in rows) == 11 * KIB
    assert [row.nbytes for row in rows if row.role == "joined"] == [KIB]


@pytest.mark.parametrize("policy", slow_if(("auto", "tensile", "vdnn", "capuchin", "checkpoint", "none"), "capuchin", "tensile"))
@pytest.mark.parametrize("state_memory", ["device", "any"])
@pytest.mark.parametrize("budget", [None, "75%", "50%"])
def test_every_policys_plans_name_all_that_is_resident(policy: Any, state_memory: Any, budget: str | None) -> None:
    model = mlp(batch_size=1024)

    def plan_under(budget: str | int | None) -> tensile.Plan:
        step = tensile.jit(
            model.step, budget=budget, policy=policy, state_memory=state_memory, device_profile="cpu", donate_argnums=0
        )
        return step.plan(model.state_shape, model.batch_shape)

    try:
        plan = plan_under(budget)
    except tensile.BudgetTooSmall as refusal:
        plan = plan_under(refusal.floor_bytes)
    sizes = {tensor.id: tensor.nbytes for tensor in plan.tensors}
    for place, (segment, there) in enumerate(zip(plan.segments, residents(plan), strict=True)):
        assert sum(sizes[t] for t in there) == segment.resident_bytes
        assert sum(row.nbytes for row in on_device(plan, place)) == segment.device_bytes
    assert sum(row.nbytes for row in at_peak(plan)) == plan.peak_bytes
