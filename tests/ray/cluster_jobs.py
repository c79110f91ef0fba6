"""A small job for the tests of clusters: dense layers, with batches that come slowly enough for a test to step in."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def job(seed: int = 0, width: int = 32, pause_s: float = 0.05) -> tuple[Callable[..., Any], Any, Callable[[], Iterator[Any]]]:
    def step(weights: list[jax.Array], images: jax.Array) -> tuple[list[jax.Array], dict[str, jax.Array]]:
        def loss_of(weights: list[jax.Array]) -> jax.Array:
            x = images
            for w in weights:
                x = jnp.tanh(x @ w)
            return jnp.mean((x - images) ** 2)

        loss, gradients = jax.value_and_grad(loss_of)(weights)
        return [w - 0.1 * g for w, g in zip(weights, gradients, strict=True)], {"loss": loss}

    def batches() -> Iterator[np.ndarray]:
        rng = np.random.default_rng(seed)
        while True:
            time.sleep(pause_s)
            yield rng.standard_normal((64, width)).astype(np.float32)

    return step, list(jax.random.normal(jax.random.key(seed), (4, width, width)) / 4), batches
