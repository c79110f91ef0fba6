"""Defines when a swapped tensor is absent from the device, and counts the bytes that are stored if nothing is swapped.

Time is counted in *places*, the positions of operators in their order of execution; boundary b lies before the operator at place
b. A tensor is *stored*, kept in device memory, from the place `begin` where it is made to the place `end` where it is last
needed. A swap makes the tensor *absent* in between: from the end of its copy to the host until the start of its copy back.
Without swaps, these bytes are stored at boundary b (TENSILE, equation 1, calls them the memory footprint):

    stored(b) = sum of nbytes over the tensors with begin < b <= end

If the update of a state tensor takes over the memory of the old state, the two count as one tensor.

Sizes in bytes.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from tensile_jax.ir import TensorId
from tensile_jax.plan.analysis.retention import Retention


@dataclass(frozen=True, slots=True)
class Absence:
    """`tensor` is not on the device at boundaries b with leave < b <= back.

    `leave` is the place during which the copy to the host ends, or -1 for state that is on the host when the iteration begins.
    `back` is the place during which the copy to the device begins, or the number of operators for state that remains on the host.
    `hidden_us` is the part of the time of both copies during which the device can compute.

    A tensor may be absent several times. It is copied to the host only for its first absence: that copy stays valid, because
    tensors do not change.
    """

    tensor: TensorId
    leave: int
    back: int
    hidden_us: float


Absences = Mapping[TensorId, tuple[Absence, ...]]


def stored_unless_swapped(retention: Retention, counted: np.ndarray | None = None) -> np.ndarray:
    """`stored(b)` for the boundaries b = 0 .. count when nothing is swapped; shape (count + 1,).

    Args:
        counted: for each tensor, whether it counts; by default all do.
    """
    liveness = retention.liveness
    count = len(liveness.graph.operators)
    nbytes, begin, end = liveness.nbytes.copy(), liveness.begins, retention.ends.copy()
    aliases = retention.aliases
    if aliases:
        old, new = np.array(list(aliases.items())).T
        end[old] = end[new]
        nbytes[new] = 0
    there = (begin < count) & (end > begin)
    if counted is not None:
        there &= counted
    change = np.zeros(count + 2, dtype=np.int64)
    np.add.at(change, begin[there] + 1, nbytes[there])
    np.add.at(change, end[there] + 1, -nbytes[there])
    return np.cumsum(change)[: count + 1]
