"""What XLA fuses: the statistics of rows, and operands of products that it copies into another layout."""

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

from tensile_jax.ir import Graph
from tensile_jax.plan.analysis.fusion import Fusion, find_fusion
from tensile_jax.plan.analysis.latency import rerun_latencies
from tensile_jax.plan.analysis.liveness import find_liveness
from tensile_jax.trace import trace_step
from tests.builders import PROFILE, graph_of

_N = 64


def graph_for(function: Callable[..., Any], *arguments: Any) -> Graph:
    return trace_step(jax.jit(function), function, arguments, {}).graph


def fusion_of(graph: Graph, *, fused_reductions: bool = True) -> Fusion:
    return find_fusion(find_liveness(graph), fused_reductions=fused_reductions)


def virtual_primitives(graph: Graph, fusion: Fusion) -> set[str]:
    return {op.primitive for op in graph.operators if any(fusion.virtual[t] for t in op.outputs)}


def attention(q: Any, w: Any) -> Any:
    return jnp.sum(jax.nn.softmax(q @ w, axis=-1) @ w)


def test_the_maximum_and_the_sum_of_a_softmax_are_computed_again_for_nothing() -> None:
    graph = graph_for(attention, jnp.ones((_N, _N)), jnp.ones((_N, _N)))
    liveness, fusion = find_liveness(graph), fusion_of(graph)
    rerun_us = rerun_latencies(liveness, fusion, PROFILE)
    statistics = [place for place, op in enumerate(graph.operators) if op.kind == "reduction" and op.over_rows]
    assert [graph.operators[place].primitive for place in statistics] == ["reduce_max", "reduce_sum"]
    for place in statistics:
        assert all(fusion.virtual[t] for t in graph.operators[place].outputs)
        assert rerun_us[place] == 0
    last = graph.operators[-1]  # the sum over everything, whose result is combined with nothing
    assert last.kind == "reduction"
    assert not any(fusion.virtual[t] for t in last.outputs)


def test_statistics_are_kept_where_reductions_are_not_fused() -> None:
    graph = graph_for(attention, jnp.ones((_N, _N)), jnp.ones((_N, _N)))
    assert not virtual_primitives(graph, fusion_of(graph, fused_reductions=False)) & {"reduce_max", "reduce_sum"}


def test_statistics_over_other_axes_and_those_that_are_combined_with_nothing_are_kept() -> None:
    def by_column(x: Any, w: Any) -> Any:  # as batch normalization does, on a square where shapes do not tell the axes apart
        y = x @ w
        return jnp.sum((y - jnp.max(y, axis=0)) @ w)

    def alone(x: Any, w: Any) -> Any:
        return jnp.max(x @ w, axis=-1)

    def returned(x: Any, w: Any) -> Any:
        y = x @ w
        highest = jnp.max(y, axis=-1)
        return highest, (y - highest[:, None]) @ w

    for function in (by_column, alone, returned):
        graph = graph_for(function, jnp.ones((_N, _N)), jnp.ones((_N, _N)))
        assert "reduce_max" not in virtual_primitives(graph, fusion_of(graph)), function.__name__


def _normalized(x: Any) -> Any:
    centered = x - jnp.mean(x, axis=-1, keepdims=True)
    return centered * jax.lax.rsqrt(jnp.mean(centered**2, axis=-1, keepdims=True) + 1e-5)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_neither_statistics_of_a_layer_normalization_nor_what_lies_between_them_are_stored(dtype: Any) -> None:
    def layer(x: Any, w: Any) -> Any:
        y = x @ w
        normalized = _normalized(y.astype(jnp.float32)).astype(dtype)
        return jnp.sum(jnp.tanh(y + normalized @ w)).astype(jnp.float32)  # the sum reads `y`, too

    graph = graph_for(jax.grad(layer), jnp.ones((_N, _N), dtype), jnp.ones((_N, _N), dtype))
    fusion = fusion_of(graph)
    mean, variance, *_ = (op.outputs[0] for op in graph.operators if op.over_rows)
    centered = next(op for op in graph.operators if op.primitive == "sub")
    (square,) = (op for op in graph.operators if op.primitive in ("square", "integer_pow") and op.inputs == centered.outputs)
    product = [op for op in graph.operators if op.primitive == "dot_general"][1]  # reads the normalized rows
    for t in (mean, variance, *centered.outputs, *square.outputs):
        assert fusion.virtual[t]
    assert not fusion.virtual[product.inputs[0]]
    assert fusion.materialised[product.inputs[0]]


def test_the_statistic_of_a_root_mean_square_normalization_is_not_stored() -> None:
    def layer(x: Any, w: Any) -> Any:
        y = x @ w
        return jnp.sum((y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True))) @ w)

    graph = graph_for(layer, jnp.ones((_N, _N)), jnp.ones((_N, _N)))
    (statistic,) = (op.outputs[0] for op in graph.operators if op.over_rows)
    assert fusion_of(graph).virtual[statistic]


def test_a_mean_and_a_mean_of_squares_that_are_combined_are_kept() -> None:
    def layer(x: Any, w: Any) -> Any:
        y = x @ w
        mean, squares = jnp.mean(y, axis=-1, keepdims=True), jnp.mean(y * y, axis=-1, keepdims=True)
        return jnp.sum(((y - mean) * jax.lax.rsqrt(squares - mean * mean)) @ w)

    graph = graph_for(layer, jnp.ones((_N, _N)), jnp.ones((_N, _N)))
    fusion = fusion_of(graph)
    statistics = [op.outputs[0] for op in graph.operators if op.over_rows]
    assert len(statistics) == 2
    assert not any(fusion.virtual[t] for t in statistics)


def test_what_a_loss_reduces_is_kept_for_its_gradient() -> None:
    def loss(w: Any, x: Any, labels: Any) -> Any:
        return optax.softmax_cross_entropy_with_integer_labels(x @ w, labels).mean()

    def by_logarithms(w: Any, x: Any, labels: Any) -> Any:
        return -jnp.take_along_axis(jax.nn.log_softmax(x @ w), labels[:, None], axis=1).mean()

    for function in (loss, by_logarithms):
        step = jax.value_and_grad(function)
        graph = graph_for(step, jnp.ones((_N, _N)), jnp.ones((_N, _N)), jnp.zeros(_N, int))
        statistics = [op.outputs[0] for op in graph.operators if op.over_rows]
        assert len(statistics) >= 2
        assert not any(fusion_of(graph).virtual[t] for t in statistics), function.__name__


def test_what_is_expensive_is_written_if_several_kernels_read_it() -> None:
    def twice(function: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
        def step(x: Any, w: Any) -> Any:
            y = function(x @ w)
            return (2 * y) @ w, (3 * y) @ w

        return step

    def once(x: Any, w: Any) -> Any:
        return (2 * jnp.tanh(x @ w)) @ w

    def is_written(step: Callable[[Any, Any], Any], primitive: str, *, on_gpu: bool) -> bool:
        graph = graph_for(step, jnp.ones((_N, _N)), jnp.ones((_N, _N)))
        made = next(op for op in graph.operators if op.primitive == primitive).outputs[0]
        return fusion_of(graph, fused_reductions=on_gpu).materialised[made]

    assert is_written(twice(jnp.tanh), "tanh", on_gpu=True)
    assert is_written(twice(jnp.tanh), "tanh", on_gpu=False)
    assert not is_written(twice(jnp.exp), "exp", on_gpu=True)
    assert is_written(twice(jnp.exp), "exp", on_gpu=False)
    assert not is_written(twice(jnp.negative), "neg", on_gpu=False)
    assert not is_written(once, "tanh", on_gpu=False)


def test_what_a_scatter_updates_is_written_where_its_result_is() -> None:
    def step(x: Any, w: Any, rows: Any) -> Any:
        return jnp.zeros((_N, _N)).at[rows].add(x @ w), (x @ w).at[rows].add(x)

    graph = graph_for(step, jnp.ones((_N, _N)), jnp.ones((_N, _N)), jnp.zeros(_N, int))
    into_zeros, into_product = (op for op in graph.operators if op.primitive == "scatter-add")
    for on_gpu in (True, False):
        written = fusion_of(graph, fused_reductions=on_gpu).materialised
        assert not written[into_zeros.inputs[0]]
        assert written[into_product.inputs[0]]  # a product is a kernel of its own
        assert all(written[op.outputs[0]] for op in (into_zeros, into_product))


def test_what_is_expensive_costs_nothing_again_where_only_a_derivative_reads_it() -> None:
    def layer(x: Any, w: Any) -> Any:
        y = x @ w
        return jnp.sum(jnp.sin((y * jnp.tanh(y)) @ w))

    graph = graph_for(jax.grad(layer, argnums=1), jnp.ones((_N, _N)), jnp.ones((_N, _N)))
    by_primitive = {op.primitive: place for place, op in reversed(list(enumerate(graph.operators)))}
    nbytes = 4 * _N * _N
    on_gpu, on_cpu = fusion_of(graph), fusion_of(graph, fused_reductions=False)
    tanh, activation = by_primitive["tanh"], by_primitive["mul"]
    assert on_gpu.materialised[graph.operators[tanh].outputs[0]]
    assert on_gpu.again[tanh] == 0
    assert on_gpu.again[activation] == 2 * nbytes  # its own result, which a product reads, and the other one
    assert (on_cpu.again[tanh], on_cpu.again[activation]) == (nbytes, nbytes)


def test_a_slice_that_a_product_copies_into_another_layout_counts_as_written_only_if_it_crosses() -> None:
    def scores(x: Any, w: Any) -> Any:
        parts = (x @ w).reshape(8, 16, 2, 4, 8)
        return jnp.einsum("bqhd,bkhd->bhqk", parts[:, :, 0], parts[:, :, 1])

    graph = graph_for(scores, jnp.ones((8, 16, 64)), jnp.ones((64, 64)))
    fusion = fusion_of(graph)
    product = graph.operators[-1]
    assert product.primitive == "dot_general"
    assert set(product.relaid) == set(product.inputs)
    for t in product.relaid:
        assert fusion.relaid[t]
        assert fusion.materialised[t]  # the copy takes as much memory
        assert not fusion.written_as_made[t]
    first = next(op for op in graph.operators if op.primitive == "dot_general")
    assert first.relaid == ()


def test_a_small_view_is_never_stored_and_a_large_one_may_be() -> None:
    def function(x: Any, bias: Any, w: Any) -> Any:
        y = x @ w + bias.reshape(1, _N)
        return jnp.sum(y.reshape(-1, 2, _N) * bias.reshape(1, 1, _N))

    graph = graph_for(function, jnp.ones((8 * _N * _N, _N)), jnp.ones(_N), jnp.ones((_N, _N)))
    fusion = fusion_of(graph, fused_reductions=False)
    views = [op for op in graph.operators if op.primitive in ("reshape", "broadcast_in_dim")]
    assert {(graph.tensors[op.outputs[0]].nbytes, fusion.virtual[op.outputs[0]]) for op in views} >= {
        (4 * _N, True),
        (4 * 8 * _N**3, False),
    }


@pytest.mark.parametrize("seed", range(20))
def test_expensive_tensors_that_several_kernels_read_are_written(seed: int) -> None:
    """A kernel belongs to a heavy operator, to a reduction, or to a light operator whose result is written."""
    rng = random.Random(seed)
    graph = random_light_graph(rng)
    liveness = find_liveness(graph)
    fusion = fusion_of(graph, fused_reductions=False)

    def kernels(t: int) -> set[int]:
        found: set[int] = set()
        for place in liveness.uses[t]:
            op = graph.operators[place]
            own = op.kind != "light" or any(fusion.materialised[u] for u in op.outputs)
            found |= {place} if own else set[int]().union(*(kernels(u) for u in op.outputs))
        return found

    read_by_kernel = {u for op in graph.operators if op.kind != "light" for u in op.inputs}
    for op in graph.operators:
        (t,) = op.outputs
        if op.kind == "light" and t not in read_by_kernel:
            assert fusion.materialised[t] == (op.primitive == "tanh" and len(kernels(t)) > 1)


def random_light_graph(rng: random.Random) -> Graph:
    """A graph of few heavy operators and reductions, and many light ones, of which some are expensive."""
    lines, made = list[str](), ["x"]
    for i in range(40):
        kind = rng.choice(("light", "light", "light", "light", "heavy", "reduction"))
        read = dict.fromkeys(rng.choices(made[-8:], k=rng.randint(1, 2)))
        lines.append(f"t{i} = {kind}({', '.join(read)})")
        made.append(f"t{i}")
    graph = graph_of(lines, inputs="x", outputs="t39")
    operators = tuple(
        dataclasses.replace(op, primitive=rng.choice(("tanh", "mul"))) if op.kind == "light" else op for op in graph.operators
    )
    return dataclasses.replace(graph, operators=operators)
