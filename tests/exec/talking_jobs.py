"""A job that another process can import, whose steps have effects: they write lines to a file."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback


def write_down(path: str, tag: str, value: Any) -> None:
    """A line more in the file."""
    with Path(path).open("a") as file:
        file.write(f"{tag} {float(np.asarray(value)):.3f}\n")


def batches() -> Iterator[Any]:
    for i in range(10_000):
        yield np.full((64, 32), (i % 7) / 10, np.float32)


def make_job(*, path: str, layers: int = 4) -> Any:
    """A training step with an effect for each layer and two at its end."""

    def loss_of(params: Any, x: Any) -> Any:
        for number, w in enumerate(params):
            x = jnp.tanh(x @ w)
            jax.debug.callback(partial(write_down, path, f"layer_{number}"), x.mean(), ordered=True)
        return jnp.mean((x - 0.1) ** 2)

    def step(state: Any, x: Any) -> tuple[Any, Any]:
        loss, gradients = jax.value_and_grad(loss_of)(state["params"], x)
        io_callback(partial(write_down, path, "loss"), None, loss, ordered=True)
        params = jax.tree.map(lambda w, g: w - 0.1 * g, state["params"], gradients)
        io_callback(partial(write_down, path, "weight"), None, params[0].sum(), ordered=True)
        return {"params": params}, {"loss": loss}

    rng = np.random.default_rng(0)
    return step, {"params": [jnp.asarray(rng.normal(size=(32, 32)) / 6, jnp.float32) for _ in range(layers)]}, batches
