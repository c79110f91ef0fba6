"""Defines ResNet-50 v1.5, a convolutional network of residual blocks.

He et al., "Deep Residual Learning for Image Recognition" (2015), table 1, column 50 layers. Version 1.5 differs from the paper in
one point: where a block halves the image, the 3x3 convolution has the stride of two, and not the first 1x1 convolution. With 1000
classes the network has 25,557,032 parameters and 53,120 running statistics.

The scale of every batch norm begins at one, so that every parameter has a gradient from the first step on. (In some recipes, the
last scale of each block begins at zero.)
"""

from collections.abc import Sequence

import jax
from flax import linen as nn
from jax.typing import DTypeLike

from tensile_models.classifier import Classifier
from tensile_models.layers import batch_norm, conv, head, stem


class ResNet(nn.Module):
    """Stem, stages of bottleneck blocks, global average, linear head."""

    classes: int
    width: int
    blocks: Sequence[int]
    dtype: DTypeLike

    @nn.compact
    def __call__(self, images: jax.Array, *, train: bool) -> jax.Array:
        x = stem(images, self.width, train=train, dtype=self.dtype)
        index = 0
        for stage, blocks in enumerate(self.blocks):
            for position in range(blocks):
                x = Bottleneck(
                    width=self.width * 2**stage,
                    stride=2 if stage > 0 and position == 0 else 1,
                    dtype=self.dtype,
                    name=f"Block_{index}",
                )(x, train=train)
                index += 1
        return head(x, self.classes, dtype=self.dtype)


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions beside a shortcut, which is projected where shapes differ."""

    width: int
    stride: int
    dtype: DTypeLike

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool) -> jax.Array:
        def conv_norm(x: jax.Array, names: tuple[str, str], width: int, kernel: int, stride: int = 1) -> jax.Array:
            y = conv(names[0], width, kernel, stride=stride, dtype=self.dtype)(x)
            return batch_norm(names[1], train=train, dtype=self.dtype)(y)

        outer = 4 * self.width
        y = nn.relu(conv_norm(x, ("Conv_0", "Norm_0"), self.width, 1))
        y = nn.relu(conv_norm(y, ("Conv_1", "Norm_1"), self.width, 3, self.stride))
        y = conv_norm(y, ("Conv_2", "Norm_2"), outer, 1)
        if x.shape != y.shape:
            x = conv_norm(x, ("Projection", "ProjectionNorm"), outer, 1, self.stride)
        return nn.relu(x + y)


resnet50 = Classifier("resnet50", ResNet, image_size=224, smallest_image=32, width=64, blocks=(3, 4, 6, 3))
