"""Defines layers that several image networks share: a convolution without a bias, batch norm, the stem of ResNet and DenseNet,
and the head."""

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike


def conv(name: str, width: int, kernel: int, *, stride: int = 1, dtype: DTypeLike) -> nn.Conv:
    """A square convolution with zeros around the image, so that a stride of one keeps the image's size."""
    return nn.Conv(width, (kernel, kernel), strides=stride, padding=kernel // 2, use_bias=False, dtype=dtype, name=name)


def batch_norm(name: str, *, train: bool, dtype: DTypeLike, epsilon: float = 1e-5) -> nn.BatchNorm:
    """The usual constants for ImageNet; Flax's own momentum, 0.99, is slower. Mean and variance are taken in float32."""
    return nn.BatchNorm(not train, momentum=0.9, epsilon=epsilon, dtype=dtype, name=name)


def stem(images: jax.Array, width: int, *, train: bool, dtype: DTypeLike) -> jax.Array:
    """A 7x7 convolution, batch norm and ReLU, and a 3x3 maximum: the image is halved twice."""
    x = conv("Stem", width, 7, stride=2, dtype=dtype)(images)
    x = nn.relu(batch_norm("StemNorm", train=train, dtype=dtype)(x))
    halo = ((1, 1), (1, 1))
    return nn.max_pool(x, (3, 3), strides=(2, 2), padding=halo)  # pyright: ignore[reportArgumentType]  (Flax annotates str only)


def head(features: jax.Array, classes: int, *, dtype: DTypeLike) -> jax.Array:
    """The mean over all places of an image, and one dense layer: float32 logits of shape [images, classes]."""
    return nn.Dense(classes, dtype=dtype, name="Head")(jnp.mean(features, axis=(1, 2))).astype(jnp.float32)
