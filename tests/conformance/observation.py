"""Records everything that a caller can see of a call, so that calls of `jax.jit` and of `tensile_jax.jit` can be compared.

results     structure, values, dtypes, weak types, shardings with memory kinds, layouts, commitment; whether each has its own
            memory
arguments   which of them are deleted afterwards
warnings    category and first words
exceptions  their type
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

import tensile_jax as tensile

Jit = Callable[..., Any]
"""`jax.jit`, or something that is to be like it."""


def segments(function: Any = None, **options: Any) -> Any:
    """`tensile_jax.jit` that runs the segments of the step, with a boundary wherever there can be one."""
    return tensile.jit(policy="none", **options) if function is None else tensile.jit(function, policy="none", **options)


def whole(function: Any = None, **options: Any) -> Any:
    """`tensile_jax.jit` without a budget, which runs the step whole."""
    return tensile.jit(**options) if function is None else tensile.jit(function, **options)


VARIANTS: dict[str, Jit] = {"segments": segments, "whole": whole}


@dataclass(frozen=True)
class Seen:
    """What was seen of one call; `values` are compared with a tolerance, everything else exactly."""

    raised: str
    structure: str
    kinds: tuple[str, ...]
    values: tuple[Any, ...]
    own: tuple[bool, ...]
    deleted: tuple[bool, ...]
    warned: tuple[str, ...]


_AGAIN = "was planned and compiled again"
"""In the one warning that a caller of `jax.jit` does not see: that of `exec/call/other_shapes.py`."""


def see(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Seen:
    """Call the function and look at everything that its caller could look at."""
    arrays = [leaf for leaf in jax.tree.leaves((args, kwargs)) if isinstance(leaf, jax.Array)]
    result, raised = None, ""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            result = jax.block_until_ready(function(*args, **kwargs))
        except Exception as error:
            raised = "refused by Execute" if "Execute()" in str(error) else type(error).__name__  # ValueError on jit's fast path
    leaves, structure = jax.tree.flatten(result)
    return Seen(
        raised=raised,
        structure=str(structure),
        kinds=tuple(map(kind_of, leaves)),
        values=tuple(map(value_of, leaves)),
        own=tuple(not any(leaf is array for array in arrays) for leaf in leaves),
        deleted=tuple(array.is_deleted() for array in arrays),
        warned=tuple(sorted({f"{w.category.__name__}: {str(w.message)[:60]}" for w in caught if _AGAIN not in str(w.message)})),
    )


def kind_of(leaf: Any) -> str:
    """Everything of an array but its values; shardings are compared by their type, devices and specification."""
    if is_token(leaf):
        return "token"
    if not isinstance(leaf, jax.Array):
        return (
            f"{type(leaf).__name__} {leaf!r}" if not hasattr(leaf, "shape") else f"{type(leaf).__name__} {leaf.dtype}{leaf.shape}"
        )
    committed = "committed" if leaf.committed else "uncommitted"
    a: Any = leaf  # whose `format` a type checker does not know
    layout = "" if jax.numpy.issubdtype(a.dtype, jax.dtypes.extended) else a.format.layout  # keys have none
    return f"{leaf.aval.str_short()} weak={getattr(leaf, 'weak_type', None)} {committed} {leaf.sharding} {layout}"


def value_of(leaf: Any) -> Any:
    """A copy of the numbers of an array, which may be donated afterwards."""
    if isinstance(leaf, jax.Array) and jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return np.array(jax.random.key_data(leaf))
    return np.zeros(0) if is_token(leaf) else np.array(leaf)


def is_token(leaf: Any) -> bool:
    """Whether the leaf is a token, which has neither a shape nor numbers."""
    return hasattr(leaf, "block_until_ready") and not hasattr(leaf, "shape")


Scenario = Callable[[Jit], list[Seen]]
"""Calls something that it jits by the function that it is given, and says what it saw."""


def expect_same(scenario: Scenario, jit: Jit, *, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    """The scenario looks the same with `jit` as with `jax.jit`. XLA may fuse otherwise, so values may differ a little."""
    wanted = scenario(jax.jit)
    got = scenario(jit)
    assert len(got) == len(wanted)
    for place, (a, b) in enumerate(zip(got, wanted, strict=True)):
        where = f"call {place} of {scenario.__name__}"
        for name in ("raised", "structure", "kinds", "own", "deleted", "warned"):
            assert getattr(a, name) == getattr(b, name), f"{where}: {name}"
        for x, y in zip(a.values, b.values, strict=True):
            if x.dtype.kind in "fc":
                np.testing.assert_allclose(x, y, rtol=rtol, atol=atol, err_msg=where)
            else:
                x, y = (z.astype(np.float32) if z.dtype.kind == "V" else z for z in (x, y))  # no NaN of ml_dtypes equals another
                np.testing.assert_array_equal(x, y, err_msg=where)
