"""Computes when each copy to the host ends, if the copies run one after another in the order in which a plan issues them.

A paper's algorithm may place a copy to the host anywhere in the free time of the link between device and host. A plan is simpler:
it issues each copy right after the last access before the tensor leaves, and the link makes the copies in that order:

    end(t) = max(end of the copy before, end of the last access to t) + nbytes(t) / rate

So a copy may end later than the algorithm planned. The tensor's *absence*, the time in which it is not on the device, begins
when the copy ends. If the absence began earlier, the computation would wait for the copy. An absence that would end before the
copy ends is left out. A tensor is copied to the host only once, for its first absence. If this absence is left out, the copy is
made for the next one.

The result for each absence is the *place* at which it begins, the position of an operator in the order of execution. Times are
microseconds since the step began. They leave out recomputation, which only makes the plan slower. So when the plan reaches that
place, the copy has ended.
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
