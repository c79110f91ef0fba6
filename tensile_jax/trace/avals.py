"""Shapes, types and sizes of values, read from what JAX calls their abstract values.

A token has neither shape nor type. Types whose numbers are smaller than a byte are packed: several numbers share one.
"""

import math
import re
from typing import Any

import jax

_PACKED = re.compile(r"(?:u?int|float)([124])(?:_\w+)?")  # int4, uint2, float4_e2m1fn: bits of a number that fills no byte


def shape_struct(value: Any, sharding: Any = None) -> jax.ShapeDtypeStruct:
    """What stands for a value where only its shape and type count: for an array, a number, or an abstract value."""
    aval = value if hasattr(value, "weak_type") else jax.typeof(value)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding, weak_type=aval.weak_type)


def nbytes_of(aval: Any) -> int:
    """The size of a value in device memory, as XLA lays it out.

    Numbers of less than a byte are packed: two of `int4` share one. Tokens have no size, and neither has `float0`, of which JAX
    keeps no buffer. (An array's own `nbytes` counts a byte for each packed number.)
    """
    dtype = getattr(aval, "dtype", None)
    if dtype is None or dtype == jax.dtypes.float0:
        return 0
    packed = _PACKED.fullmatch(str(dtype))
    count = math.prod(aval.shape)
    return -(-count * int(packed[1]) // 8) if packed else count * int(getattr(dtype, "itemsize", 0))


def is_packed(aval: Any) -> bool:
    """Whether several numbers share a byte."""
    return _PACKED.fullmatch(str(getattr(aval, "dtype", ""))) is not None


def shape_of(aval: Any) -> tuple[int, ...]:
    """The shape of a value; a token has none, and counts as a scalar."""
    return tuple(getattr(aval, "shape", ()))


def dtype_of(aval: Any) -> str:
    """The name of the type of a value's numbers."""
    return str(getattr(aval, "dtype", "token"))
