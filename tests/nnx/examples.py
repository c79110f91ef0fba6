"""Train steps like those of Flax's NNX examples (MNIST, VAE, Gemma), written anew and in small sizes."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx


@dataclass(frozen=True)
class Example:
    """`step(*objects(), *batch(i))` changes the objects in place; `donated` are the parameters that may be given away."""

    step: Callable[..., Any]
    objects: Callable[[], tuple[Any, ...]]
    batch: Callable[[int], tuple[Any, ...]]
    donated: tuple[str, ...]


# -- MNIST ----------------------------------------------------------------------------------------------------------------


class ConvNet(nnx.Module):
    """Two convolutions with batch statistics, two dense layers, and dropout whose keys come with the call."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.conv1 = nnx.Conv(1, 8, kernel_size=(3, 3), rngs=rngs)
        self.norm1 = nnx.BatchNorm(8, rngs=rngs)
        self.dropout1 = nnx.Dropout(0.025)
        self.conv2 = nnx.Conv(8, 16, kernel_size=(3, 3), rngs=rngs)
        self.norm2 = nnx.BatchNorm(16, rngs=rngs)
        self.pool = partial(nnx.avg_pool, window_shape=(2, 2), strides=(2, 2))
        self.dense1 = nnx.Linear(7 * 7 * 16, 32, rngs=rngs)
        self.dropout2 = nnx.Dropout(0.025)
        self.dense2 = nnx.Linear(32, 10, rngs=rngs)

    def __call__(self, x: jax.Array, rngs: nnx.Rngs) -> jax.Array:
        x = self.pool(nnx.relu(self.norm1(self.dropout1(self.conv1(x), rngs=rngs))))
        x = self.pool(nnx.relu(self.norm2(self.conv2(x))))
        x = x.reshape(x.shape[0], -1)
        return self.dense2(nnx.relu(self.dropout2(self.dense1(x), rngs=rngs)))


def mnist_step(model: ConvNet, optimizer: nnx.Optimizer, metrics: nnx.MultiMetric, batch: dict[str, Any], rngs: nnx.Rngs) -> None:
    """Loss, gradients, metrics and update; nothing is returned."""

    def loss_of(model: ConvNet, rngs: nnx.Rngs) -> tuple[jax.Array, jax.Array]:
        logits = model(batch["image"], rngs)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean(), logits

    (loss, logits), grads = nnx.value_and_grad(loss_of, has_aux=True)(model, rngs)
    metrics.update(loss=loss, logits=logits, labels=batch["label"])
    optimizer.update(model, grads)


def _mnist_objects() -> tuple[Any, ...]:
    model = ConvNet(nnx.Rngs(0))
    metrics = nnx.MultiMetric(accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average("loss"))
    return model, nnx.Optimizer(model, optax.sgd(0.05, 0.9), wrt=nnx.Param), metrics, nnx.Rngs(dropout=1)


def _mnist_step(model: Any, optimizer: Any, metrics: Any, rngs: Any, batch: dict[str, Any]) -> None:
    mnist_step(model, optimizer, metrics, batch, rngs)


def _mnist_batch(number: int) -> tuple[Any, ...]:
    draw = np.random.default_rng(number)
    return ({"image": draw.random((32, 28, 28, 1), np.float32), "label": draw.integers(0, 10, 32)},)


MNIST = Example(_mnist_step, _mnist_objects, _mnist_batch, ("model", "optimizer", "metrics", "rngs"))


# -- VAE ------------------------------------------------------------------------------------------------------------------


class Divergence(nnx.Variable[jax.Array]):
    """A term of the loss that a module leaves behind."""


class Encoder(nnx.Module):
    """Draws a latent vector, and leaves its divergence behind."""

    def __init__(self, size: int, hidden: int, latent: int, rngs: nnx.Rngs) -> None:
        self.hidden = nnx.Linear(size, hidden, rngs=rngs)
        self.mean = nnx.Linear(hidden, latent, rngs=rngs)
        self.scale = nnx.Linear(hidden, latent, rngs=rngs)
        self.rngs = rngs

    def __call__(self, x: jax.Array) -> jax.Array:
        hidden = nnx.relu(self.hidden(x))
        mean, scale = self.mean(hidden), jnp.exp(self.scale(hidden))
        self.divergence = Divergence(0.5 * jnp.mean(scale**2 + mean**2 - 1 - 2 * jnp.log(scale)))
        return mean + scale * jax.random.normal(self.rngs.noise(), mean.shape)


class Autoencoder(nnx.Module):
    """Encoder and decoder."""

    def __init__(self, rngs: nnx.Rngs, *, size: int = 196, hidden: int = 64, latent: int = 8) -> None:
        self.encoder = Encoder(size, hidden, latent, rngs)
        self.decoder = nnx.Sequential(nnx.Linear(latent, hidden, rngs=rngs), nnx.relu, nnx.Linear(hidden, size, rngs=rngs))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.decoder(self.encoder(x))


def vae_step(model: Autoencoder, optimizer: nnx.Optimizer, x: jax.Array) -> jax.Array:
    """The divergence is popped off the model again."""

    def loss_of(model: Autoencoder) -> jax.Array:
        logits = model(x)
        divergence = sum(jax.tree.leaves(nnx.pop(model, Divergence)), 0.0)
        return jnp.mean(optax.sigmoid_binary_cross_entropy(logits, x)) + 0.1 * divergence

    loss, grads = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, grads)
    return loss


def _vae_objects() -> tuple[Any, ...]:
    model = Autoencoder(nnx.Rngs(0, noise=1))
    return model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)


def _vae_batch(number: int) -> tuple[Any, ...]:
    return ((np.random.default_rng(number).random((512, 196)) < 0.3).astype(np.float32),)


VAE = Example(vae_step, _vae_objects, _vae_batch, ("model", "optimizer"))


# -- Gemma ------------------------------------------------------------------------------------------------------------------


class RootMeanSquare(nnx.Module):
    """Normalisation whose scale is `1 + weight`."""

    def __init__(self, width: int) -> None:
        self.weight = nnx.Param(jnp.zeros(width))

    def __call__(self, x: jax.Array) -> jax.Array:
        return x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6) * (1 + self.weight[...])


def rotate(x: jax.Array, positions: jax.Array) -> jax.Array:
    """Rotary positions of `(batch, time, heads, size)`."""
    frequency = 10_000.0 ** (-jnp.arange(0, x.shape[-1], 2) / x.shape[-1])
    angle = positions[..., None, None] * frequency
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * jnp.cos(angle) - b * jnp.sin(angle), b * jnp.cos(angle) + a * jnp.sin(angle)], axis=-1)


class GroupedAttention(nnx.Module):
    """More heads for queries than for keys and values; capped logits; a window where `window` says so."""

    def __init__(self, width: int, heads: int, size: int, window: int | None, rngs: nnx.Rngs) -> None:
        self.query = nnx.Einsum("BTD,DNH->BTNH", (width, heads, size), rngs=rngs)
        self.key_value = nnx.Einsum("BTD,CDKH->CBTKH", (2, width, 1, size), rngs=rngs)
        self.out = nnx.Einsum("BTNH,NHD->BTD", (heads, size, width), rngs=rngs)
        self.dropout = nnx.Dropout(0.1)
        self.window = window

    def __call__(self, x: jax.Array, positions: jax.Array, mask: jax.Array, rngs: nnx.Rngs) -> jax.Array:
        query = rotate(self.query(x), positions)
        key, value = self.key_value(x)
        logits = jnp.einsum("BTNH,BSKH->BNTS", query, rotate(key, positions)) * query.shape[-1] ** -0.5
        logits = 50.0 * jnp.tanh(logits / 50.0)
        if self.window is not None:
            mask = mask & (positions[:, :, None] - positions[:, None, :] < self.window)
        weights = jax.nn.softmax(jnp.where(mask[:, None], logits, -2e38), axis=-1)
        return self.out(jnp.einsum("BNTS,BSKH->BTNH", self.dropout(weights, rngs=rngs), value))


class Block(nnx.Module):
    """Attention and a gated feed-forward layer, with norms before and after each."""

    def __init__(self, width: int, hidden: int, window: int | None, rngs: nnx.Rngs) -> None:
        self.norms = nnx.List([RootMeanSquare(width) for _ in range(4)])
        self.attention = GroupedAttention(width, 4, 8, window, rngs)
        self.gate = nnx.Linear(width, hidden, use_bias=False, rngs=rngs)
        self.up = nnx.Linear(width, hidden, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(hidden, width, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array, positions: jax.Array, mask: jax.Array, rngs: nnx.Rngs) -> jax.Array:
        before_attention, after_attention, before_feed, after_feed = self.norms
        x = x + after_attention(self.attention(before_attention(x), positions, mask, rngs))
        y = before_feed(x)
        return x + after_feed(self.down(nnx.gelu(self.gate(y)) * self.up(y)))


class Decoder(nnx.Module):
    """A transformer whose embedding is its output layer as well."""

    def __init__(self, rngs: nnx.Rngs, *, vocabulary: int = 64, width: int = 32, hidden: int = 96, layers: int = 2) -> None:
        self.embed = nnx.Embed(vocabulary, width, rngs=rngs)
        self.blocks = nnx.List([Block(width, hidden, 8 if i % 2 == 0 else None, rngs) for i in range(layers)])
        self.norm = RootMeanSquare(width)

    def __call__(self, tokens: jax.Array, positions: jax.Array, mask: jax.Array, rngs: nnx.Rngs) -> jax.Array:
        x = self.embed(tokens) * self.embed.features**0.5
        for block in self.blocks:
            x = block(x, positions, mask, rngs)
        return 30.0 * jnp.tanh(self.embed.attend(self.norm(x)) / 30.0)


def gemma_step(
    model: Decoder, optimizer: nnx.Optimizer, rngs: nnx.Rngs, train_metrics: nnx.Metric, batch: dict[str, jax.Array]
) -> None:
    """Label smoothing, weights for padding, a fork of the rngs for the forward pass, metrics with a mask."""
    inputs, targets = batch["inputs"], batch["targets"]
    given = inputs > 0
    weights = given.astype(jnp.float32)
    positions = jnp.maximum(jnp.cumsum(given, axis=-1) - 1, 0)
    mask = given[:, None, :] & jnp.tril(jnp.ones((inputs.shape[1], inputs.shape[1]), bool))

    def loss_of(model: Decoder, rngs: nnx.Rngs) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        logits = model(inputs, positions, mask, rngs)
        smooth = optax.smooth_labels(jax.nn.one_hot(targets, logits.shape[-1]), 0.1)
        losses = optax.softmax_cross_entropy(logits, smooth) * weights
        per_sample = losses.sum(axis=1) * len(losses) / weights.sum()
        return per_sample.mean(), (per_sample, logits)

    (_, (losses, logits)), grads = nnx.value_and_grad(loss_of, has_aux=True)(model, rngs.fork())
    optimizer.update(model, grads)
    train_metrics.update(loss=losses, logits=logits, labels=targets, mask={"accuracy": given})


def _gemma_objects() -> tuple[Any, ...]:
    model = Decoder(nnx.Rngs(0))
    schedule = optax.join_schedules([optax.linear_schedule(0.0, 1e-3, 2), lambda count: 1e-3 * (1 + count / 2) ** -0.5], [2])
    optimizer = nnx.Optimizer(model, optax.adamw(schedule, weight_decay=0.1), wrt=nnx.Param)
    metrics = nnx.MultiMetric(loss=nnx.metrics.Average("loss"), accuracy=nnx.metrics.Accuracy())
    return model, optimizer, nnx.Rngs(0, dropout=1), metrics


def _gemma_batch(number: int) -> tuple[Any, ...]:
    tokens = np.random.default_rng(number).integers(1, 64, (8, 33)).astype(np.int32)
    tokens[:, 28:] = 0  # padding
    return ({"inputs": tokens[:, :-1], "targets": tokens[:, 1:]},)


GEMMA = Example(gemma_step, _gemma_objects, _gemma_batch, ("model", "optimizer", "rngs", "train_metrics"))

EXAMPLES = {"mnist": MNIST, "vae": VAE, "gemma": GEMMA}
