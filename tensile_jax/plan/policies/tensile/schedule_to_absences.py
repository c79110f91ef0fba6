"""Translates a schedule of TENSILE's Algorithm 3: which tensors are dropped, and where each swapped tensor is absent.

An *absence* of a tensor is a stretch of the step in which it is on the host only (`analysis/absence.py`).

Algorithm 3 treats each *segment*, a stretch of operators that is compiled as one executable, as if it were one operator. Its
schedule gives times and segments. The rest of `plan/` counts in *places*, the positions of the graph's own operators in their
order of execution. Segment k covers the places `[boundaries[k], boundaries[k + 1])`. Each swap becomes an absence with

    leave   the last place of the segment during which the copy to the host ends (or, if the host has a copy already, of the
            segment at whose end the tensor is released)
    back    the first place of the segment during which the copy to the device begins
    away    at the boundaries b with leave < b <= back

An absence that contains no boundary saves nothing and is left out.

A recomputed tensor is *dropped* (no longer stored) after the access that releases it. Its recomputation may run several
operators. The other tensors that these operators make are dropped too, each after the last place that needs it, unless they are
needed as long as the recomputed tensor.

The result differs from the schedule in one point: the schedule keeps a tensor once it was recomputed, but `retention.py`
computes a dropped tensor again for *every* later segment that needs it. That takes more time and mostly less memory.
"""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

from tensile_jax.ir import TensorId
from tensile_jax.plan.analysis.absence import Absence
from tensile_jax.plan.analysis.access import AccessSequence, access_sequence, find_chain
from tensile_jax.plan.analysis.device_profile import DeviceProfile
from tensile_jax.plan.analysis.retention import Retention
from tensile_jax.plan.policies.tensile.complete_scheduling import Schedule, find_schedule
from tensile_jax.plan.policies.tensile.swap_scheduling import SwappedOut, SwapScheduling
from tensile_jax.plan.search.swaps import SMALLEST


class AbsenceEvents(NamedTuple):
    """What to drop, with the last place at which each is stored, and the absences of each swapped tensor, ascending."""

    dropped: dict[TensorId, int]
    absences: dict[TensorId, tuple[Absence, ...]]
    schedule: Schedule


def schedule_events(
    retention: Retention,
    latencies: Sequence[float],
    profile: DeviceProfile,
    *,
    boundaries: Sequence[int],
    budget_bytes: float,
    state_may_stay_out: bool,
    agreed: Sequence[SwappedOut] | None = None,
) -> AbsenceEvents:
    """Algorithm 3 for the segments between the boundaries, translated to places.

    Args:
        latencies: of every place.
        budget_bytes: what the tensors between segments may occupy, without workspaces.
        agreed: the swaps that were chosen for several jobs together.
    """
    sequence = access_sequence(retention, boundaries, latencies, smallest_bytes=SMALLEST)
    swapping = SwapScheduling(sequence, profile, across_iterations=state_may_stay_out)
    schedule = find_schedule(sequence, swapping, free_bytes=budget_bytes, agreed=agreed)
    return AbsenceEvents(dropped_for(schedule, retention, boundaries), absences_of(schedule, sequence, boundaries), schedule)


def dropped_for(schedule: Schedule, retention: Retention, boundaries: Sequence[int]) -> dict[TensorId, int]:
    """What `retention` drops and what the schedule recomputes, each with the last place at which it is stored."""
    operators, end = retention.liveness.graph.operators, retention.end
    dropped = {**retention.dropped}
    for again in schedule.recomputed:
        chain = find_chain(retention, again.tensor, smallest_bytes=SMALLEST)
        passed = (t for place in chain.places for t in operators[place].outputs)
        dropped |= {t: end[t] for t in passed if end[t] < end[again.tensor]}
    return dropped | {r.tensor: boundaries[r.after + 1] - 1 for r in schedule.recomputed}


def absences_of(schedule: Schedule, sequence: AccessSequence, boundaries: Sequence[int]) -> dict[TensorId, tuple[Absence, ...]]:
    """For every swapped tensor, those of its absences that contain a boundary."""
    found: dict[TensorId, tuple[Absence, ...]] = {}
    for tensor, swaps in groupby(schedule.swaps, key=lambda away: away.tensor):
        placed = tuple(a for a in (_place(away, sequence, boundaries) for away in swaps) if a.leave < a.back)
        if placed:
            found[tensor] = placed
    return found


def _place(away: SwappedOut, sequence: AccessSequence, boundaries: Sequence[int]) -> Absence:
    count = len(sequence.ends_us)
    at_start = away.after < 0 and not away.copies_out
    leave = -1 if at_start else boundaries[min(bisect_left(sequence.ends_us, away.out_end_us), count - 1) + 1] - 1
    back = boundaries[count] if away.before >= count else boundaries[sequence.last_ended(away.in_begin_us) + 1]
    hidden_us = (away.in_end_us - away.in_begin_us) + (away.out_end_us - away.out_begin_us)
    return Absence(away.tensor, leave, back, hidden_us)
