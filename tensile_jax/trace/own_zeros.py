"""Gives each operator that writes into zeros an array of zeros of its own.

The gradient of max pooling or of a gather is written into an array of zeros. XLA computes equal values once, so other operators
read the same array, such as the gradient of relu, which is zero where it is masked. XLA for GPUs then has the array in memory
from its first reader to its last one, copies it before something is written into it, and reads it where zeros would otherwise be
a constant in a kernel (`make bench-launches`).

So each writer here makes its zeros from a number that has passed a barrier, `jax.lax.optimization_barrier`. XLA does not know
that the number is zero. XLA for CPUs drops barriers, and with them the difference.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core.primitives import select_and_scatter_p

from tensile_jax.trace.program import Equation, WrappedPrimitive, results_of
from tensile_jax.trace.reading.simplify import is_plain, makes_zeros

_POOLING_GRADIENT = "select_and_scatter_add"
_WRITERS = frozenset({"scatter-add", "scatter", "scatter-max", "scatter-min"})
"""Primitives that write into their first operand. `dynamic_update_slice` is not among them: XLA makes a `pad` of many of them, if
it knows the zeros.
"""


class OwnZeros(NamedTuple):
    """Equations of which some write into zeros, each made from a number of its own.

    Attributes:
        equations: those that write into zeros read one more variable, or another one: -1, -2, ..., one each.
        writers: how many these are.
    """

    equations: tuple[Equation, ...]
    writers: int

    def numbers(self, zero: Any | None = None) -> dict[int, Any]:
        """The values of these variables: zeros, of which XLA does not know that they are equal.

        Args:
            zero: the first one, if there is one that has passed a barrier already.
        """
        found: dict[int, Any] = {}
        for number in range(1, self.writers + 1):
            if zero is None or number > 1:
                zero = jax.lax.optimization_barrier(jnp.zeros((), jnp.float32) if zero is None else zero)
            found[-number] = zero
        return found


def with_own_zeros(equations: Sequence[Equation]) -> OwnZeros:
    """These equations, with zeros of their own for those that write into zeros which one of these equations makes."""
    zeros = {e.outputs[0]: e for e in equations if makes_zeros(e)}
    found: list[Equation] = []
    writers = 0
    for equation in equations:
        changed = _written_into_own(equation, zeros, -writers - 1)
        writers += changed is not None
        found.append(changed or equation)
    return OwnZeros(tuple(found), writers)


def _written_into_own(equation: Equation, zeros: dict[int, Equation], number: int) -> Equation | None:
    """The equation, which makes the zeros that it writes into from variable `number`; None if it writes into no zeros."""
    if is_plain(equation, _POOLING_GRADIENT):
        return replace(equation, primitive=_PoolingGradient(equation.primitive), inputs=(*equation.inputs, number))
    if not any(is_plain(equation, name) for name in _WRITERS):
        return None
    written, *others = equation.inputs
    made = zeros.get(written) if isinstance(written, int) else None
    if made is None:
        return None
    shape, dtype = made.params["shape"], made.inputs[0].aval.dtype  # pyright: ignore[reportAttributeAccessIssue]  # an Immediate
    return replace(equation, primitive=_IntoZeros(equation.primitive, shape, dtype), inputs=(number, *others))


@dataclass(frozen=True, slots=True)
class _IntoZeros(WrappedPrimitive):
    """A primitive that writes into its first operand, which is made from a number here: zeros of this shape and type."""

    shape: tuple[int, ...]
    dtype: Any

    def bind(self, zero: Any, *others: Any, **params: Any) -> Sequence[Any]:
        """The results for zeros made from `zero`, and for the other operands."""
        zeros = jax.lax.broadcast(zero.astype(self.dtype), self.shape)
        return results_of(self.primitive, (zeros, *others), params)


@dataclass(frozen=True, slots=True)
class _PoolingGradient(WrappedPrimitive):
    """The gradient of max or min pooling, whose zeros are made from its last operand."""

    def bind(self, source: Any, operand: Any, zero: Any, **params: Any) -> Sequence[Any]:
        """The result for these operands: as JAX lowers `select_and_scatter_add` for CPUs and GPUs, which pad the operand."""
        dtype, padding = operand.dtype, params["padding"]
        if dtype == jnp.bool_:  # then JAX combines by `or`
            return results_of(self.primitive, (source, operand), params)
        scalar = jnp.zeros((), dtype)
        select = jax.make_jaxpr(params["select_prim"].bind)(scalar, scalar)
        add = jax.make_jaxpr(jax.lax.add)(scalar, scalar)
        padded = jax.lax.pad(operand, _never_selected(params["select_prim"], dtype), [(low, high, 0) for low, high in padding])
        found = select_and_scatter_p.bind(
            padded,
            source,
            zero.astype(dtype),
            select_jaxpr=select.jaxpr,
            select_consts=tuple(select.consts),
            scatter_jaxpr=add.jaxpr,
            scatter_consts=tuple(add.consts),
            window_dimensions=params["window_dimensions"],
            window_strides=params["window_strides"],
            padding=((0, 0),) * len(padding),
        )
        ends = [low + size for (low, _), size in zip(padding, operand.shape, strict=True)]
        return [jax.lax.slice(found, [low for low, _ in padding], ends)]


def _never_selected(select: Any, dtype: Any) -> Any:
    """The number that pooling by this comparison never selects beside another one."""
    greatest = select.name == "ge"
    if jnp.issubdtype(dtype, jnp.inexact):
        return np.array(-np.inf if greatest else np.inf, dtype)
    return np.array(jnp.iinfo(dtype).min if greatest else jnp.iinfo(dtype).max, dtype)
