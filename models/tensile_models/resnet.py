"""ResNet-50 v1.5, a convolutional network of residual blocks.

He et al., "Deep Residual Learning for Image Recognition" (2015), table 1, column 50 layers.
Version 1.5 differs from the paper in one point: where a block halves the image, the 3x3
convolution has the stride, and not the first 1x1. With 1000 classes it has 25,557,032
parameters and 53,120 running statistics.

Every scale of a batch norm begins at one (some recipes begin the last of each block at zero),
so that from the first step on every parameter has a gradient.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

from tensile_models.inputs import photograph_input
from tensile_models.model import Model
from tensile_models.training import adam_or, build_model

SMALLEST_IMAGE = 32  # five halvings leave one pixel
BLOCKS_OF_RESNET_50 = (3, 4, 6, 3)


def resnet50(
    *,
    batch_size: int,
    image_size: int = 224,
    classes: int = 1000,
    seed: int = 0,
    learning_rate: float | None = None,
    optimizer: optax.GradientTransformation | None = None,
) -> Model:
    """ResNet-50 on crops of photographs, trained with Adam (rate 1e-3) unless `optimizer` is given."""
    source = photograph_input(batch_size=batch_size, image_size=image_size, smallest=SMALLEST_IMAGE, classes=classes, seed=seed)
    module = ResNet(blocks=BLOCKS_OF_RESNET_50, classes=classes)
    return build_model("resnet50", module, source, seed=seed, optimizer=adam_or(optimizer, learning_rate, usual=1e-3))


class ResNet(nn.Module):
    """Stem, stages of bottleneck blocks, global average, linear head."""

    blocks: Sequence[int]
    classes: int
    width: int = 64

    @nn.compact
    def __call__(self, images: jax.Array, *, train: bool) -> jax.Array:
        stem = nn.Conv(self.width, (7, 7), strides=2, padding=3, use_bias=False, name="Stem")
        x = stem(images)
        x = nn.relu(batch_norm("StemNorm", train=train)(x))
        halo = ((1, 1), (1, 1))
        x = nn.max_pool(x, (3, 3), strides=(2, 2), padding=halo)  # pyright: ignore[reportArgumentType]  (Flax annotates str only)
        index = 0
        for stage, blocks in enumerate(self.blocks):
            for position in range(blocks):
                x = Bottleneck(
                    width=self.width * 2**stage,
                    stride=2 if stage > 0 and position == 0 else 1,
                    name=f"Block_{index}",
                )(x, train=train)
                index += 1
        return nn.Dense(self.classes, name="Head")(jnp.mean(x, axis=(1, 2)))


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions beside a shortcut, which is projected where shapes differ."""

    width: int
    stride: int

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool) -> jax.Array:
        def conv(name: str, width: int, kernel: int, stride: int = 1) -> nn.Conv:
            return nn.Conv(
                width,
                (kernel, kernel),
                strides=stride,
                padding=kernel // 2,
                use_bias=False,
                name=name,
            )

        outer = 4 * self.width
        y = nn.relu(batch_norm("Norm_0", train=train)(conv("Conv_0", self.width, 1)(x)))
        y = nn.relu(batch_norm("Norm_1", train=train)(conv("Conv_1", self.width, 3, self.stride)(y)))
        y = batch_norm("Norm_2", train=train)(conv("Conv_2", outer, 1)(y))
        if x.shape != y.shape:
            x = batch_norm("ProjectionNorm", train=train)(conv("Projection", outer, 1, self.stride)(x))
        return nn.relu(x + y)


def batch_norm(name: str, *, train: bool) -> nn.BatchNorm:
    """The usual constants for ImageNet; Flax's own momentum, 0.99, is slower."""
    return nn.BatchNorm(not train, momentum=0.9, epsilon=1e-5, name=name)
