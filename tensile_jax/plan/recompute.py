# scipy carries no types: what it returns is unknown here, and here only.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""Which tensors are kept across a turn, and which are computed again: one minimum cut.

Take a boundary at which much is stored (the *turn*, usually from forward to backward). Every tensor made before it and used
after it is either kept, which costs its bytes, or computed again after the turn from others that are kept, which costs the
operators in between. The cheapest choice for all of them at once is a minimum cut. With the sink side meaning
"available after the turn":

    source -> o        price(o)     operator o runs again
    u      -> o        infinite     ... which needs its inputs
    o      -> t        keep(t)      t, an output of o, is kept
    t      -> sink     infinite     t is used after the turn

    keep(t)  = nbytes(t)                                      materialised anyway
             = nbytes(t) * (1 + price)                        otherwise: it must be written
    price(o) = price * latency(o) * bytes_per_us * (largest tensor / nbytes(o)) ** 0.1     heavy operators and reductions
             = max(price, 1) * (bytes that its readers re-read)       the 1st, 3rd, .. in a row of light operators that join
             | 2 * price * (bytes that its readers re-read)           the 2nd, 4th, ..                      large tensors
             + price * 2 * nbytes(o) * (...) ** 0.1           light operators read by a heavy one: written and read again
             ~ 0                                              other light operators: XLA fuses them into their consumer

so `price` is the number of bytes one is willing to keep rather than move one byte more. That one number draws the whole
curve from "keep all" to "keep as little as possible". Light operators that join large tensors (a residual sum) are
dear, because every segment that needs the sum would compute the chain of its terms again, back to the last sum that is kept.
With every other sum kept, that is one block, and a segment that spans two needs it anyway.

What is *not* decided here: where segments begin (`cut.py`) and which of the dropped tensors a segment computes again
(`retention.py`); those follow.

The paper recomputes one tensor at a time by MSPS (section IV-D, from Capuchin); the cut sees that a chain of cheap
operators is one decision. The formulation is the one of PyTorch's min-cut partitioner (functorch, 2022), with
heavy operators allowed at a price.
"""

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

from tensile_jax.ir import TensorId
from tensile_jax.plan.activity import Activity
from tensile_jax.plan.latency import DeviceProfile, operator_latency
from tensile_jax.plan.retention import Retention
from tensile_jax.plan.traffic import Traffic

_INFINITE = 2**30  # far above any sum of capacities; maximum_flow counts in int32
_FINITE = 2**28  # the scale to which the sum of all capacities is brought
_JOIN_PRICE = 1.0  # of every other join in a row, never cheaper: if all were dropped, chains would grow with every block
_OTHER_JOINS = 2.0  # of the price, for those in between: the segment that needs one must reach over two blocks
_SMALLER_IS_DEARER = 0.1  # tells apart operators that free as much per byte moved: the larger results go first
_LIGHT_PRICE = 0.01  # breaks ties towards short chains


def drop_tensors(
    activity: Activity,
    traffic: Traffic,
    retention: Retention,
    *,
    turn: int,
    price: float,
    profile: DeviceProfile,
) -> dict[TensorId, int]:
    """The tensors not to keep across boundary `turn`, each with the last place at which it is read before the turn.

    `retention` says what is dropped already and what is stored where. Ties go to keeping.
    """
    graph = activity.graph
    begin = activity.begin
    count = len(graph.operators)
    wanted = [t.id for t in graph.tensors if 0 <= begin[t.id] < turn <= retention.end[t.id] < count]
    ancestors: set[int] = set()  # places of operators that may run again
    stack = [begin[t] for t in wanted]
    while stack:
        place = stack.pop()
        if place in ancestors:
            continue
        ancestors.add(place)
        stack += [begin[u] for u in graph.operators[place].inputs if 0 <= begin[u] < turn]
    if not ancestors:
        return {}

    node: dict[int, int] = {}  # operators by place, then tensors by ~id
    edges: list[tuple[int, int, float]] = []
    source, sink = 0, 1

    def number(key: int) -> int:
        return node.setdefault(key, len(node) + 2)

    wanted_set = set(wanted)
    for place in ancestors:
        operator = graph.operators[place]
        edges.append((source, number(place), _price(activity, traffic, place, price, profile)))
        for u in operator.inputs:
            if 0 <= begin[u] < turn:
                edges.append((number(~u), number(place), np.inf))
        for t in operator.outputs:
            edges.append((number(place), number(~t), _keeping(activity, traffic, retention, t, turn, price)))
            if t in wanted_set and retention.needs[t][-1] >= turn:
                edges.append((number(~t), sink, np.inf))
    available = _sink_side(edges, len(node) + 2, source, sink)
    return {
        t: max((p for p in activity.uses[t] if p < turn), default=begin[t])
        for place in ancestors
        if node[place] in available
        for t in graph.operators[place].outputs
        if retention.end[t] < count
    }


def _keeping(activity: Activity, traffic: Traffic, retention: Retention, tensor: TensorId, turn: int, price: float) -> float:
    """What keeping the tensor across the turn costs: nothing if the step returns it, everything if it is gone by then."""
    if retention.end[tensor] >= len(activity.graph.operators):
        return 0.0
    if tensor in retention.dropped and retention.end[tensor] < turn:
        return np.inf
    written = 0.0 if traffic.materialised[tensor] else price
    return activity.graph.tensors[tensor].nbytes * (1 - 1e-6 + written)


def _price(activity: Activity, traffic: Traffic, place: int, price: float, profile: DeviceProfile) -> float:
    graph = activity.graph
    operator = graph.operators[place]
    out = sum(graph.tensors[t].nbytes for t in operator.outputs)
    smaller = (traffic.largest / max(out, 1)) ** _SMALLER_IS_DEARER
    if operator.kind != "light":
        return price * smaller * operator_latency(operator, profile) * profile.bytes_per_us
    written = sum(graph.tensors[t].nbytes for t in operator.outputs if traffic.materialised[t])
    joined = max(price, _JOIN_PRICE) if traffic.row[place] % 2 else _OTHER_JOINS * price
    return joined * traffic.reread[place] + price * smaller * 2 * written + _LIGHT_PRICE * min(price, 1.0) * out


def _sink_side(edges: list[tuple[int, int, float]], count: int, source: int, sink: int) -> set[int]:
    """The nodes from which the sink can still be reached under a maximum flow: the smallest sink side of a minimum cut."""
    heads = np.array([e[0] for e in edges])
    tails = np.array([e[1] for e in edges])
    values = np.array([e[2] for e in edges])
    finite = np.isfinite(values)
    total = float(values[finite].sum())
    scale = _FINITE / max(total, _FINITE)
    capacity = np.where(finite, np.ceil(np.where(finite, values, 0) * scale), _INFINITE).astype(np.int32)
    network = csr_array((capacity, (heads, tails)), shape=(count, count))
    flow = maximum_flow(network, source, sink).flow
    residual = network - flow
    residual.data = np.where(residual.data > 0, 1, 0)
    residual.eliminate_zeros()
    reached = breadth_first_order(csr_array(residual.T), sink, directed=True, return_predecessors=False)
    return set(reached.tolist())
