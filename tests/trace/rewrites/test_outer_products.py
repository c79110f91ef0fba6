"""Products of few terms as light operators: the results of the product, and no memory for a gradient that an update reads."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import tensile_jax as tensile
from tensile_jax.trace.program import Nested, Program
from tensile_jax.trace.reading.flatten import flatten
from tensile_jax.trace.rewrites.outer_products import with_outer_products
from tests.builders import fresh, numbers, trained_alike
from tests.test_loops import run

RNG = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def numbers_do_not_depend_on_earlier_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "RNG", np.random.default_rng(0))


def normal(*shape: int, dtype: Any = jnp.float32) -> jax.Array:
    return jnp.asarray(RNG.normal(size=shape), dtype)


def rewritten(function: Any, *args: Any) -> Program | None:
    return with_outer_products(flatten(Nested(jax.make_jaxpr(function)(*args))))


def count(program: Program, name: str) -> int:
    return sum(e.primitive.name == name for e in program.equations)


PRODUCTS: dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[Any, Any]]] = {
    "rows of two matrices": ((4, 160), (4, 192), (((0,), (0,)), ((), ()))),
    "columns of two matrices": ((160, 4), (192, 4), (((1,), (1,)), ((), ()))),
    "columns and rows": ((160, 4), (4, 192), (((1,), (0,)), ((), ()))),
    "one term": ((1, 96), (1, 160), (((0,), (0,)), ((), ()))),
    "terms in two dimensions, in another order": ((2, 200, 3), (3, 210, 2), (((0, 2), (2, 0)), ((), ()))),
    "free dimensions around the terms": ((12, 4, 16), (5, 4, 64), (((1,), (1,)), ((), ()))),
    "16 terms": ((16, 600), (16, 600), (((0,), (0,)), ((), ()))),
}


@pytest.mark.smoke
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", PRODUCTS)
def test_the_results_are_those_of_the_product(name: str, dtype: str) -> None:
    left_shape, right_shape, dimensions = PRODUCTS[name]
    left, right = normal(*left_shape, dtype=dtype), normal(*right_shape, dtype=dtype)

    def step(left: Any, right: Any) -> Any:
        return 2 * lax.dot_general(left, right, dimensions)

    program = rewritten(step, left, right)
    assert program is not None and count(program, "outer_products") == 1 and not count(program, "dot_general")
    exact = np.asarray(step(left.astype(jnp.float32), right.astype(jnp.float32)))
    with jax.disable_jit():
        (alone,) = run(program, left, right)
    for found in (*run(program, left, right), alone):
        assert found.dtype == dtype and found.shape == exact.shape
        np.testing.assert_allclose(np.asarray(found, np.float32), exact, rtol=1e-5 if dtype == "float32" else 2e-2, atol=1e-4)


ADAM = optax.adam(1e-3)
CLIPPED = optax.chain(optax.clip_by_global_norm(1.0), ADAM)


def update_of(optimizer: Any) -> Any:
    """The update of a dense layer."""

    def update(params: Any, x: Any, dy: Any) -> Any:
        weights, moments = params
        updates, moments = optimizer.update(x.T @ dy, moments, weights)
        return optax.apply_updates(weights, updates), moments

    return update


def layer(rows: int = 4, width: int = 256, optimizer: Any = ADAM) -> tuple[Any, Any, Any]:
    """The parameters with the optimizer's state, the inputs, and the gradient of the outputs.

    The state is that after one update. Adam's first update divides a gradient by its own size: where that is close to zero,
    the rounding of the gradient decides about the whole update.
    """
    weights = normal(width, width)
    _, moments = optimizer.update(normal(width, width), optimizer.init(weights), weights)
    return (weights, moments), normal(rows, width), normal(rows, width)


@pytest.mark.parametrize("optimizer", [ADAM, optax.sgd(0.1, momentum=0.9), optax.adamw(1e-3)])
@pytest.mark.parametrize("rows", [4, 16])
def test_an_update_needs_no_memory_for_the_gradient(rows: int, optimizer: Any) -> None:
    """XLA computes the gradient in the kernel that updates the weights and the moments where they are."""
    args = layer(rows, 1024, optimizer)
    update = update_of(optimizer)
    program = rewritten(update, *args)
    assert program is not None
    compiled: Any = jax.jit(lambda *args: run(program, *args), donate_argnums=0).lower(*args).compile()
    plain: Any = jax.jit(update, donate_argnums=0).lower(*args).compile()
    gradient = args[0][0].nbytes
    assert plain.memory_analysis().temp_size_in_bytes >= gradient
    assert compiled.memory_analysis().temp_size_in_bytes < gradient / 16
    expected = jax.jit(update)(*args)
    for a, b in zip(compiled(*fresh(args)), numbers(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kernel", [(256, 320), (16, 20, 320), (256, 4, 80)], ids=str)
def test_the_transposition_of_a_gradient_is_part_of_it(kernel: tuple[int, ...]) -> None:
    """A layer with several dimensions of features, as `nn.DenseGeneral` has them."""
    inputs = 1 if kernel[0] == 256 else 2

    def step(w: Any, m: Any, x: Any) -> Any:
        gradient = jax.grad(lambda w: jnp.sum(jnp.tanh(jnp.tensordot(x, w, inputs))))(w)
        m = 0.9 * m + gradient
        return w - 0.1 * m, m

    args = normal(*kernel), normal(*kernel), normal(4, *kernel[:inputs])
    program = rewritten(step, *args)
    assert program is not None
    assert count(program, "outer_products") == 1 and not count(program, "transpose")
    for a, b in zip(run(program, *args), jax.jit(step)(*args), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_a_gradient_that_is_also_read_as_it_is_keeps_its_transposition() -> None:
    def step(w: Any, u: Any, x: Any, y: Any) -> Any:
        gradient = x.T @ y
        return w - gradient.T, u - gradient

    args = normal(320, 256), normal(256, 320), normal(4, 256), normal(4, 320)
    program = rewritten(step, *args)
    assert program is not None
    assert count(program, "outer_products") == 1 and count(program, "transpose") >= 1
    for a, b in zip(run(program, *args), jax.jit(step)(*args), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def squared(params: Any, x: Any, dy: Any) -> Any:
    gradient = x.T @ dy
    return params[0] + gradient @ gradient


def returned(params: Any, x: Any, dy: Any) -> Any:
    gradient = x.T @ dy
    return params[0] - gradient, gradient


def beside_much_else(params: Any, x: Any, dy: Any) -> Any:
    return params[0] - x[:, :8].T @ dy[:, :8]


def of_whole_numbers(params: Any, x: Any, dy: Any) -> Any:
    return params[0] - x.astype(jnp.int32).T @ dy.astype(jnp.int32)


@pytest.mark.parametrize(
    ("update", "args"),
    [
        (update_of(ADAM), layer(17, 1024)),
        (update_of(ADAM), layer(16, 256)),
        (update_of(CLIPPED), layer(optimizer=CLIPPED)),
        (squared, layer()),
        (returned, layer()),
        (beside_much_else, (normal(8, 8), *layer()[1:])),
        (of_whole_numbers, layer()),
    ],
    ids=[
        "17 terms",
        "small beside its operands",
        "a norm",
        "read by a product",
        "a result",
        "small",
        "whole numbers",
    ],
)
def test_other_products_stay(update: Any, args: Any) -> None:
    assert rewritten(update, *args) is None


def dense_step(params: Any, x: Any, labels: Any) -> Any:
    """A step of a network whose memory is nearly all in dense layers, with momentum."""
    weights, moments = params

    def loss_of(weights: Any) -> Any:
        hidden = jax.nn.relu(jax.nn.relu(x @ weights[0]) @ weights[1])
        return optax.softmax_cross_entropy_with_integer_labels(hidden @ weights[2], labels).mean()

    loss, gradients = jax.value_and_grad(loss_of)(weights)
    moments = jax.tree.map(lambda m, g: 0.9 * m + g, moments, gradients)
    return (jax.tree.map(lambda w, m: w - 0.1 * m, weights, moments), moments), loss


def dense_network() -> tuple[Any, jax.Array, jax.Array]:
    weights = [normal(512, 512) / 22, normal(512, 1024) / 22, normal(1024, 10) / 32]
    return (weights, [jnp.zeros_like(w) for w in weights]), normal(8, 512), jnp.arange(8)


def test_a_training_keeps_a_budget_that_has_no_room_for_gradients() -> None:
    params, x, labels = dense_network()
    state_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    function = tensile.jit(dense_step, budget=int(1.1 * state_bytes), donate_argnums=0)
    state = trained_alike(function, dense_step, params, x, labels, steps=10, rtol=1e-4, atol=1e-6)
    plan = function.plan(state, x, labels)
    assert plan.peak_bytes <= 1.1 * state_bytes and not plan.swapped_out_bytes
    assert "products of few terms" in plan.notes[0]
    again = tensile.jit(dense_step, plan=plan, donate_argnums=0)
    assert again(fresh(state), x, labels)[1] == function(fresh(state), x, labels)[1]


def test_the_least_memory_within_a_slowdown_has_no_room_for_gradients_either(cheap_launches: str) -> None:
    params, x, labels = dense_network()
    state_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    function = tensile.jit(dense_step, max_slowdown=1.2, donate_argnums=0, device_profile=cheap_launches)
    function(fresh(params), x, labels)
    plan = function.plan(params, x, labels)
    assert plan.peak_bytes <= 1.1 * state_bytes and not plan.swapped_out_bytes


def test_a_share_is_one_of_the_compiled_peak_once_that_is_known() -> None:
    params, x, labels = dense_network()
    function = tensile.jit(dense_step, budget="80%", donate_argnums=0)
    before = function.plan(params, x, labels)
    peak = function.jit_peak_bytes(params, x, labels)
    function(fresh(params), x, labels)
    plan = function.plan(params, x, labels)
    assert "products of few terms" in before.notes[0] and "products of few terms" in plan.notes[0]
    assert plan.budget_bytes == int(0.8 * peak)


def test_policies_are_compared_as_their_plans_would_be_made() -> None:
    """`auto` keeps 75 % of the peak without a swap, for which no other policy has a plan; and it is not below the bound."""
    params, x, labels = dense_network()
    compared = tensile.jit(dense_step, donate_argnums=0).compare(params, x, labels)
    there = next(one for one in compared.budgets if one.share == 0.75)
    ours = there.of("auto")
    assert ours is not None and there.entries == (ours,) and not ours.swapped_bytes
    assert there.bound_eor is not None and there.bound_eor <= ours.eor
