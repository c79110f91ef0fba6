"""Estimates what a product of ragged groups costs (`jax.lax.ragged_dot`, which mixtures of experts use).

One axis is divided into groups of any sizes. In most uses, the rows of the left operand are divided, and each group of rows is
multiplied by a matrix of its own. The divided axis can also be the axis that is summed over (contracted), or a batch axis. On
CPUs and on NVIDIA GPUs, XLA treats each group as if it were as large as all groups together (jax 0.10.2 and 0.12.0; compiled
for an H200):

    the divided axis    XLA multiplies              and writes to memory
    rows                [g, m, k] by [g, k, n]      the left operand once for each group, with zeros in the rows of other groups,
                                                    and the right operand in another layout
    contracted          [g, m, k] by [g, m, n]      both operands once for each group
    batch               the operands as they are    nothing

Here g is the number of groups, and m the size of the divided axis. The sizes of the other axes are k in the left operand and n
in the right one; for divided rows, k is also the contracted axis of the right operand. With the option
`jax_ragged_dot_use_gpu_pallas_triton_lowering`, JAX uses a kernel of its own, which needs no such memory.
"""

import math
from typing import Literal

import jax

from tensile_jax.trace.avals import nbytes_of
from tensile_jax.trace.program import Equation, Program

RAGGED_PRODUCT = "ragged_dot_general"


def ragged_flops(program: Program, equation: Equation) -> int:
    """Floating-point operations, those with the zeros of other groups included."""
    (contracted, _), _ = equation.params["ragged_dot_dimension_numbers"].dot_dimension_numbers
    left = program.aval(equation.inputs[0]).shape
    times = max(1, _copies(program, equation)) if _groups_are_of(equation) == "rows" else 1
    return 2 * times * math.prod(left[d] for d in contracted) * math.prod(program.avals[equation.outputs[0]].shape)


def ragged_bytes(program: Program, equation: Equation) -> int:
    """The bytes that XLA writes beside operands and result."""
    of, copies = _groups_are_of(equation), _copies(program, equation)
    if of == "batches" or not copies:
        return 0
    left, right = (nbytes_of(program.aval(operand)) for operand in equation.inputs[:2])
    return copies * left + (copies * right if of == "terms" else right)


def _groups_are_of(equation: Equation) -> Literal["rows", "terms", "batches"]:
    numbers = equation.params["ragged_dot_dimension_numbers"]
    (contracted, _), (batch, _) = numbers.dot_dimension_numbers
    ragged = numbers.lhs_ragged_dimensions[0]
    return "terms" if ragged in contracted else "batches" if ragged in batch else "rows"


def _copies(program: Program, equation: Equation) -> int:
    """How often an operand is in memory, once for each group; 0 if a kernel reads it where it is."""
    if getattr(jax.config, "jax_ragged_dot_use_gpu_pallas_triton_lowering", False):
        return 0
    return program.aval(equation.inputs[2]).shape[-1]
