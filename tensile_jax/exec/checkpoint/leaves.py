"""The leaves of a pytree as bytes in host memory, and back: what a checkpoint is made of.

    Leaf ::= path kind dtype shape text
    kind ::= array | weak | key | bool | int | float | complex

    array    bytes; comes back as a NumPy array
    weak     bytes of a weakly typed `jax.Array`, whose dtype yields to others'; comes back as one, in pinned host memory
    key      bytes of the data of typed PRNG keys, `text` names their generator; comes back as one, in pinned host memory
    others   a Python scalar, in `text`; no bytes

Every leaf comes back bit for bit, whatever its dtype, and none is brought into the device's memory: bytes do not ask what they
mean. `None` is no leaf but part of the structure. A weakly typed array is made by a small program on the CPU.
"""

import struct
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from tensile_jax.exec.step.transfer import HOST

Kind = Literal["array", "weak", "key", "bool", "int", "float", "complex"]

_DTYPES: dict[type, str] = {bool: "bool", int: "int64", float: "float64", complex: "complex128"}
"""Of a Python scalar, by its type."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """What is written of one leaf beside its bytes. `shape` is that of the keys where it is of those."""

    path: str
    kind: Kind
    dtype: str
    shape: tuple[int, ...]
    text: str = ""

    @property
    def stored(self) -> bool:
        """Whether it has bytes of its own."""
        return self.kind in ("array", "weak", "key") and 0 not in self.shape


def describe(tree: Any) -> tuple[Leaf, ...]:
    """The leaves of `tree`, which may be of arrays, of `ShapeDtypeStruct`s, or of both, in their order.

    Raises:
        TypeError: a leaf is none of them, and no scalar.
    """
    return tuple(_describe(f"state{jax.tree_util.keystr(path)}", leaf) for path, leaf in jax.tree.leaves_with_path(tree))


def _describe(path: str, leaf: Any) -> Leaf:
    if (dtype := _DTYPES.get(type(leaf))) is not None:
        return Leaf(path, type(leaf).__name__, dtype, (), _write_scalar(leaf))  # pyright: ignore[reportArgumentType] # one of the kinds
    if not isinstance(leaf, jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct):
        raise TypeError(f"{path} is a {type(leaf).__name__}, which no checkpoint holds. State is made of arrays and numbers.")
    shape = tuple(leaf.shape)
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        generator = str(jax.random.key_impl(leaf)) if isinstance(leaf, jax.Array) else ""
        return Leaf(path, "key", str(leaf.dtype), shape, generator)
    if not (jnp.issubdtype(leaf.dtype, np.number) or leaf.dtype == np.bool_):
        raise TypeError(f"{path} is an array of {leaf.dtype}, which no checkpoint holds. State is made of numbers.")
    weak = isinstance(leaf, jax.Array) and jax.typeof(leaf).weak_type
    return Leaf(path, "weak" if weak else "array", np.dtype(leaf.dtype).name, shape)


def find_difference(saved: tuple[Leaf, ...], like: tuple[Leaf, ...]) -> str | None:
    """How the first leaf that differs does so; None where the one may be restored in the place of the other.

    A step turns scalars and 64-bit arrays of NumPy into what JAX makes of them; such a leaf of `like` agrees with both.
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
    return saved.dtype in would_be or (saved.kind in _DTYPES_BY_NAME and _canonical(saved.dtype) in would_be)


_DTYPES_BY_NAME = frozenset(scalar.__name__ for scalar in _DTYPES)


def _canonical(dtype: str) -> str:
    return np.dtype(jax.dtypes.canonicalize_dtype(dtype)).name


def _say(leaf: Leaf) -> str:
    return f"{leaf.dtype}[{', '.join(map(str, leaf.shape))}]"


def to_bytes(leaf: Any) -> np.ndarray:
    """The bytes of an array or of keys, one after another, in host memory; on a CPU they may be the array's own."""
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    host = np.asarray(leaf)
    if not host.dtype.isnative:
        host = host.astype(host.dtype.newbyteorder("="))
    return np.ascontiguousarray(host).reshape(-1).view(np.uint8)


def from_bytes(leaf: Leaf, stored: np.ndarray | None) -> Any:
    """The leaf whose bytes, if it has any, are `stored`.

    Raises:
        ValueError: they are not as many as the description says.
    """
    if leaf.kind in _DTYPES_BY_NAME:
        return _read_scalar(leaf.kind, leaf.text)
    raw = np.empty(0, np.uint8) if stored is None else stored
    if leaf.kind == "key":
        return _keys(leaf, raw)
    host = raw.view(np.dtype(leaf.dtype)).reshape(leaf.shape)
    return jax.device_put(weaken(host), _pinned()) if leaf.kind == "weak" else host


def _keys(leaf: Leaf, raw: np.ndarray) -> jax.Array:
    words = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0, impl=leaf.text)))
    data = raw.view(words.dtype).reshape(*leaf.shape, *words.shape)
    return jax.random.wrap_key_data(jax.device_put(data, _pinned()), impl=leaf.text)


def weaken(host: np.ndarray) -> Any:
    """A weakly typed array of these numbers, on the CPU and not committed to it; `host` itself where JAX has no such dtype."""
    with on_cpu():
        blank = jnp.full(host.shape, host.dtype.type(0).item())  # what a Python scalar fills is weakly typed
        if blank.dtype != host.dtype:  # 64 bits, read where JAX has only 32
            return host
        return blank.at[...].set(host)


def on_cpu() -> Any:
    """A `with` block in which JAX makes arrays on the CPU, if it has that backend."""
    try:
        return jax.default_device(jax.local_devices(backend="cpu")[0])
    except RuntimeError:  # a JAX that was told to have no other backend
        return nullcontext()


def _pinned() -> SingleDeviceSharding:
    return SingleDeviceSharding(jax.local_devices()[0], memory_kind=HOST)


def _write_scalar(value: bool | int | float | complex) -> str:
    if isinstance(value, bool | int):
        return str(int(value))
    number = complex(value)
    return struct.pack("<2d", number.real, number.imag).hex()  # a NaN has bits of its own


def _read_scalar(kind: Kind, text: str) -> bool | int | float | complex:
    if kind in ("bool", "int"):
        return bool(int(text)) if kind == "bool" else int(text)
    real, imag = struct.unpack("<2d", bytes.fromhex(text))
    return real if kind == "float" else complex(real, imag)
