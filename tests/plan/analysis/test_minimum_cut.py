"""What is computed again, against every subset of small graphs."""

import itertools
import random
from dataclasses import replace

import pytest

from tensile_jax.ir import Graph, TensorId
from tensile_jax.plan.analysis.fusion import find_fusion
from tensile_jax.plan.analysis.liveness import find_liveness
from tensile_jax.plan.analysis.minimum_cut import _prices, drop_tensors
from tensile_jax.plan.analysis.retention import retain
from tests.builders import PROFILE, graph_of, tensor_named


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


def layers_of(narrow: int, wide: int) -> Graph:
    """Two layers, each with a narrow product, the first residual sum, a wide product and the second sum; then their gradients."""
    lines = [
        "a = heavy(x)", "s = light(a, x)", "b = heavy(s)", "t = light(b, s)", "c = heavy(t)", "u = light(c, t)",
        "d = heavy(u)", "v = light(d, u)", "e = heavy(v)", "f = heavy(e, u)", "g = heavy(f, t)", "y = heavy(g, s)",
    ]  # fmt: skip
    graph = graph_of(lines, inputs="x", outputs="y")
    of = {"a": narrow, "b": wide, "c": narrow, "d": wide}
    flops = [of.get(graph.tensors[op.outputs[0]].name, op.flops) for op in graph.operators]
    return replace(graph, operators=tuple(replace(op, flops=n) for op, n in zip(graph.operators, flops, strict=True)))


@pytest.mark.parametrize(("narrow", "wide", "rows"), [(1000, 4000, (2, 3, 4, 5)), (4000, 1000, (1, 2, 3, 4))])
def test_of_two_residual_sums_in_a_layer_the_one_behind_the_wide_product_is_kept(
    narrow: int, wide: int, rows: tuple[int, ...]
) -> None:
    graph = layers_of(narrow, wide)
    liveness = find_liveness(graph)
    fusion = find_fusion(liveness, fused_reductions=True)
    assert tuple(row for row in fusion.row if row) == rows
    dropped = drop_tensors(liveness, fusion, retain(liveness, {}), turn=8, price=0.01, profile=PROFILE)
    assert {"s", "t", "u", "v"} - {graph.tensors[t].name for t in dropped} == ({"t", "v"} if wide > narrow else {"s", "u"})


def test_a_gated_product_costs_what_is_read_and_no_more_at_low_prices() -> None:
    graph = graph_of(
        ["a = heavy(x)", "b = heavy(x)", "p = light(a, b)", "c = heavy(p)", "y = heavy(c, p, a, b)"], inputs="x", outputs="y"
    )
    liveness = find_liveness(graph)
    fusion = find_fusion(liveness, fused_reductions=True)
    assert fusion.reread[2] == 100
    assert fusion.row[2] == 0
    dropped = drop_tensors(liveness, fusion, retain(liveness, {}), turn=4, price=0.01, profile=PROFILE)
    assert "p" in {graph.tensors[t].name for t in dropped}
