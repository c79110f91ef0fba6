"""Dense layers with ReLU for handwritten digits, of any width and number."""

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

from tensile_jax.models import data
from tensile_jax.models.model import Model, check_sizes
from tensile_jax.models.training import build_model

SMALLEST_IMAGE = 8  # the digits as they are


def mlp(
    *,
    batch_size: int,
    image_size: int = 8,
    width: int = 128,
    layers: int = 2,
    seed: int = 0,
    optimizer: optax.GradientTransformation | None = None,
) -> Model:
    """`layers` hidden layers on digits, trained with Adam unless `optimizer` is given."""
    check_sizes(batch_size=batch_size, width=width, layers=layers)
    check_sizes(at_least=SMALLEST_IMAGE, image_size=image_size)
    check_sizes(at_least=0, seed=seed)
    return build_model(
        "mlp",
        MLP(width=width, layers=layers),
        inputs="image",
        labels="label",
        batch_shape={
            "image": jax.ShapeDtypeStruct((batch_size, image_size, image_size, 1), jnp.float32),
            "label": jax.ShapeDtypeStruct((batch_size,), jnp.int32),
        },
        optimizer=optax.adam(1e-3) if optimizer is None else optimizer,
        seed=seed,
        batches=lambda: data.digit_batches(batch_size=batch_size, image_size=image_size, seed=seed),
        test=lambda: data.digits(test=True, image_size=image_size),
    )


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
