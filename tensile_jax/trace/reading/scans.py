"""Reads a scan, and makes the equations by which its iterations take what they need from stacked arrays.

`lax.scan` runs a body `length` times. Every loop of JAX with a fixed number of turns is a scan: `nn.scan` and `nnx.scan` over the
layers of a network, gradient accumulation over parts of a batch, `fori_loop` with constant bounds, and their gradients. These are
the inputs and outputs of a scan, and of its body:

    scan  : constants, carry, xs (stacked) -> carry, ys (stacked)
    body  : constants, carry, x            -> carry, y

Here xs and ys have one more axis than x and y: the first axis, of size `length`. If a scan is *split*, shorter scans replace it
in the program (`flatten.py`), each with stacks of its own. If a scan is *opened*, the bodies of its iterations replace it. Its
outputs are then stacked only if something reads the whole stack. What an opened iteration saves for its backward pass is then an
ordinary variable, not a slice of a stack.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tensile_jax.trace.avals import array_type, shape_of


@dataclass(frozen=True, slots=True, eq=False)
class Loop:
    """A scan: its body as a jaxpr, that jaxpr's constants, and how many constants and carried values the scan has."""

    body: Any
    body_consts: Sequence[Any]
    length: int
    reverse: bool
    constants: int
    carried: int

    @property
    def order(self) -> range:
        """The indices of the iterations, in the order in which they run."""
        return range(self.length - 1, -1, -1) if self.reverse else range(self.length)


@dataclass(slots=True, eq=False)
class Stack:
    """A stacked output of a scan that is opened or split, while the program is built.

    `parts` has, by half-open interval, what some iterations give: the stack of these, or, if the scan is opened (`inlined`), the
    element of one iteration. `whole` is the stack of all, once something needs it. `scope`, `position` and `outside` say where
    the scan is: its name scope, the position of the equation that gives a part the axis of the stack, and the iterations of the
    loops around the scan (`Equation`).
    """

    aval: Any
    parts: dict[tuple[int, int], Any]
    inlined: bool
    scope: str
    position: tuple[int, ...]
    outside: tuple[int, ...]
    whole: Any = None

    def stack_as(self, whole: Any) -> None:
        """All parts are stacked in this atom."""
        self.whole = whole


def loop_of(equation: Any) -> Loop | None:
    """The loop of a jaxpr's equation; None if it is no scan."""
    if equation.primitive.name != "scan":
        return None
    return scan_of(equation.params, [v.aval for v in equation.invars], [v.aval for v in equation.outvars])


def scan_of(params: Mapping[str, Any], inputs: Sequence[Any], outputs: Sequence[Any]) -> Loop:
    """The scan with these parameters, and these abstract values of its inputs and outputs.

    The numbers of constants, carried values and stacked arrays are told from shapes, since each version of JAX writes them in
    another form.
    """
    closed = params["jaxpr"]
    body = getattr(closed, "jaxpr", closed)
    stacked = sum(given.ndim == own.aval.ndim + 1 for given, own in zip(inputs, body.invars, strict=True))
    carried = sum(given.ndim == own.aval.ndim for given, own in zip(outputs, body.outvars, strict=True))
    return Loop(
        body=body,
        body_consts=tuple(getattr(closed, "consts", ())),
        length=int(params["length"]),
        reverse=bool(params["reverse"]),
        constants=len(body.invars) - carried - stacked,
        carried=carried,
    )


def part_of(shape: tuple[int, ...], dtype: Any, length: int | None) -> Any:
    """A jaxpr that takes a stacked array and an index (int32), and gives `length` elements from that index on.

    If `length` is None, it gives one element, without the axis of the stack.

    The index is an argument and not a part of the program, so that the same segment of every iteration has the same content.
    """

    def take(stack: Any, index: Any) -> Any:
        if length is None:
            return jax.lax.dynamic_index_in_dim(stack, index, 0, keepdims=False, allow_negative_indices=False)
        return jax.lax.dynamic_slice_in_dim(stack, index, length, 0)

    return jax.make_jaxpr(take)(jax.ShapeDtypeStruct(shape, dtype), jax.ShapeDtypeStruct((), np.int32))


def layer(part: Any) -> Any:
    """A jaxpr that gives an array of this type a new first axis, of length 1."""
    return jax.make_jaxpr(lambda part: jax.lax.expand_dims(part, (0,)))(part)


def joined(stack: Any, bounds: Sequence[tuple[int, int]]) -> Any:
    """A jaxpr that takes the parts of a stack of this type, one for each interval, and concatenates them.

    If there are none, it gives an empty stack.
    """
    shape = shape_of(stack)
    if not bounds:
        return jax.make_jaxpr(lambda: jnp.zeros(shape, stack.dtype))()
    parts = [array_type(stack, (end - begin, *shape[1:])) for begin, end in bounds]
    return jax.make_jaxpr(lambda *parts: jax.lax.concatenate(parts, 0))(*parts)
