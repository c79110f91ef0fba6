"""Finds the values of a step that are known before it runs, because the step computes them from constants in its code."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.core
import numpy as np

from tensile_jax.trace.avals import is_extended
from tensile_jax.trace.program import Equation, Immediate
from tensile_jax.trace.reading.shard_maps import Mapped

_FOLDED = frozenset("and clamp convert_element_type eq ge gt le lt max min ne not or select_n".split())
"""Primitives from whose results more may be known before the step runs."""
_DEEPEST = 20  # of them, one after another; not tuned: well below Python's limit


def known_scalar(
    atom: Any, equations: Sequence[Equation], avals: Sequence[Any], constants: Mapping[int, Any], depth: int = 0
) -> Any | None:
    """The value of a scalar that does not depend on the arguments; None if it does, or if it is not that simple."""
    if isinstance(atom, Immediate):
        return None if is_extended(atom.aval.dtype) else np.asarray(atom.value, atom.aval.dtype)
    if not isinstance(atom, int) or avals[atom].shape != ():
        return None
    if atom in constants:
        value = constants[atom]
        is_here = isinstance(value, np.ndarray) or (isinstance(value, jax.Array) and value.is_fully_addressable)
        return np.asarray(value) if is_here and not isinstance(value, jax.core.Tracer) else None
    maker = next((e for e in reversed(equations) if atom in e.outputs), None)
    if maker is None or maker.primitive.name not in _FOLDED or isinstance(maker.primitive, Mapped) or depth == _DEEPEST:
        return None
    given: list[Any] = []
    for value in maker.inputs:
        known = known_scalar(value, equations, avals, constants, depth + 1)
        if known is None:
            return None
        given.append(known)
    with jax.ensure_compile_time_eval():
        return np.asarray(maker.run(given)[0])
