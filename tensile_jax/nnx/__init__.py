"""Runs a step on Flax NNX objects within a memory budget. Such a step changes its model and its optimizer in place.

    import tensile_jax as tensile

    @tensile.nnx.jit(budget="60%", donate_argnames=("model", "optimizer"))
    def train_step(model, optimizer, metrics, batch): ...

    train_step(model, optimizer, metrics, batch)

`tensile_jax.nnx.jit` takes the place of `flax.nnx.jit`, as `tensile_jax.jit` takes the place of `jax.jit`.
"""

from tensile_jax.nnx.function import NnxFunction, jit

__all__ = ["NnxFunction", "jit"]
