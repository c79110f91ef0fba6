"""Chooses the order in which operators run, so that gradients do not pile up in memory: each update runs as soon as it can.

JAX emits the whole optimizer after the whole backward pass, so every gradient stays in memory until then. But the update of a
parameter needs only that parameter's gradient (and sometimes a global norm). XLA runs *heavy* operators as kernels of their own,
and fuses *light* ones into their consumers. Three rules move operators; all other operators keep their order:

    tail       An operator that leads to no heavy one (optimizer, statistics, metrics) runs right after the last heavy result that
               it depends on. So each gradient is used as soon as it is computed.
    prelude    A light operator that depends on inputs and constants alone runs right before its first consumer.
    delayed    Some products have a result much larger than their operands, such as the gradient of a wide dense layer. If only
               the tail depends on such a product, it runs after all other operators, when the activations are no longer in
               memory.

The step's own copies between device memory and host memory count as light in these rules: a copy from the host runs right before
its first consumer, and a copy to the host is part of the tail. An operator that has an effect and no results (a debug print) is
part of the tail. Operators with effects always keep their order, and a product that one of them depends on is not delayed.

Early updates save memory only if they take over the memory of the old state. Otherwise the old and the new state are both in
memory during the backward pass. So the module compares three orders, and takes the one with the lowest peak: by all three rules,
by `tail` and `prelude`, and by `prelude` alone.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from tensile_jax.ir import OUTER_PRODUCTS, Graph, Operator, TensorId
from tensile_jax.plan.analysis.absence import stored_unless_swapped
from tensile_jax.plan.analysis.liveness import find_liveness
from tensile_jax.plan.analysis.retention import retain

_MUCH = 4  # times its operands' bytes: a larger result is delayed to save memory (`make bench-constants`)


def order(graph: Graph) -> Graph:
    """The same graph with its operators in the one of three topological orders that has the lowest peak.

    Ties go to `tail` and `prelude`, then to `prelude` alone. With sums of outer products, ties go to all three rules first, so
    that an update follows the last product that reads the old parameter and can take over its memory.
    """
    early = _sorted(graph, early_tail=True, delay=False)
    late = _sorted(graph, early_tail=False, delay=False)
    delayed = _sorted(graph, early_tail=True, delay=True)
    outer_products = any(op.primitive == OUTER_PRODUCTS for op in graph.operators)
    return min((delayed, early, late) if outer_products else (early, late, delayed), key=_peak)


def _peak(graph: Graph) -> int:
    """An estimate of the peak: the maximum, over pairs of neighbouring heavy operators, of the least that is stored between them,
    plus the result of the second one.

    Light temporaries do not count: XLA fuses them.
    """
    liveness = find_liveness(graph)
    stored = stored_unless_swapped(retain(liveness, {}))
    inheriting = set(liveness.alias)
    made = [sum(graph.tensors[t].nbytes for t in op.outputs if t not in inheriting) for op in graph.operators]
    heavy = [place for place, op in enumerate(graph.operators) if op.kind == "heavy"]
    edges = pairwise([-1, *heavy, len(graph.operators)])
    return max(int(stored[a + 1 : b + 1].min()) + (made[b] if b < len(made) else 0) for a, b in edges if b > a)


def _sorted(graph: Graph, *, early_tail: bool, delay: bool) -> Graph:
    operators = graph.operators
    count = len(operators)
    reaches_heavy, reaches_effect = [False] * count, [False] * count
    producer = {t: o for o, op in enumerate(operators) for t in op.outputs}
    heavy = [op.kind == "heavy" and not _is_copy(op) and not (op.effectful and not op.outputs) for op in operators]
    for o in range(count - 1, -1, -1):
        for t in operators[o].inputs:
            if t in producer:
                reaches_heavy[producer[t]] |= heavy[o] or reaches_heavy[o]
                reaches_effect[producer[t]] |= operators[o].effectful or reaches_effect[o]
    tail = [not reaches_heavy[o] and not heavy[o] for o in range(count)]

    ready = [-1] * count  # place after which the operator can run; -1: at once
    latest_effect = -1  # `ready` of the effectful operator before
    for o, op in enumerate(operators):
        before = max((ready[producer[t]] for t in op.inputs if t in producer), default=-1)
        moves = tail[o] and early_tail
        if op.effectful:
            before = max(before, latest_effect)
            ready[o] = latest_effect = before if moves and before >= 0 else o
            continue
        product = op.kind == "heavy" or op.primitive == OUTER_PRODUCTS
        may_wait = delay and product and not reaches_heavy[o] and not reaches_effect[o]
        if may_wait and _is_larger_than_its_operands(graph, op.inputs, op.outputs):
            ready[o] = count
            continue
        if before < 0 and (op.kind != "heavy" or _is_copy(op)):
            ready[o] = -1
        else:
            ready[o] = before if moves else o
    key = list(ready)
    nobody = count + 1
    first_consumer = [nobody] * count
    for o in range(count - 1, -1, -1):
        if ready[o] < 0:
            key[o] = first_consumer[o] if first_consumer[o] < nobody else o
        for t in operators[o].inputs:
            if t in producer:
                first_consumer[producer[t]] = min(first_consumer[producer[t]], key[o])
    places = sorted(range(count), key=lambda o: (key[o], o))
    return replace(graph, operators=tuple(operators[o] for o in places))


def _is_copy(operator: Operator) -> bool:
    return operator.primitive == "device_put" and operator.bytes_in + operator.bytes_out > 0


def _is_larger_than_its_operands(graph: Graph, inputs: Sequence[TensorId], outputs: Sequence[TensorId]) -> bool:
    """Whether the results take much more memory than the operands. Operands that are inputs of the step do not count: they are
    kept anyway.
    """
    waiting = sum(graph.tensors[t].nbytes for t in inputs if graph.tensors[t].producer is not None)
    made = sum(graph.tensors[t].nbytes for t in outputs)
    return waiting * _MUCH <= made
