"""Computes the liveness of tensors: where each tensor begins, where it is used, and until when it must be kept.

The paper calls this activity analysis (TENSILE section III-C and Algorithm 3, line 2): every tensor is released after its last
use.

Time is counted in *places*: operator k runs at place k, and boundary b lies between the operators b - 1 and b. A tensor is
*stored* at a boundary if it is made before the boundary and needed after it:

    stored at b  <=>  begin < b <= end
    stored(b)    =   sum of nbytes over the tensors stored at b

`begin` is the place of the operator that makes the tensor, and -1 for an input. `end` is the place of the last operator that
reads the tensor. Some tensors are kept to the end of the step: results, constants, and inputs that are not donated. Their `end`
is the number of operators. If an update takes over the memory of donated state, the two count as one tensor (section IV-B).

On a GPU, XLA cannot update the weights of convolutions in place, nor the optimizer's state for them: the kernel that computes
these updates also transposes the gradient, and cannot write where it reads. If this state were donated, XLA would write the
updates elsewhere and then copy them. So plans do not donate it (docs/how-it-works.md, "What XLA cannot update in place").
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import prod

import numpy as np

from tensile_jax.ir import Graph, TensorId

_CONVOLUTION = "conv_general_dilated"


@dataclass(frozen=True, eq=False)
class Liveness:
    """Places of every tensor of `graph`, by tensor id.

    `begin` and `end` are as above. `uses` are the places of the operators that read the tensor, ascending. `alias[t]` is the
    tensor that may take over the memory of `t`, or -1. `rewritten` are the tensors whose alias the backend writes elsewhere,
    although they are donated. `reads` and `makes` are the pairs (place, tensor) of operators and their inputs or outputs.
    """

    graph: Graph
    begin: tuple[int, ...]
    end: tuple[int, ...]
    uses: tuple[tuple[int, ...], ...]
    alias: tuple[int, ...]
    rewritten: frozenset[TensorId]
    kept_by_caller: frozenset[TensorId]
    reads: "Incidence"
    makes: "Incidence"

    @cached_property
    def begins(self) -> np.ndarray:
        """`begin` as an array."""
        return np.array(self.begin, dtype=np.int64)

    @cached_property
    def last_uses(self) -> tuple[int, ...]:
        """The last place that reads each tensor; -1 if none does."""
        return tuple(places[-1] if places else -1 for places in self.uses)

    @cached_property
    def nbytes(self) -> np.ndarray:
        """Sizes of the tensors."""
        return np.array([tensor.nbytes for tensor in self.graph.tensors], dtype=np.int64)

    @cached_property
    def flops(self) -> np.ndarray:
        """Floating-point operations of every operator, by place."""
        return np.array([op.flops for op in self.graph.operators], dtype=float)

    @cached_property
    def touched(self) -> np.ndarray:
        """Bytes that every operator reads and writes, by place."""
        return np.array([op.nbytes for op in self.graph.operators], dtype=float)

    @cached_property
    def kinds(self) -> np.ndarray:
        """The kind of every operator (heavy, reduction or light), by place."""
        return np.array([op.kind for op in self.graph.operators], dtype=np.str_)

    @cached_property
    def made_once(self) -> frozenset[TensorId]:
        """Tensors that are never computed again: results of effectful operators, and inputs of operators that are alone.

        An effectful operator runs only once. In the segment of an operator that is alone, nothing else can run.
        """
        results = {t for op in self.graph.operators if op.effectful for t in op.outputs}
        return frozenset(results.union(*(op.inputs for op in self.graph.operators if op.alone)))

    @cached_property
    def relayout(self) -> np.ndarray:
        """Bytes that every operator copies to bring its operands into a canonical layout, by place."""
        return np.array([op.relayout for op in self.graph.operators], dtype=float)

    @cached_property
    def aliases(self) -> tuple[tuple[TensorId, TensorId], ...]:
        """The pairs (tensor, alias) of all tensors whose alias takes over their memory."""
        return tuple((t, h) for t, h in self.possible_aliases if t not in self.rewritten)

    @cached_property
    def possible_aliases(self) -> tuple[tuple[TensorId, TensorId], ...]:
        """The pairs (tensor, alias) of all tensors that have an alias."""
        return tuple((TensorId(t), TensorId(h)) for t, h in enumerate(self.alias) if h >= 0)


@dataclass(frozen=True, slots=True, eq=False)
class Incidence:
    """Pairs (place, tensor), ascending by place; those of place p have the indices `[start[p], start[p + 1])`."""

    start: np.ndarray
    place: np.ndarray
    tensor: np.ndarray

    def sums(self, weight: np.ndarray) -> np.ndarray:
        """For each place, the sum of its tensors' weights, which are whole numbers."""
        total = np.concatenate([[0], np.cumsum(weight[self.tensor])])
        return total[self.start[1:]] - total[self.start[:-1]]


def incidence(tensors: Sequence[Sequence[TensorId]]) -> Incidence:
    """The pairs of each place and its tensors."""
    lengths = np.array([len(some) for some in tensors], dtype=np.int64)
    flat = np.array([t for some in tensors for t in some], dtype=np.int64)
    return Incidence(np.concatenate([[0], np.cumsum(lengths)]), np.repeat(np.arange(len(tensors)), lengths), flat)


def find_liveness(graph: Graph, *, transposed_updates: bool = False) -> Liveness:
    """The liveness of every tensor when each is released right after its last use.

    Args:
        transposed_updates: whether updates of the weights of convolutions are transposed, as XLA for GPUs does.
    """
    count, tensors = len(graph.operators), len(graph.tensors)
    reads, makes = incidence([op.inputs for op in graph.operators]), incidence([op.outputs for op in graph.operators])
    begins = np.full(tensors, -1)
    begins[makes.tensor] = makes.place
    readers: list[int] = reads.place[np.argsort(reads.tensor, kind="stable")].tolist()
    until: list[int] = np.cumsum(np.bincount(reads.tensor, minlength=tensors)).tolist()
    uses = tuple(tuple(readers[first:last]) for first, last in pairwise([0, *until]))
    ends = np.maximum(begins, 0)
    np.maximum.at(ends, reads.tensor, reads.place)
    kept_by_caller = frozenset(t.id for t in graph.tensors if t.producer is None and t.id not in graph.donated)
    ends[[*kept_by_caller, *graph.outputs]] = count
    begin, end = tuple(begins.tolist()), tuple(ends.tolist())
    alias = _aliases(graph, begin, end)
    rewritten = _rewritten(graph, alias) if transposed_updates else frozenset[TensorId]()
    return Liveness(graph, begin, end, uses, alias, rewritten, kept_by_caller, reads, makes)


def _aliases(graph: Graph, begin: Sequence[int], end: Sequence[int]) -> tuple[int, ...]:
    alias = [-1] * len(graph.tensors)
    for pair in graph.carried:
        old, new = graph.tensors[pair.input], graph.tensors[pair.output]
        fits = old.nbytes == new.nbytes and old.dtype == new.dtype and old.shape == new.shape
        if old.id in graph.donated and old.id != new.id and fits and end[old.id] <= begin[new.id]:
            alias[old.id] = new.id
    return tuple(alias)


def _rewritten(graph: Graph, alias: Sequence[int]) -> frozenset[TensorId]:
    """The tensors whose alias light operators compute, number by number, from a result of a convolution."""
    numbers = [prod(tensor.shape) for tensor in graph.tensors]
    convolved = [False] * len(numbers)  # whether light operators compute it, number by number, from a result of a convolution
    for op in graph.operators:
        for t in op.outputs:
            if op.kind == "light":
                convolved[t] = any(convolved[u] and numbers[u] == numbers[t] for u in op.inputs)
            else:
                convolved[t] = op.primitive == _CONVOLUTION
    return frozenset(TensorId(t) for t, h in enumerate(alias) if h >= 0 and convolved[h])
