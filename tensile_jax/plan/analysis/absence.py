"""Computes the residencies of each tensor: the intervals of time in which it occupies device memory.

A tensor is resident from its beginning to its end, except while it is swapped out (its *absences*). Time is counted in places,
the positions of operators in their order of execution; boundary b lies before the operator at place b. Memory is counted at
boundaries, because a segment may begin there:

    stored(b) = sum of nbytes over the residencies with begin < b <= end

This is the footprint of TENSILE, equation 1. It grows in three ways (a generating access, a swap-in, the beginning of the
iteration) and shrinks in two (a swap-out, a release). If an update takes over the memory of the state that it updates, the two
share one residency. The update is called an *alias* of the old state.

Sizes in bytes.
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

    `leave` is the place during which the copy to the host ends, or -1 for state that is on the host when the iteration begins.
    `back` is the place during which the copy to the device begins, or the number of operators for state that remains on the host.
    `hidden_us` is the time of both copies that other work can hide.

    A tensor may be absent several times, in ascending order. It is copied to the host the first time only. That copy remains
    valid, because tensors do not change.
    """

    tensor: TensorId
    leave: int
    back: int
    hidden_us: float


Absences = Mapping[TensorId, tuple[Absence, ...]]


class Residency(NamedTuple):
    """`tensor` occupies device memory at boundaries b with begin < b <= end; `whole` if it is never swapped."""

    tensor: TensorId
    nbytes: int
    begin: int
    end: int
    whole: bool


def find_residencies(retention: Retention, absences: Absences) -> tuple[Residency, ...]:
    """Every residency of an iteration. An alias that continues the residency of another tensor has none of its own."""
    liveness = retention.liveness
    count = len(liveness.graph.operators)
    aliases = retention.aliases
    taken_over = set(aliases.values())
    apart = {*absences, *(t for t, h in aliases.items() if h in absences)}
    begins, ends = liveness.begins, retention.ends.copy()
    for t, h in aliases.items():
        ends[t] = retention.end[h]
    whole = (begins < count) & (ends > begins) & (liveness.nbytes > 0)
    whole[[*taken_over, *apart]] = False
    fields = (np.flatnonzero(whole), liveness.nbytes[whole], begins[whole], ends[whole])
    residencies = [Residency._make(residency) for residency in zip(*(f.tolist() for f in fields), repeat(True))]
    for t in sorted(apart - taken_over):
        tensor = liveness.graph.tensors[t]
        if tensor.nbytes == 0:
            continue
        begin, end = liveness.begin[t], int(ends[t])
        alias = aliases.get(t)
        pieces = [(begin, end)]
        for away in (*absences.get(t, ()), *(absences.get(alias, ()) if alias is not None else ())):
            pieces = [*pieces[:-1], (pieces[-1][0], away.leave), (away.back, end)]
        made_to_leave = None if begin < 0 else begin  # a tensor may leave right after the operator that makes it
        residencies += [
            Residency(t, tensor.nbytes, b, e, False) for b, e in pieces if b < count and (e > b or e == b == made_to_leave)
        ]
    return tuple(sorted(residencies, key=attrgetter("tensor")))


def stored_bytes(residencies: Sequence[Residency], count: int) -> np.ndarray:
    """`stored(b)` for the boundaries b = 0 .. count; shape (count + 1,)."""
    _, nbytes, begin, end, _ = columns(residencies)
    return _stored(nbytes, begin, end, count)


def columns(residencies: Sequence[Residency]) -> np.ndarray:
    """The fields of the residencies, one row a field."""
    return np.fromiter(chain.from_iterable(residencies), dtype=np.int64, count=5 * len(residencies)).reshape(-1, 5).T


def _stored(nbytes: np.ndarray, begin: np.ndarray, end: np.ndarray, count: int) -> np.ndarray:
    change = np.zeros(count + 2, dtype=np.int64)
    np.add.at(change, begin + 1, nbytes)
    np.add.at(change, end + 1, -nbytes)
    return np.cumsum(change)[: count + 1]


def stored_unless_swapped(retention: Retention, counted: np.ndarray | None = None) -> np.ndarray:
    """What `stored_bytes` gives for all residencies when nothing is swapped, without making these one by one.

    Args:
        counted: for each tensor, whether its residency counts; by default all do.
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
    return _stored(nbytes[there], begin[there], end[there], count)


def away_bytes(retention: Retention, absences: Absences) -> np.ndarray:
    """The bytes that are absent at each of the boundaries 0 .. count; shape (count + 1,)."""
    tensors = retention.liveness.graph.tensors
    count = len(retention.liveness.graph.operators)
    change = np.zeros(count + 2, dtype=np.int64)
    for away in (away for several in absences.values() for away in several):
        if away.leave < away.back:
            change[away.leave + 1] += tensors[away.tensor].nbytes
            change[min(away.back, count) + 1] -= tensors[away.tensor].nbytes
    return np.cumsum(change)[: count + 1]
