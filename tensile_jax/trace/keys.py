"""Makes keys for parts of a program, so that equal parts are found: equal keys mean the same value, or the same computation."""

from typing import Any

import numpy as np
from jax.extend.core import Literal

from tensile_jax.trace.avals import is_extended
from tensile_jax.trace.program import Atom, Immediate


def atom_key(atom: Atom) -> Any:
    """Equal keys, equal values."""
    if isinstance(atom, int):
        return atom
    if is_extended(atom.aval.dtype):
        return ("extended", _Same(atom.value))
    return ("immediate", str(atom.aval), np.asarray(atom.value, atom.aval.dtype).tobytes())


def params_key(value: Any) -> Any:
    """A hashable stand-in for the parameters of an equation: equal keys mean the same computation.

    Functions and captured arrays cannot be compared by value, so they are compared by identity. Two equal parameters can then
    have different keys, but different parameters never have equal keys. A key keeps alive each object that it names, so that no
    other object gets the same address.
    """
    if isinstance(value, dict):
        return tuple((k, params_key(v)) for k, v in sorted(value.items(), key=lambda item: str(item[0])))
    if isinstance(value, (tuple, list)):
        return (type(value).__name__, *map(params_key, value))
    if isinstance(value, np.ndarray):
        return ("array", str(value.dtype), value.shape, value.tobytes())
    if hasattr(value, "eqns"):  # a jaxpr, closed or open
        return _jaxpr_key(value)
    try:
        hash(value)
    except TypeError:
        return ("identity", _Same(value))
    return (type(value).__name__, value)


class _Same:
    """A hashable holder of an object: two holders are equal exactly if they hold the same object."""

    __slots__ = ("held",)

    def __init__(self, held: Any) -> None:
        self.held = held

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.held is self.held

    def __hash__(self) -> int:
        return id(self.held)


def _jaxpr_key(value: Any) -> Any:
    jaxpr = value.jaxpr if hasattr(value, "jaxpr") else value
    number: dict[Any, int] = {}

    def key(atom: Any) -> Any:
        if isinstance(atom, Literal):
            return atom_key(Immediate(atom.val, atom.aval)) if np.ndim(atom.val) == 0 else params_key(np.asarray(atom.val))
        return number.setdefault(atom, len(number))

    variables = [*jaxpr.constvars, *jaxpr.invars]
    header = tuple((key(v), str(v.aval)) for v in variables)
    body = tuple(
        (e.primitive, params_key(e.params), tuple(map(key, e.invars)), tuple((key(v), str(v.aval)) for v in e.outvars), e.ctx)
        for e in jaxpr.eqns
    )
    constants = tuple(("identity", _Same(c)) for c in getattr(value, "consts", ()))
    return ("jaxpr", constants, header, body, tuple(map(key, jaxpr.outvars)))
