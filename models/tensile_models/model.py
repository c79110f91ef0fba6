"""Defines the records of this package: a model (a train step, its first state and its batches) and its state.

A `Model` is plain JAX: its `step` can be passed to `jax.jit`, or to any other transformation. Images have the shape (batch,
height, width, channels), and tokens have the shape (batch, position).
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.typing import DTypeLike

Batch = dict[str, Any]  # arrays, or in `batch_shape` their shapes: 'image' and 'label', ...
Metrics = dict[str, jax.Array]  # 'loss' and 'accuracy', both scalars


@struct.dataclass
class State:
    """The state of the training, which each iteration takes and returns."""

    params: Any
    batch_stats: Any  # running means and variances; an empty dict without batch norm
    opt_state: Any
    step: Any  # iterations done, an int32 scalar


@dataclass(frozen=True)
class Model:
    """One network with its optimizer and its input, all sizes fixed.

    Attributes:
        step: one training iteration, (state, batch) -> (state, metrics); pure.
        init: makes the first state; the same one each time.
        state_shape: the state with a `jax.ShapeDtypeStruct` for each array.
        batch_shape: a batch, with a `jax.ShapeDtypeStruct` for each array.
        batches: makes an endless iterator of batches as NumPy arrays; the same sequence each time.
        evaluate: gives the accuracy of a state on the test set; None if the data has no test set.
    """

    name: str
    step: Callable[[State, Batch], tuple[State, Metrics]]
    init: Callable[[], State]
    state_shape: State
    batch_shape: Batch
    batches: Callable[[], Iterator[Batch]]
    evaluate: Callable[[State], float] | None = None

    @property
    def parameters(self) -> int:
        """How many numbers are trained: running statistics and moments do not count."""
        return count(self.state_shape.params)


def count(tree: Any) -> int:
    """How many numbers the arrays (or shapes) of `tree` hold together."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))


def check_sizes(*, at_least: int = 1, **sizes: int) -> None:
    """Raises unless every size is a whole number of `at_least` or more."""
    for argument, value in sizes.items():
        if not isinstance(value, (int, np.integer)) or isinstance(value, bool):
            raise TypeError(f"{argument} must be a whole number: got {value!r} ({type(value).__name__}). Pass an int.")
        if value < at_least:
            raise ValueError(f"{argument} must be at least {at_least}: got {value}. Pass {argument}={at_least} or more.")


def check_dtype(dtype: DTypeLike) -> None:
    """Raises unless layers can compute in `dtype`."""
    try:
        name, floating = jnp.dtype(dtype).name, jnp.issubdtype(dtype, jnp.floating)
    except TypeError:
        name, floating = repr(dtype), False
    if not floating:
        raise ValueError(f"dtype must be a floating type: got {name}. Pass jnp.float32, jnp.bfloat16 or jnp.float16.")
