"""Defines what a plan is built from: where a step is cut into segments, and at which boundaries each tensor is on the device.

The boundaries divide the operators into segments 0 .. k - 1, each of which is compiled as one executable. Boundary j lies before
segment j, and boundary k at the end of the iteration. A *residency* is an interval in which a tensor is on the device. `first`
and `last` are the first and the last boundary in that interval, and `arrival` says how the tensor came to the device:

    BEGINS    the tensor is on the device when the iteration begins, and `first` is 0
    MADE      the tensor is a result of segment first - 1, which makes it or computes it again
    COPIED    the tensor is copied from the host; the copy is issued before segment `first`

If `leaves` is set, the tensor is in host memory after the residency. If the host has no copy of the tensor yet, the tensor is
copied to the host, and segment last + 1 waits for that copy. Otherwise the tensor is released after segment `last`, since the
host's copy stays valid. So a tensor is copied to the host only once.

A residency may be too short to contain a boundary. For instance, segment 4 makes a tensor, and segment 5 waits for the tensor's
copy to the host. Then `first` is 5, and `last` is `first - 1`.

A segment that needs a tensor between two of its residencies computes it again for itself, from tensors that are on the device
when the segment begins. So a tensor can be kept, swapped, computed again in each segment that needs it, or computed again once
and kept for several segments. An iteration may treat a tensor in several of these ways, one after another, with one exception:
a tensor that is swapped is never computed again *and kept*, so only its first residency can be MADE.

A copy to the host is issued right after the last segment of the residency that needs the tensor. After a copy to the device is
issued, the first segment that needs the tensor waits for the copy.
"""

from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple

from tensile_jax.ir import TensorId
from tensile_jax.plan.analysis.absence import Absences
from tensile_jax.plan.analysis.liveness import Liveness
from tensile_jax.plan.analysis.retention import Retention
from tensile_jax.plan_format import Memory

Arrival = Literal[0, 1, 2]
BEGINS: Arrival = 0
MADE: Arrival = 1
COPIED: Arrival = 2


class Residency(NamedTuple):
    """A tensor is on the device at the boundaries `first` .. `last`, both included; at no boundary if `last` is `first - 1`."""

    first: int
    last: int
    arrival: Arrival
    leaves: bool


def is_swapped(residencies: Sequence[Residency]) -> bool:
    """Whether a tensor with these residencies is copied."""
    return any(r.leaves or r.arrival == COPIED for r in residencies)


def may_have(residencies: Sequence[Residency]) -> bool:
    """Whether a tensor may have these residencies: one that is swapped is made once only."""
    return not is_swapped(residencies) or all(r.arrival != MADE for r in residencies[1:])


Residencies = Mapping[TensorId, tuple[Residency, ...]]


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """The boundaries (places of operators, from 0 to their number) and the residencies of all tensors that have any."""

    boundaries: tuple[int, ...]
    residencies: Residencies

    @property
    def key(self) -> object:
        """Equal for layouts that are the same."""
        return self.boundaries, tuple(sorted(self.residencies.items()))


@dataclass(frozen=True, slots=True)
class Contents:
    """A segment: the operators at the places `[begin, end)`, and those at `again`, which ran before and run again.

    `inputs` are the tensors that it reads and that are on the device when it begins, ascending; `outputs` are those that it
    leaves behind.
    """

    begin: int
    end: int
    again: tuple[int, ...]
    inputs: tuple[TensorId, ...]
    outputs: tuple[TensorId, ...]


def contents_of(liveness: Liveness, begin: int, end: int, there: Collection[TensorId], wanted: Sequence[TensorId]) -> Contents:
    """The contents of a segment that begins with the tensors `there`, and must leave the tensors `wanted` on the device as well.

    Raises:
        KeyError: it needs an input of the step that is not there.
    """
    made_at, operators = liveness.begin, liveness.graph.operators
    inputs: set[TensorId] = set()
    again: set[int] = set()
    needed = [t for t in wanted if not begin <= made_at[t] < end]
    needed += [t for place in range(begin, end) for t in operators[place].inputs]
    while needed:
        t = needed.pop()
        made = made_at[t]
        if begin <= made < end or t in inputs:
            continue
        if t in there:
            inputs.add(t)
        elif made < 0:
            raise KeyError(t)
        elif made not in again:
            again.add(made)
            needed += operators[made].inputs
    return Contents(begin, end, tuple(sorted(again)), tuple(sorted(inputs)), tuple(sorted(wanted)))


def layout_of(retention: Retention, absences: Absences, boundaries: Sequence[int]) -> Layout:
    """The layout of a choice that was made on the operators' places: what is kept until when, and what is absent when.

    An absence during no segment is left out, unless it begins the iteration, or its copy to the host serves a later absence.
    """
    liveness = retention.liveness
    count = len(liveness.graph.operators)
    k = len(boundaries) - 1
    found: dict[TensorId, tuple[Residency, ...]] = {}
    for tensor in liveness.graph.tensors:
        t = tensor.id
        begin, end = liveness.begin[t], retention.end[t]
        first = bisect_right(boundaries, begin)
        last = max(bisect_right(boundaries, end) - 1, 0 if begin < 0 else -1)
        arrival: Arrival = BEGINS if begin < 0 else MADE
        pieces: list[Residency] = []
        several = absences.get(t, ())
        for away in several:
            issued = bisect_right(boundaries, retention.last_need(t, away.leave)) if away.leave >= 0 else 0
            gone = max(bisect_right(boundaries, away.leave), issued) if away.leave >= 0 else 0
            back = max(bisect_right(boundaries, away.back) - 1, 0) if away.back < count else k + 1
            serves = away.leave < 0 or away is several[0] is not several[-1]
            if gone > back or (gone == back and not serves):
                continue
            if away.leave >= 0 or pieces:
                pieces.append(Residency(first, gone - 1, arrival, True))
            first, arrival = back, COPIED
        if first <= last:
            pieces.append(Residency(first, last, arrival, False))
        if pieces:
            found[t] = tuple(pieces)
    return Layout(tuple(boundaries), found)


def on_device(layout: Layout) -> tuple[list[set[TensorId]], list[set[TensorId]]]:
    """The tensors on the device at each boundary 0 .. k, and those there when each segment 0 .. k - 1 has ended."""
    k = len(layout.boundaries) - 1
    at: list[set[TensorId]] = [set() for _ in range(k + 1)]
    after: list[set[TensorId]] = [set() for _ in range(k)]
    for t, several in layout.residencies.items():
        for first, last, arrival, leaves in several:
            for j in range(first, last + 1):
                at[j].add(t)
            begin = first - 1 if arrival == MADE else first
            for j in range(begin, min(last, k - 1) + 1 if leaves else last):
                after[j].add(t)
    return at, after


def segments_of(liveness: Liveness, layout: Layout) -> list[Contents]:
    """The contents of every segment."""
    at, after = on_device(layout)
    return [contents_of(liveness, a, b, at[j], sorted(after[j] - at[j])) for j, (a, b) in enumerate(pairwise(layout.boundaries))]


class Copy(NamedTuple):
    """A copy of a tensor to `memory`, or from there. It must have ended before segment `until` is launched."""

    until: int
    tensor: TensorId
    memory: Memory = "host"


_Copies = dict[int, list[Copy]]


def copies_of(layout: Layout, all_contents: Sequence[Contents]) -> tuple[_Copies, _Copies, dict[int, set[TensorId]]]:
    """Copies from the device, copies to the device, and tensors that leave without a copy.

    Both kinds of copies are listed by the segment before whose launch they are issued, those that must end first coming first.
    The tensors without a copy are listed by the segment after which they are released.
    """
    count = len(all_contents)
    used = [set(contents.inputs) for contents in all_contents]
    outgoing: _Copies = {}
    incoming: _Copies = {}
    let_go: dict[int, set[TensorId]] = {}
    for t, several in sorted(layout.residencies.items()):
        on_host = False
        for first, last, arrival, leaves in several:
            uses = [j for j in range(first, min(last, count - 1) + 1) if t in used[j]]
            if arrival == COPIED:
                incoming.setdefault(first, []).append(Copy(uses[0] if uses else count, t))
                on_host = True
            if leaves and not on_host:
                issued = max(uses[-1] + 1 if uses else first, first)
                outgoing.setdefault(issued, []).append(Copy(last + 1, t))
                on_host = True
            elif leaves:
                let_go.setdefault(last, set()).add(t)
    for copies in (*incoming.values(), *outgoing.values()):
        copies.sort()
    return outgoing, incoming, let_go
