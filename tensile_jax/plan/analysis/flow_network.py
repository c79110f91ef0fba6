# scipy carries no types: what it returns is unknown here, and here only.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""Finds the nodes on the sink side of a minimum cut of a flow network.

A cut puts each node on the source side S or on the sink side T. It costs the capacities of the edges from S to T. Of several
minimum cuts, the one with the smallest sink side is found. That one is unique.

The time of a maximum flow grows with the square of the length of a chain of nodes. So nodes that lie in a chain are
*eliminated* first: other edges stand for them, with which a minimum cut puts the remaining nodes on the same sides as before.
Let a node v have an edge of capacity k from one node p, an edge of capacity m to one node q, an edge of capacity c from the
source and an edge of capacity s to the sink. A missing edge has capacity 0. What v costs on the cheaper of its two sides
depends on the sides of p and q only:

    f(p, q) = min(a, b)
    a       = c + k [p in S]      the cost if v is in T; [x] is 1 if x holds, and 0 otherwise
    b       = s + m [q in T]      the cost if v is in S

Let f(T, S) be this cost for p in T and q in S, and so on. Without v, three edges and the constant f(T, S) give the same cost:

    p -> sink      f(S, S) - f(T, S)
    source -> q    f(T, T) - f(T, S)
    p -> q         f(S, T) + f(T, S) - f(S, S) - f(T, T)

Many nodes are eliminated at once, no two of them neighbours. When the sides of all other nodes are known, v is put on the
cheaper side, or on the source side if both cost the same.
"""

from dataclasses import dataclass

import numpy as np

_INFINITE = 2**30  # far above any sum of finite capacities; maximum_flow counts in int32
_FINITE = 2**28  # the scale to which the sum of all finite capacities is brought
_FEW = 0.02  # of the nodes: eliminating fewer at once takes longer than it saves (`make bench-scale`)
_HASH, _HASHES = 2654435761, 2**32  # puts the nodes of a chain into an order that is neither ascending nor descending


@dataclass(frozen=True, eq=False)
class _Network:
    """By node: the capacities `from_source` and `to_sink`, and whether it is `left`. By inner edge: its ends and capacity."""

    from_source: np.ndarray
    to_sink: np.ndarray
    left: np.ndarray
    heads: np.ndarray
    tails: np.ndarray
    capacities: np.ndarray


@dataclass(frozen=True, eq=False)
class _Eliminated:
    """The nodes that were eliminated at once. By node: `before` and `after` it, or -1, and the capacities of its four edges."""

    nodes: np.ndarray
    before: np.ndarray
    after: np.ndarray
    from_before: np.ndarray
    to_after: np.ndarray
    from_source: np.ndarray
    to_sink: np.ndarray


def sink_side(heads: np.ndarray, tails: np.ndarray, values: np.ndarray, count: int) -> np.ndarray:
    """For each node (0 is the source, 1 the sink), whether it is on the sink side of the minimum cut with the smallest sink side.

    Args:
        heads, tails: the two nodes of each edge. No edge leads into the source or out of the sink.
        values: the capacity of each edge; it may be infinite.
        count: the number of nodes.
    """
    finite = np.isfinite(values)
    scale = _FINITE / max(float(values[finite].sum()), _FINITE)
    capacities = np.where(finite, np.ceil(np.where(finite, values, 0) * scale), _INFINITE).astype(np.int64)
    network, eliminated = _network(heads, tails, capacities, count), list[_Eliminated]()
    while (some := _choose(network)) is not None:
        eliminated.append(some)
        network = _without(network, some)
    available = _by_flow(network)
    for some in reversed(eliminated):
        again = some.from_source + np.where(_on(available, some.before, missing=True), 0, some.from_before)
        kept = some.to_sink + np.where(_on(available, some.after, missing=False), some.to_after, 0)
        available[some.nodes] = again < kept
    return available


def _network(heads: np.ndarray, tails: np.ndarray, capacities: np.ndarray, count: int) -> _Network:
    from_source, to_sink = np.zeros((2, count), dtype=np.int64)
    begins, ends = heads == 0, tails == 1
    np.add.at(from_source, tails[begins], capacities[begins])
    np.add.at(to_sink, heads[ends], capacities[ends])
    inner = ~begins & ~ends
    left = np.ones(count, dtype=bool)
    left[:2] = False
    return _Network(_capped(from_source), _capped(to_sink), left, *_merged(heads[inner], tails[inner], capacities[inner], count))


def _capped(capacities: np.ndarray) -> np.ndarray:
    """The same capacities, with all that are above every finite sum equal."""
    return np.where(capacities >= _INFINITE // 2, _INFINITE, capacities)


def _merged(
    heads: np.ndarray, tails: np.ndarray, capacities: np.ndarray, count: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The same edges, with one edge for all from a node to another, and none of capacity zero."""
    keys, which = np.unique(heads[capacities > 0] * count + tails[capacities > 0], return_inverse=True)
    merged = np.zeros(len(keys), dtype=np.int64)
    np.add.at(merged, which, capacities[capacities > 0])
    return keys // count, keys % count, _capped(merged)


def _choose(network: _Network) -> _Eliminated | None:
    """Nodes to eliminate: each with at most one node before and one after it, and no two of them neighbours. None if few are."""
    count, edges = len(network.left), np.arange(len(network.heads))
    in_chain = network.left & (np.bincount(network.tails, minlength=count) <= 1)
    in_chain &= np.bincount(network.heads, minlength=count) <= 1
    edge_from, edge_to = np.full((2, count), -1)
    edge_from[network.tails], edge_to[network.heads] = edges, edges
    first = np.arange(count) * _HASH % _HASHES
    others = np.where(in_chain, first, -1)
    highest = np.full(count, -1)
    np.maximum.at(highest, network.tails, others[network.heads])
    np.maximum.at(highest, network.heads, others[network.tails])
    nodes = np.flatnonzero(in_chain & (first > highest))
    if len(nodes) == 0 or len(nodes) < _FEW * network.left.sum():
        return None
    into, out = edge_from[nodes], edge_to[nodes]
    ends = [np.append(end, -1) for end in (network.heads, network.tails)]  # the last for an edge that is missing
    capacities = np.append(network.capacities, 0)
    return _Eliminated(
        nodes, ends[0][into], ends[1][out], capacities[into], capacities[out], network.from_source[nodes], network.to_sink[nodes]
    )


def _without(network: _Network, some: _Eliminated) -> _Network:
    """The network without these nodes, with the edges that stand for them."""
    again, kept = some.from_source, some.to_sink
    neither, both = np.minimum(again + some.from_before, kept), np.minimum(again, kept + some.to_after)  # f(S, S), f(T, T)
    least, most = np.minimum(again, kept), np.minimum(again + some.from_before, kept + some.to_after)  # f(T, S), f(S, T)
    from_source, to_sink, left = network.from_source.copy(), network.to_sink.copy(), network.left.copy()
    left[some.nodes] = False
    has_before, has_after = some.before >= 0, some.after >= 0
    np.add.at(to_sink, some.before[has_before], (neither - least)[has_before])
    np.add.at(from_source, some.after[has_after], (both - least)[has_after])
    stays, through = left[network.heads] & left[network.tails], has_before & has_after
    edges = _merged(
        np.concatenate([network.heads[stays], some.before[through]]),
        np.concatenate([network.tails[stays], some.after[through]]),
        np.concatenate([network.capacities[stays], (most + least - neither - both)[through]]),
        len(left),
    )
    return _Network(_capped(from_source), _capped(to_sink), left, *edges)


def _on(available: np.ndarray, nodes: np.ndarray, *, missing: bool) -> np.ndarray:
    """Whether each of the nodes is on the sink side; `missing` for -1."""
    return np.where(nodes >= 0, available[nodes], missing)


def _by_flow(network: _Network) -> np.ndarray:
    """For each node that is left, whether the sink can be reached from it in the residual network of a maximum flow."""
    from scipy.sparse import csr_array  # a fifth of a second to import, which a process that plans nothing does without
    from scipy.sparse.csgraph import breadth_first_order, maximum_flow

    count = len(network.left)
    available = np.zeros(count, dtype=bool)
    available[1] = True
    nodes = np.flatnonzero(network.left)
    if not nodes.size:
        return available
    number = np.zeros(count, dtype=np.int64)
    number[nodes] = 2 + np.arange(nodes.size)
    heads = np.concatenate([np.zeros(nodes.size, np.int64), number[nodes], number[network.heads]])
    tails = np.concatenate([number[nodes], np.ones(nodes.size, np.int64), number[network.tails]])
    capacities = np.concatenate([network.from_source[nodes], network.to_sink[nodes], network.capacities]).astype(np.int32)
    used = capacities > 0
    graph = csr_array((capacities[used], (heads[used], tails[used])), shape=(2 + nodes.size,) * 2)
    residual = graph - maximum_flow(graph, 0, 1).flow
    residual.data = np.where(residual.data > 0, 1, 0)
    residual.eliminate_zeros()
    reached = breadth_first_order(csr_array(residual.T), 1, directed=True, return_predecessors=False)
    available[nodes[reached[reached > 1] - 2]] = True
    return available
