"""Predicts which tensors XLA fuses away inside an executable, and which ones it writes to device memory.

XLA runs a *heavy* operator, such as a matrix product, as a kernel of its own. XLA fuses all other operators, the *light* ones,
into their consumers. So most results of light operators never exist in memory. A tensor is *materialised* (written to memory) in
these cases:

    - it is an input, or a heavy operator makes it or reads it. There is one exception: a tensor that a light operator makes and
      a scatter updates, such as zeros. XLA computes this tensor directly in the memory of the scatter's result
    - a reduction reads it. Some backends do not write it then: they compute on the fly what a reduction reads, and also what a
      gather reads
    - it is expensive to compute, and several kernels would have to compute it (`tanh` on a GPU; `exp`, a division and others on a
      CPU). On a CPU, a padded tensor is written even for one kernel

Every other tensor is computed on the fly from its *leaves*, the tensors from which a chain of light operators computes it:

    leaves(t) = {t}                                     if t is an input, if a heavy operator or a reduction makes t, if a heavy
                                                        operator reads t, if t is materialised because it is expensive, or if t
                                                        would have more than 12 leaves
              = union of leaves(u) for all inputs u     otherwise
                of the operator that makes t

The planner uses these properties of tensors t and operators o:

    virtual(t)  t is never stored, because computing it again costs next to nothing: a broadcast, a mask, a cast of a parameter. A
                light operator makes t, the step does not return t, and the leaves of t that the caller does not own have at most
                a sixteenth of the bytes of t. A small view (the same numbers in another shape) is virtual too. So are statistics
                (below), if the backend computes on the fly what a reduction reads
    relaid(t)   a light operator makes t, and heavy operators read t only through copies in another layout (`Operator.relaid`).
                XLA writes these copies. It writes t itself only if another segment needs t
    more(o)     how many bytes more a kernel reads if it computes o on the fly:
                (bytes of the leaves of all inputs) - max(bytes of the result, most bytes that the leaves of one input have)
    join        a light operator o, such as a residual sum, that brings large leaves of several inputs together: more(o) is above
                a quarter of the bytes of its result
    reread(o)   more(o) * number of kernels that compute o (at most 4 count) if o is a join; 0 otherwise
    statistic   the result of a reduction over rows, such as the maximum in a softmax, if light operators combine it with the
                tensor that was reduced, and make an input of a heavy operator from both. All of this must lie in one pass, the
                forward pass or the backward pass. What light operators make of a statistic alone is a statistic too, if it is
                no larger than the reduction's result
    again(o)    the bytes of those results of o that XLA writes if another segment runs o again
    row(o)      the number of a join in its chain; 0 if o is no join or is in no chain. A *chain* is a sequence of joins, each of
                which reaches the next through light operators

XLA computes statistics that follow from one another in one kernel, for example the mean and the variance of a layer
normalization. It cannot do so if one of them, or a tensor between them, passes from one segment to another. Not every reduction
gives a statistic: if two reductions of one tensor are combined with one another, such as the mean and the mean of squares, XLA
gives each its own kernel.

On a GPU, again(o) has an exception. Let operator p make an expensive tensor t. XLA fuses p into the first kernel that reads t,
for example that of an activation function, and this kernel then writes two tensors: t and the result of a light operator q. Later
kernels, for example that of the function's derivative, read t. A segment that runs only a later kernel computes t on the fly and
writes nothing. A segment that runs the first kernel again writes t again. So the bytes of t count in again(q), not in again(p).

The planner drops joins, that is, computes them again instead of keeping their results. If it dropped all joins of a chain, each
segment would compute a long sum from its beginning. So it drops mainly joins with even numbers (`minimum_cut.py`). The joins
that take more operations to compute from the join before them should be kept, so they get the odd numbers: the first join of a
chain has number 1 or 2 accordingly. In a transformer, such a join is the residual sum after the wide product of a layer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import numpy as np

from tensile_jax.ir import EXPENSIVE, UPDATES
from tensile_jax.plan.analysis.liveness import Liveness

_SMALL = 16  # a tensor is much smaller than another if it has at most a sixteenth of its bytes (`make bench-constants`)
_MOST_LEAVES = 12  # of a tensor that is computed on the fly (`make bench-constants`)
_PAD = "pad"  # XLA:CPU writes what is padded, as in the gradient of a slice, in a kernel of its own
# Primitives whose results XLA writes instead of computing them in several kernels (`make bench-workspaces`).
_EXPENSIVE_ON_CPU = EXPENSIVE | frozenset(f"cbrt div erfc exp exp2 expm1 log log1p logistic {_PAD} pow rsqrt sqrt".split())
_VIEWS = frozenset("broadcast_in_dim expand_dims reshape squeeze".split())
_SMALL_VIEW = 65536  # bytes: the minimum cut decides whether a larger view is stored (`minimum_cut.py`); not tuned
_SCALAR = 16  # bytes; the largest scalar


@dataclass(frozen=True, eq=False)
class Fusion:
    """By tensor id: `materialised`, `virtual`, `relaid`. By the operator's place: `reread` bytes, `row`, and `again` (bytes).

    `largest` is the size of the largest result of a heavy operator.
    """

    materialised: tuple[bool, ...]
    virtual: tuple[bool, ...]
    relaid: tuple[bool, ...]
    reread: tuple[float, ...]
    row: tuple[int, ...]
    largest: int
    again: np.ndarray

    @cached_property
    def written(self) -> np.ndarray:
        """`materialised` as an array."""
        return np.array(self.materialised, dtype=bool)

    @cached_property
    def written_as_made(self) -> np.ndarray:
        """The tensors of `written` that XLA writes in the layout in which other segments would read them."""
        return _as_made(self.materialised, self.relaid)


def find_fusion(liveness: Liveness, *, fused_reductions: bool) -> Fusion:
    """The fusion of every tensor and operator: what is materialised, what is virtual, and what joins read again.

    Args:
        fused_reductions: whether what a reduction reads is computed on the fly.
    """
    graph = liveness.graph
    operators = graph.operators
    size = liveness.nbytes.tolist()
    heavy, barrier = liveness.kinds == "heavy", liveness.kinds != "light"
    if fused_reductions:  # such a backend also computes on the fly what it gathers from
        heavy_readers = barrier = heavy & np.array([op.primitive != "gather" for op in operators], dtype=bool)
    else:
        heavy_readers = heavy
    read_by = np.zeros((2, len(size)), dtype=bool)  # a heavy operator, a barrier
    reads, elsewhere = liveness.reads, np.ones(len(liveness.reads.place), dtype=bool)
    updating = [place for place, op in enumerate(operators) if op.primitive in UPDATES and op.inputs]
    elsewhere[reads.start[updating]] = False  # what is updated is written where the result is
    for those, which in zip(read_by, (heavy_readers, barrier), strict=True):
        those[reads.tensor[which[reads.place] & elsewhere]] = True
    read_by_heavy = read_by[0].tolist()
    written = (liveness.begins < 0) | read_by[1]
    written[liveness.makes.tensor[heavy[liveness.makes.place]]] = True
    materialised: list[bool] = written.tolist()
    shared = _shared(liveness, materialised, EXPENSIVE if fused_reductions else _EXPENSIVE_ON_CPU)
    for t in shared:
        materialised[t] = True

    results = set(graph.outputs)
    statistics = _statistics(liveness) if fused_reductions else set[int]()
    virtual = [False] * len(size)
    leaves: list[frozenset[int]] = [frozenset((t,)) for t in range(len(size))]
    leaf_bytes = list(size)
    reread = [0.0] * len(operators)
    row = [0] * len(operators)
    joined = [(0, -1)] * len(size)  # how many joins in a row lead to it, and the place of the last one
    chain: dict[int, list[int]] = {}  # by the place of each join of a chain, the places of all joins of that chain
    kernels = _kernels(liveness, materialised)
    own_flops: dict[int, int] = {}  # by the place of a join, the operations that a segment with the join before it adds
    for place, op in enumerate(operators):
        if op.kind != "light" and statistics.isdisjoint(op.outputs):
            continue
        read = leaves[op.inputs[0]] if len(op.inputs) == 1 else frozenset[int]().union(*(leaves[u] for u in op.inputs))
        read_bytes = sum(size[u] for u in read)
        largest = max((leaf_bytes[u] for u in op.inputs), default=0)
        out = sum(size[t] for t in op.outputs)
        joins = max(0, read_bytes - max(largest, out))
        own_bytes = sum(size[u] for u in read if u not in liveness.kept_by_caller)
        is_view = op.primitive in _VIEWS and len(op.inputs) == 1 and size[op.inputs[0]] == out <= _SMALL_VIEW
        for t in op.outputs:
            never_stored = own_bytes * _SMALL <= size[t] or t in statistics or is_view
            virtual[t] = never_stored and t not in results and not graph.tensors[t].in_host_memory
            if not read_by_heavy[t] and t not in shared and len(read) <= _MOST_LEAVES:
                leaves[t], leaf_bytes[t] = read, read_bytes
        before = max((joined[u] for u in op.inputs if size[u] * _SMALL > out), default=(0, -1))
        if joins > out // 4:
            count, last = before
            chain[place] = chain[last] if count else []
            chain[place].append(place)
            own_flops[place] = sum(operators[p].flops for u in read if (p := liveness.begin[u]) > last)
            row[place] = count + 1
            before = count + 1, place
            reread[place] = joins * max(1, len(kernels[place]))
        for t in op.outputs:
            joined[t] = before
    for places in {id(those): those for those in chain.values()}.values():
        even, odd = (sum(own_flops[p] for p in places if row[p] % 2 == side) for side in (0, 1))
        for p in places:
            row[p] = 0 if len(places) == 1 else row[p] + (even > odd)
    largest = max((size[t] for op in operators if op.kind == "heavy" for t in op.outputs), default=1)
    relaid = _relaid(liveness)
    again = _written_again(liveness, materialised, relaid, shared if fused_reductions else {})
    return Fusion(tuple(materialised), tuple(virtual), tuple(relaid), tuple(reread), tuple(row), largest, again)


def _written_again(
    liveness: Liveness, materialised: list[bool], relaid: list[bool], shared: Mapping[int, Sequence[int]]
) -> np.ndarray:
    """`again` of every operator. Of two kernels that read one of the tensors `shared`, a later segment may run only one."""
    again = liveness.makes.sums(liveness.nbytes * _as_made(materialised, relaid))
    for t, kernels in shared.items():
        if len(kernels) == 2 and liveness.kinds[kernels[0]] == "light":
            again[liveness.begin[t]] -= liveness.nbytes[t]
            again[kernels[0]] += liveness.nbytes[t]
    return again


def _as_made(materialised: Sequence[bool], relaid: Sequence[bool]) -> np.ndarray:
    return np.array(materialised, dtype=bool) & ~np.array(relaid, dtype=bool)


def _statistics(liveness: Liveness) -> set[int]:
    """The statistics of rows, and what lies between two of them: no tensor that a heavy operator reads."""
    graph, size = liveness.graph, liveness.nbytes.tolist()
    numbers = [prod(t.shape) for t in graph.tensors]
    read_by_heavy = {u for op in graph.operators if op.kind == "heavy" for u in op.inputs}
    leads = _leads_to_heavy(liveness, numbers)
    origin: dict[int, int] = {}  # by tensor that is a function of one other tensor with as many numbers: that tensor
    of: dict[int, tuple[int, int]] = {}  # by tensor that is a function of one reduction's result: its origin and that result
    constant: set[int] = set()  # tensors that are made of scalars
    combined: set[int] = set()  # results of reductions that are combined with what was reduced
    shifted: set[int] = set()  # what these are combined to
    mixed: set[int] = set()  # results of reductions of one tensor that are combined with one another
    for op in graph.operators:
        result = op.outputs[0]
        if op.over_rows:
            of[result] = origin.get(op.inputs[0], op.inputs[0]), result
        elif op.kind == "light":
            large = [u for u in dict.fromkeys(op.inputs) if size[u] > _SCALAR and u not in constant]
            found = {of[u] for u in large if u in of}
            origins = {origin.get(u, u) for u in large if u not in of}
            here = {r for reduced, r in found if reduced in origins and _same_pass(liveness, r, result)}
            if not large:
                constant.update(op.outputs)
            elif here and result in leads:
                combined |= here
                shifted.update(op.outputs)
            elif len({reduced for reduced, _ in found}) < len(found):
                mixed |= {r for _, r in found}
            elif found and not origins and len(found) == 1:
                of.update(dict.fromkeys(op.outputs, *found))
            elif len(large) == 1 and numbers[result] == numbers[large[0]]:
                origin.update(dict.fromkeys(op.outputs, *origins))
    kept = {t: (reduced, r) for t, (reduced, r) in of.items() if r in combined - mixed}
    between = {reduced for reduced, _ in kept.values() if reduced in shifted}
    statistics = {t for t, (_, r) in kept.items() if size[t] <= size[r]}
    return (statistics | between | {t for t, reduced in origin.items() if reduced in between}) - read_by_heavy


def _leads_to_heavy(liveness: Liveness, numbers: Sequence[int]) -> set[int]:
    """The tensors from which light operators, within one pass of the step, make a heavy operator's input with as many numbers."""
    found: set[int] = set()
    for op in reversed(liveness.graph.operators):
        heavy = op.kind == "heavy" and op.primitive != "gather"
        if heavy or (op.kind == "light" and not found.isdisjoint(op.outputs)):
            made = op.outputs[0]
            inputs = [u for u in op.inputs if liveness.begin[u] >= 0 and _same_pass(liveness, u, made)]
            found.update(u for u in inputs if heavy or numbers[u] == numbers[made])
    return found


def _same_pass(liveness: Liveness, t: int, u: int) -> bool:
    """Whether both tensors are made in the forward pass, or in the backward pass."""
    operators, begin = liveness.graph.operators, liveness.begin
    return operators[begin[t]].in_backward_pass == operators[begin[u]].in_backward_pass


def _relaid(liveness: Liveness) -> list[bool]:
    """By tensor, whether it is relaid."""
    relaid = [False] * len(liveness.nbytes)
    for op in liveness.graph.operators:
        for u in op.relaid:
            relaid[u] = True
    for op in liveness.graph.operators:
        for u in () if op.kind == "light" else op.inputs:
            relaid[u] &= u in op.relaid
        for t in () if op.kind == "light" else op.outputs:
            relaid[t] = False
    for u in (t for t, begin in enumerate(liveness.begin) if begin < 0):
        relaid[u] = False
    return relaid


def _shared(liveness: Liveness, materialised: Sequence[bool], expensive: frozenset[str]) -> dict[int, list[int]]:
    """The results of expensive light operators that several kernels read; for each, the first three kernels.

    Here a reduction is always a kernel of its own. Each operator is visited after all that read its results: one pass is enough.
    """
    operators, uses, known = liveness.graph.operators, liveness.uses, list(materialised)
    found: dict[int, list[int]] = {}
    kernels = [frozenset[int]()] * len(operators)  # by place: the first three that evaluate the operator
    for place in reversed(range(len(operators))):
        op = operators[place]
        if op.kind == "light" and op.primitive in expensive:
            for t in op.outputs:
                reading = _of_users(kernels, uses[t], 3)
                if (len(reading) > 1 or op.primitive == _PAD) and not known[t]:
                    known[t] = True
                    found[t] = sorted(reading)
        if op.kind != "light" or any(known[t] for t in op.outputs):
            kernels[place] = frozenset((place,))
        else:
            kernels[place] = _of_users(kernels, [p for t in op.outputs for p in uses[t]], 3)
    return found


def _kernels(liveness: Liveness, materialised: list[bool], most: int = 4) -> list[frozenset[int]]:
    """For the operator at each place, up to `most` places of operators whose kernels evaluate it.

    XLA evaluates a fused operator in each kernel that needs its result. Such a kernel belongs to a heavy operator, or to a light
    operator whose result is written to memory.
    """
    operators = liveness.graph.operators
    found = [frozenset[int]()] * len(operators)
    for place in reversed(range(len(operators))):
        op = operators[place]
        if op.kind == "heavy" or any(materialised[t] for t in op.outputs):
            found[place] = frozenset((place,))
        elif op.kind == "light":
            found[place] = _of_users(found, [p for t in op.outputs for p in liveness.uses[t]], most)
    return found


def _of_users(kernels: Sequence[frozenset[int]], users: Sequence[int], most: int) -> frozenset[int]:
    """The first `most` of the kernels that evaluate the operators at the places `users`."""
    if len(users) == 1:
        return kernels[users[0]]
    several = frozenset[int]().union(*(kernels[p] for p in users))
    return several if len(several) <= most else frozenset(sorted(several)[:most])
