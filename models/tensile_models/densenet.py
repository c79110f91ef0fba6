"""Defines DenseNet-121, a convolutional network in which every layer reads the outputs of all earlier layers of its block.

Huang et al., "Densely Connected Convolutional Networks" (2017), table 1, column DenseNet-121: bottleneck layers, and transitions
that halve the channels. With 1000 classes the network has 7,978,856 parameters and 83,648 running statistics.

    x_l = [x_(l-1), Conv_3x3(relu(Norm(Conv_1x1(relu(Norm(x_(l-1)))))))]      [a, b]: the channels of both, side by side

The network's `width` is the growth rate k, the number of channels that each layer adds. The stem has 2 k channels, and the 1x1
convolution of a layer has 4 k.

Every layer makes a new array of all channels so far, and normalises all of them. So the memory of a training step grows with the
square of the number of layers in a block, although the network has few parameters.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike

from tensile_models.classifier import Classifier
from tensile_models.layers import batch_norm, conv, head, stem


class DenseNet(nn.Module):
    """Stem, blocks of dense layers with transitions between them, global average, linear head."""

    classes: int
    width: int
    blocks: Sequence[int]
    dtype: DTypeLike

    @nn.compact
    def __call__(self, images: jax.Array, *, train: bool) -> jax.Array:
        x = stem(images, 2 * self.width, train=train, dtype=self.dtype)
        index = 0
        for block, layers in enumerate(self.blocks):
            if block > 0:
                x = Transition(self.dtype, name=f"Transition_{block - 1}")(x, train=train)
            for _ in range(layers):
                x = DenseLayer(self.width, self.dtype, name=f"Layer_{index}")(x, train=train)
                index += 1
        x = nn.relu(batch_norm("Norm", train=train, dtype=self.dtype)(x))
        return head(x, self.classes, dtype=self.dtype)


class DenseLayer(nn.Module):
    """Adds `width` channels, computed from all channels of `x`, to `x`."""

    width: int
    dtype: DTypeLike

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool) -> jax.Array:
        y = nn.relu(batch_norm("Norm_0", train=train, dtype=self.dtype)(x))
        y = conv("Conv_0", 4 * self.width, 1, dtype=self.dtype)(y)
        y = nn.relu(batch_norm("Norm_1", train=train, dtype=self.dtype)(y))
        y = conv("Conv_1", self.width, 3, dtype=self.dtype)(y)
        return jnp.concatenate([x, y], axis=-1)


class Transition(nn.Module):
    """Halves the channels by a 1x1 convolution, and the image by an average."""

    dtype: DTypeLike

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool) -> jax.Array:
        y = nn.relu(batch_norm("Norm", train=train, dtype=self.dtype)(x))
        y = conv("Conv", x.shape[-1] // 2, 1, dtype=self.dtype)(y)
        return nn.avg_pool(y, (2, 2), strides=(2, 2))


densenet121 = Classifier("densenet121", DenseNet, image_size=224, smallest_image=32, width=32, blocks=(6, 12, 24, 16))
