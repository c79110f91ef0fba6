"""Defines VGG-16, a plain chain of 3x3 convolutions, followed by three wide dense layers.

Simonyan and Zisserman, "Very Deep Convolutional Networks for Large-Scale Image Recognition" (2014),
table 1, column D. With 224x224 images and 1000 classes the network has 138,357,544 parameters. At
another image size, the first dense layer has another shape, because it reads every remaining pixel.
There is no dropout. Since there is no batch norm, the network is trained at a tenth of Adam's usual
rate.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike

from tensile_models.classifier import Classifier


class VGG(nn.Module):
    """Convolutions in stages, each stage halved by pooling; three dense layers.

    The width doubles from stage to stage up to eight times that of the first. The hidden dense layers have 64 times its width.
    """

    classes: int
    width: int
    blocks: Sequence[int]
    dtype: DTypeLike

    @nn.compact
    def __call__(self, images: jax.Array, *, train: bool) -> jax.Array:
        del train  # nothing here differs between training and testing
        x = images
        index = 0
        for stage, convolutions in enumerate(self.blocks):
            width = self.width * min(2**stage, 8)
            for _ in range(convolutions):
                x = nn.relu(nn.Conv(width, (3, 3), padding=1, dtype=self.dtype, name=f"Conv_{index}")(x))
                index += 1
            x = nn.max_pool(x, (2, 2), strides=(2, 2))
        x = x.reshape(len(x), -1)
        for name in ("Dense_0", "Dense_1"):
            x = nn.relu(nn.Dense(64 * self.width, dtype=self.dtype, name=name)(x))
        return nn.Dense(self.classes, dtype=self.dtype, name="Head")(x).astype(jnp.float32)


vgg16 = Classifier("vgg16", VGG, image_size=224, smallest_image=32, width=64, blocks=(2, 2, 3, 3, 3), learning_rate=1e-4)
