"""Describes the leaves of a pytree in host memory, so that each leaf can be stored or sent, and comes back bit for bit.

    Leaf ::= path kind dtype shape text
    kind ::= array | weak | key | bool | int | float | complex

    array    an array; it comes back as a NumPy array
    weak     a weakly typed `jax.Array`, whose dtype yields to other dtypes; it comes back weakly typed, in pinned host memory
    key      typed PRNG keys; their numbers (`jax.random.key_data`) are stored, and `text` names their generator; they come back
             in pinned host memory
    others   a Python scalar, whose exact value is `text`

`describe` describes every leaf of a pytree. `to_host` returns the numbers of one leaf as a NumPy array, and `from_host` makes
the leaf again from its description and numbers. NumPy has no weak types, so `as_weakly_typed` makes a weakly typed array by a
small JAX program on the CPU. Nothing here puts anything into device memory. As in JAX, a `None` in a pytree is not a leaf.
"""

import struct
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from tensile_jax.exec.transfer import HOST

Kind = Literal["array", "weak", "key", "bool", "int", "float", "complex"]

_DTYPES: dict[type, str] = {bool: "bool", int: "int64", float: "float64", complex: "complex128"}
"""The dtype of a Python scalar, by the type of the scalar."""

_SCALARS = frozenset(scalar.__name__ for scalar in _DTYPES)


@dataclass(frozen=True, slots=True)
class Leaf:
    """The description of one leaf: everything but its numbers. If the leaf consists of keys, `shape` is the shape of the keys."""

    path: str
    kind: Kind
    dtype: str
    shape: tuple[int, ...]
    text: str = ""

    @property
    def has_numbers(self) -> bool:
        """Whether the leaf has numbers, for `to_host` to return, that are not in the description already."""
        return self.kind not in _SCALARS and 0 not in self.shape


def describe(tree: Any) -> tuple[Leaf, ...]:
    """The leaves of `tree` in their order. They may be arrays, `ShapeDtypeStruct`s and Python scalars.

    Raises:
        TypeError: a leaf is none of these.
    """
    return tuple(_describe(f"state{jax.tree_util.keystr(path)}", leaf) for path, leaf in jax.tree.leaves_with_path(tree))


def _describe(path: str, leaf: Any) -> Leaf:
    if (dtype := _DTYPES.get(type(leaf))) is not None:
        return Leaf(path, type(leaf).__name__, dtype, (), _write_scalar(leaf))  # pyright: ignore[reportArgumentType] # one of the kinds
    if not isinstance(leaf, jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct):
        raise TypeError(f"{path} is a {type(leaf).__name__}, which no checkpoint holds. State is made of arrays and numbers.")
    shape = tuple(leaf.shape)
    if is_key(leaf):
        generator = str(jax.random.key_impl(leaf)) if isinstance(leaf, jax.Array) else ""
        return Leaf(path, "key", str(leaf.dtype), shape, generator)
    if not (jnp.issubdtype(leaf.dtype, np.number) or leaf.dtype == np.bool_):
        raise TypeError(f"{path} is an array of {leaf.dtype}, which no checkpoint holds. State is made of numbers.")
    weak = isinstance(leaf, jax.Array) and jax.typeof(leaf).weak_type
    return Leaf(path, "weak" if weak else "array", np.dtype(leaf.dtype).name, shape)


def is_key(leaf: Any) -> bool:
    """Whether `leaf` consists of typed PRNG keys."""
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def find_difference(saved: tuple[Leaf, ...], like: tuple[Leaf, ...]) -> str | None:
    """How the first leaf that differs does so; None if a saved state may be restored instead of `like`.

    A step turns Python scalars and NumPy's 64-bit arrays into arrays of JAX's dtypes. Such a leaf of `like` agrees with its own
    dtype and with that which JAX gives it.
    """
    for there, here in zip(saved, like, strict=False):
        if there.path != here.path:
            return f"the checkpoint has {there.path} where `like` has {here.path}"
        if there.shape != here.shape or not _agree(there, here):
            return f"{there.path} is {_say(there)} in the checkpoint and {_say(here)} in `like`"
    if len(saved) > len(like):
        return f"the checkpoint has {saved[len(like)].path}, which `like` has not"
    if len(saved) < len(like):
        return f"`like` has {like[len(saved)].path}, which the checkpoint has not"
    return None


def _agree(saved: Leaf, like: Leaf) -> bool:
    if "key" in (saved.kind, like.kind):
        return saved.dtype == like.dtype
    would_be = {like.dtype, _canonical(like.dtype)}
    return saved.dtype in would_be or (saved.kind in _SCALARS and _canonical(saved.dtype) in would_be)


def _canonical(dtype: str) -> str:
    return np.dtype(jax.dtypes.canonicalize_dtype(dtype)).name


def _say(leaf: Leaf) -> str:
    return f"{leaf.dtype}[{', '.join(map(str, leaf.shape))}]"


def host_copy(leaf: Any) -> np.ndarray:
    """A copy of the numbers of an array, or of the words of keys. It stays when the array is donated."""
    return np.array(jax.random.key_data(leaf) if isinstance(leaf, jax.Array) and is_key(leaf) else leaf)


def to_host(leaf: Any) -> np.ndarray:
    """The numbers of an array, or the words of keys, as a NumPy array. On a CPU it may share the memory of `leaf`."""
    host = np.asarray(jax.random.key_data(leaf) if isinstance(leaf, jax.Array) and is_key(leaf) else leaf)
    return host if host.dtype.isnative else host.astype(host.dtype.newbyteorder("="))


def from_host(leaf: Leaf, numbers: np.ndarray | None) -> Any:
    """The leaf with the description `leaf`. `numbers` is what `to_host` returned, or None if the leaf has no numbers."""
    if leaf.kind in _SCALARS:
        return _read_scalar(leaf.kind, leaf.text)
    if leaf.kind == "key":
        words = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0, impl=leaf.text)))
        return keys_on_host(np.empty((*leaf.shape, *words.shape), words.dtype) if numbers is None else numbers, leaf.text)
    host = np.empty(leaf.shape, np.dtype(leaf.dtype)) if numbers is None else numbers
    return jax.device_put(as_weakly_typed(host), _pinned()) if leaf.kind == "weak" else host


def keys_on_host(words: np.ndarray, generator: str) -> jax.Array:
    """The typed PRNG keys that consist of these words, in pinned host memory."""
    return jax.random.wrap_key_data(jax.device_put(words, _pinned()), impl=generator)


def as_weakly_typed(host: np.ndarray) -> Any:
    """A weakly typed array of these numbers, on the CPU and not committed to it; `host` itself if JAX has no such dtype now."""
    with on_cpu():
        blank = jnp.full(host.shape, host.dtype.type(0).item())  # an array that is filled with a Python scalar is weakly typed
        if blank.dtype != host.dtype:  # 64 bits, while JAX is set to have only 32
            return host
        return blank.at[...].set(host)


def on_cpu() -> Any:
    """A `with` block in which JAX makes arrays on the CPU, if it has that backend."""
    try:
        return jax.default_device(jax.local_devices(backend="cpu")[0])
    except RuntimeError:  # JAX was told not to have the CPU backend
        return nullcontext()


def _pinned() -> SingleDeviceSharding:
    return SingleDeviceSharding(jax.local_devices()[0], memory_kind=HOST)


def _write_scalar(value: bool | int | float | complex) -> str:
    if isinstance(value, bool | int):
        return str(int(value))
    number = complex(value)
    return struct.pack("<2d", number.real, number.imag).hex()  # the bits are kept, since there are many NaNs


def _read_scalar(kind: Kind, text: str) -> bool | int | float | complex:
    if kind in ("bool", "int"):
        return bool(int(text)) if kind == "bool" else int(text)
    real, imag = struct.unpack("<2d", bytes.fromhex(text))
    return real if kind == "float" else complex(real, imag)
