"""From a schedule of TENSILE's Algorithm 3 to places of the graph: what is dropped, and when each tensor is absent.

The schedule speaks of the operators of a cut graph, its segments, and of times; the rest of `plan/` speaks of places, of which a
segment covers `[boundaries[k], boundaries[k + 1])`:

    leave   the last place of the segment during which the copy to the host ends (or whose end releases the tensor)
    back    the first place of the segment during which the copy to the device begins
    away    at the boundaries b with leave < b <= back

An absence that no boundary falls into saves nothing and is left out. If it was the one that copies the tensor to the host,
the next one of the tensor copies instead (the first of a tensor's absences always does), in the open.

A recomputed tensor is dropped after the access that releases it, and so is, after its last need, what its chain passes through.
`retention.py` then computes it again for *every* later segment that needs it, where the schedule keeps it after the first: less
memory, more time, but for inputs that must stay longer for it.
"""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

from tensile_jax.ir import TensorId
from tensile_jax.plan.analysis.access import AccessSequence, access_sequence, find_chain
from tensile_jax.plan.analysis.copy_time import copy_out_us
from tensile_jax.plan.analysis.device_profile import DeviceProfile
from tensile_jax.plan.analysis.residency import Absence
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
) -> AbsenceEvents:
    """Algorithm 3 for the segments between the boundaries, translated to places.

    Args:
        latencies: of every place.
        budget_bytes: what the tensors between segments may hold, without workspaces.
    """
    sequence = access_sequence(retention, boundaries, latencies, smallest_bytes=SMALLEST)
    swapping = SwapScheduling(
        sequence,
        profile,
        across_iterations=state_may_stay_out,
    )
    schedule = find_schedule(sequence, swapping, free_bytes=budget_bytes)
    return AbsenceEvents(
        dropped_for(schedule, retention, boundaries), absences_of(schedule, sequence, boundaries, profile), schedule
    )


def dropped_for(schedule: Schedule, retention: Retention, boundaries: Sequence[int]) -> dict[TensorId, int]:
    """What `retention` drops and what the schedule recomputes, each with the last place at which it is stored."""
    operators, end = retention.liveness.graph.operators, retention.end
    dropped = {**retention.dropped}
    for again in schedule.recomputed:
        chain = find_chain(retention, again.tensor, smallest_bytes=SMALLEST)
        passed = (t for place in chain.places for t in operators[place].outputs)
        dropped |= {t: end[t] for t in passed if end[t] < end[again.tensor]}
    return dropped | {r.tensor: boundaries[r.after + 1] - 1 for r in schedule.recomputed}


def absences_of(
    schedule: Schedule, sequence: AccessSequence, boundaries: Sequence[int], profile: DeviceProfile
) -> dict[TensorId, tuple[Absence, ...]]:
    """The absences of every swapped tensor that some boundary falls into."""
    found: dict[TensorId, tuple[Absence, ...]] = {}
    for tensor, swaps in groupby(schedule.swaps, key=lambda away: away.tensor):
        placed: list[Absence] = []
        owed = False  # the copy to the host, by an absence that was left out
        for away in swaps:
            copies = away.copies_out or owed
            absence = _place(away, copies, sequence, boundaries, profile)
            if absence.leave < absence.back:
                placed.append(absence)
            owed = copies and not absence.leave < absence.back
        if placed:
            found[tensor] = tuple(placed)
    return found


def _place(
    away: SwappedOut, copies: bool, sequence: AccessSequence, boundaries: Sequence[int], profile: DeviceProfile
) -> Absence:
    count = len(sequence.ends_us)
    out_end = away.out_end_us
    if copies and not away.copies_out:
        out_end += copy_out_us(sequence.nbytes[away.tensor], profile)
    leave = -1 if away.after < 0 and not copies else boundaries[min(bisect_left(sequence.ends_us, out_end), count - 1) + 1] - 1
    back = boundaries[count] if away.before >= count else boundaries[sequence.last_ended(away.in_begin_us) + 1]
    hidden_us = (away.in_end_us - away.in_begin_us) + (away.out_end_us - away.out_begin_us)
    return Absence(away.tensor, leave, back, hidden_us)
