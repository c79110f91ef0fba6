"""Finds the boundaries at which a policy's copies begin and end, so that no segment waits for a copy that the policy hides.

A *segment* is a stretch of operators that is compiled as one executable, so a copy can be issued, and waited for, only between
two segments. A policy from a paper *hides* a copy behind some operators: the copy runs while they do. That works only if segments
begin and end at these operators. An *absence* of a tensor is the time between its copy to the host and its copy back. Each
absence needs up to three boundaries:

    issued    after the last operator that needs the tensor before it leaves: the copy to the host is issued here
    back      before the operator beside which the policy wants the copy to the device to begin: that copy is issued here
    used      before the next operator that needs the tensor: the copy to the device must have ended here

The end of the copy to the host needs no boundary of its own: the tensor is freed at the first boundary after it. If the tensor
stays so long that a segment exceeds the memory limit, `segments.py` adds a boundary.

A boundary costs the time of one launch, `launch_us`, and so may cost more than the wait for a copy that it avoids. So a boundary
is left out if another chosen one is near: less than `launch_us` after `issued`, or less than `launch_us` before `back` or `used`.
The plan has all boundaries that remain. It has others only if the limit requires them, or if they save time. A *place* is the
position of an operator in the order of execution; boundary b lies before the operator at place b.

Times in microseconds since the step began.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

import numpy as np

from tensile_jax.plan.analysis.absence import Absences
from tensile_jax.plan.analysis.latency import StepCosts
from tensile_jax.plan.analysis.retention import Retention


def event_boundaries(retention: Retention, absences: Absences, costs: StepCosts) -> tuple[int, ...]:
    """The boundaries for which the absences ask, ascending, without the begin and the end of the step."""
    reached = _reached_us(retention, costs)
    end = len(reached) - 1
    issued: set[int] = set()
    back_or_used: set[int] = set()
    for t, several in absences.items():
        if several[0].leave >= 0:  # a tensor is copied to the host for its first absence only
            issued.add(retention.last_need(t, several[0].leave) + 1)
        for away in several:
            if away.back < end:
                back_or_used |= {max(away.back, 0), retention.next_need(t, away.leave)}
    chosen = [0, end]
    for b in sorted(issued, reverse=True):
        place = bisect_left(chosen, b)
        if reached[chosen[place]] - reached[b] >= costs.profile.launch_us:
            chosen.insert(place, b)
    for b in sorted(back_or_used):
        place = bisect_right(chosen, b)
        if reached[b] - reached[chosen[place - 1]] >= costs.profile.launch_us:
            chosen.insert(place, b)
    return tuple(chosen[1:-1])


def _reached_us(retention: Retention, costs: StepCosts) -> Sequence[float]:
    """The latest time at which each boundary is reached: every operator computes again what it needs, as if it were a segment of
    its own.
    """
    taken = np.array(costs.latencies, dtype=float)
    for place, runs in enumerate(retention.reruns):
        taken[list(runs)] += costs.rerun_us[place]
    return [0.0, *np.cumsum(taken).tolist()]
