"""Finds the fastest swaps and boundaries for one choice of kept tensors (a retention). It is a part of the oracle (`oracle.py`).

The search is a label-setting algorithm, as for shortest paths with resources. It visits the boundaries in order. A *label* is a
state of the device at a boundary. A label is dropped if another label at the same boundary has the same tensors away and none of
its times is later. `oracle.py` says which plans are searched, and why no optimal plan is lost.
"""

from collections.abc import Iterator
from itertools import combinations, pairwise, permutations
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tensile_jax.ir import TensorId
from tensile_jax.plan.analysis.absence import Absence
from tensile_jax.plan.analysis.retention import Retention

if TYPE_CHECKING:
    from tests.plan.oracle import Oracle


class Gap(NamedTuple):
    """`tensor` is not needed between the places `after` and `before`."""

    tensor: TensorId
    after: int
    before: int


def gaps_of(oracle: "Oracle", retention: Retention) -> list[Gap]:
    """Every gap in which there is a boundary at which a tensor that may be swapped can be away."""
    found: list[Gap] = []
    for t in map(TensorId, map(int, np.flatnonzero(oracle.swappable))):
        end = retention.end[t]
        points = [retention.liveness.begin[t], *(p for p in retention.needs[t] if p <= end)]
        points += [oracle.count] if end >= oracle.count else []
        found += [Gap(t, a, b) for a, b in pairwise(points) if b - a > 1 and a < oracle.count - 1]
    return found


class Trail(NamedTuple):
    """The history of a label: the boundary, the gaps that had begun there (`gone`), and those that ended there (`back`)."""

    place: int
    gone: tuple[Gap, ...]
    back: tuple[Gap, ...]
    before: "Trail | None"


class Label(NamedTuple):
    """The device at a boundary: `leaving` and `coming` are the copies under way and their ends, in the order of issue."""

    clock: float
    out: float  # when the lane is free
    into: float
    leaving: tuple[tuple[Gap, float], ...]
    host: frozenset[Gap]
    coming: tuple[tuple[Gap, float], ...]
    copied: frozenset[TensorId]
    trail: Trail | None

    def key(self) -> tuple[object, ...]:
        return frozenset(g for g, _ in self.leaving), self.host, frozenset(g for g, _ in self.coming), self.copied

    def times(self) -> tuple[float, ...]:
        ends = (e for _, e in sorted((*self.leaving, *self.coming)))
        return (self.clock, self.out, self.into, *ends)


class Labels:
    """The search of one retention: labels at each boundary in turn."""

    def __init__(self, oracle: "Oracle", index: int, usable: np.ndarray, limit: float) -> None:
        self._oracle = oracle
        s = oracle.segments(index)
        self._peak = s.held + s.workspace
        self._us = usable
        self._limit = limit
        self._count = oracle.count
        self._gaps = gaps_of(oracle, oracle.retentions[index])
        self._rest = np.full(self._count + 1, np.inf)
        self._rest[-1] = 0.0
        for a in range(self._count - 1, -1, -1):
            self._rest[a] = (usable[a, a + 1 :] + self._rest[a + 1 :]).min()
        profile = oracle.profile
        self._out_us = {g.tensor: oracle.nbytes[g.tensor] / profile.device_to_host_bytes_per_us for g in self._gaps}
        self._in_us = {g.tensor: oracle.nbytes[g.tensor] / profile.host_to_device_bytes_per_us for g in self._gaps}

    def search(self, upper: float) -> tuple[float, dict[TensorId, tuple[Absence, ...]], tuple[int, ...]] | None:
        """The fastest plan below `upper`, with its absences and boundaries."""
        at: list[dict[tuple[object, ...], list[Label]]] = [{} for _ in range(self._count + 1)]
        nothing = frozenset[Gap]()
        at[0][()] = [Label(0.0, 0.0, 0.0, (), nothing, (), frozenset(), None)]
        found: tuple[float, Trail | None] | None = None
        for a in range(self._count):
            for labels in at[a].values():
                for label in labels:
                    for ready in self._decided(label, a):
                        for b in range(a + 1, self._count + 1):
                            after = self._run(ready, a, b)
                            if after is None or (a == 0 and b == self._count and self._count > 1):
                                continue
                            if b == self._count:
                                finish = max(after.clock, after.out, after.into)
                                if finish < upper:
                                    found, upper = (finish, after.trail), finish
                            elif after.clock + self._rest[b] < upper:
                                keep(at[b], after)
        return None if found is None else (found[0], *self._told(found[1]))

    def _decided(self, label: Label, a: int) -> Iterator[Label]:
        """The labels after each choice of copies to issue and to await at the boundary."""
        previous = -1 if label.trail is None else label.trail.place
        begins = [g for g in self._gaps if previous <= g.after < a < g.before]
        for going in subsets(begins):
            free = [g for g in going if g.tensor in label.copied]
            for ordered in permutations(g for g in going if g.tensor not in label.copied):
                out, leaving = label.out, list(label.leaving)
                for g in ordered:
                    out = max(out, label.clock) + self._out_us[g.tensor]
                    leaving.append((g, out))
                for clock in sorted({label.clock, *(max(label.clock, e) for _, e in leaving if a)}):
                    gone = [*free, *(g for g, e in leaving if e <= clock and a)]
                    for coming_back in subsets(sorted(label.host, key=lambda g: (g.before, g.tensor))):
                        into, coming = label.into, list(label.coming)
                        for g in coming_back:
                            into = max(into, clock) + self._in_us[g.tensor]
                            coming.append((g, into))
                        yield Label(
                            clock, out, into, tuple(x for x in leaving if x[0] not in gone),
                            (label.host - frozenset(coming_back)) | frozenset(gone), tuple(coming),
                            label.copied | {g.tensor for g in gone},
                            Trail(a, tuple(gone), tuple(coming_back), label.trail),
                        )  # fmt: skip

    def _run(self, label: Label, a: int, b: int) -> Label | None:
        """The label after the segment; None if it does not fit, or needs what is not there."""
        nbytes = self._oracle.nbytes
        if self._peak[a, b] - sum(int(nbytes[g.tensor]) for g in label.host) > self._limit or not np.isfinite(self._us[a, b]):
            return None
        if any(g.before < b or b == self._count for g in label.host) or any(
            g.before < b or b == self._count for g, _ in label.leaving
        ):
            return None
        clock = max([label.clock, *(e for g, e in label.coming if g.before < b)]) + self._us[a, b]
        return label._replace(clock=clock, coming=tuple(x for x in label.coming if x[0].before >= b))

    def _told(self, trail: Trail | None) -> tuple[dict[TensorId, tuple[Absence, ...]], tuple[int, ...]]:
        """Absences and boundaries of a trail."""
        bounds = [self._count]
        back: dict[Gap, int] = {}
        absences: dict[TensorId, list[Absence]] = {}
        while trail is not None:
            bounds.append(trail.place)
            for g in trail.back:
                back[g] = trail.place
            for g in trail.gone:
                if g in back:
                    absences.setdefault(g.tensor, []).insert(0, Absence(g.tensor, trail.place - 1, back[g], 0.0))
            trail = trail.before
        return {t: tuple(several) for t, several in absences.items()}, tuple(reversed(bounds))


def subsets(items: list[Gap]) -> Iterator[tuple[Gap, ...]]:
    """All subsets, in order of size."""
    return (some for n in range(len(items) + 1) for some in combinations(items, n))


def keep(labels: dict[tuple[object, ...], list[Label]], label: Label) -> None:
    """Add the label unless another one dominates it, and remove the labels that it dominates."""
    others = labels.setdefault(label.key(), [])
    times = label.times()
    if any(all(x <= y for x, y in zip(o.times(), times, strict=True)) for o in others):
        return
    others[:] = [o for o in others if not all(y <= x for x, y in zip(o.times(), times, strict=True))] + [label]
