"""Defines a network of dense layers with ReLU for handwritten digits. The number and the width of the layers can be chosen."""

import jax
import optax
from flax import linen as nn

from tensile_models import data
from tensile_models.inputs import digit_input
from tensile_models.model import Model, check_sizes
from tensile_models.training import adam_or, build_model


def mlp(
    *,
    batch_size: int,
    image_size: int = 8,
    width: int = 128,
    layers: int = 2,
    seed: int = 0,
    learning_rate: float | None = None,
    optimizer: optax.GradientTransformation | None = None,
) -> Model:
    """`layers` hidden layers on digits, trained with Adam (rate 1e-3) unless `optimizer` is given."""
    check_sizes(batch_size=batch_size, width=width, layers=layers)
    source = digit_input(batch_size=batch_size, image_size=image_size, seed=seed)
    module = MLP(width=width, layers=layers)
    return build_model("mlp", module, source, seed=seed, optimizer=adam_or(optimizer, learning_rate, usual=1e-3))


class MLP(nn.Module):
    """Hidden layers of one width and a linear head."""

    width: int
    layers: int

    @nn.compact
    def __call__(self, images: jax.Array, *, train: bool) -> jax.Array:
        del train  # nothing here differs between training and testing
        x = images.reshape(len(images), -1)
        for index in range(self.layers):
            x = nn.relu(nn.Dense(self.width, name=f"Dense_{index}")(x))
        return nn.Dense(data.DIGITS, name="Head")(x)
