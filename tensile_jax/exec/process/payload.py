"""What a job's own process gets: the surroundings in which it works, then the job.

    Setting    paths, working folder, the main module, JAX's configuration, the device
    Parcel     step, batches and state, or the entrypoint that makes them

Functions go by reference: the process imports their modules, the main one included (under another name than `__main__`, as
`multiprocessing` does). What has no name there, a lambda or a closure, goes by value if cloudpickle is installed. The state goes
as bytes, bit for bit (`exec/checkpoint/leaves.py`).
"""

import os
import pickle
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from multiprocessing import spawn
from pathlib import Path
from typing import Any

import jax
import numpy as np

from tensile_jax.exec.actor.entrypoint import Entrypoint
from tensile_jax.exec.checkpoint.leaves import Leaf, describe, from_host, to_host
from tensile_jax.exec.step.transfer import Device

_MAIN = b"__main__"
_SCALARS = (bool, int, float, str)
_REMEDIES = {
    "step": "Define it at the level of a module, or give an Entrypoint.",
    "batches": "Give a function at the level of a module that makes them, or an Entrypoint as step.",
    "state": "Make its structure of classes at the level of a module.",
}


@dataclass(frozen=True, slots=True)
class Setting:
    """Where a process works. `main` names or finds the main module, if the job needs it."""

    path: tuple[str, ...]
    folder: str
    main: dict[str, Any]
    configuration: dict[str, Any]
    platform: str
    device: int

    def apply(self) -> Device:
        """Make this process work there; the device."""
        sys.path[:] = self.path
        os.chdir(self.folder)
        for key, value in self.configuration.items():
            with suppress(Exception):  # of a configuration that can only be set in other ways
                if jax.config.values.get(key) != value:
                    jax.config.update(key, value)
        if self.main:
            spawn.prepare(self.main)
        return next(d for d in jax.local_devices(backend=self.platform) if d.id == self.device)


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """The leaves of a pytree."""

    leaves: tuple[Leaf, ...]
    stored: tuple[np.ndarray | None, ...]

    @property
    def nbytes(self) -> int:
        """All bytes."""
        return sum(one.nbytes for one in self.stored if one is not None)

    def unpack(self, structure: Any) -> Any:
        """The pytree."""
        return jax.tree.unflatten(structure, [from_host(leaf, raw) for leaf, raw in zip(self.leaves, self.stored, strict=True)])


def pack_tree(tree: Any) -> Packed:
    """The leaves of `tree`; on a CPU their bytes may be the arrays' own.

    Raises:
        TypeError: a leaf is neither array nor number.
    """
    leaves = describe(tree)
    values = jax.tree.leaves(tree)
    return Packed(leaves, tuple(to_host(v) if leaf.has_numbers else None for leaf, v in zip(leaves, values, strict=True)))


@dataclass(frozen=True, slots=True, eq=False)
class Parcel:
    """A job. `job` is a pickled `Entrypoint`, or (step, batches, structure of the state), each pickled.

    `first` steps are done already; with `checkpoints` the state after them is in that folder, otherwise in `state`.
    """

    name: str
    job: bytes | tuple[bytes, bytes, bytes]
    state: Packed | None
    first: int
    checkpoints: Path | None

    def open(self) -> tuple[Callable[..., Any], Any, Any]:
        """(step, state, batches), as they were given, or as the entrypoint makes them."""
        if isinstance(self.job, bytes):
            step, state, batches = pickle.loads(self.job).make()
            return step, state, batches
        assert self.state is not None  # it goes along
        step, batches, skeleton = (_unpack(one) for one in self.job)
        return step, self.state.unpack(jax.tree.structure(skeleton)), batches


def pack_job(step: Any, state: Any, batches: Any, *, name: str, first: int, checkpoints: Path | None) -> Parcel:
    """The parcel of a job. `step` may be an `Entrypoint`; then there is neither state nor batches.

    Raises:
        TypeError: one of them cannot be sent; the message names it.
    """
    if isinstance(step, Entrypoint):
        return Parcel(name, _pack("step", step), None, first, checkpoints)
    job = _pack("step", step), _pack("batches", batches), pack_structure(state)
    return Parcel(name, job, pack_tree(state), first, None)


def pack_structure(tree: Any) -> bytes:
    """The structure of a pytree, to be taken of what `pickle` makes of it.

    Raises:
        TypeError: it cannot be sent.
    """
    structure = jax.tree.structure(tree)
    return _pack("state", jax.tree.unflatten(structure, range(structure.num_leaves)))


def setting_for(parcel: Parcel, device: Device) -> Setting:
    """This process's own surroundings, as far as `parcel` needs them."""
    parts: Sequence[bytes] = [parcel.job] if isinstance(parcel.job, bytes) else parcel.job
    found = spawn.get_preparation_data(parcel.name) if any(_MAIN in part for part in parts) else {}
    main = {key: found[key] for key in ("init_main_from_name", "init_main_from_path", "sys_argv") if key in found}
    configuration = {key: value for key, value in jax.config.values.items() if value is None or isinstance(value, _SCALARS)}
    return Setting(tuple(sys.path), os.getcwd(), main, configuration, device.platform, device.id)


@dataclass(frozen=True, slots=True)
class _ByName:
    module: str
    path: str

    def find(self) -> Any:
        found: Any = import_module(self.module)
        for part in self.path.split("."):
            found = getattr(found, part)
        return found


def _pack(argument: str, value: Any) -> bytes:
    name = _ByName(getattr(value, "__module__", None) or "", getattr(value, "__qualname__", ""))
    with suppress(Exception):
        if name.find() is value:  # as functions that are decorated with jax.jit, which pickle does not know by name
            return pickle.dumps(name)
    try:
        return pickle.dumps(value, protocol=5)
    except Exception as error:
        first = error
    try:
        return import_module("cloudpickle").dumps(value, protocol=5)
    except ImportError:
        reason = f"{type(first).__name__}: {first}"
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
    raise TypeError(
        f"{argument} cannot be sent to the job's own process: {reason}. {_REMEDIES[argument]} Or leave the job in this "
        'process, with isolation="thread".'
    )


def _unpack(pickled: bytes) -> Any:
    value = pickle.loads(pickled)
    return value.find() if isinstance(value, _ByName) else value
