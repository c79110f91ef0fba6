"""Simplifies a program: removes repeated and dead equations, and also removes copies to host memory that `jax.checkpoint` added.

`jax.checkpoint` repeats equations in order to recompute, and copies values to host memory in order to save device memory. Here
the planner decides both. Only one simplification can change bits of the results: `x + scatter(zeros, ...)` becomes
`scatter(x, ...)`. XLA does the same in plain `jax.jit`.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np

from tensile_jax.trace.avals import is_extended
from tensile_jax.trace.keys import atom_key, params_key
from tensile_jax.trace.program import Atom, Equation, Immediate, WrappedPrimitive
from tensile_jax.trace.reading.shard_maps import Mapped


def without_repeated(equations: Sequence[Equation], outputs: Sequence[Atom]) -> tuple[list[Equation], list[Atom]]:
    """Common subexpression elimination: each equation that repeats an earlier one is replaced by the results of that one."""
    seen: dict[Any, tuple[int, ...]] = {}
    replaced: dict[int, Atom] = {}
    now = partial(_now, replaced)
    kept: list[Equation] = []
    for equation in equations:
        inputs = tuple(now(atom) for atom in equation.inputs)
        if not equation.effectful:
            key = (
                equation.repeat,
                equation.primitive,
                params_key(equation.params),
                tuple(atom_key(a) for a in inputs),
                equation.context,
            )
            earlier = seen.get(key)
            if earlier is not None:
                replaced.update(zip(equation.outputs, earlier, strict=True))
                continue
            seen[key] = equation.outputs
        kept.append(replace(equation, inputs=inputs))
    return kept, [now(atom) for atom in outputs]


def without_offloading(equations: Sequence[Equation], outputs: Sequence[Atom]) -> tuple[list[Equation], list[Atom]]:
    """Without copies to host memory of values that are only copied back, as offloading policies of `jax.checkpoint` make them.

    The planner decides for itself what is swapped, and when.
    """
    source: dict[int, Atom] = {}
    for equation in equations:
        if _destination(equation) is jax.memory.Space.Host:
            source[equation.outputs[0]] = equation.inputs[0]
    for equation in equations:
        if _destination(equation) is not jax.memory.Space.Device:
            for atom in equation.inputs:
                if isinstance(atom, int):
                    source.pop(atom, None)
    for atom in outputs:
        if isinstance(atom, int):
            source.pop(atom, None)
    replaced: dict[int, Atom] = {}
    now = partial(_now, replaced)
    kept: list[Equation] = []
    for equation in equations:
        given = equation.inputs[0] if equation.inputs else None
        if equation.outputs and equation.outputs[0] in source:
            continue
        if isinstance(given, int) and given in source:
            replaced[equation.outputs[0]] = now(source[given])
            continue
        kept.append(replace(equation, inputs=tuple(map(now, equation.inputs))))
    return kept, [now(atom) for atom in outputs]


def _now(replaced: Mapping[int, Atom], atom: Atom) -> Atom:
    return replaced.get(atom, atom) if isinstance(atom, int) else atom


def _destination(equation: Equation) -> Any:
    """The memory space to which the equation copies one value; None for any other equation."""
    places = equation.params.get("devices", ()) if equation.primitive.name == "device_put" else ()
    return places[0] if len(places) == 1 else None


def with_rectified_conditions(equations: Sequence[Equation]) -> list[Equation]:
    """With `max(x, 0) > 0` instead of `x > 0` where the program computes that maximum anyway.

    The result has the same bits, even where `x` is not a number. The gradient of a rectifier then needs only the rectifier's
    result, so there is one tensor less to keep.
    """
    rectified: dict[int, int] = {}
    for equation in equations:
        if equation.primitive.name == "max" and _is_zero(equation.inputs[-1]) and isinstance(equation.inputs[0], int):
            rectified[equation.inputs[0]] = equation.outputs[0]
    made: set[int] = set()
    changed = list(equations)
    for place, equation in enumerate(equations):
        made.update(equation.outputs)
        if isinstance(equation.primitive, Mapped):
            continue  # its operand may lie otherwise than the rectifier's result
        if equation.primitive.name == "gt" and _is_zero(equation.inputs[-1]):
            result = rectified.get(equation.inputs[0]) if isinstance(equation.inputs[0], int) else None
            if result in made:
                changed[place] = replace(equation, inputs=(result, *equation.inputs[1:]))
    return changed


def with_sums_in_scatters(equations: Sequence[Equation], outputs: Sequence[Atom]) -> list[Equation]:
    """With `scatter(x, ...)` instead of `x + scatter(zeros, ...)`, if `x` is made first and nothing else reads the scatter.

    XLA does the same inside an executable. The gradient of a cross-entropy has such a sum, as large as the logits. The gradient
    of an embedding that a model uses twice has another.
    """
    reads = Counter(atom for e in equations for atom in e.inputs if isinstance(atom, int))
    reads.update(atom for atom in outputs if isinstance(atom, int))
    made = {v: place for place, e in enumerate(equations) for v in e.outputs}
    changed = dict(enumerate(equations))
    for place, equation in enumerate(equations):
        for x, scattered in (equation.inputs, equation.inputs[::-1]) if is_plain(equation, "add_any") else ():
            if not (isinstance(x, int) and isinstance(scattered, int) and reads[scattered] == 1 and scattered in made):
                continue
            at = made[scattered]
            scatter = changed[at]
            same = scatter.context is equation.context and scatter.iterations == equation.iterations
            if (
                same
                and made.get(x, -1) < at
                and is_plain(scatter, "scatter-add")
                and _is_zeros(scatter.inputs[0], made, equations)
            ):
                changed[at] = replace(scatter, inputs=(x, *scatter.inputs[1:]), outputs=equation.outputs)
                del changed[place]
                made[equation.outputs[0]] = at
                break
    return [changed[place] for place in sorted(changed)]


def _is_zeros(atom: Atom, made: Mapping[int, int], equations: Sequence[Equation]) -> bool:
    """Whether an equation makes it of zeros."""
    place = made.get(atom) if isinstance(atom, int) else None
    return place is not None and makes_zeros(equations[place])


def makes_zeros(equation: Equation) -> bool:
    """Whether the equation makes an array of zeros."""
    return is_plain(equation, "broadcast_in_dim") and _is_zero(equation.inputs[0])


def is_plain(equation: Equation, name: str) -> bool:
    """Whether the equation is this primitive of JAX, and runs as JAX has it."""
    return equation.primitive.name == name and not isinstance(equation.primitive, WrappedPrimitive)


def _is_zero(atom: Atom) -> bool:
    if not isinstance(atom, Immediate) or is_extended(atom.aval.dtype):
        return False
    return atom.aval.shape == () and not np.asarray(atom.value).any()


def without_dead(equations: Sequence[Equation], outputs: Sequence[Atom]) -> list[Equation]:
    """Without equations that do nothing but give values that nobody reads."""
    live = {atom for atom in outputs if isinstance(atom, int)}
    kept: list[Equation] = []
    for equation in reversed(equations):
        if live.isdisjoint(equation.outputs) and not equation.effectful:
            continue
        live.update(atom for atom in equation.inputs if isinstance(atom, int))
        kept.append(equation)
    return kept[::-1]
