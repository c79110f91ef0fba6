"""Defines GPT-style decoders: learned positions, pre-norm blocks, causal attention, tied head.

Radford et al., "Language Models are Unsupervised Multitask Learners" (2019). At the sizes of GPT-2 small the network has the
published 124,439,808 parameters. One block is

    x = x + Attention(Norm_0(x))            Attention: softmax(Q K^T / sqrt(head width)) V
    x = x + Down(gelu(Up(Norm_1(x))))       Up: to four times the width

In `gpt`, layers are unrolled, so every layer has its own name and its own parameters. In `gpt_scan`, they are one loop
(`nn.scan`), whose parameters are stacked: the first axis of each counts the layers. Large decoders are written in this way,
because XLA then compiles one layer only. Parameters and loss are float32; `dtype` is the type that the layers compute in. There
is no dropout. Kernels begin at standard deviation 0.02, as in GPT-2.

The text is read byte by byte (`data.text_batches`), so only 256 tokens occur. A larger vocabulary has the cost that it would have
with a tokenizer, which is what planning and benchmarks need.
"""

from functools import partial

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from jax.typing import DTypeLike

from tensile_models import data
from tensile_models.attention import Attention, check_heads
from tensile_models.inputs import text_input
from tensile_models.model import Model, check_dtype, check_sizes
from tensile_models.training import adam_or, build_model


def gpt(
    *,
    batch_size: int,
    sequence_length: int = 128,
    vocabulary: int = data.BYTES,
    width: int = 128,
    heads: int = 4,
    layers: int = 4,
    dtype: DTypeLike = jnp.float32,
    seed: int = 0,
    learning_rate: float | None = None,
    optimizer: optax.GradientTransformation | None = None,
) -> Model:
    """A decoder on English text, small by default, trained with Adam (rate 1e-3) unless `optimizer` is given."""
    module = _decoder(batch_size, sequence_length, vocabulary, width, heads, layers, dtype)
    source = text_input(batch_size=batch_size, sequence_length=sequence_length, seed=seed)
    optimizer = adam_or(optimizer, learning_rate, usual=1e-3)
    return build_model("gpt", module, source, seed=seed, optimizer=optimizer, deviation=lambda shape: 0.02)


def gpt_scan(
    *,
    batch_size: int,
    sequence_length: int = 128,
    vocabulary: int = data.BYTES,
    width: int = 128,
    heads: int = 4,
    layers: int = 4,
    dtype: DTypeLike = jnp.float32,
    seed: int = 0,
    learning_rate: float | None = None,
    optimizer: optax.GradientTransformation | None = None,
    remat: bool = False,
) -> Model:
    """`gpt` with its layers in one loop. With `remat`, every layer is inside `nn.remat` (`jax.checkpoint`)."""
    module = _decoder(batch_size, sequence_length, vocabulary, width, heads, layers, dtype, scan=True, remat=remat)
    source = text_input(batch_size=batch_size, sequence_length=sequence_length, seed=seed)
    optimizer = adam_or(optimizer, learning_rate, usual=1e-3)
    return build_model("gpt_scan", module, source, seed=seed, optimizer=optimizer, deviation=lambda shape: 0.02)


def _decoder(
    batch_size: int,
    sequence_length: int,
    vocabulary: int,
    width: int,
    heads: int,
    layers: int,
    dtype: DTypeLike,
    *,
    scan: bool = False,
    remat: bool = False,
) -> "GPT":
    """The module; its sizes are checked first."""
    check_sizes(batch_size=batch_size, sequence_length=sequence_length, width=width, heads=heads, layers=layers)
    check_sizes(at_least=data.BYTES, vocabulary=vocabulary)
    check_heads(heads, width)
    check_dtype(dtype)
    return GPT(vocabulary, sequence_length, width, heads, layers, dtype, scan, remat)


def gpt2_small(
    *,
    batch_size: int,
    sequence_length: int = 1024,
    layers: int = 12,
    dtype: DTypeLike = jnp.float32,
    seed: int = 0,
    learning_rate: float | None = None,
    optimizer: optax.GradientTransformation | None = None,
    scan: bool = False,
    remat: bool = False,
) -> Model:
    """The decoder at the sizes of GPT-2 small: large for a CPU to run, quick to plan. `scan` and `remat` as for `gpt_scan`."""
    make = partial(gpt_scan, remat=remat) if scan else gpt
    return make(
        batch_size=batch_size,
        sequence_length=sequence_length,
        vocabulary=50257,
        width=768,
        heads=12,
        layers=layers,
        dtype=dtype,
        seed=seed,
        learning_rate=learning_rate,
        optimizer=optimizer,
    )


class GPT(nn.Module):
    """Token and position embeddings, blocks, final norm, and the embedding as the head."""

    vocabulary: int
    positions: int
    width: int
    heads: int
    layers: int
    dtype: DTypeLike
    scan: bool = False
    remat: bool = False

    @nn.compact
    def __call__(self, tokens: jax.Array, *, train: bool) -> jax.Array:
        del train  # nothing here differs between training and testing
        embedding = nn.Embed(self.vocabulary, self.width, dtype=self.dtype, name="Tokens")
        positions = nn.Embed(self.positions, self.width, dtype=self.dtype, name="Positions")
        x = embedding(tokens) + positions(jnp.arange(tokens.shape[1]))
        if self.scan:
            x = self._scanned(x)
        for index in range(0 if self.scan else self.layers):
            x = Block(self.heads, self.dtype, name=f"Block_{index}")(x)
        x = nn.LayerNorm(dtype=self.dtype, name="Norm")(x)
        return embedding.attend(x).astype(jnp.float32)

    def _scanned(self, x: jax.Array) -> jax.Array:
        """The result of all blocks, as one loop over their stacked parameters."""

        def body(block: Block, carry: jax.Array, _: None) -> tuple[jax.Array, None]:
            return block(carry), None

        layer = nn.remat(body) if self.remat else body
        loop = nn.scan(layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=self.layers)
        carry, _ = loop(Block(self.heads, self.dtype, name="Blocks"), x, None)
        return carry


class Block(nn.Module):
    """Attention and a dense network of one hidden layer, each beside a shortcut."""

    heads: int
    dtype: DTypeLike

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        width = x.shape[-1]
        y = nn.LayerNorm(dtype=self.dtype, name="Norm_0")(x)
        x = x + Attention(self.heads, self.dtype, causal=True, name="Attention")(y)
        y = nn.LayerNorm(dtype=self.dtype, name="Norm_1")(x)
        y = nn.gelu(nn.Dense(4 * width, dtype=self.dtype, name="Up")(y))
        return x + nn.Dense(width, dtype=self.dtype, name="Down")(y)
