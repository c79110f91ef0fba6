"""Rewrites products of few terms, such as the gradient of a dense layer's kernel for a small batch, as light equations.

    product(x, y)[i, j] = sum over t of x[t, i] * y[t, j]         t: the contracted dimensions, here of the size of a batch

XLA computes a product by a kernel of its own, which writes the result to memory. Of a large dense layer, that result is as large
as the layer's kernel. If the sum has few terms, it is little work to compute a number of the result where it is used: in the
kernel that updates the parameter and the optimizer's moments. Then the gradient is never in memory, and neither written nor read.
The program has such a product as one light equation, `outer_products`, which XLA fuses into what reads it.

A product is rewritten if its result is large, much larger than its operands, and read by light equations only, which lead to no
reduction over as many numbers (as the global norm of all gradients does: XLA would write the product for that). If only one
result of the step is computed from it, as in gradient descent without momentum, XLA for GPUs fuses that into the product itself,
which is as good. Results agree to rounding; on a GPU, the sum is computed in the precision of its numbers, also where a product
is computed in a lower one.
"""

import math
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import mlir

from tensile_jax.trace.avals import nbytes_of, shape_of
from tensile_jax.trace.cost import kind_of
from tensile_jax.trace.flatten import Equation, Program

_MOST_TERMS, _MOST_OF_ONE_RESULT = 32, 16
"""Compiled for an H200, the update of a layer of 25,088 x 4,096 by Adam moves 0.86 times the bytes with 4 to 128 terms, and needs
0.3 KB beside its state (with more than 16 terms, 0.5 to 2 MB) in the place of 411 MB. Each term takes a multiplication and an
addition for each number: with 32 terms, an H200 at its peak rate takes 0.1 ms for that, and 0.6 ms to move the bytes. One of
4,096 x 4,096 by nine optimizers: 0.67 to 0.89 times the bytes with 16 and 32 terms. Without momentum: as many with 16 terms, and
twice as many with 32."""
_LARGE = 1 / 32  # of all arguments of the step: results with fewer bytes are not worth another rounding; not tuned
_SMALL = 16  # the operands together have at most a sixteenth of the result's bytes: such a tensor is never stored (`fusion.py`)
_TERMS_AT_ONCE = 16
"""Of one reduction on a GPU: compiled for an H200, one over 24 terms is fused, and one over 32 is written to memory. Sums that
are written out take a small kernel for each term there. XLA:CPU fuses only these."""

outer_products_p = Primitive("outer_products")


def with_outer_products(program: Program) -> Program | None:
    """The program with its large products of few terms as light equations; None if it has none."""
    least_bytes = _LARGE * sum(nbytes_of(program.avals[v]) for v in program.inputs)
    found = {
        place: replace(e, primitive=outer_products_p, params=_params(program, e))
        for place, e in enumerate(program.equations)
        if _is_large(program, e, least_bytes) and 0 < _terms(program, e) <= _most_terms(program, place)
    }
    if not found:
        return None
    return replace(program, equations=tuple(found.get(place, e) for place, e in enumerate(program.equations)))


def _is_large(program: Program, e: Equation, least_bytes: float) -> bool:
    """Whether an equation is a product without batch dimensions, with so many bytes and many more than its operands."""
    operands = [program.avals[atom] for atom in e.inputs if isinstance(atom, int)]
    if e.primitive.name != "dot_general" or len(operands) < 2:
        return False
    left, right = operands
    _, (batch, _) = e.params["dimension_numbers"]
    result = program.avals[e.outputs[0]]
    if batch or not all(jnp.issubdtype(aval.dtype, jnp.floating) for aval in (left, right, result)):
        return False
    return nbytes_of(result) >= max(least_bytes, _SMALL * (nbytes_of(left) + nbytes_of(right)), 1)


def _terms(program: Program, e: Equation) -> int:
    (_, contracted), _ = e.params["dimension_numbers"]
    right = e.inputs[1]
    assert isinstance(right, int)  # it is large
    return math.prod(shape_of(program.avals[right])[d] for d in contracted)


def _most_terms(program: Program, place: int) -> int:
    """The most terms of the product at `place` that XLA computes where the result is read; 0 if it would write the result.

    It would not if only light equations read the result, or as many numbers that are computed from it.
    """
    (result,) = program.equations[place].outputs
    if result in program.outputs:
        return 0
    numbers = math.prod(shape_of(program.avals[result]))
    computed = {result}
    for e in program.equations[place + 1 :]:
        if computed.isdisjoint(e.inputs):
            continue
        if kind_of(e) != "light":
            return 0
        computed.update(v for v in e.outputs if math.prod(shape_of(program.avals[v])) >= numbers)
    return _MOST_OF_ONE_RESULT if len(computed.intersection(program.outputs)) == 1 else _MOST_TERMS


def _params(program: Program, e: Equation) -> dict[str, Any]:
    contracted, _ = e.params["dimension_numbers"]
    left, right = (tuple(map(int, dimensions)) for dimensions in contracted)
    return {"left": left, "right": right, "dtype": program.avals[e.outputs[0]].dtype}


# -- the primitive ----------------------------------------------------------------------------------------------------------


def _free(aval: Any, contracted: tuple[int, ...]) -> list[int]:
    return [d for d in range(len(aval.shape)) if d not in contracted]


def _abstract(x: Any, y: Any, *, left: tuple[int, ...], right: tuple[int, ...], dtype: Any) -> Any:
    shape = [*(x.shape[d] for d in _free(x, left)), *(y.shape[d] for d in _free(y, right))]
    return ShapedArray(tuple(shape), dtype)


def _rows(z: Any, contracted: tuple[int, ...]) -> Any:
    """The operand as a matrix with a row for each term, in the precision in which terms are added up."""
    z = jnp.transpose(z, (*contracted, *_free(z, contracted)))
    terms = math.prod(z.shape[: len(contracted)])
    return z.reshape(terms, -1).astype(jnp.promote_types(z.dtype, jnp.float32))


def _one_by_one(x: Any, y: Any, *, left: tuple[int, ...], right: tuple[int, ...], dtype: Any) -> Any:
    rows, columns = _rows(x, left), _rows(y, right)
    terms = (rows[t][:, None] * columns[t][None, :] for t in range(rows.shape[0]))
    total = next(terms)
    for term in terms:
        total = total + term
    return total.astype(dtype).reshape(_abstract(x, y, left=left, right=right, dtype=dtype).shape)


def _some_at_once(x: Any, y: Any, *, left: tuple[int, ...], right: tuple[int, ...], dtype: Any) -> Any:
    rows, columns = _rows(x, left), _rows(y, right)
    parts = [slice(t, t + _TERMS_AT_ONCE) for t in range(0, rows.shape[0], _TERMS_AT_ONCE)]
    total = sum(jnp.sum(rows[part][:, :, None] * columns[part][:, None, :], axis=0) for part in parts)
    return jnp.asarray(total).astype(dtype).reshape(_abstract(x, y, left=left, right=right, dtype=dtype).shape)


outer_products_p.def_abstract_eval(_abstract)
mlir.register_lowering(outer_products_p, mlir.lower_fun(_one_by_one, multiple_results=False))
for _platform in ("cuda", "rocm"):
    mlir.register_lowering(outer_products_p, mlir.lower_fun(_some_at_once, multiple_results=False), platform=_platform)
