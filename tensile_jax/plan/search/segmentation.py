"""Cuts the step into segments: finds the cheapest boundaries with which every segment stays under a memory limit.

A *place* is the position of an operator in the order of execution, and boundary b lies before the operator at place b. The
segment [a, b) runs as one executable. XLA holds its inputs until it ends and its outputs from its start, so that

    peak(a, b)      = stored(a) + made(a, b) + workspace(a, b)
    stored(a)       = bytes of the tensors that are on the device at boundary a
    made(a, b)      = bytes of the tensors that begin in [a, b) and are stored at b
    workspace(a, b) = max over places q in [a, b) of the materialised bytes that begin and end inside and are live at q

    cost(a, b)      = launch + (bytes that would not have been written without the boundary b) / bytes_per_us
                      + latency of what [a, b) computes again

A tensor is materialised if XLA writes it to memory even inside an executable (`analysis/fusion.py`). The workspace also contains
what is live while tensors are computed again, and copies into other layouts on a backend that needs them. The buffers of outputs
that are not written yet reduce it, because XLA uses them for temporaries. A materialised tensor that crosses b would be written
anyway; a tenth of its bytes is counted nevertheless, so that boundaries are preferred at which little is stored.

Cost and peak depend on the two ends of a segment only. The cheapest segmentation in which every peak is under a limit is
therefore a shortest path. Dynamic programming finds it exactly over a set of possible boundaries: between any two heavy
operators, the earliest place at which least is stored. Where light operators between them make much, as an optimizer does, there
are several. `cost` and the parts of `peak` are matrices over pairs of possible boundaries, computed by cumulative sums.

Ties go to the earlier boundary: a late one would split what XLA fuses (measured for the design: 15 % more memory traffic).

Sizes in bytes, times in microseconds.
"""

from collections.abc import Sequence, Set
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from tensile_jax.ir import TensorId
from tensile_jax.plan.analysis.device_profile import DeviceProfile
from tensile_jax.plan.analysis.fusion import Fusion
from tensile_jax.plan.analysis.latency import rerun_latencies
from tensile_jax.plan.analysis.absence import Residency, columns, stored_bytes
from tensile_jax.plan.analysis.retention import Retention

_MOST_CANDIDATES = 192  # possible boundaries
_CROSSING = 0.1  # the part of its bytes that counts as written if a materialised tensor crosses a boundary


@dataclass(frozen=True, slots=True, eq=False)
class BoundaryTable:
    """The possible boundaries (ascending, with 0 and the end), and cost and peak of the segment between any two of them.

    `cost` (microseconds), `held` (stored and made, bytes), `workspace` (bytes, with the best schedule that XLA could find) and
    `kernels` (the number of heavy operators) are square arrays that are valid above the diagonal only.
    """

    boundaries: tuple[int, ...]
    cost: np.ndarray
    held: np.ndarray
    workspace: np.ndarray
    kernels: np.ndarray

    def estimates(self, growth: float) -> np.ndarray:
        """Workspaces as XLA's schedule needs them: each heavy operator adds the part `growth`."""
        return np.ceil(self.workspace * (1.0 + growth * self.kernels))


def boundary_table(
    retention: Retention,
    fusion: Fusion,
    profile: DeviceProfile,
    *,
    residencies: Sequence[Residency],
    boundaries: tuple[int, ...] | None = None,
    own: tuple[int, ...] = (),
) -> BoundaryTable:
    """Cost and peak of every segment between possible boundaries.

    Args:
        boundaries: the possible boundaries; if None, they are found.
        own: boundaries of a policy, ascending. They are possible, and a segment with one of them inside holds infinitely much.
    """
    liveness, graph = retention.liveness, retention.liveness.graph
    count = len(graph.operators)
    stored = stored_bytes(residencies, count)
    boundaries = boundaries or _candidate_boundaries(retention, stored, own)
    k = len(boundaries)
    bucket = np.searchsorted(np.array(boundaries), np.arange(count + 1), side="right") - 1  # of a place
    bucket[count] = k - 1

    def histogram(first: np.ndarray, last: np.ndarray, weight: np.ndarray) -> np.ndarray:
        flat = np.bincount(bucket[first] * (k + 1) + bucket[last], weights=weight, minlength=(k + 1) ** 2)
        return flat.reshape(k + 1, k + 1)

    tensor, nbytes, begin, end, whole = columns([residency for residency in residencies if residency.begin >= 0])
    until = np.where(whole, end, count)  # a swapped tensor is never inside one segment alone: it is an input or an output
    made_bytes = _count_crossing(histogram(begin, until, nbytes))[:k, :k]
    crossing = nbytes * np.where(fusion.written[tensor], _CROSSING, 1.0)
    written_bytes = _count_crossing(histogram(begin, until, crossing))[:k, :k]
    result = begin == liveness.begins[tensor]  # not brought in from the host
    lent = _count_crossing(histogram(begin[result], until[result], nbytes[result]))[:k, :k]
    again_us = _again(retention, fusion, profile, bucket, k)
    base = stored[list(boundaries)]
    inside = _temporaries(retention, fusion, {residency.tensor for residency in residencies if not residency.whole})
    work = _workspace(retention, fusion, profile, boundaries, bucket, histogram(*inside), inside, lent)
    heavy = np.cumsum([0, *(liveness.kinds == "heavy")])[list(boundaries)]
    cost = profile.launch_us + written_bytes / profile.bytes_per_us + again_us
    across = np.searchsorted(own, boundaries)[None, :] > np.searchsorted(own, boundaries, side="right")[:, None]
    held = np.where(across, np.inf, base[:, None] + made_bytes)
    return BoundaryTable(boundaries, cost, held, work, np.maximum(heavy[None, :] - heavy[:, None], 0))


def _temporaries(retention: Retention, fusion: Fusion, away: Set[TensorId]) -> np.ndarray:
    """Columns (first place, last place, bytes) of all tensors that may exist only inside a segment, also recomputed ones."""
    liveness = retention.liveness
    begin, end, nbytes = liveness.begins, retention.ends, liveness.nbytes
    there = fusion.written & (begin >= 0) & (nbytes > 0)
    own = there & (end < len(liveness.graph.operators))
    own[[*retention.aliases.values(), *away]] = False
    again: list[tuple[int, int, int]] = []
    for t, last in retention.dropped.items():
        if there[t]:
            places = pairwise([last, *_read_again(retention, t)])
            # at `before` it is counted as a use, or with the chain that makes it
            again += [(before + 1, place, int(nbytes[t])) for before, place in places if place > before + 1]
    return np.concatenate(
        [np.array([begin[own], end[own], nbytes[own]]), np.array(again, dtype=np.int64).reshape(-1, 3).T], axis=1
    )


def _candidate_boundaries(retention: Retention, stored: np.ndarray, own: Sequence[int]) -> tuple[int, ...]:
    liveness = retention.liveness
    count = len(liveness.graph.operators)
    heavy: list[int] = np.flatnonzero(liveness.kinds == "heavy").tolist()
    made: list[int] = [0, *np.cumsum(liveness.makes.sums(liveness.nbytes)).tolist()]
    free = stored.astype(float)
    free[_after_folded_transpose(retention)] = np.inf
    chosen = {0, count, *own}
    bucket_bytes = max(float(stored.max()) / 48, 1.0)
    for first, last in zip([0, *heavy], [*heavy, count], strict=True):
        if last <= first:
            continue
        # The light operators after one heavy operator are divided by the bytes that they make (an optimizer makes many).
        pieces = max(1, min(32, int((made[last] - made[first + 1]) // bucket_bytes)))
        edges = (
            sorted({int(edge) for edge in np.linspace(first + 1, last + 1, pieces + 1)}) if pieces > 1 else (first + 1, last + 1)
        )
        for low, high in pairwise(edges):
            narrowest = low + int(free[low:high].argmin())
            if free[narrowest] < np.inf:
                chosen.add(narrowest)
    ordered = sorted(chosen)
    if len(ordered) > _MOST_CANDIDATES:
        must = {0, count, *own}
        rest = [b for b in ordered if b not in must]
        stretches = np.array_split(np.array(rest), max(1, _MOST_CANDIDATES - len(must)))
        ordered = sorted(
            must | {int(s[np.argmin(stored[s])]) for s in stretches if s.size}
        )  # of each stretch, the boundary at which least is stored
    return tuple(ordered)


def _after_folded_transpose(retention: Retention) -> list[int]:
    """Boundaries at which XLA would have folded a transposition into the heavy operator before it."""
    begin, operators = retention.liveness.begin, retention.liveness.graph.operators
    return [
        place
        for place, op in enumerate(operators)
        if op.primitive == "transpose" and begin[op.inputs[0]] == place - 1 and operators[place - 1].kind == "heavy"
    ]


def _count_crossing(grid: np.ndarray) -> np.ndarray:
    """M[a, b] = sum of grid[u, v] over a <= u < b <= v."""
    from_right = np.cumsum(grid[:, ::-1], axis=1)[:, ::-1]  # R[u, b] = sum over v >= b
    above = np.vstack([np.zeros((1, grid.shape[1])), np.cumsum(from_right, axis=0)])  # A[a, b] = sum over u < a
    size = grid.shape[0]
    diagonal = above[np.arange(size), np.arange(size)]  # sum over u < b <= v
    return diagonal[None, :] - above[:size, :]


def _workspace(
    retention: Retention,
    fusion: Fusion,
    profile: DeviceProfile,
    boundaries: tuple[int, ...],
    bucket: np.ndarray,
    grid: np.ndarray,
    inside: np.ndarray,
    lent: np.ndarray,
) -> np.ndarray:
    """W[a, b], the workspace of the segment between the possible boundaries a and b.

    A *bucket* is the stretch of places from one possible boundary to the next. G[u, v] are the bytes of the tensors that begin in
    bucket u and end in bucket v > u, and P[u, v] is the sum of G over all buckets before u and before v. alone[q] is the most
    that is live in bucket q of what begins and ends there. later[q, b] are the bytes of outputs that are made between bucket q
    and b; XLA uses the buffers of outputs that are not written yet.

        W[a, b] = max over buckets q in [a, b) of P[q + 1, b] - P[a, b] - P[q + 1, q] + P[a, q] + alone[q] - later[q, b]
    """
    k = len(boundaries)
    liveness = retention.liveness
    count = len(liveness.graph.operators)
    first, last, weight = inside
    same = bucket[first] == bucket[last]
    change = np.bincount(first[same], weights=weight[same], minlength=count + 2)
    change -= np.bincount(last[same] + 1, weights=weight[same], minlength=count + 2)
    live = np.cumsum(change)[:count] + chains(retention, fusion)
    if profile.canonical_layouts:
        live += liveness.relayout
    alone = np.maximum.reduceat(live, boundaries[:-1])
    cross = grid[:k, :k].copy()
    np.fill_diagonal(cross, 0.0)
    before = np.zeros((k + 1, k + 1))
    before[1:, 1:] = np.cumsum(np.cumsum(cross, axis=0), axis=1)
    work = np.full((k, k), -np.inf)
    for q in range(k - 1):
        after = slice(q + 1, k)
        tail = before[q + 1, after] - before[q + 1, q] + alone[q] - lent[q + 1, after]  # lent: results of [q + 1, b)
        np.maximum(work[: q + 1, after], before[: q + 1, q, None] + tail, out=work[: q + 1, after])
    return np.maximum(work - before[:k, :k], 0.0)


def _read_again(retention: Retention, tensor: TensorId) -> list[int]:
    """The places that read a dropped tensor even if its segment contains the need before: the first need, and some of the others.

    If a segment contains two needs, what is computed again for the first one is still there for the second. What it was computed
    from is not read a second time.
    """
    liveness, end = retention.liveness, retention.end[tensor]
    needs = [p for p in retention.needs[tensor] if p > end]
    before = dict(zip(needs[1:], needs, strict=False))
    read = {*needs[:1], *(p for p in liveness.uses[tensor] if p > end)}
    for reader in liveness.uses[tensor]:
        runs = retention.reruns[reader]
        read.update(p for last, p in zip((-1, *runs), runs, strict=False) if p > end and before.get(p, -1) != last)
    return sorted(read)


def chains(retention: Retention, fusion: Fusion) -> np.ndarray:
    """For each place, the most bytes that are live while the dropped tensors that it is the first to need are computed again.

    A *chain* are the operators that run again for this. Later readers in the same segment find the results of the chain in
    memory; these are counted with the tensors that live across places.
    """
    liveness = retention.liveness
    operators, tensors = liveness.graph.operators, liveness.graph.tensors
    chain: dict[int, list[int]] = {}  # by the first place to need it
    for place, runs in enumerate(retention.reruns):
        if runs:
            chain.setdefault(runs[0], []).append(place)
    most = np.zeros(len(operators))
    for need, everything in chain.items():
        places = [place for place in everything if any(fusion.materialised[t] for t in operators[place].outputs)]
        if not places:
            continue
        members = {t for place in places for t in operators[place].outputs if fusion.materialised[t]}
        last: dict[int, int] = dict.fromkeys(operators[need].inputs, need)
        for place in reversed(everything):  # what a fused operator reads is read where its results are
            op = operators[place]
            until = max((last.get(t, need) for t in op.outputs), default=need) if op.kind == "light" else place
            if any(t in members for t in op.outputs):
                until = place
            for t in op.inputs:
                last[t] = max(last.get(t, 0), until)
        live = peak = 0
        ends: dict[int, int] = {}
        for place in places:
            for t in operators[place].outputs:
                if t in members:
                    live += tensors[t].nbytes
                    until = last.get(t, need)
                    ends[until] = ends.get(until, 0) + tensors[t].nbytes
            peak = max(peak, live)
            live -= ends.pop(place, 0)
        most[need] = peak
    return most


def _again(retention: Retention, fusion: Fusion, profile: DeviceProfile, bucket: np.ndarray, k: int) -> np.ndarray:
    """R[a, b] = microseconds of what the segment [a, b) computes again, each operator once."""
    liveness = retention.liveness
    operators = liveness.graph.operators
    grid = np.zeros((k + 1, k + 1))
    before: list[int] = []
    after: list[int] = []
    places: list[int] = []
    latencies = rerun_latencies(liveness, fusion, profile)
    for place, runs in enumerate(retention.reruns):
        if runs and latencies[place] > 0.0:
            stored_until = max(retention.end[t] for t in operators[place].outputs)
            before += [max(stored_until, place), *runs[:-1]]
            after += runs
            places += [place] * len(runs)
    if before:
        np.add.at(grid, (bucket[np.array(before)], bucket[np.array(after)]), latencies[np.array(places)])
    # sum over u < a <= v < b
    total = np.zeros((k + 2, k + 2))
    total[1:, 1:] = np.cumsum(np.cumsum(grid, axis=0), axis=1)
    return np.maximum(total[:k, :k] - total.diagonal()[:k, None], 0.0)


class Cut(NamedTuple):
    """A segmentation, and the microseconds that it adds to the step."""

    cost: float
    boundaries: tuple[int, ...]


def cheapest_cut(table: BoundaryTable, workspaces: np.ndarray, limit: float) -> Cut | None:
    """The cheapest segmentation, of two segments or more, in which no segment's peak exceeds `limit`, or None.

    Args:
        workspaces: of every segment, in the order of `table.boundaries`.
    """
    peak = table.held + workspaces
    k = len(table.boundaries)
    total = np.full(k, np.inf)
    total[0] = 0.0
    back = np.zeros(k, dtype=int)
    for b in range(1, k):
        through = np.where(peak[:b, b] <= limit, total[:b] + table.cost[:b, b], np.inf)
        if b == k - 1 and b > 1:
            through[0] = np.inf  # the step as one executable is plain jit's, not a segmentation
        a = int(np.argmin(through))
        total[b], back[b] = through[a], a
    return Cut(float(total[-1]), _path(table, back)) if np.isfinite(total[-1]) else None


def least_peak(table: BoundaryTable, workspaces: np.ndarray) -> int:
    """The smallest limit for which there is a segmentation of two segments or more."""
    peak = table.held + workspaces
    k = len(table.boundaries)
    worst = np.full(k, np.inf)
    worst[0] = 0.0
    for b in range(1, k):
        first = 1 if b == k - 1 and b > 1 else 0
        worst[b] = np.min(np.maximum(worst[first:b], peak[first:b, b]))
    return int(np.ceil(worst[-1]))


def pressure(retention: Retention, fusion: Fusion, profile: DeviceProfile) -> np.ndarray:
    """For each place, the bytes that its operator needs beyond what is stored before it; what XLA fuses away does not count."""
    liveness = retention.liveness
    added = np.where(fusion.written, liveness.nbytes, 0)
    added[list(retention.aliases.values())] = 0
    alone = chains(retention, fusion) + liveness.makes.sums(added)
    return alone + liveness.relayout if profile.canonical_layouts else alone


def _path(table: BoundaryTable, back: np.ndarray) -> tuple[int, ...]:
    path = [len(table.boundaries) - 1]
    while path[-1] > 0:
        path.append(int(back[path[-1]]))
    return tuple(table.boundaries[i] for i in reversed(path))
