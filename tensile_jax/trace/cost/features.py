"""Describes a heavy equation by numbers, from which its latency is predicted (TENSILE section IV-A: "input information").

Heavy equations are matrix products, convolutions and others that XLA does not fuse into their neighbours. The numbers describe
the work (operations, bytes, bytes of the results), the shapes (such as the batch, rows, columns and inner size of a product, or
the window and channels of a convolution), the size of one element in bytes, and the layout of the operands. Sizes are given as
logarithms. All equations of one primitive have equally many numbers, in the same order whatever the layout of the operands.
"""

import math
from collections.abc import Sequence
from typing import Any

from tensile_jax.trace.avals import nbytes_of, shape_of
from tensile_jax.trace.cost.flops import flops_of
from tensile_jax.trace.cost.traffic import bytes_touched, relayout_bytes
from tensile_jax.trace.program import Equation, Program

_MOST_AXES = 2  # of a window; a convolution over more axes is described by the first ones
_OTHER_SHAPES = 3  # operands and results of any other primitive whose shapes count
_OTHER_AXES = 4


def features_of(program: Program, equation: Equation) -> tuple[float, ...]:
    """The numbers that describe an equation; none if it cannot be predicted, since a value of it has no shape."""
    avals = list(map(program.aval, equation.inputs))
    results = [program.avals[v] for v in equation.outputs]
    if not results or not all(hasattr(aval, "shape") and hasattr(aval.dtype, "itemsize") for aval in (*avals, *results)):
        return ()
    general = [
        _log(flops_of(program, equation)),
        _log(bytes_touched(program, equation)),
        _log(sum(map(nbytes_of, results))),
        _log(relayout_bytes(program, equation)),
        float(results[0].dtype.itemsize),
    ]
    name = equation.primitive.name
    if name == "dot_general":
        own = _product(equation, avals)
    elif name == "conv_general_dilated":
        own = _convolution(equation, avals, results[0])
    else:
        own = _other([*avals, *results])
    return tuple(round(value, 6) for value in (*general, *own))


def _product(equation: Equation, avals: Sequence[Any]) -> list[float]:
    """The numbers that describe a product: batch, rows, columns, inner size, and for each operand whether its inner axes are its
    last ones.
    """
    (left_inner, right_inner), (left_batch, right_batch) = equation.params["dimension_numbers"]
    left, right = shape_of(avals[0]), shape_of(avals[1])
    batch, inner = _size(left, left_batch), _size(left, left_inner)
    rows, columns = math.prod(left) // max(batch * inner, 1), math.prod(right) // max(batch * inner, 1)
    lasts = [float(_are_last(axes, shape)) for axes, shape in ((left_inner, left), (right_inner, right))]
    firsts = [float(list(axes) == list(range(len(axes)))) for axes in (left_batch, right_batch)]
    return [*map(_log, (batch, rows, columns, inner)), *lasts, *firsts]


def _convolution(equation: Equation, avals: Sequence[Any], result: Any) -> list[float]:
    """The numbers that describe a convolution: images, channels in and out, sides of image, window and result, strides,
    dilations, groups, and layouts.
    """
    params = equation.params
    numbers = params["dimension_numbers"]
    image, kernel, out = shape_of(avals[0]), shape_of(avals[1]), shape_of(result)
    sides = [
        size
        for shape, spec in ((image, numbers.lhs_spec), (kernel, numbers.rhs_spec), (out, numbers.out_spec))
        for size in _first([shape[axis] for axis in spec[2:]])
    ]
    steps = [size for name in ("window_strides", "lhs_dilation", "rhs_dilation") for size in _first(params[name])]
    last = len(numbers.lhs_spec) - 1
    layouts = [
        numbers.lhs_spec[0] == 0 and numbers.lhs_spec[1] == last,
        numbers.rhs_spec[0] == last and numbers.rhs_spec[1] == last - 1,
        numbers.out_spec[0] == 0 and numbers.out_spec[1] == last,
    ]
    channels = (image[numbers.lhs_spec[0]], image[numbers.lhs_spec[1]], out[numbers.out_spec[1]])
    groups = (params["feature_group_count"], params["batch_group_count"])
    return [*map(_log, (*channels, *sides, *steps, *groups)), *map(float, layouts)]


def _other(avals: Sequence[Any]) -> list[float]:
    shapes = [shape_of(aval) for aval in sorted(avals, key=lambda aval: -math.prod(shape_of(aval)))[:_OTHER_SHAPES]]
    shapes += [()] * (_OTHER_SHAPES - len(shapes))
    return [_log(size) for shape in shapes for size in (*shape[-_OTHER_AXES:], *([1] * _OTHER_AXES))[:_OTHER_AXES]]


def _first(sizes: Sequence[int]) -> list[int]:
    return [*sizes, *([1] * _MOST_AXES)][:_MOST_AXES]


def _are_last(axes: Sequence[int], shape: Sequence[int]) -> bool:
    return sorted(axes) == list(range(len(shape) - len(axes), len(shape)))


def _size(shape: Sequence[int], axes: Sequence[int]) -> int:
    return math.prod(shape[axis] for axis in axes)


def _log(amount: float) -> float:
    return math.log2(1 + amount)
