"""Moves the in-triggers of swaps earlier, where a segment of the plan still waits for a copy to the device.

Capuchin (Peng et al., ASPLOS 2020, section 4.3): if a tensor is still being swapped in when its back access comes, its in-trigger
moves earlier in the next iteration, by 5 % of the swap-in time, until the tensor is there in time.

Differences from the paper: The iterations are simulated (`result/simulate.py`), because a plan does not change while it runs. A
copy is issued at a boundary between segments, so an in-trigger moves to the boundary before, and only if there is room under the
limit for the tensor in the segment that it crosses. The moves end when they no longer make the step faster.
"""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import replace

from tensile_jax.ir import TensorId
from tensile_jax.plan.analysis.residency import Absence, Absences
from tensile_jax.plan.result.build import build_plan, empty_plan
from tensile_jax.plan.search.candidates import Candidates
from tensile_jax.plan.search.choice import Choice, layout, segment_peaks
from tensile_jax.plan.search.workspace import Measured
from tensile_jax.plan_format import Plan

_ITERATIONS = 20  # with 5 % of the swap-in time in each, an in-trigger comes as much earlier as the whole copy takes


def move_in_triggers(candidates: Candidates, choice: Choice, limit: float, measured: Measured) -> Choice:
    """The choice with earlier in-triggers, no slower, under the limit or with its peak as it was."""
    if choice.runs_whole or not choice.absences:
        return choice
    plan = _plan_of(candidates, choice, measured)
    limit = max(limit, float(segment_peaks(candidates, choice, measured).max()))
    for _ in range(_ITERATIONS):
        moved = _moved(candidates, choice, plan, limit, measured)
        if moved is None:
            break
        then = _plan_of(candidates, moved, measured)
        if then.step_us >= plan.step_us:
            break
        choice, plan = moved, then
    return choice


def _plan_of(candidates: Candidates, choice: Choice, measured: Measured) -> Plan:
    return build_plan(layout(candidates, choice, measured), candidates.costs, empty_plan(candidates.graph))


def _moved(candidates: Candidates, choice: Choice, plan: Plan, limit: float, measured: Measured) -> Choice | None:
    """The choice after one iteration in which every late copy is issued one boundary earlier; None if none can be."""
    peaks = segment_peaks(candidates, choice, measured)
    bounds = choice.boundaries
    absences = dict(choice.absences)
    for t, segment in _late(plan):
        nbytes = candidates.graph.tensors[t].nbytes
        for number, away in enumerate(absences[t]):
            gone = bisect_right(bounds, away.leave)
            if bisect_right(bounds, away.back) - 1 == segment and gone < segment - 1 and peaks[segment - 1] + nbytes <= limit:
                peaks[segment - 1] += nbytes
                sooner: Absence = replace(away, back=bounds[segment - 1])
                absences[t] = (*absences[t][:number], sooner, *absences[t][number + 1 :])
    return None if absences == dict(choice.absences) else replace(choice, absences=_ordered(absences))


def _late(plan: Plan) -> Iterator[tuple[TensorId, int]]:
    """The tensors for whose copy to the device a segment waits, and the segment right before which the copy is issued."""
    for event in plan.events:
        if event.kind == "swap_in" and event.until < len(plan.segments):
            segment = plan.segments[event.until]
            if segment.stall_us > 0 and event.end_us > segment.begin_us - segment.stall_us:
                yield event.tensor, event.trigger + 1


def _ordered(absences: dict[TensorId, tuple[Absence, ...]]) -> Absences:
    return dict(sorted(absences.items()))
