"""What lies in device memory inside an executable, before XLA has compiled it.

XLA fuses light operators into their consumers, so most light tensors never exist. A tensor is *materialised* inside an executable
if a heavy operator makes it or reads it. Everything else is computed on the fly from its *leaves*: the materialised tensors,
inputs and reductions that its light operators start from.

    leaves(t)  = {t}                                     if t is materialised, or a reduction's result, or an input
               = union of leaves(u) over the inputs      otherwise
    virtual(t) : t is not materialised by its producer and its leaves are much smaller than itself, or belong to the caller;
                 such a tensor (a broadcast, a mask, a cast of a parameter) is never stored
    reread(o)  = what a light operator adds to the bytes that its chain reads: leaves beyond its largest input's
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from tensile_jax.plan.activity import Activity

_SMALL = 16  # a tensor is much smaller than another if it has at most a sixteenth of its bytes
_MOST_LEAVES = 12


@dataclass(frozen=True, eq=False)
class Traffic:
    """By tensor id: `materialised`, `virtual`; by place: `reread` bytes.

    `largest` is the size of the largest result of a heavy operator.
    """

    materialised: tuple[bool, ...]
    virtual: tuple[bool, ...]
    reread: tuple[float, ...]
    largest: int

    @cached_property
    def written(self) -> np.ndarray:
        """`materialised` as an array."""
        return np.array(self.materialised, dtype=bool)


def find_traffic(activity: Activity, *, fused_reductions: bool) -> Traffic:
    """What is materialised, what is virtual, and what joining costs, for every tensor and operator.

    Args:
        fused_reductions: whether what a reduction reads is computed on the fly.
    """
    graph = activity.graph
    operators = graph.operators
    size = activity.nbytes.tolist()
    heavy, barrier = activity.kinds == "heavy", activity.kinds != "light"
    read_by = np.zeros((2, len(size)), dtype=bool)  # a heavy operator, a barrier
    for row, which in zip(read_by, (heavy, heavy if fused_reductions else barrier), strict=True):
        row[activity.reads.tensor[which[activity.reads.place]]] = True
    read_by_heavy = read_by[0].tolist()
    written = (activity.begins < 0) | read_by[1]
    written[activity.makes.tensor[heavy[activity.makes.place]]] = True
    is_heavy: list[bool] = heavy.tolist()

    results = set(graph.outputs)
    virtual = [False] * len(size)
    leaves: list[frozenset[int]] = [frozenset((t,)) for t in range(len(size))]
    leaf_bytes = list(size)
    reread = [0.0] * len(operators)
    for place, op in enumerate(operators):
        if op.kind != "light":
            continue
        read = leaves[op.inputs[0]] if len(op.inputs) == 1 else frozenset[int]().union(*(leaves[u] for u in op.inputs))
        read_bytes = sum(size[u] for u in read)
        largest = max((leaf_bytes[u] for u in op.inputs), default=0)
        out = sum(size[t] for t in op.outputs)
        joins = max(0, read_bytes - max(largest, out))
        own_bytes = sum(size[u] for u in read if u not in activity.kept_by_caller)
        for t in op.outputs:
            virtual[t] = own_bytes * _SMALL <= size[t] and t not in results
            if not read_by_heavy[t] and len(read) <= _MOST_LEAVES:
                leaves[t], leaf_bytes[t] = read, read_bytes
        if joins > out // 4:
            consumers = {p for t in op.outputs for p in _heavy_reached(activity, t, is_heavy)}
            reread[place] = joins * max(1, len(consumers))
    largest = max((size[t] for op in operators if op.kind == "heavy" for t in op.outputs), default=1)
    return Traffic(tuple(written.tolist()), tuple(virtual), tuple(reread), largest)


def _heavy_reached(activity: Activity, tensor: int, heavy: list[bool], most: int = 4) -> set[int]:
    """Places of up to `most` heavy operators that read `tensor` through light ones."""
    found: set[int] = set()
    seen: set[int] = set()
    stack = [tensor]
    while stack and len(found) < most:
        for place in activity.uses[stack.pop()]:
            if heavy[place]:
                found.add(place)
            elif activity.graph.operators[place].kind == "light" and place not in seen:
                seen.add(place)
                stack += activity.graph.operators[place].outputs
    return found
