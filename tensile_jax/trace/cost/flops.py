"""Counts the floating-point operations of an equation; a multiplication and an addition count as two."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from tensile_jax.ir import OUTER_PRODUCTS
from tensile_jax.trace.avals import shape_of
from tensile_jax.trace.cost.fusion_kinds import SHAPES, kind_of
from tensile_jax.trace.cost.ragged_products import RAGGED_PRODUCT, ragged_flops
from tensile_jax.trace.program import Equation, Program

_EXPENSIVE_ELEMENTS = frozenset(
    "acos acosh asin asinh atan atan2 atanh cos cosh digamma erf erf_inv erfc exp exp2 expm1 lgamma log log1p log2 "
    "logistic pow sin sinh tan tanh".split()
)
_RANDOM_FLOPS_PER_WORD = 100  # threefry2x32: 20 rounds of add, rotate, xor on two words


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
    return max(inputs, outputs) if kind_of(equation) == "reduction" else outputs


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
