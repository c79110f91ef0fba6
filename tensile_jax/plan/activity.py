"""Activity analysis: where each tensor begins, where it is used, and until when it must be kept.

TENSILE section III-C and Algorithm 3, line 2 ("run Activity Analysis"): every tensor is released when its last use is over.

Time is counted in *places*: operator k runs at place k, and boundary b lies between the operators b - 1 and b. A tensor is
*stored* at a boundary if it exists before it and is needed after it:

    stored at b  <=>  begin < b <= end
    stored(b)    =   sum of nbytes over the tensors stored at b

An input begins at -1. What the caller owns (inputs that are not donated, constants) never ends; the step's results end at
the number of operators. Updated state that can take the place of the donated state that it updates adds nothing: the two are
one tensor ("the new parameter uses the memory address of the old parameter", section IV-B).
"""

from dataclasses import dataclass

from tensile_jax.ir import Graph, TensorId


@dataclass(frozen=True, slots=True, eq=False)
class Activity:
    """Places of every tensor of `graph`, by tensor id.

    `begin` and `end` as above; `uses` are the places of the operators that read it, ascending; `heir[t]` is the tensor
    that takes over the memory of `t`, or -1, and `heir` of that one is -1 always.
    """

    graph: Graph
    begin: tuple[int, ...]
    end: tuple[int, ...]
    uses: tuple[tuple[int, ...], ...]
    heir: tuple[int, ...]
    kept_by_caller: frozenset[TensorId]


def find_activity(graph: Graph) -> Activity:
    """The activity of every tensor when each is dropped right after its last use."""
    count = len(graph.operators)
    begin = [-1] * len(graph.tensors)
    uses: list[list[int]] = [[] for _ in graph.tensors]
    for place, operator in enumerate(graph.operators):
        for t in operator.inputs:
            uses[t].append(place)
        for t in operator.outputs:
            begin[t] = place
    kept_by_caller = frozenset(t.id for t in graph.tensors if t.producer is None and t.id not in graph.donated)
    results = set(graph.outputs)
    end = [0] * len(graph.tensors)
    for tensor in graph.tensors:
        t = tensor.id
        if t in kept_by_caller or t in results:
            end[t] = count
        else:
            end[t] = max(uses[t][-1] if uses[t] else begin[t], 0)
    return Activity(graph, tuple(begin), tuple(end), tuple(map(tuple, uses)), _heirs(graph, begin, end), kept_by_caller)


def _heirs(graph: Graph, begin: list[int], end: list[int]) -> tuple[int, ...]:
    heir = [-1] * len(graph.tensors)
    for pair in graph.carried:
        old, new = graph.tensors[pair.input], graph.tensors[pair.output]
        fits = old.nbytes == new.nbytes and old.dtype == new.dtype and old.shape == new.shape
        if old.id in graph.donated and old.id != new.id and fits and end[old.id] <= begin[new.id]:
            heir[old.id] = new.id
    return tuple(heir)
