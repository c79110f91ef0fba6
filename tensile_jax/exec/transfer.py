"""Copies arrays between device memory and pinned host memory (TENSILE section III-D, "Swap Executor").

`jax.device_put` to a sharding with another memory kind is an asynchronous copy. The copy starts when the programs launched before
it are done. It overlaps the programs launched after it.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental.layout import Format
from jax.sharding import NamedSharding, SingleDeviceSharding

from tensile_jax.plan_format import Memory
from tensile_jax.trace import is_packed, shard_of, size_of
from tensile_jax.trace.avals import is_extended

Device = Any
"""A `jax.Device`, which is a variable and not a type to a type checker."""

DEVICE, HOST = "device", "pinned_host"
_KINDS: Mapping[Memory, str] = {"host": HOST}
"""JAX's name of each memory where tensors wait."""
_OFF_DEVICE = frozenset(_KINDS.values())


class Transfer:
    """Copies to and from the memory of one device, or of several among which arrays are divided.

    An array that is divided among devices is copied shard by shard, each to the host memory of its own device. Of an array on
    devices of several processes, each process copies the shards on its own devices. `device` is where everything else is copied
    that is not on a device yet.

    Copies are committed to the device. If not `committed`, those of packed arrays are not, since jax 0.10.2 lets a compiled
    function take a packed array only if it is not committed (`compiler.py`).
    """

    def __init__(self, device: Device, *, committed: bool = True) -> None:
        self.device = device
        self._committed = committed
        self._to_device = SingleDeviceSharding(device, memory_kind=DEVICE)
        self._to = {memory: SingleDeviceSharding(device, memory_kind=kind) for memory, kind in _KINDS.items()}

    def out(self, arrays: Any, memory: Memory = "host") -> Any:
        """Start to copy an array, or a list of arrays, to this memory. Returns the copies at once."""
        return jax.device_put(arrays, jax.tree.map(lambda array: self._place_of(array, memory), arrays))

    def into(self, arrays: Any) -> Any:
        """Start to copy an array, or a list of arrays, to device memory. Returns the copies at once."""
        return self._put(arrays)

    def copy_into(self, array: Any) -> Any:
        """A copy in device memory that shares no memory with `array`."""
        return self._put(array, may_alias=False)

    def _put(self, arrays: Any, *, may_alias: bool | None = None) -> Any:
        if self._committed or not any(map(_hides_its_bits, jax.tree.leaves(arrays))):
            return jax.device_put(arrays, jax.tree.map(self._device_of, arrays), may_alias=may_alias)
        places = jax.tree.map(lambda array: None if _hides_its_bits(array) else self._device_of(array), arrays)
        values = jax.tree.map(lambda array: np.asarray(array) if _hides_its_bits(array) else array, arrays)
        with jax.default_device(self.device):  # where JAX puts, without binding it there, what is to go nowhere in particular
            return jax.device_put(values, places, may_alias=may_alias)

    def laid_out(self, array: Any, layout: Any) -> Any:
        """A copy in device memory with this memory layout (`jax.experimental.layout.Layout`); `array` itself if it has it."""
        return jax.device_put(array, Format(layout, self._to_device))

    def copy_out(self, array: Any) -> Any:
        """A copy in pinned host memory that shares no memory with `array`."""
        return jax.device_put(array, self._place_of(array, "host"), may_alias=False)

    def _place_of(self, array: Any, memory: Memory) -> Any:
        return array.sharding.with_memory_kind(_KINDS[memory]) if is_divided(array) else self._to[memory]

    def _device_of(self, array: Any) -> Any:
        return array.sharding.with_memory_kind(DEVICE) if is_divided(array) else self._to_device


def _hides_its_bits(array: Any) -> bool:
    """Whether the array is packed and its layout does not say so, as in jax 0.10.2."""
    if not is_packed(array) or array.dtype.name == "int1":  # which a compiled function takes, and NumPy gets as bools
        return False
    layout = array.format.layout if isinstance(array, jax.Array) else None  # pyright: ignore[reportAttributeAccessIssue] # unknown to it
    return layout is None or not layout.sub_byte_element_size_in_bits


def is_divided(array: Any) -> bool:
    """Whether `array` is a `jax.Array` on several devices, or a `ShapeDtypeStruct` of one."""
    sharding = getattr(array, "sharding", None)
    return sharding is not None and isinstance(array, jax.Array | jax.ShapeDtypeStruct) and len(sharding.device_set) > 1


def divided_as(value: Any, sharding: NamedSharding) -> Any:
    """`value` as an array with this sharding. If the devices are those of several processes, each of them has the whole value."""
    if sharding.is_fully_addressable or (isinstance(value, jax.Array) and not value.is_fully_addressable):
        return jax.device_put(value, sharding)
    dtype = jax.typeof(value).dtype
    if jax.numpy.issubdtype(dtype, jax.dtypes.prng_key):
        numbers = divided_as(jax.random.key_data(value), sharding)  # a key has one axis more, which is not divided
        return jax.random.wrap_key_data(numbers, impl=jax.random.key_impl(value))
    whole = np.asarray(value, dtype)
    return jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])


def placed_like(tree: Any, like: Any) -> Any:
    """`tree` with each array divided among devices, in pinned host memory, as the array in its place in `like` is divided."""

    def placed(leaf: Any, there: Any) -> Any:
        return jax.device_put(leaf, there.sharding.with_memory_kind(HOST)) if is_divided(there) else leaf

    return jax.tree.map(placed, tree, like)


def places_on_host(tree: Any) -> frozenset[int]:
    """The flat positions of the arrays in pinned host memory."""
    return frozenset(i for i, leaf in enumerate(jax.tree.leaves(tree)) if on_host(leaf))


def nbytes_on_a_device(array: Any) -> int:
    """The bytes that an array takes on each of its devices, be it in device memory or in the host memory of the device."""
    return size_of(shard_of(array.aval, array.sharding) if is_divided(array) else array.aval)


def device_bytes(values: Iterable[Any]) -> int:
    """The bytes that those of the values take on each device that are arrays in device memory."""
    return sum(nbytes_on_a_device(v) for v in values if isinstance(v, jax.Array) and not v.is_deleted() and not on_host(v))


def in_device_memory(sharding: Any) -> Any:
    """The same sharding in device memory if `sharding` is where tensors wait; otherwise `sharding` itself."""
    return sharding.with_memory_kind(DEVICE) if sharding.memory_kind in _OFF_DEVICE else sharding


def on_host(array: Any) -> bool:
    """Whether `array` is a `jax.Array` in pinned host memory, or in another memory where tensors wait."""
    sharding = getattr(array, "sharding", None)  # the quick test first: this is called for every argument
    return sharding is not None and sharding.memory_kind in _OFF_DEVICE and isinstance(array, jax.Array)


def own_layout(array: Any) -> tuple[int, ...] | None:
    """The memory layout of an array, its dimensions from major to minor; None if it is row-major, or is of a type of JAX's own.

    Keys and tokens have no layout.
    """
    if not isinstance(array, jax.Array) or is_extended(array.dtype):
        return None
    layout = array.format.layout  # pyright: ignore[reportAttributeAccessIssue] # unknown to it
    return None if layout is None or layout.major_to_minor == tuple(range(array.ndim)) else layout.major_to_minor


def may_move(value: Any) -> bool:
    """Whether the value can be copied to a device. Tokens cannot, nor can arrays of `float0`, which have no device buffer."""
    dtype = getattr(value, "dtype", None)
    return not hasattr(value, "block_until_ready") if dtype is None else dtype != jax.dtypes.float0


def to_device(tree: Any) -> Any:
    """`tree` with every array in pinned host memory copied to device memory; all other leaves are unchanged.

    That includes arrays that a step itself keeps in host memory. A step that returns its state there, and to which they are given
    on the device, is another step, as it is for `jax.jit`.
    """
    return jax.tree.map(lambda leaf: Transfer(_device_of(leaf)).into(leaf) if on_host(leaf) else leaf, tree)


def _device_of(array: jax.Array) -> Device:
    return next(iter(array.sharding.addressable_devices))
