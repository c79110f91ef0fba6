"""Policy `checkpoint`: makes the plan that `jax.checkpoint` around every block of the model would give, on the same graph.

A *block* is a part of the forward pass. The step keeps the tensors that one block makes and another one reads. All other
tensors of a block are dropped after its forward pass, and the backward pass computes them again. This is `jax.checkpoint` with
its default policy (`nothing_saveable`), after Chen et al., "Training Deep Nets with Sublinear Memory Cost" (2016). Users try
`jax.checkpoint` first when memory is short. The TENSILE paper does not compare with it.

    inside(b)  = the tensors made in block b that no forward operator outside of b reads, and that are no results of the step
    dropped[t] = the place after which t, a tensor in inside(b), is dropped: the place of the last operator in b that reads t
                 or, if none does, of the operator that makes t

A *place* is the position of an operator in the order of execution. The module finds blocks by the names of operators. A name
is a path of scopes, and the names of the backward pass begin with `backward`. The module uses the first of these rules that
finds blocks:

    1. Numbered scopes with the same parent are blocks if there are scopes inside them (`ResNet/Block_0` ... `ResNet/Block_15`).
       If such scopes are nested, the outermost ones are the blocks. Outside of blocks, the plan recomputes only what policy
       `none` recomputes: cheap operators that XLA repeats in its fusions anyway.
    2. If there is one outermost scope, each of its children (`VGG/Conv_0`, `VGG/Dense_0`) begins a block. If there are several
       outermost scopes, each of them begins a block. What the parent scope does between two children belongs to the child
       before it.
    3. If names give no structure, the forward pass is cut into about sqrt(n) blocks, by its n heavy operators (matrix
       products and others that XLA does not fuse).

If no name begins with `backward`, the forward pass ends where the stored tensors have the most bytes. A scope that is entered
again later is another block. Light operators (which XLA fuses) that depend only on the step's inputs begin no block, because
`operator_order.py` has moved them to where they are first read.

Difference from `jax.checkpoint`: it computes a whole block again once, and holds all of it until the block's backward pass is
over. Here each *segment*, a stretch of operators that is compiled as one executable, computes again only what it needs. So less
is held at once, but a tensor that two segments need is computed twice.
"""

import math
import re
from collections.abc import Sequence
from itertools import pairwise

from tensile_jax.ir import Graph, TensorId
from tensile_jax.plan.analysis.absence import stored_unless_swapped
from tensile_jax.plan.analysis.retention import Retention, retain
from tensile_jax.plan.policies.segments import Decision, first_that_fits
from tensile_jax.plan.search.choice import WHOLE, Choice
from tensile_jax.plan.search.cost.workspace import CompiledSizes
from tensile_jax.plan.search.step_model import StepModel

_NUMBERED = re.compile(r"(?P<kind>.*\D)\d+\Z")

Scope = tuple[str, ...]
_JOINS: Scope = ()  # of an operator that belongs to the same block as the operator before it


def checkpoint(model: StepModel, limit: float, measured: CompiledSizes) -> Choice | None:
    """The cheapest cut with every block computed again in the backward pass."""
    if not model.graph.operators:
        return WHOLE
    return first_that_fits(model, [("checkpoint", lambda: Decision(checkpointed(model.base), {}, ()))], limit, measured)


def checkpointed(retention: Retention) -> Retention:
    """The retention after dropping, in addition, what is inside blocks."""
    liveness = retention.liveness
    graph = liveness.graph
    turn = find_backward_start(retention)
    dropped = dict(retention.dropped)
    for block in find_blocks(graph, turn):
        members = set(block)
        for place in block:
            for t in graph.operators[place].outputs:
                forward = [p for p in liveness.uses[t] if p < turn]
                if liveness.end[t] < len(graph.operators) and members.issuperset(forward):
                    last = max(forward, default=place)
                    dropped[t] = min(last, dropped.get(t, last))
    return retain(liveness, dropped)


def find_backward_start(retention: Retention) -> int:
    """The place at which the backward pass begins."""
    named = (p for p, operator in enumerate(retention.liveness.graph.operators) if operator.in_backward_pass)
    return next(named, int(stored_unless_swapped(retention).argmax()))


def find_blocks(graph: Graph, turn: int) -> tuple[tuple[int, ...], ...]:
    """The blocks of the forward pass, in the order in which they run: places of their operators, ascending."""
    scopes = [tuple(filter(None, operator.scope.split("/"))) for operator in graph.operators[:turn]]
    depth = _depth_of_siblings(scopes)
    if depth is not None:
        inside = [scope[: depth + 1] if len(scope) > depth and _NUMBERED.match(scope[depth]) else None for scope in scopes]
        return _runs(graph, inside)
    firsts = {scope[0] for scope in scopes if scope}
    top = tuple(firsts) if len(firsts) == 1 else ()
    children = [None if scope[: len(top)] != top else _JOINS if scope == top else scope[: len(top) + 1] for scope in scopes]
    if len(set(children) - {None, _JOINS}) > 1:
        return _runs(graph, children)
    heavy = [place for place, operator in enumerate(graph.operators[:turn]) if operator.kind == "heavy"]
    edges = [0, *heavy[:: math.isqrt(max(len(heavy) - 1, 0)) + 1][1:], turn]
    return tuple(tuple(range(a, b)) for a, b in pairwise(edges) if b > a)


def _depth_of_siblings(scopes: Sequence[Scope]) -> int | None:
    """The least depth at which a scope has numbered children, two of a kind or more, with scopes inside."""
    kinds: dict[tuple[Scope, str], set[str]] = {}
    for scope in scopes:
        for depth, name in enumerate(scope[:-1]):
            numbered = _NUMBERED.match(name)
            if numbered is not None:
                kinds.setdefault((scope[:depth], numbered["kind"]), set()).add(name)
    return min((len(parent) for (parent, _), names in kinds.items() if len(names) > 1), default=None)


def _runs(graph: Graph, blocks: Sequence[Scope | None]) -> tuple[tuple[int, ...], ...]:
    """Maximal runs of operators of one block; an operator is in none (None), or in that of the operator before it (`_JOINS`).

    Operators that depend on inputs alone neither begin nor end a run.
    """
    dependent: set[TensorId] = set()
    runs: list[tuple[Scope | None, list[int]]] = []
    for place, block in enumerate(blocks):
        operator = graph.operators[place]
        free = operator.kind != "heavy" and dependent.isdisjoint(operator.inputs)
        if not free:
            dependent.update(operator.outputs)
        if runs and (free or block in (_JOINS, runs[-1][0])):
            runs[-1][1].append(place)
        else:
            runs.append((None if free or block == _JOINS else block, [place]))
    return tuple(tuple(places) for block, places in runs if block is not None)
