"""The fastest of all plans of a small graph under a limit, and the least peak of any: exact, by search.

The space is that of the planner's own model, without its candidates, its candidates and its prices:

    dropped      every tensor that an operator makes and the step does not return, kept or stored no longer than the place that
                 makes it or one of those that read it
    boundaries   any places, in any number (at least two segments; the step as one executable is a plan too)
    absences     any set of the gaps between two needs of a tensor that may be swapped; leave and back at any place in between,
                 with a boundary from which it is away

A plan's time is `build_plan`'s `step_us`; its peak is `build_plan`'s `peak_bytes` with the workspaces that a table with a
candidate at every place estimates. The iteration begins and ends with the state on the device.

Places of absences. `build_plan` issues and awaits copies at boundaries alone: two leave places between the same two boundaries
are one, and so are two back places. A tensor that is back before there was a boundary without it has gained nothing, and holds
no less than one that stayed: `made` and `workspace` count a swapped tensor as a result of the segment that makes it, which it is
as soon as there is a boundary in its gap. So at each boundary each tensor on its way out is awaited or not, each one on the host
brought in or not, and nothing else can be told apart. Copies issued at one boundary leave in any order here; `build_plan` has
them leave in the order in which they are awaited, which ends no later.

Without `idle_drops`, a dropped tensor has a boundary between the last place that it is stored for and the next one that needs it.
An idle drop changes nothing that runs, but it does change what `boundary_table` expects of the workspace: plans that gain by it
gain on paper only.

Pruning, all of it sound. `workspace` does not depend on absences, for the reason above. With every tensor away wherever nothing
needs it and copies for nothing, a retention's segments hold least and the shortest path over them is a lower bound on its plans;
first with no workspace at all, so that tables are laid for the retentions in question only, best first. Within one
retention, labels (clock, lanes, ends of copies) at a boundary are dominated by those that are no later in anything, and
what remains to be run is bounded by the same shortest path. `unpruned.py` knows none of this.

Times in microseconds, sizes in bytes, as in `plan/`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from tensile_jax.ir import Graph, TensorId
from tensile_jax.plan import DeviceProfile, Measured
from tensile_jax.plan.analysis.liveness import Liveness
from tensile_jax.plan.analysis.residency import Absences, find_residencies
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
    """The fastest plan under a limit: its step, and what it does; no layout where the step runs whole."""

    step_us: float
    layout: Layout | None


@dataclass(frozen=True, eq=False)
class Segments:
    """Of one retention, for every pair of places a < b: bytes held, workspace, and microseconds with what runs again.

    `away` are bytes that nothing needs in [a, b) and that may be on the host.
    """

    held: np.ndarray
    workspace: np.ndarray
    us: np.ndarray
    away: np.ndarray


class Oracle:
    """Every retention of one graph, with what each must hold at least."""

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
        """Microseconds of what a segment from `a` to each place runs again; what is stored at `a` decides."""
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
        """The least peak of any plan. Everything is away where nothing needs it; time is no object."""
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
    """Every choice of what is dropped, and after which place; later tensors first, since they say what needs the earlier ones."""
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
    """Least sums along paths of two segments or more, where there are two; and from where each place is reached."""
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
    """The same for the largest along a path."""
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
