"""VGG-16, a plain chain of 3x3 convolutions under three wide dense layers.

Simonyan and Zisserman, "Very Deep Convolutional Networks for Large-Scale Image Recognition"
(2014), table 1, column D. With 224x224 images and 1000 classes it has 138,357,544 parameters;
at another image size the first dense layer, which sees every remaining pixel, has another
shape. There is no dropout. Without batch norm it is trained at a tenth of Adam's usual rate.
"""

import jax
import optax
from flax import linen as nn

from tensile_models.inputs import photograph_input
from tensile_models.model import Model
from tensile_models.training import adam_or, build_model

SMALLEST_IMAGE = 32  # five halvings leave one pixel
STAGES = ((2, 64), (2, 128), (3, 256), (3, 512), (3, 512))  # (convolutions, width)
DENSE_WIDTH = 4096


def vgg16(
    *,
    batch_size: int,
    image_size: int = 224,
    classes: int = 1000,
    seed: int = 0,
    learning_rate: float | None = None,
    optimizer: optax.GradientTransformation | None = None,
) -> Model:
    """VGG-16 on crops of photographs, trained with Adam (rate 1e-4) unless `optimizer` is given."""
    source = photograph_input(batch_size=batch_size, image_size=image_size, smallest=SMALLEST_IMAGE, classes=classes, seed=seed)
    optimizer = adam_or(optimizer, learning_rate, usual=1e-4)
    return build_model("vgg16", VGG(classes=classes), source, seed=seed, optimizer=optimizer)


class VGG(nn.Module):
    """Thirteen convolutions in five stages, each stage halved by pooling; three dense layers."""

    classes: int

    @nn.compact
    def __call__(self, images: jax.Array, *, train: bool) -> jax.Array:
        del train  # nothing here differs between training and testing
        x = images
        index = 0
        for convolutions, width in STAGES:
            for _ in range(convolutions):
                x = nn.relu(nn.Conv(width, (3, 3), padding=1, name=f"Conv_{index}")(x))
                index += 1
            x = nn.max_pool(x, (2, 2), strides=(2, 2))
        x = x.reshape(len(x), -1)
        x = nn.relu(nn.Dense(DENSE_WIDTH, name="Dense_0")(x))
        x = nn.relu(nn.Dense(DENSE_WIDTH, name="Dense_1")(x))
        return nn.Dense(self.classes, name="Head")(x)
