"""Gives the processes of a step one key-value store (`key_value_store.py`): the first process serves it, the others connect.

To connect, they must know where it is. Before they have a store, the processes can only exchange data as every program on several
processes does: by their devices. So they run two small programs, on one device of each process, in which every process gets the
bytes of all:

    1. the first process gives the address of its store
    2. every process gives "", or why it cannot connect. All of them then know, and raise the same error if one cannot

A device waits for ever for a process that does not come. The programs therefore run in a thread of their own, for which the
process can wait as long as it likes. That also keeps them from what the user has set for his thread, by `jax.set_mesh` for
instance.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import jax
import msgspec
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tensile_jax.errors import DistributedError
from tensile_jax.exec.step.key_value_store import Address, RemoteStore, Server, Store, Values
from tensile_jax.exec.transfer import Device

_NBYTES = 1024  # what a process gives in one program; an address has less than 300


def start_joining(devices: Sequence[Device], process: int, on_lost: Callable[[Store, int], None]) -> Future[Values]:
    """Start to join the store of these processes. All must call this at the same point of what they run on their devices.

    Args:
        devices: one of each process, in the order of the processes. The store is in the first one.
        process: the number of this process.
        on_lost: called in the first process with the store and the number of a process whose connection has ended, in a thread.

    Returns:
        The store, when all processes are connected. Otherwise a `DistributedError` that names those that cannot connect, or the
        error of JAX. As long as a process does not come, the result is not there, and this process cannot end by itself.
    """
    future: Future[Values] = Future()

    def run() -> None:
        try:
            found = _join(devices, process, on_lost)
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(found)

    threading.Thread(target=run, name="tensile store", daemon=True).start()
    return future


def _join(devices: Sequence[Device], process: int, on_lost: Callable[[Store, int], None]) -> Values:
    processes = [device.process_index for device in devices]
    store, told = Store(), b""
    if process == processes[0]:
        told = msgspec.json.encode(Server(store, lambda lost: on_lost(store, lost)).address)
    address = msgspec.json.decode(_gathered(devices, process, told)[0], type=Address)
    found, why = store, ""
    if process != processes[0]:
        try:
            found = RemoteStore(address, process)
        except OSError as error:
            why = str(error)
    failed = {p: text.decode() for p, text in zip(processes, _gathered(devices, process, why.encode()), strict=True) if text}
    if failed:
        stories = "; ".join(f"process {p} has tried {text}" for p, text in list(failed.items())[:4])
        raise DistributedError(
            f"Process {processes[0]} plans the step, and process{'es' if len(failed) > 1 else ''} "
            f"{', '.join(map(str, failed))} cannot connect to it: {stories}. Let the machines of the job connect to one another "
            "on all TCP ports.",
            processes=tuple(failed),
        )
    return found


def _gathered(devices: Sequence[Device], process: int, mine: bytes) -> list[bytes]:
    """What each process gives, at most `_NBYTES - 2` bytes of it, in the order of the devices."""
    mine = mine[: _NBYTES - 2]
    row = np.zeros((1, _NBYTES), np.uint8)
    row[0, : len(mine) + 2] = np.frombuffer(len(mine).to_bytes(2, "little") + mine, np.uint8)
    mesh = Mesh(np.array(devices), ("process",))
    own = next(device for device in devices if device.process_index == process)
    rows = jax.make_array_from_single_device_arrays(
        (len(devices), _NBYTES), NamedSharding(mesh, PartitionSpec("process")), [jax.device_put(row, own)]
    )
    whole = jax.jit(_same, out_shardings=NamedSharding(mesh, PartitionSpec()))(rows)
    table = jax.device_get(whole.addressable_data(0))
    return [line[2 : 2 + int.from_bytes(line[:2].tobytes(), "little")].tobytes() for line in table]


def _same(rows: jax.Array) -> jax.Array:
    return rows
