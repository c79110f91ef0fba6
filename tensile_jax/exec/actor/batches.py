"""The shapes and dtypes of a job's batches. All batches of a job must have the same, since a plan is made for one kind of batch.

Leaves are taken as `jax.jit` takes them: 64 bits of NumPy are 32 where JAX has only those. Arrays of NumPy are copied, since
batches are drawn ahead, and whoever yields them may fill the same buffer again, or shuffle what they are views of.
"""

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np


@dataclass(frozen=True, slots=True)
class BatchType:
    """Path and type, such as `float32[8, 3]`, of each leaf of a batch."""

    leaves: tuple[tuple[str, str], ...]


def take_in(batch: Any) -> Any:
    """`batch` with every leaf an array of its own: `jax.Array`s as they are, copies of all others."""
    return jax.tree.map(lambda leaf: leaf if isinstance(leaf, jax.Array) else np.array(leaf), batch)


def type_of(batch: Any, *, index: int) -> BatchType:
    """The type of a batch that was taken in.

    Raises:
        TypeError: a leaf is of nothing that JAX computes with.
    """
    leaves = jax.tree.leaves_with_path(batch)
    return BatchType(tuple((f"batch{jax.tree_util.keystr(path)}", _leaf_type(path, leaf, index)) for path, leaf in leaves))


def _leaf_type(path: Any, leaf: Any, index: int) -> str:
    try:
        seen = jax.typeof(leaf)
    except TypeError as error:
        raise TypeError(
            f"batch{jax.tree_util.keystr(path)} is of {leaf.dtype} in {_number(index)} with which JAX does not compute. "
            "Give numbers; keep texts and other objects out of the batches."
        ) from error
    return f"{seen.dtype}[{', '.join(map(str, seen.shape))}]"


def expect_same_type(first: BatchType, other: BatchType, *, index: int) -> None:
    """Raises ValueError naming the first leaf in which batch `index` differs from the first."""
    there, here = dict(first.leaves), dict(other.leaves)
    remedy = "A plan is made for one kind of batch: drop a last batch that is smaller, or pad each to the same shape."
    for path, seen in other.leaves:
        if path not in there:
            raise ValueError(f"{path} is {seen} in {_number(index)} and the first batch had no such leaf. {remedy}")
        if there[path] != seen:
            raise ValueError(f"{path} is {seen} in {_number(index)} and was {there[path]} in the first. {remedy}")
    for path, seen in first.leaves:
        if path not in here:
            raise ValueError(f"{path} was {seen} in the first batch, and {_number(index)} has no such leaf. {remedy}")


def _number(index: int) -> str:
    return f"batch {index}, counted from 0,"
