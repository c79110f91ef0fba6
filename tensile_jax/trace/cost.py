"""Estimates what an equation costs: its floating-point operations, and the bytes that it reads, writes and copies.

    flops_of         floating-point operations; a multiplication and an addition count as two
    bytes_touched    bytes of inputs + bytes of outputs, each tensor once, and of copies that every backend makes, twice
    copied_bytes     bytes that it copies between device memory and host memory
    relaid_operands  operands of a `dot_general` that XLA copies, on any device, since their dimensions must be in another order
    relayout_bytes   bytes that XLA:CPU, alone, copies around the equation, to give operands and results another layout or dtype

Which equations XLA fuses with others, `fusion_kind.py` says.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from jax.extend.core import jaxprs_in_params

from tensile_jax.ir import OUTER_PRODUCTS
from tensile_jax.trace.avals import dtype_of, host_bytes_of, in_host_memory, nbytes_of, shape_of
from tensile_jax.trace.fusion_kind import REDUCTIONS, SHAPES
from tensile_jax.trace.program import Equation, Program
from tensile_jax.trace.ragged_products import RAGGED_PRODUCT, ragged_bytes, ragged_flops

_EXPENSIVE_ELEMENTS = frozenset(
    "acos acosh asin asinh atan atan2 atanh cos cosh digamma erf erf_inv erfc exp exp2 expm1 lgamma log log1p log2 "
    "logistic pow sin sinh tan tanh".split()
)
_RANDOM_FLOPS_PER_WORD = 100  # threefry2x32: 20 rounds of add, rotate, xor on two words


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
    """The operands of a product whose dimensions do not lie as those of matrices do.

    XLA computes products of matrices: batch dimensions come first, then free and contracted ones, either of the two first. It
    copies an operand whose dimensions lie otherwise; light operators that make the operand are fused into this copy.
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


def flops_of(program: Program, equation: Equation) -> int:
    """Floating-point operations of the equation."""
    rule = _FLOPS.get(equation.primitive.name)
    if rule is not None:
        return rule(program, equation)
    inputs = sum(_size(program, v) for v in equation.inputs if isinstance(v, int))
    outputs = sum(_size(program, v) for v in equation.outputs)
    name = equation.primitive.name
    if name in SHAPES:
        return 0
    if name in _EXPENSIVE_ELEMENTS:
        return 8 * outputs
    return max(inputs, outputs) if name in REDUCTIONS else outputs


def _size(program: Program, variable: int) -> int:
    return math.prod(shape_of(program.avals[variable]))


def _dot_general(program: Program, equation: Equation) -> int:
    (contracted, _), _ = equation.params["dimension_numbers"]
    left = program.aval(equation.inputs[0]).shape
    return 2 * math.prod(left[d] for d in contracted) * _size(program, equation.outputs[0])


def _convolution(program: Program, equation: Equation) -> int:
    """Two operations for each product of the window. In the gradient of a strided convolution the input is dilated with zeros
    (`lhs_dilation`), and products with these zeros do not count.
    """
    numbers = equation.params["dimension_numbers"]
    kernel = program.aval(equation.inputs[1]).shape
    window = math.prod(kernel[d] for d in numbers.rhs_spec[1:])
    holes = math.prod(equation.params["lhs_dilation"]) or 1
    return 2 * window * _size(program, equation.outputs[0]) // holes


def _reduce_window(program: Program, equation: Equation) -> int:
    window = equation.params.get("window_dimensions", ())
    return math.prod(window) * max(_size(program, v) for v in equation.outputs)


def _sort(program: Program, equation: Equation) -> int:
    size = max((_size(program, v) for v in equation.outputs), default=1)
    return size * max(1, size.bit_length()) * len(equation.outputs)


def _random(program: Program, equation: Equation) -> int:
    return _RANDOM_FLOPS_PER_WORD * sum(_size(program, v) for v in equation.outputs)


def _scan(program: Program, equation: Equation) -> int:
    return int(equation.params["length"]) * body_flops(equation.params["jaxpr"])


def _while(program: Program, equation: Equation) -> int:
    """The operations of one turn of the loop, because the program does not say how many turns there will be."""
    return body_flops(equation.params["body_jaxpr"])


def _cond(program: Program, equation: Equation) -> int:
    return max(body_flops(branch) for branch in equation.params["branches"])


def body_flops(closed_jaxpr: Any) -> int:
    """Floating-point operations of the body of a loop or of a branch."""
    from_body = getattr(closed_jaxpr, "jaxpr", closed_jaxpr)
    total = 0
    for inner in from_body.eqns:
        nested = next((v for v in inner.params.values() if hasattr(v, "eqns")), None)
        if nested is not None and inner.primitive.name != "scan":
            total += body_flops(nested)
            continue
        avals = [v.aval for v in (*inner.invars, *inner.outvars)]
        inputs = tuple(range(len(inner.invars)))
        outputs = tuple(range(len(inner.invars), len(avals)))
        body = Program((), tuple(avals), (), {}, ())
        total += flops_of(body, Equation(inner.primitive, inner.params, inputs, outputs, "", None))
    return total


_FLOPS: Mapping[str, Callable[[Program, Equation], int]] = {
    "dot_general": _dot_general,
    OUTER_PRODUCTS: _dot_general,
    RAGGED_PRODUCT: ragged_flops,
    "conv_general_dilated": _convolution,
    "reduce_window_sum": _reduce_window,
    "reduce_window_max": _reduce_window,
    "reduce_window_min": _reduce_window,
    "select_and_scatter_add": _reduce_window,
    "select_and_gather_add": _reduce_window,
    "sort": _sort,
    "random_bits": _random,
    "threefry2x32": _random,
    "scan": _scan,
    "while": _while,
    "cond": _cond,
}
