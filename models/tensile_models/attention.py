"""Defines attention with several heads (Vaswani et al., 2017), which the decoders (`gpt.py`) and the encoder (`bert.py`) share.

Attention: softmax(Q K^T / sqrt(head width)) V
"""

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike


def check_heads(heads: int, width: int) -> None:
    """Raises unless the heads can share the width."""
    if width % heads:
        raise ValueError(
            f"heads must divide width: got heads={heads}, width={width}. "
            f"Pass a width that is a multiple of {heads}, or other heads."
        )


class Attention(nn.Module):
    """Attention with several heads; scores and their softmax are float32. If `causal`, a place sees none of those after it."""

    heads: int
    dtype: DTypeLike
    causal: bool

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        batch, length, width = x.shape
        qkv = nn.Dense(3 * width, dtype=self.dtype, name="QKV")(x)
        qkv = qkv.reshape(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32)
        scores = scores / (width // self.heads) ** 0.5
        if self.causal:
            seen = jnp.arange(length)[:, None] >= jnp.arange(length)
            scores = jnp.where(seen, scores, jnp.finfo(jnp.float32).min)
        weights = nn.softmax(scores).astype(self.dtype)
        y = jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(batch, length, width)
        return nn.Dense(width, dtype=self.dtype, name="Out")(y)
