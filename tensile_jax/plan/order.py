"""The order of operators: the optimizer early, what depends on inputs alone late.

JAX emits the whole optimizer after the whole backward pass, so that every gradient waits for it. Nothing but its own
gradient (and sometimes a global norm) holds an update back. Two rules, both stable:

    tail       an operator from which no heavy one can be reached (optimizer, statistics, metrics) goes right after the
               last heavy result that it depends on: gradients are consumed at once, in buckets as they come
    prelude    a light operator that depends on inputs and constants alone goes right before its first consumer

Early updates only pay where they take the place of what they update. Where state is not donated they would hold old and
new state at once during the backward pass; then the tail stays where it was if its peak is lower there.
"""

from dataclasses import replace
from itertools import pairwise

from tensile_jax.ir import Graph
from tensile_jax.plan.activity import find_activity
from tensile_jax.plan.retention import retain
from tensile_jax.plan.stays import stored_unless_swapped


def order(graph: Graph) -> Graph:
    """The same graph with its operators in the better of two topological orders: by peak of bytes stored, ties to early."""
    early = _sorted(graph, early_tail=True)
    late = _sorted(graph, early_tail=False)
    return early if _peak(early) <= _peak(late) else late


def _peak(graph: Graph) -> int:
    """The most that is stored between two heavy operators, where it is least: light temporaries do not count, XLA fuses them."""
    stored = stored_unless_swapped(retain(find_activity(graph), {}))
    heavy = [place for place, op in enumerate(graph.operators) if op.kind == "heavy"]
    return max(int(stored[a + 1 : b + 1].min()) for a, b in pairwise([-1, *heavy, len(graph.operators)]) if b > a)


def _sorted(graph: Graph, *, early_tail: bool) -> Graph:
    operators = graph.operators
    count = len(operators)
    reaches_heavy = [False] * count
    producer = {t: o for o, op in enumerate(operators) for t in op.outputs}
    for o in range(count - 1, -1, -1):
        if operators[o].kind == "heavy" or reaches_heavy[o]:
            for t in operators[o].inputs:
                if t in producer:
                    reaches_heavy[producer[t]] = True
    tail = [not reaches_heavy[o] and operators[o].kind != "heavy" for o in range(count)]

    ready = [-1] * count  # place after which the operator can run; -1: at once
    for o, op in enumerate(operators):
        before = max((ready[producer[t]] for t in op.inputs if t in producer), default=-1)
        moves = tail[o] and early_tail
        if before < 0 and op.kind != "heavy":
            ready[o] = -1
        else:
            ready[o] = before if moves else o
    key = list(ready)
    first_consumer = [count] * count
    for o in range(count - 1, -1, -1):
        if ready[o] < 0:
            key[o] = first_consumer[o] if first_consumer[o] < count else o
        for t in operators[o].inputs:
            if t in producer:
                first_consumer[producer[t]] = min(first_consumer[producer[t]], key[o])
    places = sorted(range(count), key=lambda o: (key[o], o))
    return replace(graph, operators=tuple(operators[o] for o in places))
