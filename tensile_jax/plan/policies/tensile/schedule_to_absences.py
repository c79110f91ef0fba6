"""Translates a schedule of TENSILE's Algorithm 3: which tensors are dropped, and where each swapped tensor is absent.

The schedule is in terms of times and of the operators of a cut graph, which are segments. The rest of `plan/` counts in *places*,
the positions of the graph's own operators in their order of execution. Segment k covers the places
`[boundaries[k], boundaries[k + 1])`. A swapped tensor becomes an absence (`analysis/residency.py`) with

    leave   the last place of the segment during which the copy to the host ends (or whose end releases the tensor)
    back    the first place of the segment during which the copy to the device begins
    away    at the boundaries b with leave < b <= back

A plan issues a copy to the host right after the tensor's last access, and the lane of the link makes copies in the order in which
they were issued. Algorithm 2 may have placed a copy later, after a copy of a tensor that is accessed for longer. The end of each
copy to the host is therefore computed again, for the order in which a plan issues them:

    end(t) = max(end of the copy before, end of the last access of t before its swap-out) + nbytes(t) / rate

An absence that contains no boundary saves nothing and is left out. If it was the one that copies the tensor to the host, the
tensor's next absence makes that copy, since the first of a tensor's absences always does.

A recomputed tensor is dropped after the access that releases it. The tensors in between, through which it is recomputed, are
dropped after their last need. The schedule keeps a recomputed tensor after its first recomputation; `retention.py` computes a
dropped tensor again for *every* later segment that needs it. That takes more time and less memory, except that the inputs of the
recomputation must stay longer.
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
        budget_bytes: what the tensors between segments may occupy, without workspaces.
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
    """For every swapped tensor, those of its absences that contain a boundary."""
    swaps = {t: [*several] for t, several in groupby(schedule.swaps, key=lambda away: away.tensor)}
    while True:
        out_ends = _copy_out_ends([first for first, *_ in swaps.values()], sequence, profile)
        placed = {
            t: [_place(away, out_ends.get(t) if away is several[0] else None, sequence, boundaries) for away in several]
            for t, several in swaps.items()
        }
        saves_nothing = [t for t, (first, *_) in placed.items() if not first.leave < first.back]
        if not saves_nothing:
            return {t: tuple(a for a in several if a.leave < a.back) for t, several in placed.items()}
        for t in saves_nothing:
            del swaps[t][0]
        swaps = {t: several for t, several in swaps.items() if several}


def _copy_out_ends(firsts: Sequence[SwappedOut], sequence: AccessSequence, profile: DeviceProfile) -> dict[TensorId, float]:
    """When the copies to the host end; `firsts` are the first swaps of all tensors. State may be on the host from the start."""
    ready: list[tuple[float, float, TensorId]] = []
    for away in firsts:
        if away.after >= 0 or away.copies_out:
            accessed = (access.end_us for access in sequence.accesses[away.tensor] if access.end_us <= away.out_begin_us)
            ready.append((max(accessed), away.out_begin_us, away.tensor))
    ends: dict[TensorId, float] = {}
    free_us = 0.0
    for accessed_us, _, t in sorted(ready):
        free_us = ends[t] = max(free_us, accessed_us) + copy_out_us(sequence.nbytes[t], profile)
    return ends


def _place(away: SwappedOut, out_end_us: float | None, sequence: AccessSequence, boundaries: Sequence[int]) -> Absence:
    """The absence of one swap; without `out_end_us`, the host has the tensor already."""
    count = len(sequence.ends_us)
    gone_us = away.out_end_us if out_end_us is None else out_end_us
    at_start = away.after < 0 and out_end_us is None
    leave = -1 if at_start else boundaries[min(bisect_left(sequence.ends_us, gone_us), count - 1) + 1] - 1
    back = boundaries[count] if away.before >= count else boundaries[sequence.last_ended(away.in_begin_us) + 1]
    out_us = 0.0 if out_end_us is None else away.out_end_us - away.out_begin_us
    return Absence(away.tensor, leave, back, away.in_end_us - away.in_begin_us + out_us)
