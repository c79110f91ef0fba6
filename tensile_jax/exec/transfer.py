"""Copies between device memory and pinned host memory: the paper's Swap Executor (section III-D), on JAX.

`jax.device_put` to a sharding with another memory kind is an asynchronous copy, not a program: it starts when what was
launched before it is done and overlaps what is launched after it.
"""

from collections.abc import Sequence
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

    def out(self, array: jax.Array) -> jax.Array:
        """A copy in pinned host memory, in flight."""
        return jax.device_put(array, self._to_host)

    def out_all(self, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        """The same for several, in one call."""
        return jax.device_put(list(arrays), self._to_host)

    def into_all(self, arrays: Sequence[Any]) -> list[jax.Array]:
        """Copies in device memory of several arrays, in flight, in one call."""
        return jax.device_put(list(arrays), self._to_device)

    def into(self, array: Any) -> jax.Array:
        """A copy in device memory, in flight."""
        return jax.device_put(array, self._to_device)


def on_host(array: Any) -> bool:
    """Whether the array is a `jax.Array` in host memory that belongs to a device."""
    return isinstance(array, jax.Array) and array.sharding.memory_kind == HOST


def to_device(tree: Any) -> Any:
    """`tree` with every array that lies in host memory brought into device memory; all others as they are."""
    return jax.tree.map(lambda leaf: Transfer(_device_of(leaf)).into(leaf) if on_host(leaf) else leaf, tree)


def _device_of(array: jax.Array) -> Device:
    return next(iter(array.devices()))
