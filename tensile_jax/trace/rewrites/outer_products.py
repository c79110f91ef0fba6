"""Turns products that sum few terms into equations that XLA fuses, such as the gradient of a dense layer's weights.

    product(x, y)[i, j] = sum over t of x[t, i] * y[t, j]         t: the contracted dimensions, here of the size of a batch

XLA computes a product in a kernel of its own, which writes the result to memory. The gradient of a large dense layer is as large
as the layer's weights. With a small batch, each of its numbers is a sum of few terms, which can be computed where it is used: in
the kernel that updates the parameter and the optimizer's moments. Then the gradient is never in memory. The rewritten product is
one *light* equation, `outer_products`, which XLA fuses into the equations that read it.

A product is rewritten if its result is large, much larger than its operands, and read only by light equations. Such equations
may compute other arrays of the same size from the result. If a reduction reads one of these, for instance to compute the global
norm of all gradients, the product is not rewritten, since XLA would write the result to memory all the same. Rewriting changes
numbers only by rounding. On a GPU, the sum is computed in the precision of its numbers, even where the GPU computes products in
a lower precision.
"""

import math
import operator
from collections.abc import Callable
from dataclasses import replace
from functools import partial, reduce
from typing import Any

import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import mlir

from tensile_jax.ir import OUTER_PRODUCTS
from tensile_jax.trace.avals import nbytes_of, shape_of
from tensile_jax.trace.cost.fusion_kinds import kind_of
from tensile_jax.trace.program import Equation, Program
from tensile_jax.trace.rewrites.rewrite import Rewrite

_MOST_TERMS = 16
"""More terms cost more work where the result is used, and save the same traffic. Compiled for an H200, updates move 0.67 to 0.89
times the bytes with up to 16 terms, and XLA writes a reduction over 32 terms to memory. On a CPU of 2 cores, the update of
4,096 x
4,096 numbers by Adam takes 0.43, 0.46 and 0.8 times the time with 4, 8 and 16 terms, and 1.8 times with 32."""
_LARGE = 1 / 32  # of all arguments of the step: results with fewer bytes are not worth another rounding; not tuned
_SMALL = 16  # the operands together have at most a sixteenth of the result's bytes: such a tensor is never stored (`fusion.py`)
outer_products_p = Primitive(OUTER_PRODUCTS)


def with_outer_products(program: Program) -> Program | None:
    """The program with its large products of few terms as light equations; None if it has none."""
    least_bytes = _LARGE * sum(nbytes_of(program.avals[v]) for v in program.inputs)
    found: dict[int, Equation] = {}
    gone: set[int | None] = set()
    for place, e in enumerate(program.equations):
        if _is_large(program, e, least_bytes) and 0 < _terms(program, e) <= _MOST_TERMS and _is_fused(program, place):
            transposition = _transposition(program, place)
            found[place] = _rewritten(program, e, None if transposition is None else program.equations[transposition])
            gone.add(transposition)
    if not found:
        return None
    equations = (found.get(place, e) for place, e in enumerate(program.equations) if place not in gone)
    return replace(program, equations=tuple(equations))


OUTER_PRODUCTS_IN_PLACE = Rewrite(
    name="products of few terms where they are used",
    note="Large products of few terms, such as gradients for a small batch, are computed where they are used.",
    apply=with_outer_products,
    always=True,
)


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
    return math.prod(program.shape(e.inputs[0])[d] for d in _contracted(e)[0])


def _is_fused(program: Program, place: int) -> bool:
    """Whether only light equations read the result of the product at `place`, or as many numbers that are computed from it."""
    (result,) = program.equations[place].outputs
    numbers = math.prod(shape_of(program.avals[result]))
    computed = {result}
    for e in program.equations[place + 1 :]:
        if computed.isdisjoint(e.inputs):
            continue
        if kind_of(e) != "light":
            return False
        computed.update(v for v in e.outputs if math.prod(shape_of(program.avals[v])) >= numbers)
    return result not in program.outputs


def _transposition(program: Program, place: int) -> int | None:
    """The place of the only equation that reads the product at `place`, if that puts the dimensions of the right operand first.

    JAX differentiates a dense layer so. XLA for GPUs would not fuse the sum into what comes after such a transposition.
    """
    product = program.equations[place]
    readers = [p for p, e in enumerate(program.equations) if not set(product.outputs).isdisjoint(e.inputs)]
    if len(readers) != 1 or program.equations[readers[0]].primitive.name != "transpose":
        return None
    left, right = (len(program.shape(atom)) - len(c) for atom, c in zip(product.inputs, _contracted(product), strict=True))
    swapped = (*range(left, left + right), *range(left))
    return readers[0] if tuple(program.equations[readers[0]].params["permutation"]) == swapped else None


def _contracted(product: Equation) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The contracted dimensions of the left and of the right operand."""
    (left, right), _ = product.params["dimension_numbers"]
    return tuple(map(int, left)), tuple(map(int, right))


def _rewritten(program: Program, product: Equation, transposition: Equation | None) -> Equation:
    """The product as a light equation; with its transposition, if it has one."""
    contracted, inputs, outputs = _contracted(product), product.inputs, product.outputs
    dtype = program.avals[outputs[0]].dtype
    if transposition is not None:
        contracted, inputs, outputs = contracted[::-1], inputs[::-1], transposition.outputs
    params = {"dimension_numbers": (contracted, ((), ())), "dtype": dtype}
    return replace(product, primitive=outer_products_p, params=params, inputs=inputs, outputs=outputs)


# -- the primitive: parameters `dimension_numbers`, as of `dot_general`, and `dtype`, of the result ----------------------------


def _free(aval: Any, contracted: tuple[int, ...]) -> list[int]:
    return [d for d in range(len(aval.shape)) if d not in contracted]


def _abstract(x: Any, y: Any, *, dimension_numbers: Any, dtype: Any) -> Any:
    contracted, _ = dimension_numbers
    shape = [z.shape[d] for z, those in zip((x, y), contracted, strict=True) for d in _free(z, those)]
    return ShapedArray(tuple(shape), dtype)


def _rows(z: Any, contracted: tuple[int, ...]) -> Any:
    """The operand as a matrix with a row for each term, in the precision in which terms are added up."""
    z = jnp.transpose(z, (*contracted, *_free(z, contracted)))
    terms = math.prod(z.shape[: len(contracted)])
    return z.reshape(terms, -1).astype(jnp.promote_types(z.dtype, jnp.float32))


def _computed(add: Callable[[Any, Any], Any], x: Any, y: Any, *, dimension_numbers: Any, dtype: Any) -> Any:
    """The result, for which `add` adds up the outer products of the rows of two matrices."""
    (left, right), _ = dimension_numbers
    total = add(_rows(x, left), _rows(y, right))
    return total.astype(dtype).reshape(_abstract(x, y, dimension_numbers=dimension_numbers, dtype=dtype).shape)


def _one_by_one(x: Any, y: Any) -> Any:
    """For XLA:CPU, which computes a reduction in a kernel of its own."""
    return reduce(operator.add, (x[t][:, None] * y[t][None, :] for t in range(x.shape[0])))


def _at_once(x: Any, y: Any) -> Any:
    """For XLA:GPU, which takes a small kernel for each term of a sum that is written out."""
    return jnp.sum(x[:, :, None] * y[:, None, :], axis=0)


outer_products_p.def_abstract_eval(_abstract)
outer_products_p.def_impl(partial(_computed, _one_by_one))
mlir.register_lowering(outer_products_p, mlir.lower_fun(partial(_computed, _one_by_one), multiple_results=False))
for _platform in ("cuda", "rocm"):
    _lowered = mlir.lower_fun(partial(_computed, _at_once), multiple_results=False)
    mlir.register_lowering(outer_products_p, _lowered, platform=_platform)
