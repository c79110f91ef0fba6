"""Estimates the bytes that an equation reads, writes and copies.

bytes_touched     bytes of inputs and outputs, each tensor once. For a `ragged_dot`, also twice the bytes of the copies of
                  operands that XLA makes for it, since each copy is written and then read (`ragged_products.py`)
copied_bytes      bytes that the equation copies between device memory and host memory
relaid_operands   operands of a `dot_general` that XLA copies, on CPUs and on GPUs, to put their dimensions in another order
relayout_bytes    bytes that only XLA:CPU copies around the equation, to give operands and results another layout or dtype
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jax.extend.core import jaxprs_in_params

from tensile_jax.trace.avals import dtype_of, host_bytes_of, in_host_memory, nbytes_of
from tensile_jax.trace.cost.ragged_products import RAGGED_PRODUCT, ragged_bytes
from tensile_jax.trace.program import Equation, Program


def bytes_touched(program: Program, equation: Equation) -> int:
    """Bytes read and written by the equation if it ran alone."""
    reads = {v for v in equation.inputs if isinstance(v, int)}
    copied = 2 * ragged_bytes(program, equation) if equation.primitive.name == RAGGED_PRODUCT else 0
    return copied + sum(nbytes_of(program.avals[v]) for v in (*reads, *equation.outputs))


class CopiedBytes(NamedTuple):
    """The bytes that an equation copies from device memory to host memory, and from there."""

    out: int
    into: int


def copied_bytes(program: Program, equation: Equation) -> CopiedBytes:
    """What the equation copies between the memories; what a loop copies, in all of its iterations (one, if it is a `while`)."""
    if equation.primitive.name == "device_put":
        return _copied([program.aval(v) for v in equation.inputs], [program.avals[v] for v in equation.outputs])
    return _copied_inside(equation.params)


def _copied_inside(params: Mapping[str, Any]) -> CopiedBytes:
    """What the equations in the parameters of an equation copy. Of a conditional, each branch counts."""
    out = into = 0
    for jaxpr in jaxprs_in_params(dict(params)):
        for inner in jaxpr.eqns:
            is_copy = inner.primitive.name == "device_put"
            avals = [[v.aval for v in some] for some in (inner.invars, inner.outvars)]
            copied = _copied(*avals) if is_copy else _copied_inside(inner.params)
            out, into = out + copied.out, into + copied.into
    turns = int(params.get("length", 1))
    return CopiedBytes(turns * out, turns * into)


def _copied(before: Sequence[Any], after: Sequence[Any]) -> CopiedBytes:
    pairs = [(a, b) for a, b in zip(before, after, strict=True) if in_host_memory(a) != in_host_memory(b)]
    return CopiedBytes(sum(host_bytes_of(b) for _, b in pairs), sum(host_bytes_of(a) for a, _ in pairs))


def relaid_operands(program: Program, equation: Equation) -> list[int]:
    """The operands of a product that XLA copies because their dimensions are not in the order of a matrix.

    XLA multiplies matrices: batch dimensions come first, then all free dimensions and all contracted ones, or the other way
    round. It copies an operand whose dimensions are in another order. Light operators that make the operand are fused into this
    copy.
    """
    if equation.primitive.name != "dot_general":
        return []
    contracted, batch = equation.params["dimension_numbers"]
    found: list[int] = []
    for operand, inner, outer in zip(equation.inputs, contracted, batch, strict=True):
        rank, inner = len(program.shape(operand)), sorted(inner)
        first, last = range(len(outer), len(outer) + len(inner)), range(rank - len(inner), rank)
        if isinstance(operand, int) and (list(outer) != list(range(len(outer))) or inner not in (list(first), list(last))):
            found.append(operand)
    return list(dict.fromkeys(found))


def relayout_bytes(program: Program, equation: Equation) -> int:
    """Bytes of copies, index arrays and counters that XLA:CPU makes around the equation (all measured).

    Convolutions of XLA:CPU need images in the layout NHWC and kernels in the layout HWIO. XLA transposes every operand and result
    that has another layout (its pass ConvCanonicalization). In the convolution that gives the gradient of a kernel, both
    operands have another layout. The left operand of a product is transposed if its contracted dimensions are not the last ones,
    as in the gradient of a dense layer's kernel. Products and convolutions of 16-bit numbers are computed in 32 bits: operands
    and result are converted. A select-and-scatter is expanded into scatters over index arrays, which have eight times the size of
    its output. The random generator Threefry carries its counters and words through a loop: three times the size of its output.
    """
    name = equation.primitive.name
    results = [program.avals[v] for v in equation.outputs]
    if name == "select_and_scatter_add":
        return 8 * sum(map(nbytes_of, results))
    if name == "random_bits":
        return 3 * sum(map(nbytes_of, results)) if dtype_of(program.aval(equation.inputs[0])) == "key<fry>" else 0
    if name == RAGGED_PRODUCT:
        return 2 * ragged_bytes(program, equation) if results[0].dtype in ("bfloat16", "float16") else 0
    if name not in ("dot_general", "conv_general_dilated"):
        return 0
    operands = [program.aval(equation.inputs[0]), program.aval(equation.inputs[1])]
    widened = sum(2 * nbytes_of(aval) for aval in (*operands, *results) if aval.dtype in ("bfloat16", "float16"))
    if name == "dot_general":
        contracted = sorted(equation.params["dimension_numbers"][0][0])
        turned = contracted != list(range(operands[0].ndim - len(contracted), operands[0].ndim))
        relaid = {*relaid_operands(program, equation), *(equation.inputs[:1] if turned else ())}
        return widened + sum(nbytes_of(program.avals[v]) for v in relaid if isinstance(v, int))
    numbers = equation.params["dimension_numbers"]
    last = len(numbers.lhs_spec) - 1
    image = operands[0], numbers.lhs_spec[0] == 0 and numbers.lhs_spec[1] == last
    kernel = operands[1], numbers.rhs_spec[0] == last and numbers.rhs_spec[1] == last - 1
    result = results[0], numbers.out_spec[0] == 0 and numbers.out_spec[1] == last
    return widened + sum(nbytes_of(aval) for aval, canonical in (image, kernel, result) if not canonical)
