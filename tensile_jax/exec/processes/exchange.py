"""Gives each process of a step the bytes of all others, by a small program on one device of each process.

    1. every process gives the number of its bytes; all of them then know the largest
    2. every process gives its bytes, padded to a power of two that holds the largest

JAX has public functions for such exchanges (`jax.experimental.multihost_utils`), but all processes of `jax.distributed` must call
them. The mesh of a step may cover fewer processes.
"""

from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tensile_jax.exec.transfer import Device

_LEAST = 1024  # bytes of a program: each size is compiled once, and most of what is said is short


def exchanged(devices: Sequence[Device], process: int, mine: bytes) -> list[bytes]:
    """What each process gives, in the order of the devices. All of them must call this at the same point.

    Args:
        devices: one of each process.
        process: the number of this process.

    Raises:
        JaxRuntimeError: the devices cannot reach one another.
    """
    count = np.frombuffer(np.int64(len(mine)).tobytes(), np.uint8)
    lengths = _gathered(devices, process, count).view(np.int64).ravel().tolist()
    width = _LEAST
    while width < max(lengths):
        width *= 2
    row = np.zeros(width, np.uint8)
    row[: len(mine)] = np.frombuffer(mine, np.uint8)
    rows = _gathered(devices, process, row)
    return [line[:length].tobytes() for line, length in zip(rows, lengths, strict=True)]


def _gathered(devices: Sequence[Device], process: int, row: np.ndarray) -> np.ndarray:
    """The rows of all processes, of equal lengths."""
    mesh = Mesh(np.array(devices), ("process",))
    own = next(device for device in devices if device.process_index == process)
    rows = jax.make_array_from_single_device_arrays(
        (len(devices), len(row)), NamedSharding(mesh, PartitionSpec("process")), [jax.device_put(row[None], own)]
    )
    whole = jax.jit(_same, out_shardings=NamedSharding(mesh, PartitionSpec()))(rows)
    return np.array(whole.addressable_data(0))


def _same(rows: jax.Array) -> jax.Array:
    return rows
