"""Small jobs for the tests of clusters: dense layers, with batches that come slowly enough for a test to step in.

As a program, this trains `sharded_job` in a `Runtime` with all devices of the process, and writes the last weights to a file:

    python tests/ray/cluster_jobs.py SEED STEPS BUDGET LIMIT_BYTES FILE
"""

import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import tensile_jax as tensile


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


def sharded_job(
    seed: int = 0, width: int = 32, pause_s: float = 0.05
) -> tuple[Callable[..., Any], Any, Callable[[], Iterator[Any]]]:
    """The same job, with weights and batches divided among all devices of the process (FSDP)."""
    step, weights, batches = job(seed, width, pause_s)
    divided = NamedSharding(Mesh(jax.devices(), ("data",)), PartitionSpec("data"))

    def divided_batches() -> Iterator[jax.Array]:
        return (jax.device_put(batch, divided) for batch in batches())

    return step, jax.device_put(weights, divided), divided_batches


def _train(seed: str, steps: str, budget: str, limit_bytes: str, file: str) -> None:
    with tensile.Runtime(budget, devices=jax.devices()) as runtime:
        make = tensile.Entrypoint("tests.ray.cluster_jobs:sharded_job", {"seed": int(seed), "pause_s": 0.0})
        weights = runtime.submit(make, steps=int(steps), plan_for=int(limit_bytes)).result()
    np.savez(file, *weights)


if __name__ == "__main__":
    _train(*sys.argv[1:])
