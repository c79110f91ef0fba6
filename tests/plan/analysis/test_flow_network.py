"""The sink side of a minimum cut, with chains eliminated, against a flow through the whole network and against every cut."""

import itertools
import random
import time

import numpy as np
import pytest

from tensile_jax.plan.analysis.flow_network import _by_flow, _choose, _network, sink_side

INFINITE = float("inf")
Edges = list[tuple[int, int, float]]


def found(edges: Edges, count: int) -> list[bool]:
    heads, tails, values = (np.array(column) for column in zip(*edges, strict=True))
    return sink_side(heads, tails, values.astype(float), count).tolist()


def cost(edges: Edges, side: tuple[bool, ...]) -> float:
    return sum(value for head, tail, value in edges if not side[head] and side[tail])


def smallest_of_all_cuts(edges: Edges, count: int) -> list[bool]:
    cuts = [(False, True, *rest) for rest in itertools.product((False, True), repeat=count - 2)]
    least = min(cost(edges, cut) for cut in cuts)
    return list(min((cut for cut in cuts if cost(edges, cut) == least), key=sum))


def random_network(seed: int, most: int) -> tuple[Edges, int]:
    """Chains with some shortcuts. Ties are frequent. Edges from the source may be infinite, or else those to the sink."""
    rng = random.Random(seed)
    count = rng.randrange(3, most)
    of_source, of_sink = (9, INFINITE) if seed % 2 else (INFINITE, 9)
    edges: Edges = [(0, 2, rng.randrange(9)), (count - 1, 1, of_sink)]
    for node in range(3, count):
        before = {node - 1 if rng.random() < 0.8 else rng.randrange(2, node) for _ in range(rng.choice([1, 1, 1, 2]))}
        edges += [(u, node, rng.choice([INFINITE, rng.randrange(9), rng.randrange(9)])) for u in sorted(before)]
        edges += [(0, node, of_source if rng.random() < 0.1 else rng.randrange(5))] if rng.random() < 0.7 else []
        edges += [(node, 1, rng.choice([of_sink, rng.randrange(9)]))] if rng.random() < 0.2 else []
    return edges, count


@pytest.mark.parametrize("seed", range(150))
def test_the_side_is_the_smallest_of_all_minimum_cuts(seed: int) -> None:
    edges, count = random_network(seed, 13)
    assert found(edges, count) == smallest_of_all_cuts(edges, count)


@pytest.mark.parametrize("seed", range(100))
def test_the_side_is_that_of_a_flow_through_the_whole_network(seed: int) -> None:
    edges, count = random_network(1000 + seed, 400)
    heads, tails, values = (np.array(column) for column in zip(*edges, strict=True))
    capacities = np.where(np.isfinite(values), values, 2**30).astype(np.int64)
    network = _network(heads, tails, capacities, count)
    assert _choose(network) is not None
    assert found(edges, count) == _by_flow(network).tolist()


def test_a_chain_is_cut_where_that_costs_least_and_in_a_tie_close_to_the_sink() -> None:
    edges: Edges = [(0, 2, 1), (2, 3, 9), (0, 3, 1), (3, 4, 2), (0, 4, 3), (4, 5, 9), (0, 5, 1), (5, 1, INFINITE)]
    assert found(edges, 6) == [False, True, False, False, True, True]  # 2 + 3 + 1, as all four together: 1 + 1 + 3 + 1


def test_a_chain_of_fifty_thousand_nodes_takes_no_more_than_a_moment() -> None:
    count, kept = 50_000, 49_900
    nodes = np.arange(2, count)
    heads = np.concatenate([np.zeros(count - 2, int), nodes])
    tails = np.concatenate([nodes, nodes[1:], [1]])
    between = np.where(nodes[1:] == kept, 50, 5000)
    began = time.process_time()
    side = sink_side(heads, tails, np.concatenate([np.ones(count - 2), between, [INFINITE]]), count)
    assert time.process_time() - began < 5  # a flow through the whole chain takes a minute
    assert np.flatnonzero(side).tolist() == [1, *range(kept, count)]
