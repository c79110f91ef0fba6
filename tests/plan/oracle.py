"""Finds, by exact search, the fastest of all plans of a small graph under a limit, and the lowest peak of any plan.

Tests and `make bench-gap` compare the planner with this oracle. Time and memory are those of the planner's own model. A *place*
is the index of an operator. The planner considers few choices of kept tensors, and few boundaries; the oracle considers every
combination of

    dropped      for each tensor that an operator makes and the step does not return: the last place for which the tensor is kept
                 or stored, which may be the place that makes the tensor or any place that reads it
    boundaries   any set of places that gives at least two segments (the step as one executable is a plan as well)
    absences     for each tensor that may be swapped: any set of its gaps. A gap lies between two successive needs of the tensor.
                 The tensor leaves and is back at any places in the gap, with at least one boundary in between

The time of a plan is `step_us` of `build_plan`. Its peak is `peak_bytes` of `build_plan`, with the workspaces that a boundary
table (`plan/search/segmentation.py`) estimates if every place may be a boundary. The iteration begins and ends with the state on
the device.

Places of absences. `build_plan` issues and awaits copies only at boundaries. So two places of leaving between the same two
boundaries are equivalent, and so are two places of return. An absence within one segment saves no memory: the model counts a
swapped tensor as a result of the segment that makes it, which is right only if there is a boundary in the gap. It therefore
suffices to decide two things at each boundary: for each copy to the host that is under way, whether it is awaited; for each
tensor on the host, whether its copy to the device is issued. The oracle tries every order of the copies that are issued at one
boundary. `build_plan` issues them in the order in which they are awaited, which ends no later.

Idle drops. A drop is idle if no boundary lies between the last place for which the tensor is stored and the next place that needs
it, so that nothing is recomputed. An idle drop changes nothing that runs, but it changes the workspace that `boundary_table`
estimates. A plan that gains by it gains in the model only. With `idle_drops=False` the oracle leaves such plans out.

Pruning. No optimal plan is lost. A *retention* is a choice of what is dropped. Workspaces do not depend on absences, for the
reason above. A lower bound on the time of all plans of a retention is the shortest path over its segments if every tensor is away
wherever nothing needs it and copies take no time. The bound is first computed without workspaces. Boundary tables are made only
for retentions whose bound is below the best time so far, in order of their bounds. Within one retention, labels are compared and
dropped (`labels.py`), and the shortest path bounds the time that remains. `unpruned.py` searches the same space without pruning,
and tests compare the two.

Times are in microseconds, sizes in bytes, as in `plan/`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from tensile_jax.ir import Graph, TensorId
from tensile_jax.plan import DeviceProfile, Measured
from tensile_jax.plan.analysis.liveness import Liveness
from tensile_jax.plan.analysis.absence import Absences, find_residencies
from tensile_jax.plan.analysis.retention import Retention, retain, segment_contents
from tensile_jax.plan.result.build import Layout, build_plan
from tensile_jax.plan.result.check import check
from tensile_jax.plan.search.candidates import Candidates
from tensile_jax.plan.search.choice import whole_peak
from tensile_jax.plan.search.segmentation import boundary_table
from tensile_jax.plan_format import Plan
from tests.builders import header_for
from tests.plan.labels import Labels

SMALLEST = 2**16  # bytes: no policy swaps less
_SLACK = 1e-3  # microseconds; `build_plan` rounds to a thousandth


class Found(NamedTuple):
    """The fastest plan under a limit: the time of its step, and its layout, which is None if the step runs as one executable."""

    step_us: float
    layout: Layout | None


@dataclass(frozen=True, eq=False)
class Segments:
    """The segments [a, b) of one retention, for every pair of places a < b.

    Attributes:
        held: bytes on the device if nothing is swapped.
        workspace: estimated bytes of workspace.
        us: microseconds, recomputation included.
        away: bytes that the segment does not need and that may be on the host.
    """

    held: np.ndarray
    workspace: np.ndarray
    us: np.ndarray
    away: np.ndarray


class Oracle:
    """Every retention of one graph, with the memory and the time of its segments."""

    def __init__(self, graph: Graph, profile: DeviceProfile, *, idle_drops: bool = True) -> None:
        self.graph = graph
        self.idle_drops = idle_drops
        self.profile = profile
        self.candidates = Candidates(graph, profile, state_may_stay_out=False)
        self.count = len(graph.operators)
        self.nbytes = np.array([t.nbytes for t in graph.tensors])
        liveness = self.candidates.liveness
        self.swappable = np.array(
            [t.nbytes >= SMALLEST and t.id not in liveness.kept_by_caller for t in graph.tensors], dtype=bool
        )
        self.retentions = [retain(liveness, dropped) for dropped in drops(liveness)]
        self._again: dict[tuple[int, int], np.ndarray] = {}
        self._boards: dict[int, np.ndarray] = {}
        self._rerun_us = self.candidates.rerun_us
        self._all()

    # -- what all retentions hold -------------------------------------------------------------------------------------------

    def _all(self) -> None:
        """`held`, `away` and `us` of every segment of every retention; shape (retentions, count + 1, count + 1)."""
        liveness, n, r = self.candidates.liveness, self.count, self.retentions
        begin = np.array(liveness.begin)
        end = np.array([x.end for x in r])
        places = np.arange(n + 1)
        stored = (begin[None, None, :] < places[None, :, None]) & (places[None, :, None] <= end[:, None, :])
        needed = np.zeros((len(r), n + 1, len(begin)), dtype=np.int32)  # needs before a place
        for i, retention in enumerate(r):
            for t, needs in enumerate(retention.needs):
                for p in needs:
                    needed[i, p + 1, t] = 1
        needed = np.cumsum(needed, axis=1)
        aliases = np.array([_inherited(x, len(begin)) for x in r])
        results_of_step = np.array([t.id in self.graph.outputs for t in self.graph.tensors])
        base = np.stack([_stored(x, n) for x in r])
        self.held = np.zeros((len(r), n + 1, n + 1))
        self.away = np.zeros_like(self.held)
        self.us = np.full_like(self.held, np.inf)
        elapsed = np.concatenate([[0.0], np.cumsum(self.candidates.latencies)])
        mask = stored.astype(np.int64) @ (1 << np.arange(len(begin), dtype=np.int64))
        for a in range(n):
            masks, which = np.unique(mask[:, a], return_inverse=True)
            firsts = [int(np.flatnonzero(which == k)[0]) for k in range(len(masks))]
            again = np.array([self._again_us(int(m), a, r[first]) for m, first in zip(masks, firsts, strict=True)])
            for b in range(a + 1, n + 1):
                made = (begin >= a) & (begin < b)
                results = stored[:, b, :] & made[None, :] & ~aliases
                self.held[:, a, b] = base[:, a] + results @ self.nbytes
                idle = stored[:, a, :] & (needed[:, a, :] == needed[:, b, :]) & self.swappable[None, :]
                idle &= (needed[:, n, :] > needed[:, b, :]) | (results_of_step & (b < n))[None, :]
                self.away[:, a, b] = idle @ self.nbytes if a else 0.0  # everything is there when the iteration begins
                self.us[:, a, b] = self.profile.launch_us + elapsed[b] - elapsed[a] + again[which, b]
        if not self.idle_drops:
            for i, retention in enumerate(r):
                for t, last in retention.dropped.items():
                    self.us[i, : last + 1, next(p for p in retention.needs[t] if p > last) + 1 :] = np.inf

    def _again_us(self, mask: int, a: int, retention: Retention) -> np.ndarray:
        """Microseconds that a segment from `a` to each place spends on recomputation; they depend on what is stored at `a`."""
        if (mask, a) not in self._again:
            row = np.zeros(self.count + 1)
            for b in range(a + 1, self.count + 1):
                row[b] = sum(self._rerun_us[p] for p in segment_contents(retention, a, b).again)
            self._again[mask, a] = row
        return self._again[mask, a]

    def segments(self, index: int) -> Segments:
        """The segments of one retention, workspaces included."""
        if index not in self._boards:
            self._boards[index] = estimates(self.retentions[index], self.candidates)
        return Segments(self.held[index], self._boards[index], self.us[index], self.away[index])

    # -- the least peak -----------------------------------------------------------------------------------------------------

    def least_peak(self) -> int:
        """The lowest peak of any plan. Every tensor is on the host wherever nothing needs it, and time does not matter."""
        best = whole_peak(self.candidates, Measured())
        lower = narrowest(np.where(np.isfinite(self.us), self.held - self.away, np.inf))
        for index in np.argsort(lower, kind="stable"):
            if lower[index] >= best:
                break
            s = self.segments(int(index))
            best = min(best, int(narrowest(np.where(np.isfinite(s.us), s.held + s.workspace - s.away, np.inf)[None])[0]))
        return best

    # -- the least time -----------------------------------------------------------------------------------------------------

    def fastest(self, limit: float, *, swaps: bool = True) -> Found | None:
        """The fastest plan whose peak is at most `limit`; without `swaps`, of those that swap nothing. None if there is none."""
        best: Found | None = None
        if whole_peak(self.candidates, Measured()) <= limit:
            best = Found(sum(self.candidates.latencies) + self.profile.launch_us, None)
        lower, _ = shortest(np.where(self.held - (self.away if swaps else 0) <= limit, self.us, np.inf))
        for index in np.argsort(lower, kind="stable"):
            upper = np.inf if best is None else best.step_us - _SLACK
            if not lower[index] < upper:
                break
            s = self.segments(int(index))
            peak = s.held + s.workspace
            plain, back = shortest(np.where(peak <= limit, s.us, np.inf)[None])
            if plain[0] < upper:
                bounds = path(back[0])
                best, upper = Found(float(plain[0]), self._layout(int(index), {}, bounds)), float(plain[0]) - _SLACK
            if swaps:
                usable = np.where(peak - s.away <= limit, s.us, np.inf)
                if shortest(usable[None])[0][0] < upper:
                    found = Labels(self, int(index), usable, limit).search(upper)
                    best = best if found is None else Found(found[0], self._layout(int(index), *found[1:]))
        return best

    def _layout(self, index: int, absences: Absences, bounds: tuple[int, ...]) -> Layout:
        work = self.segments(index).workspace
        return Layout(self.retentions[index], absences, bounds, tuple(int(work[a, b]) for a, b in pairwise(bounds)))

    def plan(self, layout: Layout) -> Plan:
        """The plan of a layout, replayed."""
        plan = build_plan(layout, self.candidates.costs, header_for(self.graph))
        check(plan, self.graph)
        return plan


def drops(liveness: Liveness) -> Iterator[dict[TensorId, int]]:
    """Every choice of dropped tensors and their last places; later tensors first, because they decide what needs earlier ones."""
    graph = liveness.graph
    count = len(graph.operators)
    made = [t for op in reversed(graph.operators) for t in op.outputs if liveness.end[t] < count and liveness.uses[t]]

    def extend(index: int, dropped: dict[TensorId, int]) -> Iterator[dict[TensorId, int]]:
        if index == len(made):
            yield dropped
            return
        t = made[index]
        yield from extend(index + 1, dropped)
        last = retain(liveness, dropped).needs[t][-1]
        for place in (liveness.begin[t], *liveness.uses[t]):
            if place < last:
                yield from extend(index + 1, {**dropped, t: place})

    return extend(0, {})


def _inherited(retention: Retention, count: int) -> list[bool]:
    """Which tensors take over the memory of another."""
    aliases = set(retention.aliases.values())
    return [t in aliases for t in range(count)]


def _stored(retention: Retention, count: int) -> np.ndarray:
    """Bytes stored at each boundary when nothing is swapped."""
    residencies = find_residencies(retention, {})
    return np.array([sum(s.nbytes for s in residencies if s.begin < b <= s.end) for b in range(count + 1)])


def estimates(retention: Retention, candidates: Candidates) -> np.ndarray:
    """Workspaces of every segment, with every place a candidate."""
    places = tuple(range(len(candidates.graph.operators) + 1))
    table = boundary_table(
        retention, candidates.fusion, candidates.profile, residencies=find_residencies(retention, {}), boundaries=places
    )
    assert table.boundaries == places
    return table.estimates(candidates.profile.workspace_growth)


def shortest(us: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The least sum along a path of at least two segments, if there are two places; and the predecessor of each place."""
    r, k = us.shape[:2]
    total = np.full((r, k), np.inf)
    total[:, 0] = 0.0
    back = np.zeros((r, k), dtype=int)
    for b in range(1, k):
        first = 1 if b == k - 1 and b > 1 else 0
        through = total[:, first:b] + us[:, first:b, b]
        back[:, b] = first + through.argmin(axis=1)
        total[:, b] = through.min(axis=1)
    return total[:, -1], back


def narrowest(peak: np.ndarray) -> np.ndarray:
    """The least maximum along a path of at least two segments, if there are two places."""
    r, k = peak.shape[:2]
    worst = np.full((r, k), np.inf)
    worst[:, 0] = 0.0
    for b in range(1, k):
        first = 1 if b == k - 1 and b > 1 else 0
        worst[:, b] = np.maximum(worst[:, first:b], peak[:, first:b, b]).min(axis=1)
    return np.ceil(worst[:, -1])


def path(back: np.ndarray) -> tuple[int, ...]:
    """The places of the shortest path."""
    found = [len(back) - 1]
    while found[-1] > 0:
        found.append(int(back[found[-1]]))
    return tuple(reversed(found))
