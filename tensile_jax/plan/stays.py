"""Where on the time axis each tensor lies in device memory: its stays.

A tensor stays from its beginning to its end, unless it is swapped out in between (an *absence*). Memory is counted at boundaries
between operators, because that is where a segment may begin:

    stored(b) = sum of nbytes over the stays with begin < b <= end

This is the footprint of TENSILE, equation 1, with its three ways of growing (generating access, swap-in, iteration beginning) and
its two of shrinking (swap-out, release). Updated state that takes over the memory of the state that it updates is one stay with
it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tensile_jax.ir import TensorId
from tensile_jax.plan.retention import Retention


@dataclass(frozen=True, slots=True)
class Absence:
    """`tensor` is not on the device at boundaries b with leave < b <= back.

    `leave` is the place during which the copy to the host ends, or -1 for state that is on the host when the iteration
    begins; `back` the place during which the copy to the device begins, or the number of operators for state that
    remains on the host. `hidden_us` is the time of both copies that other work can cover.
    """

    tensor: TensorId
    leave: int
    back: int
    hidden_us: float


@dataclass(frozen=True, slots=True)
class Stay:
    """`tensor` lies in device memory at boundaries b with begin < b <= end; `whole` if it is not swapped."""

    tensor: TensorId
    nbytes: int
    begin: int
    end: int
    whole: bool


def find_stays(retention: Retention, absences: Mapping[TensorId, Absence]) -> tuple[Stay, ...]:
    """Every stay of an iteration. Heirs that continue the stay of another tensor have none of their own."""
    activity = retention.activity
    count = len(activity.graph.operators)
    heirs = inherited(retention)
    taken_over = set(heirs.values())
    stays: list[Stay] = []
    for tensor in activity.graph.tensors:
        t = tensor.id
        if t in taken_over or tensor.nbytes == 0:
            continue
        begin, end = activity.begin[t], retention.end[t]
        heir = heirs.get(t)
        if heir is not None:
            end = retention.end[heir]
        away = absences.get(t)
        later = absences.get(heir) if heir is not None else None
        pieces = [(begin, end)]
        if away is not None:
            pieces = [(begin, away.leave), (away.back, end)]
        if later is not None:
            pieces = [*pieces[:-1], (pieces[-1][0], later.leave), (later.back, count)]
        whole = away is None and later is None
        made_to_leave = None if whole or begin < 0 else begin  # a tensor may leave right after the operator that makes it
        stays += [Stay(t, tensor.nbytes, b, e, whole) for b, e in pieces if b < count and (e > b or e == b == made_to_leave)]
    return tuple(stays)


def inherited(retention: Retention) -> dict[TensorId, TensorId]:
    """For each donated state tensor, the update that takes over its memory, where nothing reads the old value later."""
    begin = retention.activity.begin
    return {TensorId(t): TensorId(h) for t, h in enumerate(retention.activity.heir) if h >= 0 and retention.end[t] <= begin[h]}


def stored_bytes(stays: Sequence[Stay], count: int) -> np.ndarray:
    """`stored(b)` for the boundaries b = 0 .. count; shape (count + 1,)."""
    change = np.zeros(count + 2, dtype=np.int64)
    for stay in stays:
        change[stay.begin + 1] += stay.nbytes
        change[stay.end + 1] -= stay.nbytes
    return np.cumsum(change)[: count + 1]
