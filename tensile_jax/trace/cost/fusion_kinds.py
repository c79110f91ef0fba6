"""Finds the kind of an equation: heavy, light, or a reduction. The kind says whether XLA fuses the equation with its neighbours.

    heavy      XLA runs the equation as a kernel of its own: inputs and outputs lie in device memory
    reduction  XLA may fuse the producers of the input with the equation, but mostly does not fuse the equation with the
               consumers of its result: each number of the result needs many numbers of the input, as in a sum over an axis
    light      XLA fuses the equation into its neighbours

The kind is looked up in a table of primitives. A primitive that is not in the table counts as heavy, because that is the smaller
error. If a light equation counts as heavy, the plan may take a little more time than needed. If a heavy equation counted as
light, the planner would expect a fusion that does not happen, and so less memory than the step needs.
"""

from tensile_jax.ir import OUTER_PRODUCTS, Kind
from tensile_jax.trace.program import Equation, Program

ELEMENTWISE = frozenset(
    """
    abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp clz complex
    conj convert_element_type copy copy_p cos cosh digamma div eq eq_to erf erf_inv erfc exp exp2 expm1 floor ge gt
    igamma igamma_grad_a igammac imag integer_pow is_finite le le_to lgamma log log1p log2 logistic lt lt_to max min
    mul mulhi name ne neg nextafter not one_minus_square optimization_barrier or polygamma polynomial
    population_count pow real reduce_precision regularized_incomplete_beta rem round rsqrt select_n
    sharding_constraint shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt square
    stop_gradient sub tan tanh xor zeta
    """.split()
)
SHAPES = frozenset(
    """
    axis_index bitcast_convert_type broadcast broadcast_in_dim concatenate dynamic_slice dynamic_update_slice empty empty2
    expand_dims full iota pad pcast pvary random_unwrap random_wrap reshape rev slice split squeeze stack tile transpose unstack
""".split()
)
_REDUCTIONS = frozenset(
    """
    argmax argmin reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum reduce_xor
""".split()
)
_LIGHT = ELEMENTWISE | SHAPES | {OUTER_PRODUCTS}  # the last is one of ours


def kind_of(equation: Equation) -> Kind:
    """The kind of an equation, from its primitive."""
    name = equation.primitive.name
    if name in _LIGHT:
        return "light"
    return "reduction" if name in _REDUCTIONS else "heavy"


def reduces_rows(program: Program, equation: Equation) -> bool:
    """Whether the equation is a reduction over the last axes of its operand, and over no others."""
    if kind_of(equation) != "reduction":
        return False
    axes, rank = equation.params["axes"], len(program.shape(equation.inputs[0]))
    return 0 < len(axes) < rank and set(axes) == set(range(rank - len(axes), rank))
