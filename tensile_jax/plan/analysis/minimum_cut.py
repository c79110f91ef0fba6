# scipy carries no types: what it returns is unknown here, and here only.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""Decides by a minimum cut which tensors are kept across a boundary, and which are computed again after it.

The *turn* is a boundary between two operators where many bytes are stored, usually the one between the forward and the backward
pass. A tensor that is made before the turn and used after it can be kept, or *dropped* and computed again. Keeping a tensor
costs its bytes. Computing it again costs the operators that run again. A minimum cut of a flow network finds the cheapest
choice for all tensors at once. The nodes of the network are operators o and tensors t, u. A node on the sink side of the cut is
available after the turn. Each edge that is cut costs its capacity:

    source -> o        cost(o)      operator o runs again
    u      -> o        infinite     ... which needs its input u
    o      -> t        keep(t)      t, an output of o, is kept
    t      -> sink     infinite     t is used after the turn

XLA runs *heavy* operators as kernels of their own, and fuses *light* ones into their consumers. A *join* is a light operator that
adds large tensors, such as a residual sum. Joins that reach one another through light operators form a *chain*, and are numbered
along it. The costs are

    keep(t) = nbytes(t)                                 t lies in device memory anyway
            = nbytes(t) * (1 + price)                   t is fused into its readers, and would have to be written

    cost(o) = infinite                                  o has effects, which happen once only
            = price * latency(o) * bytes_per_us * s     o is heavy, or a reduction
            = max(price, 1) * reread(o)                 o is a join whose number in its chain is odd
            = 2 * price * reread(o)                     o is a join whose number in its chain is even
            = price * reread(o)                         o is a join in no chain
            = about 0                                   o is any other light operator: XLA fuses it into its consumer
            + price * 2 * again(o) * s                  in addition, if o is light: XLA writes some light results to
                                                        memory (`fusion.py` says which), and reads them from there
            + price * kernel * bytes_per_us             in addition, if a light o is a join or is written: one more kernel

    nbytes(o)     bytes of the results of o
    reread(o)     bytes that XLA reads in addition if it computes a join o again instead of reading its result (`fusion.py`)
    again(o)      bytes that XLA writes of the results of a light o if another segment runs o again (`fusion.py`)
    latency(o)    microseconds that o takes by itself (`latency.py`)
    bytes_per_us  bytes of device memory that the device moves in a microsecond
    kernel        microseconds that a kernel takes beside its work, or that the host takes to issue it if that is longer
    s             (bytes of the largest result of any heavy operator / nbytes(o)) ** 0.1

The parameter `price` says how many more bytes may be kept to save one byte of memory traffic. (A time counts as the bytes that
the device moves in that time.) Different prices give all choices from "keep everything" to "keep as little as possible". The
factor s decides between equal operators: those with large results run again.

If the results of all joins of a chain were dropped, each *segment* (a stretch of operators that is compiled as one executable)
would compute a long sum from the beginning of the chain. So computing an odd join again costs something at any price, even 0.
If only the results of even joins are dropped, a segment computes at most one more block of the network. For that block, an even
join costs twice what it reads.

This module does not decide where segments begin (`search/starts/segment_boundaries.py`), nor which dropped tensors a segment
computes again (`retention.py`).

Difference from the paper: the paper recomputes one tensor at a time, the one that saves the most memory per unit of time (MSPS,
section IV-D, from Capuchin). A minimum cut decides about a whole chain of cheap operators at once. The formulation is that of
PyTorch's min-cut partitioner (functorch, 2022), except that heavy operators may run again, at a price.
"""

from bisect import bisect_left

import numpy as np

from tensile_jax.ir import TensorId
from tensile_jax.plan.analysis.device_profile import DeviceProfile
from tensile_jax.plan.analysis.flow_network import sink_side
from tensile_jax.plan.analysis.fusion import Fusion
from tensile_jax.plan.analysis.latency import kernel_latencies
from tensile_jax.plan.analysis.liveness import Liveness
from tensile_jax.plan.analysis.retention import Retention

# Each trades memory for time (`make bench-constants`).
_JOIN_PRICE = 1.0  # the least price of every other join of a chain, so that chains do not grow with every block
_OTHER_JOINS = 2.0  # times the price, for the joins in between: a segment that needs one computes two blocks
_SIZE_EXPONENT = 0.1  # makes small results cost a little more, so that of equal operators those with large results run again
_LIGHT_PRICE = 0.01  # of light operators, per byte of results: breaks ties in favour of short chains


def drop_tensors(
    liveness: Liveness,
    fusion: Fusion,
    retention: Retention,
    *,
    turn: int,
    price: float,
    profile: DeviceProfile,
) -> dict[TensorId, int]:
    """The tensors to drop across boundary `turn`, each with the last place at which it is read before the turn.

    `retention` says what is dropped already and what is stored where. In a tie, a tensor is kept.
    """
    count = len(liveness.graph.operators)
    begin, end = liveness.begins, retention.ends
    wanted = (begin >= 0) & (begin < turn) & (turn <= end) & (end < count)
    again = _ancestors(liveness, np.unique(begin[wanted]), turn)
    if not again.size:
        return {}

    source, sink = 0, 1
    operator_node = np.full(count, -1)
    operator_node[again] = 2 + np.arange(again.size)
    reads, makes = liveness.reads, liveness.makes
    read = (operator_node[reads.place] >= 0) & (begin[reads.tensor] >= 0)
    made = operator_node[makes.place] >= 0
    results, makers = makes.tensor[made], makes.place[made]
    tensor_node = np.full(len(begin), -1)
    tensor_node[results] = 2 + again.size + np.arange(results.size)
    last_needs = retention.last_needs
    used = np.array([t for t in results[wanted[results]].tolist() if last_needs[t] >= turn], dtype=np.int64)
    edges = (  # heads, tails, capacities
        (np.full(again.size, source), operator_node[again], _prices(liveness, fusion, price, profile)[again]),
        (tensor_node[reads.tensor[read]], operator_node[reads.place[read]], np.full(int(read.sum()), np.inf)),
        (operator_node[makers], tensor_node[results], _keeping(liveness, fusion, retention, results, turn, price)),
        (tensor_node[used], np.full(used.size, sink), np.full(used.size, np.inf)),
    )
    heads, tails, capacities = (np.concatenate(column) for column in zip(*edges, strict=True))
    available = sink_side(heads, tails, capacities, 2 + again.size + results.size)
    dropped = results[available[operator_node[makers]] & (end[results] < count)]
    return {t: _last_use_before(liveness, t, turn) for t in map(TensorId, dropped.tolist())}


def _ancestors(liveness: Liveness, places: np.ndarray, turn: int) -> np.ndarray:
    """`places` and the places of all operators before `turn` on which the operators at `places` depend, ascending."""
    from scipy.sparse import csr_array  # slow to import, as in `flow_network.py`
    from scipy.sparse.csgraph import breadth_first_order

    reads = liveness.reads
    makers = liveness.begins[reads.tensor]
    inner = (reads.place < turn) & (makers >= 0)
    start = turn  # a node that depends on the given places
    after = np.concatenate([reads.place[inner], np.full(places.size, start)])
    before = np.concatenate([makers[inner], places])
    dependencies = csr_array((np.ones(after.size), (after, before)), shape=(turn + 1, turn + 1))
    found = breadth_first_order(dependencies, start, directed=True, return_predecessors=False)
    return np.sort(found[1:]).astype(np.int64)


def _last_use_before(liveness: Liveness, tensor: TensorId, turn: int) -> int:
    uses = liveness.uses[tensor]
    before = bisect_left(uses, turn)
    return uses[before - 1] if before else liveness.begin[tensor]


def _keeping(
    liveness: Liveness, fusion: Fusion, retention: Retention, tensors: np.ndarray, turn: int, price: float
) -> np.ndarray:
    """`keep(t)` of each tensor; 0 if the step returns it, infinite if it is dropped before the turn already."""
    end = retention.ends[tensors]
    dropped = np.zeros(len(retention.end), dtype=bool)
    dropped[list(retention.dropped)] = True
    written = np.where(fusion.written_as_made[tensors], 0.0, price)
    cost = liveness.nbytes[tensors] * (1 - 1e-6 + written)
    cost[dropped[tensors] & (end < turn)] = np.inf
    cost[end >= len(liveness.graph.operators)] = 0.0
    return cost


def _prices(liveness: Liveness, fusion: Fusion, price: float, profile: DeviceProfile) -> np.ndarray:
    """`cost(o)` of every operator, by place."""
    out = liveness.makes.sums(liveness.nbytes)
    written = fusion.again
    smaller = (fusion.largest / np.maximum(out, 1)) ** _SIZE_EXPONENT
    work_us = np.maximum(liveness.flops / profile.flops_per_us, liveness.touched / profile.bytes_per_us)
    latency = kernel_latencies(work_us, profile)
    row = np.array(fusion.row)
    joined = np.where(row % 2, max(price, _JOIN_PRICE), np.where(row, _OTHER_JOINS * price, price))
    reread = np.array(fusion.reread)
    kernels = max(profile.kernel_us, profile.host_kernel_us) * profile.bytes_per_us * ((reread > 0) | (written > 0))
    light = joined * reread + price * (smaller * 2 * written + kernels) + _LIGHT_PRICE * min(price, 1.0) * out
    fused = (liveness.kinds == "light") | (liveness.makes.sums(np.array(fusion.virtual, dtype=np.int64)) > 0)
    prices = np.where(fused, light, price * smaller * latency * profile.bytes_per_us)
    prices[[op.effectful for op in liveness.graph.operators]] = np.inf
    return prices
