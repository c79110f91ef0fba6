"""Computes when each copy to the host ends, if the copies run one after another in the order in which a plan issues them.

The algorithms of papers may place a copy to the host anywhere in the free time of the link between device and host: small tensors
go into short gaps, and a large one waits for a long gap. A plan is simpler: it issues each copy right after the last access
before the tensor leaves. The link makes these copies one after another, in the order in which they were issued:

    end(t) = max(end of the copy before, end of the last access to t) + nbytes(t) / rate

So a copy may end later than the algorithm planned. If the tensor's *absence*, the time in which it is not on the device, still
began at the planned time, a segment (a stretch of operators that is compiled as one executable) would have to wait for the copy.
So the absence begins when the copy ends. If no time of the absence remains, the absence is left out. The copy to the
host then belongs to the next absence of the tensor, because a tensor is copied to the host for its first absence only.

A *place* is the position of an operator in the order of execution. Times are microseconds since the step began. They leave
out recomputation, which makes segments longer. So by the time the plan reaches the place found here, the copy has ended.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from tensile_jax.ir import TensorId
from tensile_jax.plan.analysis.absence import Absence, Absences
from tensile_jax.plan.analysis.copy_time import copy_out_us
from tensile_jax.plan.analysis.latency import StepCosts
from tensile_jax.plan.analysis.retention import Retention


def in_order_of_issue(retention: Retention, absences: Absences, costs: StepCosts) -> dict[TensorId, tuple[Absence, ...]]:
    """The absences, each of which begins at the place during which its copy to the host ends."""
    found: dict[TensorId, tuple[Absence, ...]] = dict(absences)
    while True:
        leaves = _leaves([several[0] for several in found.values()], retention, costs)
        placed = {t: (replace(some[0], leave=leaves.get(t, some[0].leave)), *some[1:]) for t, some in found.items()}
        saves_nothing = {t for t, some in placed.items() if not some[0].leave < some[0].back}
        if not saves_nothing:
            return placed
        found = {t: some[1:] if t in saves_nothing else some for t, some in found.items()}
        found = {t: some for t, some in found.items() if some}


def _leaves(firsts: Sequence[Absence], retention: Retention, costs: StepCosts) -> dict[TensorId, int]:
    """By tensor, the place during which its copy to the host ends; state that is on the host from the start has no copy."""
    tensors = retention.liveness.graph.tensors
    ends = [*accumulate(costs.latencies)]
    issued = sorted((retention.last_need(a.tensor, a.leave), a.leave, a.tensor) for a in firsts if a.leave >= 0)
    leaves: dict[TensorId, int] = {}
    free_us = 0.0
    for need, _, t in issued:
        free_us = max(free_us, ends[need] if need >= 0 else 0.0) + copy_out_us(tensors[t].nbytes, costs.profile)
        leaves[t] = min(bisect_left(ends, free_us), len(ends) - 1)
    return leaves
