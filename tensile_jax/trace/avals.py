"""Reads the shape, the dtype, the size in bytes and the memory of a value from its abstract value.

An *abstract value* (aval) is JAX's record of the shape and the dtype of a value. A *token*, the value by which JAX keeps effects
in order, has neither. A dtype such as `int4` is *packed*: its numbers are smaller than a byte, so several numbers share a byte. A
value is in device memory unless the step or its caller puts it into host memory.
"""

import math
import re
from functools import cache
from typing import Any

import jax
import jax.core

_PACKED = re.compile(r"(?:u?int|float)([124])(?:_\w+)?")  # int4, uint2, float4_e2m1fn; the group is the number of bits


def shape_struct(value: Any, sharding: Any = None) -> jax.ShapeDtypeStruct:
    """The `ShapeDtypeStruct` of an array, a number or an abstract value."""
    aval = value if hasattr(value, "weak_type") else jax.typeof(value)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding, weak_type=aval.weak_type)


def shard_of(aval: Any, sharding: Any) -> Any:
    """The abstract value of what one device has of a value that is divided like this."""
    return array_type(aval, sharding.shard_shape(aval.shape))


def array_type(aval: Any, shape: tuple[int, ...] | None = None) -> Any:
    """The strongly typed abstract value of this shape (by default, its own) with the dtype and the memory of `aval`."""
    space = jax.memory.Space.Host if in_host_memory(aval) else jax.memory.Space.Device
    return jax.core.ShapedArray(aval.shape if shape is None else shape, aval.dtype, memory_space=space)


def type_on_host(shape: Any) -> Any:
    """The abstract value in host memory of a `ShapeDtypeStruct`."""
    aval = jax.typeof(shape)
    if isinstance(shape.sharding, jax.sharding.NamedSharding):  # then JAX itself reads the memory from it
        return shape
    return aval.update(memory_space=jax.memory.Space.Host)


def in_host_memory(aval: Any) -> bool:
    """Whether the value is in host memory."""
    return getattr(aval, "memory_space", None) is jax.memory.Space.Host


def nbytes_of(aval: Any) -> int:
    """The bytes that a value takes in device memory: its size, or nothing if it is in host memory."""
    return 0 if in_host_memory(aval) else size_of(aval)


def host_bytes_of(aval: Any) -> int:
    """The bytes that a value takes in host memory: its size, or nothing if it is in device memory."""
    return size_of(aval) if in_host_memory(aval) else 0


def size_of(aval: Any) -> int:
    """The size of a value, in whichever memory it is, as XLA lays it out.

    Packed numbers count by their bits: two numbers of `int4` are one byte. (An array's own `nbytes` counts a byte for each of
    them.) Tokens have no size, and neither has `float0`, for which JAX keeps no buffer.
    """
    dtype = getattr(aval, "dtype", None)
    if dtype is None or dtype == jax.dtypes.float0:
        return 0
    bits = _bits_of_packed(dtype)
    count = math.prod(aval.shape)
    return -(-count * bits // 8) if bits else count * int(getattr(dtype, "itemsize", 0))


def is_packed(aval: Any) -> bool:
    """Whether the dtype of the value is packed."""
    return hasattr(aval, "dtype") and _bits_of_packed(aval.dtype) > 0


def shape_of(aval: Any) -> tuple[int, ...]:
    """The shape of a value. A token counts as a scalar."""
    return tuple(getattr(aval, "shape", ()))


def strong(aval: Any) -> Any:
    """The abstract value without weakness of its type."""
    return aval.strip_weak_type() if is_weak(aval) else aval


def is_weak(aval: Any) -> bool:
    """Whether the type gives way to that of another operand, as those of Python's numbers do."""
    return bool(getattr(aval, "weak_type", False))


@cache
def is_extended(dtype: Any) -> bool:
    """Whether the dtype is JAX's own, such as that of a key."""
    return jax.numpy.issubdtype(dtype, jax.dtypes.extended)


def dtype_of(aval: Any) -> str:
    """The name of the dtype of a value; `token` for a token."""
    return _name_of(aval.dtype) if hasattr(aval, "dtype") else "token"


@cache
def _name_of(dtype: Any) -> str:
    """The dtype's name. NumPy takes long to write it, and a step of a thousand operators needs it ten thousand times."""
    return str(dtype)


@cache
def _bits_of_packed(dtype: Any) -> int:
    """The bits of a number of a packed dtype; 0 for other dtypes."""
    packed = _PACKED.fullmatch(_name_of(dtype))
    return int(packed[1]) if packed else 0
