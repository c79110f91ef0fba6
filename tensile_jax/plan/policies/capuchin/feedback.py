"""Starts copies to the device earlier, where the plan still waits for such a copy.

The start of a copy to the device is called its *in-trigger*. Capuchin (Peng et al., ASPLOS 2020, section 4.3) observes whether
the copy is still going on when its tensor is accessed. If so, the next iteration starts the copy earlier, by 5 % of the copy's
duration, until the tensor is there in time.

Differences from the paper: The iterations are simulated (`result/simulate.py`), because a plan does not change while it runs. A
plan starts copies only between *segments*, stretches of operators that are each compiled as one executable. So an in-trigger
moves by whole segments, and only if there is room for the tensor under the limit. The moves end when they no longer make the step
faster.
"""

from collections.abc import Iterator
from dataclasses import replace

from tensile_jax.ir import TensorId
from tensile_jax.plan.result.layout import COPIED
from tensile_jax.plan.search.choice import Choice, predicted_plan
from tensile_jax.plan.search.cost.workspace import CompiledSizes
from tensile_jax.plan.search.step_model import StepModel
from tensile_jax.plan_format import Plan

_ITERATIONS = 20  # with Capuchin's 5 % of the swap-in time in each, an in-trigger comes as much earlier as the whole copy takes


def move_in_triggers(model: StepModel, choice: Choice, limit: float, measured: CompiledSizes) -> Choice:
    """The choice with earlier in-triggers, no slower, under the limit or with its peak as it was."""
    if choice.layout is None:
        return choice
    plan = predicted_plan(model, choice, measured)
    limit = max(limit, float(plan.peak_bytes))
    for _ in range(_ITERATIONS):
        moved = _moved(choice, plan, limit)
        if moved is None:
            break
        then = predicted_plan(model, moved, measured)
        if then.step_us >= plan.step_us:
            break
        choice, plan = moved, then
    return choice


def _moved(choice: Choice, plan: Plan, limit: float) -> Choice | None:
    """The choice after one iteration in which every late copy is issued one boundary earlier; None if none can be."""
    assert choice.layout is not None
    held = [segment.device_bytes for segment in plan.segments]
    nbytes = {t.id: t.nbytes for t in plan.tensors}
    residencies = dict(choice.layout.residencies)
    for t, segment in _late(plan):
        several = residencies[t]
        for number, (first, _, arrival, _) in enumerate(several):
            free = several[number - 1].last + 1 if number else 0
            if arrival == COPIED and first == segment and free < segment - 1 and held[segment - 1] + nbytes[t] <= limit:
                held[segment - 1] += nbytes[t]
                sooner = several[number]._replace(first=first - 1)
                residencies[t] = (*residencies[t][:number], sooner, *residencies[t][number + 1 :])
    if residencies == choice.layout.residencies:
        return None
    return replace(choice, layout=replace(choice.layout, residencies=residencies))


def _late(plan: Plan) -> Iterator[tuple[TensorId, int]]:
    """The tensors for whose copy to the device a segment waits, and the segment right before which the copy is issued."""
    for event in plan.events:
        if event.kind == "swap_in" and event.until < len(plan.segments):
            segment = plan.segments[event.until]
            if segment.stall_us > 0 and event.end_us > segment.begin_us - segment.stall_us:
                yield event.tensor, event.trigger + 1
