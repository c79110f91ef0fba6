"""Brings the last state of a job that has ended to device memory, if it fits there beside the jobs that have not ended.

    room = budget - sum of the planned peaks of the jobs that have not ended
                  - bytes of the results that were brought to device memory before and are still in use

A job that has no plan yet may be planned for the whole budget. Beside such a job there is no room.
"""

import threading
import weakref
from typing import Any, Literal, get_args

import jax

from tensile_jax.exec.out_of_memory_errors import is_out_of_memory
from tensile_jax.exec.runtime.dispatcher import Dispatcher
from tensile_jax.exec.runtime.store import Store, StoredJob
from tensile_jax.exec.transfer import Transfer, nbytes_on_a_device, on_host

ResultMemory = Literal["device", "host"]
"""Where a job's last state is to be: in device memory if it fits there, or in host memory."""


def refuse_unknown_memory(memory: Any) -> None:
    """Raises ValueError if `memory` is no `ResultMemory`."""
    if memory not in get_args(ResultMemory):
        raise ValueError(f'memory must be "device" or "host", got {memory!r}.')


class Results:
    """The results of one runtime that are on the device, and the room for more."""

    def __init__(self, store: Store, dispatcher: Dispatcher, transfer: Transfer) -> None:
        self._store = store
        self._dispatcher = dispatcher
        self._transfer = transfer
        self._lock = threading.Lock()  # so that two results are not given the same room; taken before the store's lock
        self._given: list[weakref.ref[jax.Array]] = []

    def on_device(self, job: StoredJob, state: Any) -> Any | None:
        """A copy of `state` in device memory; None if there is no room for it. `state` is the last state of `job`.

        Arrays that the step itself keeps in host memory stay there. If nothing is to be copied, the result is `state` itself.
        """
        leaves, tree = jax.tree.flatten(state)
        moving = [i for i, leaf in enumerate(leaves) if on_host(leaf) and i not in job.actor.stays_on_host]
        if not moving:
            return state
        with self._lock:
            if sum(nbytes_on_a_device(leaves[i]) for i in moving) > self._room():
                return None
            try:
                for i in moving:
                    leaves[i] = self._transfer.copy_into(leaves[i])  # no alias: the caller may donate it
            except RuntimeError as error:
                if not is_out_of_memory(error, effectful=False):
                    raise
                return None  # something else than the jobs holds the device's memory
            self._given += [weakref.ref(leaves[i]) for i in moving]
        return tree.unflatten(leaves)

    def _room(self) -> int:
        given = [array for ref in self._given if (array := ref()) is not None and not array.is_deleted()]
        self._given = [weakref.ref(array) for array in given]
        with self._store.changed:
            in_use = [one.in_use for one in self._store.jobs.values() if not one.life.has_ended]
            state = self._dispatcher.state
        room = min(state.budget_bytes, state.next_budget_bytes or state.budget_bytes) - sum(map(nbytes_on_a_device, given))
        for plan in in_use:
            if plan is None:
                return 0
            room -= plan.memory.peak_bytes
        return room
