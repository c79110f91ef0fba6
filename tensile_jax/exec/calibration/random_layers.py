"""Draws random layers, with their gradients. A calibration measures the operators of these layers.

The sizes are those of networks: images of 7 to 224 pixels along a side, 8 to 1,024 channels, windows of 1 to 7 pixels, widths
of dense layers up to 4,096 (up to 32,768 inputs for a batch of at most 16 rows), texts of 32 to 1,024 tokens. For each layer, a
limit on the number of operations is drawn, too. A layer above its limit is made smaller.
"""

import random
from collections.abc import Callable
from math import log2
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

_MOST_FLOPS = {"cpu": 2e9}  # of most operators, by platform: 10 ms of two CPU cores
_MOST_FLOPS_ELSEWHERE = 1e12  # 2 ms of an H200
_TIMES = (1 / 4, 1.0, 1.0, 4.0)  # that; drawn for each layer

Layer = tuple[Callable[..., Any], tuple[Any, ...]]
"""The gradient of a layer as a function, and the shapes of its arguments."""


def random_layer(choice: random.Random, platform: str) -> Layer:
    """A random layer of one of several kinds; half of them are convolutions."""
    most = _MOST_FLOPS.get(platform, _MOST_FLOPS_ELSEWHERE) * choice.choice(_TIMES)
    kinds = [_convolution] * 10 + [_dense] * 4 + [_attention] * 3 + [_pooling] * 2 + [_embedding]
    return choice.choice(kinds)(choice, most)


def _convolution(choice: random.Random, most: float) -> Layer:
    window, stride = choice.choice((1, 1, 1, 3, 3, 3, 5, 7)), choice.choice((1, 1, 1, 2))
    side, images = choice.choice((7, 8, 14, 17, 28, 35, 56, 71, 112, 149, 224)), choice.choice((1, 2, 4, 8, 16, 32, 64))
    channels = 3 if choice.random() < 0.05 else _multiple(choice, 16, 1024)
    filters = _multiple(choice, 16, 1024)
    if window >= 5:
        channels = min(channels, 64)
    while 2.0 * images * (side / stride * window) ** 2 * channels * filters > most:
        larger = {"images": images > 1, "side": side > 7, "filters": filters > 16, "channels": True}
        match choice.choice([name for name, is_larger in larger.items() if is_larger]):
            case "images":
                images //= 2
            case "side":
                side = max(7, side // 2)
            case "filters":
                filters = max(16, filters // 2)
            case _ if channels > 3:
                channels = max(3, channels // 2)
            case _:
                break
    side = max(side, window)
    windows = (window, window)
    if window > 1 and choice.random() < 0.15:
        windows = choice.choice(((1, window), (window, 1)))
    padding = choice.choice(("SAME", "SAME", "VALID"))

    def loss(image: Any, kernel: Any) -> Any:
        numbers = ("NHWC", "HWIO", "NHWC")
        return _squares(lax.conv_general_dilated(image, kernel, (stride, stride), padding, dimension_numbers=numbers))

    return jax.grad(loss, argnums=(0, 1)), (_shape(images, side, side, channels), _shape(*windows, channels, filters))


def _dense(choice: random.Random, most: float) -> Layer:
    if choice.random() < 0.15:  # the first dense layer after images: few rows, and a matrix that no cache holds
        rows, inner, columns = _near(choice, 1, 16), _near(choice, 1024, 32_768), _near(choice, 256, 4096)
    else:
        rows, inner, columns = (_near(choice, least, 4096) for least in (4, 16, 16))
    while 2.0 * rows * inner * columns > most:
        rows, inner = max(1, rows // 2), max(8, inner // 2)
    tokens = min(rows, 64)
    batched = choice.random() < 0.5
    x = _shape(max(1, rows // tokens), tokens, inner) if batched else _shape(rows, inner)
    return jax.grad(lambda x, w: _squares(x @ w), argnums=(0, 1)), (x, _shape(inner, columns))


def _attention(choice: random.Random, most: float) -> Layer:
    texts, tokens = _near(choice, 1, 32), choice.choice((32, 64, 128, 256, 512, 1024))
    heads, width = choice.choice((2, 4, 8, 12)), choice.choice((16, 32, 64))
    while 2.0 * texts * heads * tokens**2 * width > most and tokens > 8:
        tokens //= 2

    def loss(query: Any, key: Any, value: Any) -> Any:
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key)
        return _squares(jnp.einsum("bhqk,bkhd->bqhd", jnp.tanh(scores), value))

    return jax.grad(loss, argnums=(0, 1, 2)), (_shape(texts, tokens, heads, width),) * 3


def _pooling(choice: random.Random, most: float) -> Layer:
    side, channels, images = _near(choice, 7, 112), _multiple(choice, 8, 512), _near(choice, 1, 32)
    while 10.0 * images * side**2 * channels > most / 30 and images > 1:
        images //= 2
    window, stride = choice.choice(((2, 2), (3, 2), (3, 1)))
    sizes, strides = (1, window, window, 1), (1, stride, stride, 1)
    maximum = choice.random() < 0.5

    def loss(image: Any) -> Any:
        first, combine = (-jnp.inf, lax.max) if maximum else (0.0, lax.add)
        return _squares(lax.reduce_window(image, first, combine, sizes, strides, "SAME"))

    return jax.grad(loss), (_shape(images, side, side, channels),)


def _embedding(choice: random.Random, most: float) -> Layer:
    rows, width, tokens = _near(choice, 64, 50_000), _multiple(choice, 32, 1024), _near(choice, 64, 16_384)
    while rows * width > most / 30 and rows > 64:
        rows //= 2
    tables = _shape(rows, width), jax.ShapeDtypeStruct((tokens,), jnp.int32)
    return jax.grad(lambda table, taken: _squares(table[taken])), tables


def _squares(x: Any) -> Any:
    return jnp.sum(x**2)


def _shape(*sizes: int) -> Any:
    return jax.ShapeDtypeStruct(sizes, jnp.float32)


def _near(choice: random.Random, least: int, most: int) -> int:
    """A size in this range, whose logarithm is equally likely everywhere."""
    return round(2 ** choice.uniform(log2(least), log2(most)))


def _multiple(choice: random.Random, least: int, most: int) -> int:
    """The same, a multiple of eight."""
    return max(8, 8 * round(_near(choice, least, most) / 8))
