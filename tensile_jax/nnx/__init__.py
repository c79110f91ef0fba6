"""Puts a memory budget on a step on Flax NNX objects, which changes its model and optimizer in place.

    import tensile_jax as tensile

    @tensile.nnx.jit(budget="60%", donate_argnames=("model", "optimizer"))
    def train_step(model, optimizer, metrics, batch): ...

    train_step(model, optimizer, metrics, batch)

`tensile_jax.nnx.jit` is to `flax.nnx.jit` what `tensile_jax.jit` is to `jax.jit`.
"""

from tensile_jax.nnx.function import NnxFunction, jit

__all__ = ["NnxFunction", "jit"]
