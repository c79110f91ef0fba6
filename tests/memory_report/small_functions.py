"""Functions of a few operators, whose memory can be counted by hand."""

from typing import Any

import jax
import jax.numpy as jnp

WIDTH, BATCH = 64, 256


def shape(*dimensions: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dimensions, dtype)


WEIGHTS, MOMENTS, IMAGES = shape(WIDTH, WIDTH), shape(WIDTH, WIDTH), shape(BATCH, WIDTH)
STATE = {"w": WEIGHTS, "opt_m": MOMENTS}


def loss_of(w: jax.Array, images: jax.Array) -> jax.Array:
    hidden = jnp.tanh(images @ w)
    return jnp.mean((hidden @ w) ** 2)


def train_step(state: dict[str, jax.Array], images: jax.Array) -> tuple[dict[str, jax.Array], jax.Array]:
    loss, gradient = jax.value_and_grad(loss_of)(state["w"], images)
    moments = 0.9 * state["opt_m"] + gradient
    return {"w": state["w"] - 0.1 * moments, "opt_m": moments}, loss


def forward(w: jax.Array, images: jax.Array) -> jax.Array:
    for _ in range(3):
        images = jnp.tanh(images @ w)
    return images.sum(axis=1)


def scanned(weights: jax.Array, images: jax.Array) -> jax.Array:
    def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        return jnp.tanh(x @ w), None

    return jax.grad(lambda ws: jax.lax.scan(layer, images, ws)[0].sum())(weights)
