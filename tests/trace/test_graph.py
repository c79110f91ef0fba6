"""The graph of a step: names and roles that a person recognises, state that is carried, costs, fingerprints."""

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.ad_checkpoint import checkpoint_name

from tensile_jax.installed_models import MODELS
from tensile_jax.ir import Graph, Operator
from tensile_jax.trace import trace_step
from tests.builders import batch, optimizer_state, optimizer_step, sgd_step, weights


def graph(step: Callable[..., Any], *args: Any, static: tuple[int, ...] = (), **options: Any) -> Graph:
    return trace_step(jax.jit(step, **options), step, args, {}, static=static).graph


def roles(traced: Graph) -> dict[str, str]:
    return {t.name: t.role for t in traced.tensors}


def carried(traced: Graph) -> list[tuple[str, str]]:
    return [(traced.tensors[p.input].name, traced.tensors[p.output].name) for p in traced.carried]


def operator(traced: Graph, primitive: str) -> Operator:
    return next(op for op in traced.operators if op.primitive == primitive)


# -- names and roles ----------------------------------------------------------------------------------------------------------


def test_arguments_and_results_are_named_by_their_paths() -> None:
    optimizer = optax.sgd(0.1, momentum=0.9)
    traced = graph(optimizer_step(optimizer), optimizer_state(optimizer, weights(2)), batch())
    named = {t.name for t in traced.tensors}
    assert {"state['params'][0]", "state['params'][1]", "state['opt_state'][0].trace[0]", "batch"} <= named
    assert {"result[0]['params'][0]", "result[0]['opt_state'][0].trace[1]", "result[1]"} <= named


def test_every_tensor_and_operator_of_a_model_has_a_name_and_only_one_tensor_has_it() -> None:
    model = MODELS["mlp"](batch_size=4)
    traced = graph(model.step, model.state_shape, model.batch_shape)
    names = [t.name for t in traced.tensors]
    assert len(set(names)) == len(names)
    assert all(names) and all(op.name for op in traced.operators)
    assert "state.params['Dense_0']['kernel']" in names
    assert any(op.name == "MLP/Dense_0/dot_general" for op in traced.operators)
    assert any(op.name.startswith("backward MLP/Dense_1/") for op in traced.operators)


def test_names_of_the_backward_pass_begin_with_a_word_whether_there_is_a_scope_or_not() -> None:
    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        def loss(w: jax.Array) -> jax.Array:
            with jax.named_scope("it's"):
                y = jnp.tanh(x @ w)
            return jnp.sum(jnp.sin(y))

        return w - jax.grad(loss)(w)

    traced = graph(step, jnp.ones((4, 4)), jnp.ones((4, 4)))
    products = [(op.name, op.scope, op.in_backward_pass) for op in traced.operators if op.primitive == "dot_general"]
    assert products == [("it's/dot_general", "it's", False), ("backward it's/dot_general", "it's", True)]
    last = next(op for op in traced.operators if op.primitive == "mul")
    assert (last.name, last.scope, last.in_backward_pass) == ("backward mul", "", True)
    assert traced.tensors[last.outputs[0]].name == "backward mul"


def test_roles_tell_what_a_tensor_is_for() -> None:
    optimizer = optax.adam(1e-3)
    captured = jnp.ones((32,))
    step = optimizer_step(optimizer)

    def with_constant(state: Any, batch: Any) -> Any:
        return step(state, batch + captured)

    traced = graph(with_constant, optimizer_state(optimizer, weights(2)), batch())
    found = roles(traced)
    assert found["state['params'][0]"] == "parameter"
    assert found["state['opt_state'][0].mu[0]"] == "optimizer_state"
    assert found["state['opt_state'][0].nu[1]"] == "optimizer_state"
    assert found["batch"] == "batch"
    assert found["constant_0"] == "constant"
    assert found["result[0]['params'][0]"] == "parameter"
    assert found["result[1]"] == "output"
    gradients = [t for t in traced.tensors if t.role == "gradient"]
    assert {g.shape for g in gradients} == {(32, 32)}
    assert any(t.role == "activation" and t.shape == (512, 32) for t in traced.tensors)


def test_statistics_counters_and_keys_are_state() -> None:
    def step(state: Any, batch: Any) -> Any:
        key, now = jax.random.split(state["key"])
        params, loss = sgd_step(state["params"], batch + jax.random.normal(now, batch.shape))
        return {"params": params, "mean": 0.9 * state["mean"] + loss, "count": state["count"] + 1, "key": key}, loss

    state = {"params": weights(2), "mean": jnp.zeros(()), "count": jnp.zeros((), jnp.int32), "key": jax.random.key(0)}
    found = roles(graph(step, state, batch()))
    assert {found["state['mean']"], found["state['count']"], found["state['key']"]} == {"state"}


# -- carried state -----------------------------------------------------------------------------------------------------------


def update(params: Any, x: Any) -> Any:
    return sgd_step(params, x)[0]


@pytest.mark.parametrize("donate", [(), (0,)])
def test_state_is_carried_whether_it_is_donated_or_not(donate: tuple[int, ...]) -> None:
    traced = graph(sgd_step, weights(2), batch(), donate_argnums=donate)
    assert carried(traced) == [("state[0]", "result[0][0]"), ("state[1]", "result[0][1]")]
    assert len(traced.donated) == (2 if donate else 0)


def test_state_alone_as_the_result_is_carried() -> None:
    assert carried(graph(update, weights(2), batch())) == [("params[0]", "result[0]"), ("params[1]", "result[1]")]


def test_state_in_several_arguments_is_carried_from_each() -> None:
    optimizer = optax.adam(1e-3)

    def step(params: Any, opt_state: Any, batch: Any) -> Any:
        state, loss = optimizer_step(optimizer)({"params": params, "opt_state": opt_state}, batch)
        return state["params"], state["opt_state"], loss

    params = weights(2)
    pairs = carried(graph(step, params, optimizer.init(params), batch()))
    assert ("params[1]", "result[0][1]") in pairs
    assert ("opt_state[0].mu[0]", "result[1][0].mu[0]") in pairs
    assert ("opt_state[0].count", "result[1][0].count") in pairs
    assert len(pairs) == 7


def test_state_that_comes_back_behind_the_metrics_is_carried() -> None:
    def step(batch: Any, state: Any) -> Any:
        params, loss = sgd_step(state, batch)
        return loss, params

    assert carried(graph(step, batch(), weights(2))) == [("state[0]", "result[1][0]"), ("state[1]", "result[1][1]")]


def test_a_part_of_the_state_that_comes_back_alone_is_carried() -> None:
    def step(state: Any, batch: Any) -> Any:
        params, loss = sgd_step(state["params"], batch)
        return params, loss

    state = {"params": weights(2), "frozen": jnp.ones((3, 3))}
    assert carried(graph(step, state, batch())) == [
        ("state['params'][0]", "result[0][0]"),
        ("state['params'][1]", "result[0][1]"),
    ]


def test_what_comes_back_in_another_shape_or_type_is_not_carried() -> None:
    assert carried(graph(lambda state, x: (state[:1], x.sum()), jnp.ones((2, 3)), batch())) == []
    assert carried(graph(lambda state, x: (state.astype(jnp.int32), x.sum()), jnp.ones(3), batch())) == []


def test_arguments_after_a_static_one_have_their_own_names() -> None:
    traced = graph(lambda w, depth, x: (w * depth, x), jnp.ones(3), 2, jnp.ones(5), static=(1,), static_argnums=1)
    assert [traced.tensors[t].name for t in traced.inputs] == ["w", "x"]


# -- what an operator costs -----------------------------------------------------------------------------------------------------


def test_kinds_flops_and_bytes_of_a_product() -> None:
    product = operator(graph(lambda x, w: x @ w, jnp.ones((8, 3)), jnp.ones((3, 5))), "dot_general")
    assert (product.kind, product.flops, product.nbytes) == ("heavy", 2 * 8 * 3 * 5, 4 * (8 * 3 + 3 * 5 + 8 * 5))


def test_kinds_flops_and_bytes_of_a_convolution() -> None:
    def step(x: Any, w: Any) -> Any:
        return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    convolution = operator(graph(step, jnp.ones((2, 8, 8, 3)), jnp.ones((3, 3, 3, 5))), "conv_general_dilated")
    assert convolution.kind == "heavy"
    assert convolution.flops == 2 * (3 * 3 * 3) * (2 * 8 * 8 * 5)
    assert convolution.relayout == 0


def test_a_convolution_in_another_layout_copies_what_is_not_canonical() -> None:
    def step(x: Any, w: Any) -> Any:
        return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NCHW", "OIHW", "NCHW"))

    convolution = operator(graph(step, jnp.ones((2, 3, 8, 8)), jnp.ones((5, 3, 3, 3))), "conv_general_dilated")
    assert convolution.relayout == 4 * (2 * 3 * 64 + 5 * 3 * 9 + 2 * 5 * 64)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_products_of_small_floats_are_made_in_32_bits(dtype: Any) -> None:
    def product(x: Any, w: Any) -> Any:
        return x @ w

    x, w = jnp.ones((1024, 32), dtype), jnp.ones((32, 32), dtype)
    relayout = operator(graph(product, x, w), "dot_general").relayout
    assert relayout == 4 * (1024 * 32 + 32 * 32 + 1024 * 32)
    memory = jax.jit(product).lower(x, w).compile().memory_analysis()
    assert memory is not None and memory.temp_size_in_bytes <= relayout  # less where XLA has learnt to do without


def test_threefry_works_in_three_times_its_result() -> None:
    def draw(key: Any) -> Any:
        return jax.random.bits(key, (16384,))

    key = jax.random.key(0)
    relayout = operator(graph(draw, key), "random_bits").relayout
    memory = jax.jit(draw).lower(key).compile().memory_analysis()
    assert memory is not None and 0.95 * memory.temp_size_in_bytes <= relayout == 3 * 16384 * 4
    assert operator(graph(draw, jax.random.key(0, impl="rbg")), "random_bits").relayout == 0


def test_kinds_of_light_operators_and_reductions() -> None:
    traced = graph(lambda x: jnp.sum(jnp.tanh(x)) + jnp.sort(x)[0], jnp.ones(16))
    kinds = {op.primitive: op.kind for op in traced.operators}
    assert (kinds["tanh"], kinds["reduce_sum"], kinds["sort"]) == ("light", "reduction", "heavy")


ACTIVATIONS = (
    "relu relu6 sigmoid softplus soft_sign silu swish log_sigmoid leaky_relu hard_sigmoid hard_silu hard_tanh elu celu selu "
    "gelu tanh softmax log_softmax standardize squareplus mish"
).split()


@pytest.mark.smoke
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_nothing_in_an_activation_or_its_gradient_is_heavy(name: str) -> None:
    def loss(w: Any, x: Any) -> Any:
        return jnp.sum(checkpoint_name(getattr(jax.nn, name)(x @ w), "here") ** 2)

    traced = graph(jax.grad(loss), jnp.ones((4, 4)), jnp.ones((8, 4)))
    assert {op.primitive for op in traced.operators if op.kind == "heavy"} == {"dot_general"}


def test_a_scan_costs_its_body_as_often_as_it_runs() -> None:
    def step(x: Any, w: Any) -> Any:
        return jax.lax.scan(lambda c, _: (c @ w, None), x, None, length=7)[0]

    traced = graph(step, jnp.ones((4, 4)), jnp.ones((4, 4)))
    assert operator(traced, "scan").flops == 7 * 2 * 4 * 4 * 4


# -- fingerprints ------------------------------------------------------------------------------------------------------------


def fingerprint(step: Any = sgd_step, *, rows: int = 16, dtype: Any = jnp.float32, layers: int = 2, donate: Any = ()) -> str:
    args = weights(layers, dtype=dtype), batch(rows=rows, dtype=dtype)
    return graph(step, *args, donate_argnums=donate).fingerprint


def test_two_traces_of_one_program_have_the_same_fingerprint() -> None:
    assert fingerprint() == fingerprint()
    assert fingerprint(lambda state, batch: sgd_step(state, batch)) == fingerprint()
    assert fingerprint(lambda state, batch: jax.jit(sgd_step)(state, batch)) == fingerprint()


def test_another_shape_type_depth_number_or_donation_is_another_program() -> None:
    def other_rate(state: Any, batch: Any) -> Any:
        loss, gradients = jax.value_and_grad(lambda p: jnp.sum(batch @ p[0] @ p[1]))(state)
        return jax.tree.map(lambda w, g: w - 0.2 * g, state, gradients), loss

    distinct = [
        fingerprint(),
        fingerprint(rows=17),
        fingerprint(dtype=jnp.bfloat16),
        fingerprint(layers=3),
        fingerprint(donate=(0,)),
        fingerprint(other_rate),
    ]
    assert len(set(distinct)) == len(distinct)


def test_programs_that_differ_only_in_what_they_return_are_different() -> None:
    def first(x: Any) -> Any:
        a, b = jnp.sin(x), jnp.cos(x)
        return a, b

    def second(x: Any) -> Any:
        a, b = jnp.sin(x), jnp.cos(x)
        return b, a

    assert graph(first, jnp.ones(3)).fingerprint != graph(second, jnp.ones(3)).fingerprint


def test_a_loop_has_the_same_fingerprint_in_another_process() -> None:
    script = """
import jax, jax.numpy as jnp
from tensile_jax.trace import trace_step
def step(x):
    y = jax.lax.scan(lambda c, _: (jax.nn.relu(jnp.sin(c) * 2.0), None), x, None, length=3)[0]
    return jax.lax.cond(y.sum() > 0, jnp.sin, jnp.cos, y) + jax.random.normal(jax.random.key(0), x.shape)
print(trace_step(jax.jit(step), step, (jnp.ones(4),), {}).graph.fingerprint)
"""
    found = set()
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        found.add(
            subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True).stdout
        )
    assert len(found) == 1 and found.pop().strip()


@pytest.mark.parametrize(
    ("left", "dimensions", "copied"),
    [
        ((3, 4, 5), ((2,), (0,)), False),  # batch, free, contracted
        ((3, 5, 4), ((1,), (0,)), False),  # batch, contracted, free
        ((4, 5), ((1,), ()), False),
        ((3, 4, 2, 5), ((3,), (0,)), False),
        ((3, 4, 5, 2), ((2,), (0,)), True),  # contracted between free ones
        ((4, 3, 5), ((2,), (1,)), True),  # batch between the others
        ((5, 4, 3), ((0,), (2,)), True),
    ],
)
def test_operands_of_products_that_do_not_lie_as_matrices_are_copied(
    left: tuple[int, ...], dimensions: tuple[tuple[int, ...], tuple[int, ...]], copied: bool
) -> None:
    contracted, batched = dimensions
    right = jnp.ones((3, 5, 7)) if batched else jnp.ones((5, 7))

    def product(a: Any, b: Any) -> Any:
        return jax.lax.dot_general(a, b, ((contracted, (1,) if batched else (0,)), (batched, (0,) if batched else ())))

    traced = graph(product, jnp.ones(left), right)
    assert operator(traced, "dot_general").relaid == (traced.inputs[:1] if copied else ())


def test_the_left_operand_of_a_kernels_gradient_is_transposed() -> None:
    def gradient(dy: Any, x: Any) -> Any:
        return jax.lax.dot_general(dy, x, (((0, 1), (0, 1)), ((), ())))

    dy, x = jnp.ones((8, 128, 512)), jnp.ones((8, 128, 128))
    relayout = operator(graph(gradient, dy, x), "dot_general").relayout
    assert relayout == dy.nbytes
    memory = jax.jit(gradient).lower(dy, x).compile().memory_analysis()
    assert memory is not None and memory.temp_size_in_bytes <= relayout
    assert operator(graph(lambda a, b: a @ b, jnp.ones((4, 5)), jnp.ones((5, 6))), "dot_general").relayout == 0


def test_reductions_over_the_last_axes_are_told_from_others() -> None:
    for axes, rows in (((2,), True), ((1, 2), True), ((0,), False), ((0, 1), False), ((0, 2), False), ((0, 1, 2), False)):
        assert operator(graph(lambda x, axes=axes: x.sum(axes), jnp.ones((4, 4, 4))), "reduce_sum").over_rows is rows
    assert not operator(graph(jnp.tanh, jnp.ones((4, 4))), "tanh").over_rows
