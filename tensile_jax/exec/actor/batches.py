"""Describes the shapes and dtypes of a job's batches.

A plan is made for one kind of batch, so all batches of a job must have the same shapes and dtypes.

Leaves are treated as `jax.jit` treats them: a 64-bit NumPy number becomes 32 bits, unless JAX is set to use 64 bits. NumPy
arrays are copied, because batches are drawn before they are used, and the user's generator may overwrite a batch that it has
yielded.
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
    """`batch` with copies of all leaves, as NumPy arrays, apart from `jax.Array`s, which stay as they are."""
    return jax.tree.map(lambda leaf: leaf if isinstance(leaf, jax.Array) else np.array(leaf), batch)


def signature_of(batch: Any) -> Any:
    """An object that is equal for batches of equal types. It is made much faster than a `BatchType`, and names nothing."""
    leaves, structure = jax.tree.flatten(batch)
    return structure, [(type(leaf), leaf.shape, leaf.dtype) for leaf in leaves]


def type_of(batch: Any, *, index: int) -> BatchType:
    """The type of a batch that `take_in` has returned.

    Raises:
        TypeError: a leaf has a dtype with which JAX does not compute.
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
    """Raises ValueError if `other`, the type of batch `index`, differs from `first`; the error names the first such leaf."""
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
