"""Defines BERT-style encoders that are trained to fill in masked tokens: post-norm blocks, attention to every place, tied head.

Devlin et al., "BERT: Pre-training of Deep Bidirectional Transformers for Language Understanding" (2018). At the sizes of
BERT-base, the network has 109,514,298 parameters, as many as the published model with the head for masked tokens and without the
pooler. One block is

    x = Norm_0(x + Attention(x))            Attention: softmax(Q K^T / sqrt(head width)) V
    x = Norm_1(x + Down(gelu(Up(x))))       Up: to four times the width

As in the published code, the head reads the masked places only. It is a dense layer, gelu, a norm, and the product with the
embedding of all tokens. The text is one segment (BERT's term). There is no dropout, and no prediction of the next sentence.
Parameters and loss are float32; `dtype` is the type that the layers compute in. Kernels begin at standard deviation 0.02.

The text is read byte by byte (`data.masked_text_batches`), so only 257 tokens occur: 256 bytes and the mask.
"""

from functools import partial

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from jax.typing import DTypeLike

from tensile_models import data
from tensile_models.attention import Attention, check_heads
from tensile_models.inputs import masked_text_input
from tensile_models.model import Model, check_dtype, check_sizes
from tensile_models.training import adam_or, build_model

_SEGMENTS = 2  # as published, so that the parameters are
_norm = partial(nn.LayerNorm, epsilon=1e-12)


def bert(
    *,
    batch_size: int,
    sequence_length: int = 128,
    vocabulary: int = data.BYTES + 1,
    width: int = 128,
    heads: int = 4,
    layers: int = 4,
    positions: int | None = None,
    dtype: DTypeLike = jnp.float32,
    seed: int = 0,
    learning_rate: float | None = None,
    optimizer: optax.GradientTransformation | None = None,
) -> Model:
    """An encoder on English text, small by default, trained with Adam (rate 1e-3) unless `optimizer` is given.

    `positions` is the greatest sequence length that the parameters are for; without it, they are for `sequence_length`.
    """
    check_sizes(batch_size=batch_size, sequence_length=sequence_length, width=width, heads=heads, layers=layers)
    check_sizes(at_least=data.BYTES + 1, vocabulary=vocabulary)
    positions = sequence_length if positions is None else positions
    check_sizes(at_least=sequence_length, positions=positions)
    check_heads(heads, width)
    check_dtype(dtype)
    source = masked_text_input(batch_size=batch_size, sequence_length=sequence_length, seed=seed)
    optimizer = adam_or(optimizer, learning_rate, usual=1e-3)
    module = BERT(vocabulary, positions, width, heads, layers, dtype)
    return build_model("bert", module, source, seed=seed, optimizer=optimizer, deviation=lambda shape: 0.02)


def bert_base(
    *,
    batch_size: int,
    sequence_length: int = 512,
    layers: int = 12,
    dtype: DTypeLike = jnp.float32,
    seed: int = 0,
    learning_rate: float | None = None,
    optimizer: optax.GradientTransformation | None = None,
) -> Model:
    """The encoder at the sizes of BERT-base, trained with Adam (rate 1e-4): large for a CPU to run, quick to plan."""
    return bert(
        batch_size=batch_size,
        sequence_length=sequence_length,
        vocabulary=30522,
        width=768,
        heads=12,
        layers=layers,
        positions=512,
        dtype=dtype,
        seed=seed,
        optimizer=adam_or(optimizer, learning_rate, usual=1e-4),
    )


class BERT(nn.Module):
    """Embeddings of tokens, places and segments, blocks, and the head for the places that are asked for."""

    vocabulary: int
    positions: int
    width: int
    heads: int
    layers: int
    dtype: DTypeLike

    @nn.compact
    def __call__(self, tokens: jax.Array, masked: jax.Array, *, train: bool) -> jax.Array:
        del train  # nothing here differs between training and testing
        embedding = nn.Embed(self.vocabulary, self.width, dtype=self.dtype, name="Tokens")
        positions = nn.Embed(self.positions, self.width, dtype=self.dtype, name="Positions")
        segments = nn.Embed(_SEGMENTS, self.width, dtype=self.dtype, name="Segments")
        x = embedding(tokens) + positions(jnp.arange(tokens.shape[1])) + segments(jnp.zeros((1,), jnp.int32))
        x = _norm(dtype=self.dtype, name="Norm")(x)
        for index in range(self.layers):
            x = EncoderBlock(self.heads, self.dtype, name=f"Block_{index}")(x)
        x = jnp.take_along_axis(x, masked[:, :, None], axis=1)
        x = nn.gelu(nn.Dense(self.width, dtype=self.dtype, name="Head")(x), approximate=False)
        x = _norm(dtype=self.dtype, name="HeadNorm")(x)
        bias = self.param("HeadBias", nn.initializers.zeros, (self.vocabulary,))
        return embedding.attend(x).astype(jnp.float32) + bias


class EncoderBlock(nn.Module):
    """Attention and a dense network of one hidden layer, each with a shortcut and a norm after it."""

    heads: int
    dtype: DTypeLike

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        width = x.shape[-1]
        y = Attention(self.heads, self.dtype, causal=False, name="Attention")(x)
        x = _norm(dtype=self.dtype, name="Norm_0")(x + y)
        y = nn.gelu(nn.Dense(4 * width, dtype=self.dtype, name="Up")(x), approximate=False)
        return _norm(dtype=self.dtype, name="Norm_1")(x + nn.Dense(width, dtype=self.dtype, name="Down")(y))
