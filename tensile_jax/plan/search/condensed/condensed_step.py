"""Reduces a step to what matters for planning: its large tensors, and the groups of operators that make them.

A step has thousands of equations, most of them cheap and on small tensors. The search (`moves/local_search.py`) works on a
*condensed* step, in which a plan is evaluated much faster. A *segment* is a stretch of operators that is compiled as one
executable; boundaries lie between segments. A tensor is *large* if it has at least a 4,000th of the most bytes that are live at
once. If the tensors below this threshold together have more than 30 % of that maximum, the threshold is lowered. Every tensor
of the step belongs to one of four classes:

    owned         an input that belongs to the caller, or a constant: always on the device
    significant   a large tensor that XLA writes to memory, or that is expensive to compute again, or that a minimum cut decides
                  to keep (`analysis/minimum_cut.py`). The search decides when it is on the device
    derived       any other large tensor, and any tensor that costs next to nothing to compute again (`analysis/fusion.py`). It
                  is not kept between segments. Each segment that needs it computes it again
    small         any other tensor: it is kept from where it is made to where it is needed last

A *node* is a series of consecutive operators that ends where a significant tensor is made or where a boundary may lie. A
segment consists of the nodes between two boundaries. A node counts as reading significant tensors only: instead of a derived
tensor, it reads the significant tensors from which the derived tensor is computed. A *recipe* says how to compute significant
tensors again: the operator that makes them runs once more.

Computing a derived tensor again mostly takes no time, because XLA fuses it into the operators that read it. It takes time
mainly if a heavy operator (one that XLA runs as a kernel of its own) reads the tensor, because XLA must then write the tensor
to memory inside the segment. If a segment computes such a tensor again, the time of the operator that makes the tensor is added
to the segment's time.

Sets of significant tensors, and sets of operators that make derived tensors, are represented as the bits of an integer. Sizes in
bytes, times in microseconds.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import numpy as np

from tensile_jax.ir import TensorId
from tensile_jax.plan.analysis.fusion import Fusion
from tensile_jax.plan.analysis.latency import StepCosts
from tensile_jax.plan.analysis.liveness import Liveness

# Each trades the fineness of the account for the time of the search (`make bench-constants`).
_SHARE = 1 / 4000  # of the most bytes that are live at once: the size from which a tensor is significant
_SMALL_SHARE = 0.3  # of the same bytes: the most that all small tensors may have together
_CROSSING = 0.1  # of its bytes: what a tensor that XLA writes anyway costs more as a result of a segment
_MANY = 24  # bits of a set that are found faster as an array than one by one (`make bench-scale`)
_CHEAP_US = 1.0  # a light operator that takes longer to run again makes significant tensors


@dataclass(frozen=True, slots=True, eq=False)
class Recipe:
    """How to compute significant tensors again: what a recipe reads and makes (sets), its time, and its extra bytes.

    `through` is the set of the operators that make the derived tensors through which the recipe reads; `us` does not contain
    their time. The extra bytes are needed beside significant tensors: for copies of operands into another layout, and for derived
    tensors that XLA must write to memory because a heavy operator reads them.
    """

    reads: int
    makes: int
    through: int
    us: float
    extra: int
    heavy: int


class _Sizes(dict[int, int]):
    """Sizes of sets of tensors, each computed once."""

    def __init__(self, bytes_of: Callable[[int], int]) -> None:
        super().__init__()
        self._bytes_of = bytes_of

    def __missing__(self, those: int) -> int:
        self[those] = found = self._bytes_of(those)
        return found


@dataclass(frozen=True, eq=False)
class Condensed:
    """A condensed step.

    Attributes:
        tensors: the significant tensors, in the order in which they are made; the bit of `tensors[i]` is `1 << i`. Each is a
            tuple of one, or, in a bundled step (`bundles.py`), of several tensors that are decided about together.
        nbytes: their sizes.
        recipes: for each, how to compute it again; None if that is impossible.
        made: for each, the node that makes it; -1 for an input.
        written: the set of those that XLA writes to memory even inside an executable.
        written_as_made: those of them that it writes in the layout in which other segments would read them.
        starts: for each node, the place of its first operator; the number of operators at the end.
        reads, makes: for each node, sets.
        through: for each node, the set of the operators, made before it, of the derived tensors through which it reads.
        derived_us: for each operator that makes derived tensors and takes time to run again, that time, in order of execution.
        derived_before: for each node, how many of these operators run before it.
        us, extra, heavy: for each node, its time, the bytes that it needs beside significant tensors, and its heavy operators.
        boundaries: the nodes before which a boundary may lie, ascending; 0 and the number of nodes at the ends.
        aliases: by the bit index of donated state, the bit index of the update that takes over its memory.
        at_begin, at_end: the sets of tensors on the device when the iteration begins, and that must be there when it ends.
        movable: the set of those that may be swapped.
        in_one_program: whether the step becomes one executable, which holds its arguments and results (`held`).
        alone: indices of `boundaries` after which one operator must be a segment by itself.
        pairs: bit indices of donated state that may be on the host across the iteration boundary, with its update's.
        base_bytes: the bytes of what the caller owns.
        small_bytes: small tensors that a segment holds, by the indices of its two boundaries.
        sources: of a bundled step, what each bundle that XLA does not write is computed from, by the bundle's bit (`1 << i`). In
            a step without bundles, that is what its node reads.
    """

    tensors: tuple[tuple[TensorId, ...], ...]
    nbytes: tuple[int, ...]
    recipes: tuple[Recipe | None, ...]
    made: tuple[int, ...]
    written: int
    written_as_made: int
    starts: tuple[int, ...]
    reads: tuple[int, ...]
    makes: tuple[int, ...]
    through: tuple[int, ...]
    derived_us: tuple[float, ...]
    derived_before: tuple[int, ...]
    us: tuple[float, ...]
    extra: tuple[int, ...]
    heavy: tuple[int, ...]
    boundaries: tuple[int, ...]
    aliases: dict[int, int]
    at_begin: int
    at_end: int
    movable: int
    in_one_program: bool
    alone: frozenset[int]
    pairs: tuple[tuple[int, int], ...]
    base_bytes: int
    small_bytes: np.ndarray
    sources: Mapping[int, int] = field(default_factory=dict[int, int])

    @cached_property
    def sizes(self) -> _Sizes:
        """The bytes of a set of tensors, as `bytes_of`; remembered, so for sets that come back."""
        return _Sizes(self.bytes_of)

    @cached_property
    def held(self) -> int:
        """The set of those that may be swapped only if they are on the host across the iteration boundary.

        An executable holds the memory of its arguments to its end, or until results take it over (`result/joined.py`).
        """
        return self.at_begin | self.at_end if self.in_one_program else 0

    def crossing_bytes(self, results: int) -> float:
        """The bytes that count as written in addition, if these tensors are results of a segment."""
        sizes = self.sizes
        return sizes[results & ~self.written_as_made] + _CROSSING * sizes[results & self.written_as_made]

    @cached_property
    def _nbytes(self) -> np.ndarray:
        return np.array(self.nbytes, dtype=np.int64)

    def bytes_of(self, those: int) -> int:
        """The bytes of a set of tensors."""
        if those.bit_count() >= _MANY:
            return int(self._nbytes[_indices(those)].sum())
        total = 0
        nbytes = self.nbytes
        while those:
            low = those & -those
            total += nbytes[low.bit_length() - 1]
            those ^= low
        return total


def members(those: int) -> list[int]:
    """The bit indices in a set, ascending."""
    if those.bit_count() >= _MANY:
        indices: list[int] = _indices(those).tolist()
        return indices
    found: list[int] = []
    while those:
        low = those & -those
        found.append(low.bit_length() - 1)
        those ^= low
    return found


def _indices(those: int) -> np.ndarray:
    """The bit indices in a set, ascending."""
    packed = np.frombuffer(those.to_bytes((those.bit_length() + 7) // 8, "little"), dtype=np.uint8)
    return np.flatnonzero(np.unpackbits(packed, bitorder="little"))


def classify(
    liveness: Liveness, fusion: Fusion, rerun_us: np.ndarray, *, kept_by_cuts: np.ndarray, live_bytes: int
) -> tuple[np.ndarray, np.ndarray]:
    """Which tensors are significant, and which are derived; two arrays by tensor.

    Args:
        rerun_us: microseconds to run each operator again, by place.
        kept_by_cuts: for each tensor, whether a minimum cut keeps it at some price.
        live_bytes: the most bytes that are live at once.
    """
    nbytes = liveness.nbytes
    made_by_light, expensive = np.zeros((2, len(nbytes)), dtype=bool)
    made_by_light[liveness.makes.tensor[(liveness.kinds == "light")[liveness.makes.place]]] = True
    expensive[liveness.makes.tensor[rerun_us[liveness.makes.place] > _CHEAP_US]] = True
    owned, fixed = np.zeros((2, len(nbytes)), dtype=bool)
    owned[list(liveness.kept_by_caller)] = True
    fixed[[*liveness.made_once, *liveness.graph.outputs]] = True
    virtual = np.array(fusion.virtual, dtype=bool) & ~fixed
    matters = ~owned & ~virtual & (nbytes > 0) & (fusion.written | expensive | fixed | kept_by_cuts | ~made_by_light)
    ascending = np.sort(nbytes[matters])
    most_small = ascending[: np.searchsorted(np.cumsum(ascending), _SMALL_SHARE * live_bytes)].max(initial=0)
    threshold = max(1, min(int(live_bytes * _SHARE), int(most_small) + 1))
    significant = matters & (nbytes >= threshold)
    derived = ~significant & ~owned & ~fixed & ((made_by_light & (nbytes >= threshold)) | virtual)
    both = liveness.makes.sums(significant.astype(np.int64)) > 0  # an operator makes tensors of one of the two classes only
    beside = np.zeros(len(nbytes), dtype=bool)
    beside[liveness.makes.tensor[both[liveness.makes.place]]] = True
    beside &= derived
    return significant | beside, derived & ~beside


def condense(
    liveness: Liveness,
    fusion: Fusion,
    costs: StepCosts,
    *,
    significant: np.ndarray,
    derived: np.ndarray,
    boundaries: Sequence[int],
    last_needed: np.ndarray,
    smallest_swap: int | None,
    relayout: bool,
    pairs: Sequence[tuple[TensorId, TensorId]],
    in_one_program: bool,
) -> Condensed:
    """The condensed step.

    Args:
        significant, derived: the classes of tensors (`classify`).
        boundaries: the places before which a segment may begin, with 0 and the number of operators.
        last_needed: for each tensor, the last place that may need it under any plan.
        smallest_swap: bytes; smaller tensors are never swapped. None if no tensor is.
        relayout: whether the backend copies operands into other layouts.
        pairs: donated state and its updates that may be on the host across the iteration boundary.
        in_one_program: `Condensed.in_one_program`.
    """
    graph = liveness.graph
    operators, count = graph.operators, len(graph.operators)
    nbytes, begins = liveness.nbytes, liveness.begins
    rerun_us = np.array(costs.rerun_us)
    owned = np.zeros(len(nbytes), dtype=bool)
    owned[list(liveness.kept_by_caller)] = True
    small = ~significant & ~owned & ~derived
    results = set(graph.outputs)

    order = sorted(np.flatnonzero(significant).tolist(), key=lambda t: (int(begins[t]), t))
    bit = {t: i for i, t in enumerate(order)}
    roots, passed, derived_places = _roots(liveness, bit, derived, rerun_us)

    made_at = np.zeros(count + 1, dtype=bool)  # a node begins here
    for place, op in enumerate(operators):
        if any(t in bit for t in op.outputs):
            made_at[place + 1] = True
    made_at[list(boundaries)] = True
    made_at[count] = False
    starts = (*np.flatnonzero(made_at).tolist(), count) if count else (0,)
    node_of = np.searchsorted(np.array(starts), np.arange(count + 1), side="right") - 1
    elapsed = np.concatenate([[0.0], np.cumsum(costs.latencies)])
    heavy = np.concatenate([[0], np.cumsum(liveness.kinds == "heavy")])
    extra = liveness.reads.sums(np.where(derived & fusion.written, nbytes, 0)) + np.array([op.inner for op in operators], float)
    if relayout:
        extra = extra + liveness.relayout
    reads: list[int] = []
    makes: list[int] = []
    through: list[int] = []
    copied: list[int] = []
    for first, end in pairwise(starts):
        read = made = passes = 0
        for op in operators[first:end]:
            for u in op.inputs:
                if begins[u] < first:
                    read |= roots[u]
                    passes |= passed[u]
            for t in op.outputs:
                if t in bit:
                    made |= 1 << bit[t]
        reads.append(read & ~made)
        makes.append(made)
        through.append(passes)
        copied.append(int(extra[first:end].max()))

    recipes: list[Recipe | None] = []
    for t in order:
        place = int(begins[t])
        if place < 0 or t in liveness.made_once:
            recipes.append(None)
            continue
        op = operators[place]
        read = passes = 0
        for u in op.inputs:
            read |= roots[u]
            passes |= passed[u]
        made = 0
        for u in op.outputs:
            if u in bit:
                made |= 1 << bit[u]
        recipes.append(Recipe(read & ~made, made, passes, float(rerun_us[place]), int(extra[place]), int(op.kind == "heavy")))

    aliases = {bit[t]: bit[h] for t, h in liveness.aliases if t in bit and h in bit}
    edges = tuple(int(node_of[b]) if b < count else len(starts) - 1 for b in boundaries)
    ours = [t for t in order if not graph.tensors[t].dtype.startswith("key<")]
    return Condensed(
        tensors=tuple((TensorId(t),) for t in order),
        nbytes=tuple(int(nbytes[t]) for t in order),
        recipes=tuple(recipes),
        made=tuple(int(node_of[begins[t]]) if begins[t] >= 0 else -1 for t in order),
        written=sum(1 << bit[t] for t in order if fusion.materialised[t]),
        written_as_made=sum(1 << bit[t] for t in order if fusion.written_as_made[t]),
        starts=tuple(starts),
        reads=tuple(reads),
        makes=tuple(makes),
        through=tuple(through),
        derived_us=tuple(float(rerun_us[place]) for place in derived_places),
        derived_before=tuple(np.searchsorted(derived_places, starts[:-1]).tolist()),
        us=tuple(float(elapsed[b] - elapsed[a]) for a, b in pairwise(starts)),
        extra=tuple(copied),
        heavy=tuple(int(heavy[b] - heavy[a]) for a, b in pairwise(starts)),
        boundaries=edges,
        aliases=aliases,
        at_begin=sum(1 << bit[t] for t in order if begins[t] < 0),
        at_end=sum(1 << bit[t] for t in order if t in results),
        movable=sum(1 << bit[t] for t in ours if smallest_swap is not None and nbytes[t] >= smallest_swap),
        in_one_program=in_one_program,
        alone=frozenset(i for i, place in enumerate(boundaries) if place < count and operators[place].alone),
        pairs=tuple((bit[old], bit[new]) for old, new in pairs if old in bit and new in bit),
        base_bytes=int(nbytes[owned].sum()),
        small_bytes=_small_bytes(liveness, small, last_needed, boundaries),
    )


def _roots(
    liveness: Liveness, bit: dict[int, int], derived: np.ndarray, rerun_us: np.ndarray
) -> tuple[list[int], list[int], list[int]]:
    """For each tensor, the significant tensors from which it is computed through derived ones, and the operators that it takes.

    Of these operators, there are only those that take time to run again; their places come third.
    """
    roots, passed = [0] * len(derived), [0] * len(derived)
    places: list[int] = []
    for t, i in bit.items():
        roots[t] = 1 << i
    for place, op in enumerate(liveness.graph.operators):
        if any(derived[t] for t in op.outputs):
            read = passes = 0
            for u in op.inputs:
                read |= roots[u]
                passes |= passed[u]
            if rerun_us[place] > 0:
                passes |= 1 << len(places)
                places.append(place)
            for t in op.outputs:
                roots[t], passed[t] = (read, passes) if derived[t] else (roots[t], passed[t])
    return roots, passed, places


def _small_bytes(liveness: Liveness, small: np.ndarray, last_needed: np.ndarray, boundaries: Sequence[int]) -> np.ndarray:
    """The bytes of small tensors that a segment between two boundaries holds: those it begins with, and those that outlast it."""
    count, k = len(liveness.graph.operators), len(boundaries)
    nbytes = np.where(small, liveness.nbytes, 0)
    end = np.minimum(last_needed, count)
    for old, new in liveness.aliases:
        if small[old] and small[new]:
            end[old] = end[new]
            nbytes[new] = 0
    there = (nbytes > 0) & (end > liveness.begins)
    edges = np.array(boundaries)
    begin, until, weight = liveness.begins[there], end[there], nbytes[there]
    first = np.searchsorted(edges, begin, side="right")  # the first boundary at which it may be stored
    last = np.searchsorted(edges, until, side="right") - 1  # the last one
    crosses = first <= last
    stored = np.zeros(k + 1, dtype=np.int64)
    np.add.at(stored, first[crosses], weight[crosses])
    np.add.at(stored, last[crosses] + 1, -weight[crosses])
    stored = np.cumsum(stored)[:k]
    grid = np.zeros((k + 1, k + 1), dtype=np.int64)  # by first and last boundary
    np.add.at(grid, (first[crosses], last[crosses]), weight[crosses])
    from_right = np.cumsum(grid[:, ::-1], axis=1)[:, ::-1]
    made = np.cumsum(from_right, axis=0)  # [f, b]: those with first <= f and last >= b
    held = np.zeros((k, k), dtype=np.int64)
    for b in range(k):
        held[:, b] = stored + np.maximum(made[b, b] - made[:k, b], 0)
    return held
