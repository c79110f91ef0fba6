"""Cutting and dropping against brute force: every segmentation of small tables, every subset of small graphs."""

import dataclasses
import itertools
import random

import numpy as np
import pytest

from tensile_jax.ir import Graph, TensorId
from tensile_jax.plan.analysis.fusion import find_fusion
from tensile_jax.plan.analysis.liveness import find_liveness
from tensile_jax.plan.analysis.rematerialization import _prices, drop_tensors
from tensile_jax.plan.analysis.absence import find_residencies
from tensile_jax.plan.analysis.retention import retain
from tensile_jax.plan.search.segmentation import BoundaryTable, _read_again, boundary_table, chains, cheapest_cut, least_peak
from tensile_jax.plan.search.swaps import Lane
from tests.builders import PROFILE, graph_of, tensor_named


def random_table(seed: int) -> BoundaryTable:
    rng = np.random.default_rng(seed)
    k = int(rng.integers(2, 8))
    boundaries = tuple(np.cumsum([0, *rng.integers(1, 5, k - 1)]).tolist())
    cost, held, work = (rng.integers(1, 100, (k, k)).astype(float) for _ in range(3))
    return BoundaryTable(boundaries, cost, held, work, np.zeros((k, k)))


def segmentations(table: BoundaryTable) -> list[tuple[int, ...]]:
    """All of two segments or more, as places on the table; the one segment where the table has no other."""
    inner = range(1, len(table.boundaries) - 1)
    last = len(table.boundaries) - 1
    fewest = 1 if inner else 0
    return [(0, *some, last) for n in range(fewest, len(inner) + 1) for some in itertools.combinations(inner, n)]


def worst(table: BoundaryTable, path: tuple[int, ...]) -> float:
    return max(table.held[a, b] + table.workspace[a, b] for a, b in itertools.pairwise(path))


def price(table: BoundaryTable, path: tuple[int, ...]) -> float:
    return sum(table.cost[a, b] for a, b in itertools.pairwise(path))


@pytest.mark.parametrize("seed", range(100))
def test_the_cheapest_cut_is_the_cheapest_of_all_segmentations_under_the_limit(seed: int) -> None:
    table = random_table(seed)
    for limit in (50.0, 90.0, 120.0, 150.0, 1000.0):
        fitting = [path for path in segmentations(table) if worst(table, path) <= limit]
        found = cheapest_cut(table, table.workspace, limit)
        if not fitting:
            assert found is None
            continue
        assert found is not None
        path = tuple(table.boundaries.index(b) for b in found.boundaries)
        assert path in fitting
        assert found.cost == price(table, path) == min(price(table, p) for p in fitting)


@pytest.mark.parametrize("seed", range(100))
def test_the_least_peak_is_the_least_of_all_segmentations_and_can_be_kept(seed: int) -> None:
    table = random_table(seed)
    least = least_peak(table, table.workspace)
    assert least == min(worst(table, path) for path in segmentations(table))
    assert cheapest_cut(table, table.workspace, least) is not None
    assert cheapest_cut(table, table.workspace, least - 1) is None


def table_of(graph: Graph) -> BoundaryTable:
    liveness = find_liveness(graph)
    fusion = find_fusion(liveness, fused_reductions=False)
    retention = retain(liveness, {})
    return boundary_table(retention, fusion, PROFILE, residencies=find_residencies(retention, {}))


def test_what_a_segment_holds_is_what_is_stored_before_it_and_what_it_hands_on() -> None:
    graph = graph_of(
        ["a = heavy(x)", "b = heavy(a)", "c = heavy(b)", "y = heavy(c, a)"],
        inputs="x", outputs="y", sizes={"x": 1, "a": 10, "b": 100, "c": 1000, "y": 10_000},
    )  # fmt: skip
    table = table_of(graph)
    index = {b: i for i, b in enumerate(table.boundaries)}
    assert set(table.boundaries) >= {0, 1, 2, 3, 4}

    def held(a: int, b: int) -> float:
        return table.held[index[a], index[b]]

    assert held(0, 1) == 1 + 10
    assert held(0, 2) == 1 + 10 + 100
    assert held(1, 2) == 11 + 100
    assert held(1, 3) == 11 + 1000
    assert held(3, 4) == 1 + 10 + 1000 + 10_000
    assert held(0, 4) == 1 + 10_000
    assert table.workspace[index[1], index[3]] == 100  # b lives and dies inside
    assert table.workspace[index[0], index[4]] == 10 + 1000  # a and c while y is written; before, all lie in y's buffer


def test_a_transposition_stays_with_the_product_that_xla_folds_it_into() -> None:
    graph = graph_of(
        ["g = heavy(x)", "t = light(g)", "y = light(t)", "z = heavy(y)"],
        inputs="x", outputs="z", sizes={"x": 1, "g": 10, "t": 10, "y": 10, "z": 10},
    )  # fmt: skip
    assert 1 in table_of(graph).boundaries
    operators = list(graph.operators)
    operators[1] = dataclasses.replace(operators[1], primitive="transpose")
    assert 1 not in table_of(dataclasses.replace(graph, operators=tuple(operators))).boundaries


def test_too_many_candidates_are_thinned_evenly() -> None:
    graph = graph_of([f"y{k + 1} = heavy(y{k})" for k in range(250)], inputs="y0", outputs="y250")
    boundaries = np.array(table_of(graph).boundaries)
    assert len(boundaries) == 192
    assert np.diff(boundaries).max() <= 3


def test_estimates_grow_with_kernels() -> None:
    table = BoundaryTable((0, 3, 5), np.zeros((3, 3)), np.zeros((3, 3)), np.full((3, 3), 100.0), np.full((3, 3), 2.0))
    assert table.estimates(0.5)[0, 1] == 200.0


# -- recomputation -----------------------------------------------------------------------------------------------------


def cost_of_dropping(graph: Graph, dropped: frozenset[TensorId], turn: int, price: float) -> float:
    """What is kept across the turn plus the price of what then runs again, counted one subset at a time."""
    liveness = find_liveness(graph)
    fusion = find_fusion(liveness, fused_reductions=False)
    made_before = [t.id for t in graph.tensors if 0 <= liveness.begin[t.id] < turn]
    total, again = 0.0, set()
    wanted = [t for t in made_before if any(p >= turn for p in liveness.uses[t])]
    kept: set[TensorId] = set()
    while wanted:
        t = wanted.pop()
        place = liveness.begin[t]
        if not 0 <= place < turn:
            continue
        if t not in dropped:
            kept.add(t)
        elif place not in again:
            again.add(place)
            wanted += graph.operators[place].inputs
    total += sum(graph.tensors[t].nbytes * (1 - 1e-6) for t in kept)
    return total + float(_prices(liveness, fusion, price, PROFILE)[list(again)].sum())


def two_sided_graph(seed: int) -> tuple[Graph, int]:
    """Heavy operators that read what came shortly before, then as many that read it again from the far side."""
    rng = random.Random(seed)
    n = rng.randrange(2, 6)
    sizes = {"x": 64} | {f"{side}{k}": rng.randrange(1, 20) * 64 for side in "ab" for k in range(n)}
    lines = [
        f"a{k} = heavy({', '.join(sorted({'x' if k == 0 else f'a{rng.randrange(k)}', 'x' if k < 2 else f'a{k - 1}'}))})"
        for k in range(n)
    ]
    lines += [f"b{k} = heavy(a{rng.randrange(n)}, {'x' if k == 0 else f'b{k - 1}'})" for k in range(n)]
    return graph_of(lines, sizes=sizes, inputs="x", outputs=f"b{n - 1}"), n


@pytest.mark.parametrize("price", [0.05, 0.3, 0.6])
@pytest.mark.parametrize("seed", range(40))
def test_what_is_dropped_is_the_cheapest_of_all_subsets(seed: int, price: float) -> None:
    graph, turn = two_sided_graph(seed)
    liveness = find_liveness(graph)
    fusion = find_fusion(liveness, fused_reductions=False)
    found = drop_tensors(liveness, fusion, retain(liveness, {}), turn=turn, price=price, profile=PROFILE)
    choices = [t.id for t in graph.tensors if 0 <= liveness.begin[t.id] < turn]
    subsets = (frozenset(s) for n in range(len(choices) + 1) for s in itertools.combinations(choices, n))
    best = min(cost_of_dropping(graph, subset, turn, price) for subset in subsets)
    assert cost_of_dropping(graph, frozenset(found), turn, price) == pytest.approx(best, abs=1e-2)


def test_what_is_cheap_to_make_again_is_dropped_and_what_is_dear_is_kept() -> None:
    graph = graph_of(
        ["a = heavy(x)", "b = light(a)", "c = heavy(b)", "d = heavy(c)", "y = heavy(d, b)"],
        inputs="x", outputs="y", sizes={"a": 100, "b": 400}, flops=50_000,
    )  # fmt: skip
    liveness = find_liveness(graph)
    fusion = find_fusion(liveness, fused_reductions=False)

    def dropped(price: float) -> dict[TensorId, int]:
        return drop_tensors(liveness, fusion, retain(liveness, {}), turn=4, price=price, profile=PROFILE)

    a, b = tensor_named(graph, "a"), tensor_named(graph, "b")
    assert dropped(1.0) == {}  # b written and read again: 800 bytes to save 400, and a kept instead
    assert dropped(0.3) == {b: 2}  # 0.3 * 800 + 100 < 400
    assert dropped(0.001) == {a: 1, b: 2}  # 0.001 * 50,000 < 100: even the product runs again


# -- the link ----------------------------------------------------------------------------------------------------------


RESIDUAL = (
    "a = heavy(x)", "s = light(a, x)", "b = heavy(s)", "t = light(b, s)", "c = heavy(t)", "u = light(c, t)",
    "d = heavy(u)", "e = heavy(d, t)", "y = heavy(e, s)",
)  # fmt: skip


def test_a_residual_sum_is_read_by_the_one_kernel_that_writes_it_and_counted_in_its_row() -> None:
    fusion = find_fusion(find_liveness(graph_of(RESIDUAL, inputs="x", outputs="y")), fused_reductions=True)
    assert fusion.reread == (0, 100, 0, 100, 0, 100, 0, 0, 0)
    assert fusion.row == (0, 1, 0, 2, 0, 3, 0, 0, 0)


def test_every_other_residual_sum_is_dropped() -> None:
    graph = graph_of(RESIDUAL, inputs="x", outputs="y")
    liveness = find_liveness(graph)
    fusion = find_fusion(liveness, fused_reductions=True)
    dropped = drop_tensors(liveness, fusion, retain(liveness, {}), turn=7, price=0.1, profile=PROFILE)
    assert {graph.tensors[t].name for t in dropped} == {"b", "t"}


CHAIN = ("a = heavy(x)", "k = light(a)", "l = light(k)", "b = heavy(l)", "y = heavy(b)", "z = heavy(y, b)", "w = heavy(z, b)")


def test_a_chain_lets_go_of_what_its_fused_operators_have_read() -> None:
    graph = graph_of(CHAIN, inputs="x", outputs="w")
    liveness = find_liveness(graph)
    retention = retain(liveness, {tensor_named(graph, n): place for n, place in zip("aklb", (1, 2, 3, 4), strict=True)})
    fusion = find_fusion(liveness, fused_reductions=True)
    assert chains(retention, fusion).tolist() == [0, 0, 0, 0, 0, 200, 0]  # a with l, then l with b


def test_what_a_chain_was_made_from_is_not_read_for_its_second_reader() -> None:
    graph = graph_of(CHAIN, inputs="x", outputs="w")
    retention = retain(
        find_liveness(graph), {tensor_named(graph, n): place for n, place in zip("aklb", (1, 2, 3, 4), strict=True)}
    )
    assert retention.needs[tensor_named(graph, "l")] == (3, 5, 6)
    assert _read_again(retention, tensor_named(graph, "l")) == [5]
    assert _read_again(retention, tensor_named(graph, "b")) == [5, 6]


def test_a_lane_gives_the_earliest_and_the_latest_free_window() -> None:
    lane = Lane()
    lane.take(10.0, 20.0)
    lane.take(30.0, 40.0)
    assert lane.earliest(0.0, 10.0) == 0.0
    assert lane.earliest(5.0, 10.0) == 20.0
    assert lane.earliest(15.0, 11.0) == 40.0
    assert lane.latest(50.0, 10.0) == 40.0
    assert lane.latest(35.0, 10.0) == 20.0
    assert lane.latest(35.0, 11.0) == -1.0


@pytest.mark.parametrize("seed", range(50))
def test_windows_that_a_lane_gives_never_overlap(seed: int) -> None:
    rng = random.Random(seed)
    lane, taken = Lane(), []
    for _ in range(20):
        length, when = rng.randrange(1, 10), float(rng.randrange(0, 100))
        begin = lane.earliest(when, length) if rng.random() < 0.5 else lane.latest(when, length)
        lane.take(begin, begin + length)
        taken.append((begin, begin + length))
    for a, b in itertools.pairwise(sorted(taken)):
        assert a[1] <= b[0]
