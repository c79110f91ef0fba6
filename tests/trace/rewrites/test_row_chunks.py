"""Losses and convolutions in chunks of rows: the results of the whole, to rounding; none where rows depend on one another."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

import tensile_jax as tensile
from tensile_jax.trace.program import Nested, Program
from tensile_jax.trace.reading.flatten import flatten
from tensile_jax.trace.rewrites.row_chunks import find_region, in_row_chunks
from tests.builders import fresh, trained_alike
from tests.test_loops import run

ROWS, LENGTH, WIDTH, WORDS = 8, 16, 8, 512
RNG = np.random.default_rng(0)
PARAMS = {
    "in": jnp.asarray(RNG.normal(size=(WIDTH, WIDTH)) / 3, jnp.float32),
    "out": jnp.asarray(RNG.normal(size=(WIDTH, WORDS)) / 3, jnp.float32),
}
X = jnp.asarray(RNG.normal(size=(ROWS, LENGTH, WIDTH)), jnp.float32)
LABELS = jnp.asarray(RNG.integers(WORDS, size=(ROWS, LENGTH)))


def logits_of(params: Any, x: Any) -> Any:
    return jnp.tanh(x @ params["in"]) @ params["out"]


def mean_loss(params: Any, x: Any, labels: Any) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(logits_of(params, x), labels).mean()


def loss_in_bf16(params: Any, x: Any, labels: Any) -> Any:
    logits = logits_of(jax.tree.map(lambda w: w.astype(jnp.bfloat16), params), x.astype(jnp.bfloat16))
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels).mean()


def flat_loss(params: Any, x: Any, labels: Any) -> Any:
    logits = logits_of(params, x.reshape(-1, WIDTH))
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels.reshape(-1)).mean()


def smoothed_loss(params: Any, x: Any, labels: Any) -> Any:
    targets = optax.smooth_labels(jax.nn.one_hot(labels, WORDS), 0.1)
    return optax.softmax_cross_entropy(logits_of(params, x), targets).mean()


def masked_loss(params: Any, x: Any, labels: Any) -> Any:
    losses = optax.softmax_cross_entropy_with_integer_labels(logits_of(params, x), labels)
    mask = labels > 3
    return jnp.sum(losses * mask) / jnp.sum(mask)


def loss_with_statistics(params: Any, x: Any, labels: Any) -> Any:
    logits = logits_of(params, x)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return losses.mean() + 1e-4 * (jax.nn.logsumexp(logits, axis=-1) ** 2).mean()


LOSSES = [mean_loss, loss_in_bf16, flat_loss, smoothed_loss, masked_loss, loss_with_statistics]


def step_of(loss: Callable[..., Any]) -> Callable[..., Any]:
    def train_step(params: Any, x: Any, labels: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(params, x, labels)
        hits = jnp.argmax(logits_of(params, x), axis=-1) == labels
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, gradients), value, hits.mean()

    return train_step


def flat(step: Callable[..., Any]) -> Program:
    return flatten(Nested(jax.make_jaxpr(step)(PARAMS, X, LABELS)))


@pytest.mark.smoke
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("chunks", [2, 8])
def test_a_loss_in_chunks_of_rows_has_the_results_of_the_whole(loss: Callable[..., Any], chunks: int) -> None:
    step = step_of(loss)
    program = in_row_chunks(flat(step), chunks)
    assert program is not None
    rough = loss is loss_in_bf16
    made, expected = run(program, PARAMS, X, LABELS), jax.jit(step)(PARAMS, X, LABELS)
    for a, b in zip(made, jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-2 if rough else 2e-5, atol=2e-3 if rough else 1e-6)


@pytest.mark.parametrize("chunks", [2, 8])
def test_no_tensor_has_all_rows_of_the_logits(chunks: int) -> None:
    program = in_row_chunks(flat(step_of(mean_loss)), chunks)
    assert program is not None
    made = [program.avals[v] for e in program.equations for v in e.outputs]
    assert max(aval.size for aval in made if aval.shape) <= ROWS * LENGTH * WORDS // chunks
    assert {e.iterations for e in program.equations if e.iterations} == {(c,) for c in range(chunks)}


@pytest.mark.parametrize("chunks", [0, 1, 3, 16])
def test_rows_are_divided_evenly_or_not_at_all(chunks: int) -> None:
    assert in_row_chunks(flat(step_of(mean_loss)), chunks) is None


def between_rows(params: Any, x: Any, labels: Any) -> Any:
    logits = logits_of(params, x)
    return optax.softmax_cross_entropy_with_integer_labels(logits - logits.mean(0), labels).mean()


def of_the_worst_rows(params: Any, x: Any, labels: Any) -> Any:
    losses = optax.softmax_cross_entropy_with_integer_labels(logits_of(params, x), labels)
    return jnp.sort(losses.sum(-1))[-2:].mean()


def scaled_by_the_loss(params: Any, x: Any, labels: Any) -> Any:
    return mean_loss(params, x, labels) ** 2


@pytest.mark.parametrize("loss", [between_rows, scaled_by_the_loss])
def test_a_loss_whose_rows_depend_on_one_another_stays_whole(loss: Callable[..., Any]) -> None:
    assert find_region(flat(step_of(loss))) is None


@pytest.mark.parametrize("chunks", [2, 4])
def test_what_depends_on_all_rows_stands_between_two_stretches_of_chunks(chunks: int) -> None:
    step = step_of(of_the_worst_rows)
    program = in_row_chunks(flat(step), chunks)
    assert program is not None
    assert max(program.avals[v].size for e in program.equations for v in e.outputs) <= ROWS * LENGTH * WORDS // chunks
    for a, b in zip(run(program, PARAMS, X, LABELS), jax.tree.leaves(jax.jit(step)(PARAMS, X, LABELS)), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)


# -- convolutions ------------------------------------------------------------------------------------------------------------

IMAGES = jnp.asarray(RNG.normal(size=(8, 16, 16, 3)), jnp.float32)


class Plain(nn.Module):
    """Two stages, halved by pooling, with a kernel that is dilated, one that strides, and a dense layer."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.relu(nn.Conv(16, (3, 3), kernel_dilation=2)(x))
        x = nn.max_pool(nn.relu(nn.Conv(16, (3, 3))(x)), (2, 2), strides=(2, 2))
        x = nn.avg_pool(nn.gelu(nn.Conv(16, (3, 3), strides=2)(x)), (3, 3), strides=(2, 2), padding="SAME")
        return nn.Dense(4)(x.reshape(len(x), -1))


class Separable(nn.Module):
    """Depthwise and grouped convolutions, padded by hand, and maxima that overlap."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.swish(nn.Conv(16, (1, 1))(x))
        x = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
        x = nn.swish(nn.Conv(16, (3, 3), feature_group_count=16, padding="VALID")(x))
        x = nn.max_pool(nn.Conv(16, (3, 3), feature_group_count=4)(x), (3, 3), strides=(2, 2), padding="SAME")
        return nn.Dense(4)(x.mean((1, 2)))


class UNet(nn.Module):
    """Group and layer normalization, attention between channels, a transposed convolution, a skip connection, a crop."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        high = nn.gelu(nn.GroupNorm(4)(nn.Conv(16, (3, 3))(x)))
        x = nn.silu(nn.LayerNorm()(nn.Conv(32, (3, 3), strides=2)(high)))
        x = x * nn.sigmoid(nn.Dense(32)(nn.relu(nn.Dense(8)(x.mean((1, 2))))))[:, None, None]
        x = jnp.concatenate([high, nn.ConvTranspose(16, (2, 2), strides=(2, 2))(x)], axis=-1)
        x = nn.silu(nn.GroupNorm(4)(nn.Conv(16, (3, 3))(x)))[:, 1:-1, 2:]
        return nn.Conv(4, (3, 3))(x).mean((1, 2))


class FromChannelsFirst(nn.Module):
    """The batch is the second axis, and channels come first."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = x.transpose(3, 0, 1, 2)
        for name, channels in (("a", 3), ("b", 16)):
            kernel = self.param(name, nn.initializers.lecun_normal(), (3, 3, channels, 16))
            x = nn.relu(jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("CNHW", "HWIO", "CNHW")))
        return nn.Dense(4)(x.mean((2, 3)).T)


class Normalized(nn.Module):
    """Batch normalization: images depend on one another."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.relu(nn.BatchNorm(use_running_average=False, use_bias=False, use_scale=False)(nn.Conv(16, (3, 3))(x)))
        return nn.Dense(4)(nn.relu(nn.Conv(16, (3, 3))(x)).mean((1, 2)))


def image_step(network: nn.Module) -> tuple[Callable[..., Any], Any, Any]:
    """A step of SGD, its parameters, and labels."""
    variables = network.init(jax.random.key(0), IMAGES)

    def train_step(params: Any, images: Any, labels: Any) -> Any:
        def loss_of(params: Any, images: Any) -> Any:
            logits, _ = network.apply({**variables, "params": params}, images, mutable=["batch_stats"])
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

        loss, (gradients, into_images) = jax.value_and_grad(loss_of, argnums=(0, 1))(params, images)
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, gradients), loss, into_images

    return train_step, variables["params"], jnp.arange(8) % 4


def in_chunks(network: nn.Module, chunks: int) -> Program | None:
    step, params, labels = image_step(network)
    return in_row_chunks(flatten(Nested(jax.make_jaxpr(step)(params, IMAGES, labels))), chunks)


def largest_convolution(program: Program) -> int:
    """How many numbers the largest result of a convolution has."""
    convolutions = [e for e in program.equations if e.primitive.name == "conv_general_dilated"]
    return max(program.avals[v].size for e in convolutions for v in e.outputs)


@pytest.mark.parametrize("network", [Plain(), Separable(), UNet(), FromChannelsFirst()], ids=lambda n: type(n).__name__)
@pytest.mark.parametrize("chunks", [2, 8])
def test_convolutions_in_chunks_of_images_have_the_results_of_the_whole(network: nn.Module, chunks: int) -> None:
    step, params, labels = image_step(network)
    program = in_row_chunks(whole := flatten(Nested(jax.make_jaxpr(step)(params, IMAGES, labels))), chunks)
    assert program is not None
    assert largest_convolution(program) <= largest_convolution(whole) // chunks
    expected = jax.tree.leaves(jax.jit(step)(params, IMAGES, labels))
    for a, b in zip(run(program, params, IMAGES, labels), expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-6)


def test_images_that_depend_on_one_another_stay_together() -> None:
    assert in_chunks(Normalized(), 2) is None


@pytest.mark.parametrize("chunks", [1, 3, 16])
def test_images_are_divided_evenly_or_not_at_all(chunks: int) -> None:
    assert in_chunks(Plain(), chunks) is None


def test_the_update_of_a_large_weight_is_not_divided() -> None:
    """Chunks of a gradient would save nothing that the weight and its moments, which stay whole, do not need anyway."""

    def train_step(params: Any, x: Any) -> Any:
        return jax.tree.map(lambda w, g: w - g, params, jax.grad(lambda params: jnp.sum(jnp.tanh(x @ params)))(params))

    assert find_region(flatten(Nested(jax.make_jaxpr(train_step)(jnp.ones((512, 512)), jnp.ones((8, 512)))))) is None


def test_a_step_with_effects_stays_whole() -> None:
    def step(params: Any, x: Any, labels: Any) -> Any:
        jax.debug.print("step")
        return mean_loss(params, x, labels)

    assert find_region(flat(step)) is None


class Stages(nn.Module):
    """Two stages, of which the first has by far the larger activations."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for _ in range(3):
            x = nn.relu(nn.Conv(16, (3, 3))(x))
        return nn.Dense(4)(nn.relu(nn.Conv(16, (3, 3))(nn.max_pool(x, (4, 4), strides=(4, 4)))).mean((1, 2)))


def test_a_network_for_images_trains_in_chunks_where_its_first_stage_is_too_large_otherwise() -> None:
    images, labels = jnp.tile(IMAGES, (1, 2, 2, 1)), jnp.arange(8) % 4
    step, params, _ = image_step(Stages())
    function = tensile.jit(step, budget="45%", donate_argnums=0)
    state = trained_alike(function, step, params, images, labels, steps=5, rtol=1e-4, atol=1e-6)
    plan = function.plan(state, images, labels)
    assert plan.budget_bytes is not None and plan.peak_bytes <= plan.budget_bytes
    assert "chunks of rows" in plan.notes[0]
    again = tensile.jit(step, plan=plan, donate_argnums=0)
    assert again(fresh(state), images, labels)[1] == function(fresh(state), images, labels)[1]


def test_a_training_in_chunks_gives_the_results_of_jit_and_says_so() -> None:
    """The logits are most of the memory: a low budget can only be kept in chunks."""
    optimizer = optax.adam(1e-2)

    def train_step(state: Any, x: Any, labels: Any) -> Any:
        params, opt_state = state
        loss, gradients = jax.value_and_grad(mean_loss)(params, x, labels)
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    x, labels = jnp.tile(X, (1, 16, 1)), jnp.tile(LABELS, (1, 16))
    function = tensile.jit(train_step, budget="40%", donate_argnums=0)
    begin = PARAMS, optimizer.init(PARAMS)
    state = trained_alike(function, train_step, begin, x, labels, steps=10, rtol=1e-3, atol=1e-4)
    plan = function.plan(state, x, labels)
    assert "chunks of rows" in plan.notes[0]
    again = tensile.jit(train_step, plan=plan, donate_argnums=0)
    assert again(fresh(state), x, labels)[1] == function(fresh(state), x, labels)[1]
