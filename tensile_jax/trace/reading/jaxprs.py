"""Reads the equations of JAX's jaxprs, and makes the equations that a program needs but the user did not write.

The equations that are made are copies, moves between device and host memory, and selections of a branch's result.
"""

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.extend.core import primitives

from tensile_jax.trace.avals import array_type, strong

_INNER_JAXPR = ("jaxpr", "call_jaxpr", "fun_jaxpr")
WRAPPERS = {
    "jit", "pjit", "closed_call", "core_call", "core_closed_call", "remat", "remat2", "checkpoint",
    "custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr", "custom_lin",
}  # fmt: skip
"""Primitives that only wrap a jaxpr, whose inputs are those of the jaxpr one to one."""


def inner_jaxpr(equation: Any) -> Any | None:
    """The closed jaxpr that a call equation wraps, or None for every other equation."""
    if equation.primitive.name == "call_hi_primitive":
        return _expanded(equation)
    if equation.primitive.name not in WRAPPERS:
        return None
    for key in _INNER_JAXPR:
        inner = equation.params.get(key)
        if inner is not None and hasattr(inner, "eqns"):
            return closed(inner)
    return None


def _expanded(equation: Any) -> Any | None:
    """The jaxpr that a new kind of equation stands for (from jax 0.12 on: `jax_remat3`, `jax_custom_vjp3`, `jax_custom_jvp3`)."""
    called = equation.params.get("_prim")
    if called is None or not hasattr(called, "expand"):
        return None

    def expand(*flat: Any) -> Any:
        return jax.tree.leaves(called.expand(*jax.tree.unflatten(called.in_tree, flat)))

    return jax.make_jaxpr(expand)(*[v.aval for v in equation.invars])


def closed(jaxpr: Any) -> Any:
    """The jaxpr with its constants, of which a jaxpr that is not closed has none."""
    return jaxpr if hasattr(jaxpr, "consts") and hasattr(jaxpr, "jaxpr") else _Closed(jaxpr)


@dataclass(frozen=True, slots=True, eq=False)
class _Closed:
    """An open jaxpr without constants, read like a closed one."""

    jaxpr: Any
    consts: tuple[()] = ()


def converts_nothing(equation: Any) -> bool:
    """Whether a jaxpr's equation converts a value to the type that it has already, and leaves it where it is."""
    if equation.primitive is not primitives.convert_element_type_p or equation.params.get("sharding") is not None:
        return False
    return strong(equation.invars[0].aval) == strong(equation.outvars[0].aval)


def read_from_references(jaxpr: Any) -> set[int]:
    """The identities of the variables that are computed from what is read from references.

    JAX gives them weak types, as the values that were written had; but a compiled step returns them strongly typed.
    What a loop or a branch computes from a reference stays weak there, too.
    """
    found: set[int] = set()
    for equation in jaxpr.eqns:
        if equation.primitive.name in ("get", "swap") or not found.isdisjoint(map(id, equation.invars)):
            found.update(map(id, equation.outvars))
    return found


def copy_of(aval: Any) -> Any:
    """A jaxpr's equation that copies a value. For a token, the equation makes another token that comes after it."""
    if not hasattr(aval, "shape"):
        return jax.make_jaxpr(jax.lax.after_all)(jax.jit(jax.lax.create_token)()).jaxpr.eqns[-1]
    return jax.make_jaxpr(jax.numpy.copy)(aval).jaxpr.eqns[-1]


def move_of(aval: Any, *, to_host: bool) -> Any:
    """A jaxpr's equation that copies a value to host memory, or to device memory."""
    space = jax.memory.Space.Host if to_host else jax.memory.Space.Device
    return jax.make_jaxpr(lambda value: jax.device_put(value, space))(array_type(aval)).jaxpr.eqns[-1]


def selection_of(aval: Any, cases: int) -> Any:
    """A jaxpr's equation that takes an index (int32) and so many values, and gives the value of the index."""
    given = [array_type(aval)] * cases
    return jax.make_jaxpr(jax.lax.select_n)(jax.ShapeDtypeStruct((), np.int32), *given).jaxpr.eqns[-1]
