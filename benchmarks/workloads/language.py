"""Workloads on text: tokens of the shape (batch, position)."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from jax import lax

from benchmarks.workloads.workload import Workload, applied, cross_entropy, integers, params_of, trained

_VOCABULARY, _WIDTH, _HEADS = 512, 96, 4


def _tokens(batch_size: int, length: int, vocabulary: int = _VOCABULARY) -> Callable[[int], jax.Array]:
    return lambda number: integers(number, vocabulary, batch_size, length + 1)


def _next_token(net: nn.Module) -> Callable[[Any, jax.Array, jax.Array], jax.Array]:
    def loss(params: Any, tokens: jax.Array, key: jax.Array) -> jax.Array:
        del key
        return cross_entropy(applied(net, params, tokens[:, :-1]), tokens[:, 1:])

    return loss


# -- a decoder as they are written today --------------------------------------------------------------------------------------


def _rotated(x: jax.Array) -> jax.Array:
    """Rotary positions (Su et al., 2021); `x` has the shape (batch, position, head, width)."""
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None] / 10000 ** (jnp.arange(half) / half)
    sin, cos = jnp.sin(angles)[:, None], jnp.cos(angles)[:, None]
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)


class _Attention(nn.Module):
    """Grouped queries: `heads` of them, and half as many keys and values."""

    heads: int = _HEADS
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array, other: jax.Array | None = None, *, causal: bool = True) -> jax.Array:
        source, head = x if other is None else other, x.shape[-1] // self.heads
        q = nn.DenseGeneral((self.heads, head), use_bias=False, dtype=self.dtype)(x)
        k, v = (nn.DenseGeneral((self.heads // 2, head), use_bias=False, dtype=self.dtype)(source) for _ in range(2))
        y = jax.nn.dot_product_attention(_rotated(q), _rotated(k), v, is_causal=causal and other is None)
        return nn.DenseGeneral(x.shape[-1], axis=(-2, -1), use_bias=False, dtype=self.dtype)(y)


class _Gated(nn.Module):
    """SwiGLU (Shazeer, 2020)."""

    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        gate, up = (nn.Dense(3 * x.shape[-1], use_bias=False, dtype=self.dtype)(x) for _ in range(2))
        return nn.Dense(x.shape[-1], use_bias=False, dtype=self.dtype)(nn.silu(gate) * up)


class _Block(nn.Module):
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array, other: jax.Array | None = None) -> jax.Array:
        x = x + _Attention(dtype=self.dtype)(nn.RMSNorm(dtype=self.dtype)(x))
        if other is not None:
            x = x + _Attention(dtype=self.dtype)(nn.RMSNorm(dtype=self.dtype)(x), other)
        return x + _Gated(dtype=self.dtype)(nn.RMSNorm(dtype=self.dtype)(x))


class _Decoder(nn.Module):
    """Blocks after a table of words, which the logits share unless `vocabulary` is not that of the input."""

    layers: int = 4
    vocabulary: int = _VOCABULARY
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        table = nn.Embed(self.vocabulary, _WIDTH, dtype=self.dtype)
        x = table(tokens)
        for _ in range(self.layers):
            x = _Block(self.dtype)(x)
        return table.attend(nn.RMSNorm(dtype=self.dtype)(x)).astype(jnp.float32)


def _decoder_params(net: nn.Module) -> Callable[[], Any]:
    return lambda: params_of(net, jnp.zeros((1, 8), jnp.int32))


def decoder() -> Workload:
    """Rotary positions, grouped queries, gated layers; AdamW with a schedule and clipped gradients."""
    net = _Decoder()
    rate = optax.warmup_cosine_decay_schedule(0, 1e-3, 10, 100)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, weight_decay=0.1))
    return trained(_decoder_params(net), _next_token(net), _tokens(8, 128), optimizer=optimizer)


def large_vocabulary() -> Workload:
    """Most of the memory is in the logits."""
    net = _Decoder(layers=2, vocabulary=16384)
    return trained(_decoder_params(net), _next_token(net), _tokens(4, 128, 16384), optimizer=optax.adafactor(1e-3))


def mixed_precision() -> Workload:
    """Layers in bfloat16; the loss is scaled, and a step whose gradients are not finite changes nothing but the scale."""
    net, optimizer = _Decoder(dtype=jnp.bfloat16), optax.adam(1e-3)
    loss = _next_token(net)

    def init() -> Any:
        params = _decoder_params(net)()
        return params, optimizer.init(params), jnp.float32(2.0**12), jnp.int32(0)

    def step(state: Any, tokens: jax.Array) -> tuple[Any, jax.Array]:
        params, opt_state, scale, good = state
        value, gradients = jax.value_and_grad(lambda p: scale * loss(p, tokens, jax.random.key(0)))(params)
        gradients = jax.tree.map(lambda g: g / scale, gradients)
        finite = jnp.all(jnp.asarray([jnp.all(jnp.isfinite(g)) for g in jax.tree.leaves(gradients)]))
        updates, changed = optimizer.update(gradients, opt_state)
        new = optax.apply_updates(params, updates), changed
        params, opt_state = jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, (params, opt_state))
        good = jnp.where(finite, good + 1, 0)
        scale = jnp.where(finite, jnp.where(good % 100 == 99, 2 * scale, scale), scale / 2)
        return (params, opt_state, scale, good), value / scale

    return Workload(step, init, _tokens(8, 128))


# -- other shapes of it -------------------------------------------------------------------------------------------------------


class _Experts(nn.Module):
    """Each token goes to two of the experts, whose products are ragged (Shazeer et al., 2017)."""

    experts: int = 4

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        width, flat = x.shape[-1], x.reshape(-1, x.shape[-1])
        gates, chosen = lax.top_k(nn.softmax(nn.Dense(self.experts, use_bias=False)(flat)), 2)
        order = jnp.argsort(chosen.reshape(-1))
        sizes = jnp.bincount(chosen.reshape(-1), length=self.experts).astype(jnp.int32)
        up = self.param("up", nn.initializers.lecun_normal(), (self.experts, width, 2 * width))
        down = self.param("down", nn.initializers.lecun_normal(), (self.experts, 2 * width, width))
        rows = jnp.repeat(flat, 2, axis=0)[order]
        y = lax.ragged_dot(nn.gelu(lax.ragged_dot(rows, up, sizes)), down, sizes)
        y = jnp.zeros_like(y).at[order].set(y).reshape(-1, 2, width)
        return jnp.einsum("tkw,tk->tw", y, gates).reshape(x.shape)


class _ExpertDecoder(nn.Module):
    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = nn.Embed(_VOCABULARY, _WIDTH)(tokens)
        for _ in range(3):
            x = x + _Attention()(nn.RMSNorm()(x))
            x = x + _Experts()(nn.RMSNorm()(x))
        return nn.Dense(_VOCABULARY)(nn.RMSNorm()(x))


def mixture_of_experts() -> Workload:
    net = _ExpertDecoder()
    return trained(_decoder_params(net), _next_token(net), _tokens(4, 128), optimizer=optax.adamw(1e-3))


class _Translator(nn.Module):
    """Encoder and decoder, with attention from the second to the first (Vaswani et al., 2017)."""

    @nn.compact
    def __call__(self, source: jax.Array, target: jax.Array) -> jax.Array:
        table = nn.Embed(_VOCABULARY, _WIDTH)
        x, y = table(source), table(target)
        for _ in range(2):
            x = x + _Attention()(nn.LayerNorm()(x), causal=False)
            x = x + nn.Dense(_WIDTH)(nn.relu(nn.Dense(4 * _WIDTH)(nn.LayerNorm()(x))))
        x = nn.LayerNorm()(x)
        for _ in range(2):
            y = _Block()(y, x)
        return table.attend(nn.LayerNorm()(y))


def translation() -> Workload:
    """Padding has no part in the loss."""
    net = _Translator()

    def loss(params: Any, batch: Any, key: jax.Array) -> jax.Array:
        del key
        source, target = batch
        losses = optax.softmax_cross_entropy_with_integer_labels(applied(net, params, source, target[:, :-1]), target[:, 1:])
        counts = target[:, 1:] > 9
        return jnp.sum(losses * counts) / jnp.sum(counts)

    example = jnp.zeros((1, 8), jnp.int32)
    return trained(
        lambda: params_of(net, example, example),
        loss,
        lambda number: (integers(number, _VOCABULARY, 8, 96), integers(number + 1, _VOCABULARY, 8, 97)),
    )


class _LoopDecoder(nn.Module):
    """Layers in one loop, each computed again in its backward pass (`nn.remat` inside of `nn.scan`)."""

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        def body(block: _Block, x: jax.Array, _: None) -> tuple[jax.Array, None]:
            return block(x), None

        loop = nn.scan(nn.remat(body), variable_axes={"params": 0}, split_rngs={"params": True}, length=6)
        x, _ = loop(_Block(), nn.Embed(_VOCABULARY, _WIDTH)(tokens), None)
        return nn.Dense(_VOCABULARY)(nn.RMSNorm()(x))


def loop_over_layers() -> Workload:
    net = _LoopDecoder()
    return trained(_decoder_params(net), _next_token(net), _tokens(8, 128))


# -- frozen weights -----------------------------------------------------------------------------------------------------------


def low_rank() -> Workload:
    """Frozen weights with trained additions of rank 4 (Hu et al., 2021)."""
    net, optimizer = _Decoder(), optax.adam(1e-3)
    loss = _next_token(net)

    def init() -> Any:
        frozen = _decoder_params(net)()
        shapes = [leaf.reshape(leaf.shape[0], -1).shape for leaf in jax.tree.leaves(frozen)]
        added = [(0.01 * jax.random.normal(jax.random.key(i), (a, 4)), jnp.zeros((4, b))) for i, (a, b) in enumerate(shapes)]
        return frozen, added, optimizer.init(added)

    def step(state: Any, tokens: jax.Array) -> tuple[Any, jax.Array]:
        frozen, added, opt_state = state

        def loss_of(added: Any) -> jax.Array:
            leaves, tree = jax.tree.flatten(frozen)
            merged = [leaf + (a @ b).reshape(leaf.shape) for leaf, (a, b) in zip(leaves, added, strict=True)]
            return loss(jax.tree.unflatten(tree, merged), tokens, jax.random.key(0))

        value, gradients = jax.value_and_grad(loss_of)(added)
        updates, opt_state = optimizer.update(gradients, opt_state)
        return (frozen, optax.apply_updates(added, updates), opt_state), value

    return Workload(step, init, _tokens(8, 128))


def preferences() -> Workload:
    """Of two texts one is preferred, in relation to a frozen model (Rafailov et al., 2023)."""
    net, optimizer = _Decoder(layers=3), optax.adamw(1e-4)

    def score(params: Any, tokens: jax.Array) -> jax.Array:
        chances = nn.log_softmax(applied(net, params, tokens[:, :-1]))
        return jnp.take_along_axis(chances, tokens[:, 1:, None], -1).sum((1, 2))

    def init() -> Any:
        params = _decoder_params(net)()
        return params, jax.tree.map(jnp.copy, params), optimizer.init(params)

    def step(state: Any, batch: Any) -> tuple[Any, jax.Array]:
        params, reference, opt_state = state

        def loss(params: Any) -> jax.Array:
            better, worse = (score(params, tokens) - score(reference, tokens) for tokens in batch)
            return -jnp.mean(nn.log_sigmoid(0.1 * (better - worse)))

        value, gradients = jax.value_and_grad(loss)(params)
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        return (optax.apply_updates(params, updates), reference, opt_state), value

    tokens = _tokens(4, 96)
    return Workload(step, init, lambda number: (tokens(2 * number), tokens(2 * number + 1)))


LANGUAGE: Mapping[str, Callable[[], Workload]] = {
    "decoder": decoder,
    "large_vocabulary": large_vocabulary,
    "mixed_precision": mixed_precision,
    "mixture_of_experts": mixture_of_experts,
    "translation": translation,
    "loop_over_layers": loop_over_layers,
    "low_rank": low_rank,
    "preferences": preferences,
}
