"""What a model offers: a train step, its state and its batches, at given sizes.

A `Model` is plain JAX: `step` can be given to `jax.jit`, or to any other transformation, as
it stands. Images have the shape (batch, height, width, channels); tokens (batch, position).
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from flax import struct

Batch = dict[str, Any]  # arrays, or in `batch_shape` their shapes: 'image' and 'label', ...
Metrics = dict[str, jax.Array]  # 'loss' and 'accuracy', both scalars


@struct.dataclass
class State:
    """What one iteration hands to the next."""

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
        batch_shape: the batch likewise.
        batches: endless real input as NumPy arrays; the same sequence each time.
        evaluate: accuracy on the test set, for models of data that has one.
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
