"""Copies arrays between device memory and pinned host memory (TENSILE section III-D, "Swap Executor").

`jax.device_put` to a sharding with another memory kind is an asynchronous copy. It starts when the programs that were launched
before it are done, and it overlaps the programs that are launched after it.
"""

from typing import Any

import jax
from jax.sharding import SingleDeviceSharding

Device = Any
"""A `jax.Device`, which is a variable and not a type to a type checker."""

DEVICE, HOST = "device", "pinned_host"


class Transfer:
    """Copies to and from the memory of one device."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._to_device = SingleDeviceSharding(device, memory_kind=DEVICE)
        self._to_host = SingleDeviceSharding(device, memory_kind=HOST)

    def out(self, arrays: Any) -> Any:
        """Start to copy an array, or a list of arrays, to pinned host memory. Returns the copies at once."""
        return jax.device_put(arrays, self._to_host)

    def into(self, arrays: Any) -> Any:
        """Start to copy an array, or a list of arrays, to device memory. Returns the copies at once."""
        return jax.device_put(arrays, self._to_device)

    def copy_into(self, array: Any) -> Any:
        """A copy in device memory that shares no memory with `array`."""
        return jax.device_put(array, self._to_device, may_alias=False)


def in_device_memory(sharding: Any) -> Any:
    """The same sharding in device memory if `sharding` is in pinned host memory; otherwise `sharding` itself."""
    return sharding.with_memory_kind(DEVICE) if sharding.memory_kind == HOST else sharding


def on_host(array: Any) -> bool:
    """Whether `array` is a `jax.Array` in pinned host memory."""
    sharding = getattr(array, "sharding", None)  # the quick test first: this is called for every argument
    return sharding is not None and sharding.memory_kind == HOST and isinstance(array, jax.Array)


def may_move(value: Any) -> bool:
    """Whether the value can be copied to a device. Tokens cannot, nor can arrays of `float0`, which have no device buffer."""
    dtype = getattr(value, "dtype", None)
    return not hasattr(value, "block_until_ready") if dtype is None else dtype != jax.dtypes.float0


def to_device(tree: Any) -> Any:
    """`tree` with every array in pinned host memory copied to device memory; all other leaves are unchanged."""
    return jax.tree.map(lambda leaf: Transfer(_device_of(leaf)).into(leaf) if on_host(leaf) else leaf, tree)


def _device_of(array: jax.Array) -> Device:
    return next(iter(array.devices()))
