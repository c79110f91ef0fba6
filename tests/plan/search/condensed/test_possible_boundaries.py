"""Where a step may be cut."""

import dataclasses

import numpy as np

from tensile_jax.ir import Graph
from tensile_jax.plan.analysis.absence import stored_unless_swapped
from tensile_jax.plan.analysis.liveness import find_liveness
from tensile_jax.plan.analysis.retention import retain
from tensile_jax.plan.search.condensed.possible_boundaries import possible_boundaries
from tests.builders import graph_of


def boundaries_of(graph: Graph) -> tuple[int, ...]:
    retention = retain(find_liveness(graph), {})
    return possible_boundaries(retention, stored_unless_swapped(retention))


def test_a_transposition_stays_with_the_product_that_xla_folds_it_into() -> None:
    graph = graph_of(
        ["g = heavy(x)", "t = light(g)", "y = light(t)", "z = heavy(y)"],
        inputs="x", outputs="z", sizes={"x": 1, "g": 10, "t": 10, "y": 10, "z": 10},
    )  # fmt: skip
    assert 1 in boundaries_of(graph)
    operators = list(graph.operators)
    operators[1] = dataclasses.replace(operators[1], primitive="transpose")
    assert 1 not in boundaries_of(dataclasses.replace(graph, operators=tuple(operators)))


def test_too_many_boundaries_are_thinned_evenly() -> None:
    graph = graph_of([f"y{k + 1} = heavy(y{k})" for k in range(250)], inputs="y0", outputs="y250")
    boundaries = np.array(boundaries_of(graph))
    assert len(boundaries) == 192
    assert np.diff(boundaries).max() <= 3
