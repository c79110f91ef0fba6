"""Defines a workload: a training step, how its state begins, and its batches."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

Loss = Callable[[Any, Any, jax.Array], jax.Array]
"""(parameters, batch, random key) -> the loss, a scalar."""


@dataclass(frozen=True)
class Workload:
    """`step` takes a state and a batch, and returns the next state and the loss, a scalar.

    Attributes:
        init: makes the first state; the same one each time.
        batch: makes the batch of this number, arrays.
    """

    step: Callable[[Any, Any], tuple[Any, jax.Array]]
    init: Callable[[], Any]
    batch: Callable[[int], Any]


def trained(
    params: Callable[[], Any], loss: Loss, batch: Callable[[int], Any], *, optimizer: optax.GradientTransformation | None = None
) -> Workload:
    """Loss, gradient and optimizer, Adam with a rate of 1e-3 unless another one is given; the loss has a new key each time."""
    chosen = optax.adam(1e-3) if optimizer is None else optimizer

    def init() -> Any:
        first = params()
        return first, chosen.init(first), jax.random.key(1)

    def step(state: Any, batch: Any) -> tuple[Any, jax.Array]:
        params, opt_state, key = state
        key, used = jax.random.split(key)
        value, gradients = jax.value_and_grad(loss)(params, batch, used)
        updates, opt_state = chosen.update(gradients, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state, key), value

    return Workload(step, init, batch)


def params_of(module: nn.Module, *example: Any, seed: int = 0) -> Any:
    """The module's first parameters, for arguments of the shapes of `example`."""
    return jax.jit(module.init)(jax.random.key(seed), *example)["params"]


def applied(module: nn.Module, params: Any, *arguments: Any, **options: Any) -> Any:
    """What the module with these parameters makes of the arguments."""
    return module.apply({"params": params}, *arguments, **options)


def normal(number: int, *shape: int, scale: float = 1.0) -> jax.Array:
    """Normally distributed numbers, the same ones for the same `number` and shape."""
    return jnp.asarray(scale * np.random.default_rng(number).normal(size=shape), jnp.float32)


def integers(number: int, below: int, *shape: int) -> jax.Array:
    """Integers from 0 to `below`, the same ones for the same `number` and shape."""
    return jnp.asarray(np.random.default_rng(number).integers(0, below, size=shape), jnp.int32)


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """The mean over all labels."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
