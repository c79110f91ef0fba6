"""Where on the time axis each tensor lies in device memory: its stays.

A tensor stays from its beginning to its end, unless it is swapped out in between (its *absences*). Memory is counted at
boundaries between operators, because that is where a segment may begin:

    stored(b) = sum of nbytes over the stays with begin < b <= end

This is the footprint of TENSILE, equation 1, with its three ways of growing (generating access, swap-in, iteration beginning) and
its two of shrinking (swap-out, release). Updated state that takes over the memory of the state that it updates is one stay with
it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from tensile_jax.ir import TensorId
from tensile_jax.plan.analysis.retention import Retention


@dataclass(frozen=True, slots=True)
class Absence:
    """`tensor` is not on the device at boundaries b with leave < b <= back.

    `leave` is the place during which the copy to the host ends, or -1 for state that is on the host when the iteration
    begins; `back` the place during which the copy to the device begins, or the number of operators for state that
    remains on the host. `hidden_us` is the time of both copies that other work can cover.

    A tensor may be absent several times, in ascending order. Only the first time is it copied to the host, where it then
    remains: tensors do not change.
    """

    tensor: TensorId
    leave: int
    back: int
    hidden_us: float


Absences = Mapping[TensorId, tuple[Absence, ...]]


class Stay(NamedTuple):
    """`tensor` lies in device memory at boundaries b with begin < b <= end; `whole` if it is not swapped."""

    tensor: TensorId
    nbytes: int
    begin: int
    end: int
    whole: bool


def find_stays(retention: Retention, absences: Absences) -> tuple[Stay, ...]:
    """Every stay of an iteration. Heirs that continue the stay of another tensor have none of their own."""
    activity = retention.activity
    count = len(activity.graph.operators)
    heirs = retention.heirs
    taken_over = set(heirs.values())
    apart = {*absences, *(t for t, h in heirs.items() if h in absences)}
    begins, ends = activity.begins, retention.ends.copy()
    for t, h in heirs.items():
        ends[t] = retention.end[h]
    whole = (begins < count) & (ends > begins) & (activity.nbytes > 0)
    whole[[*taken_over, *apart]] = False
    fields = (np.flatnonzero(whole), activity.nbytes[whole], begins[whole], ends[whole])
    stays = [Stay._make(stay) for stay in zip(*(f.tolist() for f in fields), repeat(True))]
    for t in sorted(apart - taken_over):
        tensor = activity.graph.tensors[t]
        if tensor.nbytes == 0:
            continue
        begin, end = activity.begin[t], int(ends[t])
        heir = heirs.get(t)
        pieces = [(begin, end)]
        for away in (*absences.get(t, ()), *(absences.get(heir, ()) if heir is not None else ())):
            pieces = [*pieces[:-1], (pieces[-1][0], away.leave), (away.back, end)]
        made_to_leave = None if begin < 0 else begin  # a tensor may leave right after the operator that makes it
        stays += [Stay(t, tensor.nbytes, b, e, False) for b, e in pieces if b < count and (e > b or e == b == made_to_leave)]
    return tuple(sorted(stays, key=attrgetter("tensor")))


def stored_bytes(stays: Sequence[Stay], count: int) -> np.ndarray:
    """`stored(b)` for the boundaries b = 0 .. count; shape (count + 1,)."""
    _, nbytes, begin, end, _ = columns(stays)
    return _stored(nbytes, begin, end, count)


def columns(stays: Sequence[Stay]) -> np.ndarray:
    """The fields of the stays, one row a field."""
    return np.fromiter(chain.from_iterable(stays), dtype=np.int64, count=5 * len(stays)).reshape(-1, 5).T


def _stored(nbytes: np.ndarray, begin: np.ndarray, end: np.ndarray, count: int) -> np.ndarray:
    change = np.zeros(count + 2, dtype=np.int64)
    np.add.at(change, begin + 1, nbytes)
    np.add.at(change, end + 1, -nbytes)
    return np.cumsum(change)[: count + 1]


def stored_unless_swapped(retention: Retention, counted: np.ndarray | None = None) -> np.ndarray:
    """The same as `stored_bytes` of every stay when nothing is swapped, without making them one by one.

    Args:
        counted: for each tensor, whether its stay counts; by default all do.
    """
    activity = retention.activity
    count = len(activity.graph.operators)
    nbytes, begin, end = activity.nbytes.copy(), activity.begins, retention.ends.copy()
    heirs = retention.heirs
    if heirs:
        old, new = np.array(list(heirs.items())).T
        end[old] = end[new]
        nbytes[new] = 0
    there = (begin < count) & (end > begin)
    if counted is not None:
        there &= counted
    return _stored(nbytes[there], begin[there], end[there], count)


def away_bytes(retention: Retention, absences: Absences) -> np.ndarray:
    """What the absences take from `stored_unless_swapped` at the boundaries 0 .. count; shape (count + 1,)."""
    tensors = retention.activity.graph.tensors
    count = len(retention.activity.graph.operators)
    change = np.zeros(count + 2, dtype=np.int64)
    for away in (away for several in absences.values() for away in several):
        if away.leave < away.back:
            change[away.leave + 1] += tensors[away.tensor].nbytes
            change[min(away.back, count) + 1] -= tensors[away.tensor].nbytes
    return np.cumsum(change)[: count + 1]
