"""Copy arrays between device memory and pinned host memory: the paper's Swap Executor (section III-D), on JAX.

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
    """The two directions for one device."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._to_device = SingleDeviceSharding(device, memory_kind=DEVICE)
        self._to_host = SingleDeviceSharding(device, memory_kind=HOST)

    def out(self, arrays: Any) -> Any:
        """Copies in pinned host memory, in flight, of an array or of a list of them."""
        return jax.device_put(arrays, self._to_host)

    def into(self, arrays: Any) -> Any:
        """Copies in device memory, in flight, of an array or of a list of them."""
        return jax.device_put(arrays, self._to_device)

    def copy_into(self, array: Any) -> Any:
        """A copy in device memory that shares no memory with `array`."""
        return jax.device_put(array, self._to_device, may_alias=False)


def in_device_memory(sharding: Any) -> Any:
    """The sharding, on the same devices, of an array that has been brought in from host memory; itself for every other one."""
    return sharding.with_memory_kind(DEVICE) if sharding.memory_kind == HOST else sharding


def on_host(array: Any) -> bool:
    """Whether the array is a `jax.Array` in host memory that belongs to a device."""
    sharding = getattr(array, "sharding", None)  # first what is quick and nearly always enough: this is asked of every argument
    return sharding is not None and sharding.memory_kind == HOST and isinstance(array, jax.Array)


def may_move(value: Any) -> bool:
    """Whether the value can be copied to a device: not a token, and not `float0`, of which no device has a buffer."""
    dtype = getattr(value, "dtype", None)
    return not hasattr(value, "block_until_ready") if dtype is None else dtype != jax.dtypes.float0


def to_device(tree: Any) -> Any:
    """`tree` with every array that lies in host memory brought into device memory; all others as they are."""
    return jax.tree.map(lambda leaf: Transfer(_device_of(leaf)).into(leaf) if on_host(leaf) else leaf, tree)


def _device_of(array: jax.Array) -> Device:
    return next(iter(array.devices()))
