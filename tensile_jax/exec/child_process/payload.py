"""Defines the payload: the first message to a job's own process, with the job and what the process must know of its parent.

The parent is the runtime's process. The payload has the parent's JAX configuration, its main module, its `sys.argv`, and the
device on which the job is to run.

Functions are sent by reference: the job's process imports their modules. If the job needs the main module, the process imports
that module too, but not as `__main__`. So what a script does under `if __name__ == "__main__":` is not done again. A lambda or a
closure has no name to import; it is sent by value if cloudpickle is installed. The state is sent as its leaves, bit for bit
(`exec/checkpoint/leaves.py`).
"""

import os
import pickle
import runpy
import sys
import threading
import types
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import jax
import numpy as np

from tensile_jax.exec.actor.entrypoint import Entrypoint
from tensile_jax.exec.checkpoint.leaves import Leaf, describe, from_host, to_host
from tensile_jax.exec.transfer import Device

_MAIN = b"__main__"
_MAIN_THERE = "__mp_main__"  # the name that multiprocessing uses
_SETTINGS = (bool, int, float, str)
_REMEDIES = {
    "step": "Define it at the level of a module, or give an Entrypoint.",
    "batches": "Give a function at the level of a module that makes them, or an Entrypoint as step.",
    "state": "Make its structure of classes at the level of a module.",
}

importing_main = threading.Event()
"""Set in a job's own process, while it imports the main module."""


@dataclass(frozen=True, slots=True, eq=False)
class PackedTree:
    """The leaves of a pytree, in a form that can be sent: their descriptions and their numbers."""

    leaves: tuple[Leaf, ...]
    numbers: tuple[np.ndarray | None, ...]

    @property
    def nbytes(self) -> int:
        """The bytes of all leaves."""
        return sum(one.nbytes for one in self.numbers if one is not None)

    def unpack(self, structure: Any) -> Any:
        """The pytree with these leaves."""
        return jax.tree.unflatten(structure, map(from_host, self.leaves, self.numbers))


def pack_tree(tree: Any) -> PackedTree:
    """The leaves of `tree`. On a CPU they may share the memory of the arrays of `tree`.

    Raises:
        TypeError: a leaf is neither array nor number.
    """
    leaves = describe(tree)
    values = jax.tree.leaves(tree)
    return PackedTree(leaves, tuple(to_host(v) if leaf.has_numbers else None for leaf, v in zip(leaves, values, strict=True)))


@dataclass(frozen=True, slots=True)
class ProcessEnvironment:
    """What a process takes over from its parent. `main` is the (name, path) of the main module, if the job needs that module."""

    main: tuple[str, str] | None
    arguments: tuple[str, ...]
    configuration: dict[str, Any]
    platform: str
    device: int

    def apply(self) -> Device:
        """Set this process up like its parent. Returns the device on which the job runs."""
        for key, value in self.configuration.items():
            with suppress(Exception):  # some settings cannot be set in this way
                if jax.config.values.get(key) != value:
                    jax.config.update(key, value)
        if self.main is not None:
            sys.argv[:] = self.arguments
            importing_main.set()
            _import_main(*self.main)
            importing_main.clear()
        return next(d for d in jax.local_devices(backend=self.platform) if d.id == self.device)


def _import_main(name: str, path: str) -> None:
    """Import the main module of another process as the main module of this process."""
    if name == _MAIN.decode() or name.endswith(".__main__"):  # the main module of a package may do anything when it is run
        return
    found = runpy.run_module(name, None, _MAIN_THERE, alter_sys=True) if name else runpy.run_path(path, None, _MAIN_THERE)
    module = types.ModuleType(_MAIN_THERE)
    module.__dict__.update(found)
    sys.modules["__main__"] = sys.modules[_MAIN_THERE] = module


def _environment(job: bytes | tuple[bytes, ...], device: Device) -> ProcessEnvironment:
    """The environment of this process, as far as the job needs it."""
    main, module = None, sys.modules["__main__"]
    if any(_MAIN in part for part in ([job] if isinstance(job, bytes) else job)):
        name, path = getattr(getattr(module, "__spec__", None), "name", None), getattr(module, "__file__", None)
        main = (name or "", os.path.abspath(path) if path else "") if name or path else None
    configuration = {key: value for key, value in jax.config.values.items() if value is None or isinstance(value, _SETTINGS)}
    return ProcessEnvironment(main, tuple(sys.argv), configuration, device.platform, device.id)


@dataclass(frozen=True, slots=True, eq=False)
class Payload:
    """The first message to a process. `job` is a pickled `Entrypoint`, or (step, batches, structure of the state), each pickled.

    `first` steps are done already. If `checkpoints` is not None, the state after them is in that folder; otherwise it is `state`,
    or the entrypoint makes it. The arrays of the state at the positions `given_on_host` were given in host memory.
    """

    name: str
    environment: ProcessEnvironment
    job: bytes | tuple[bytes, bytes, bytes]
    state: PackedTree | None
    first: int
    checkpoints: Path | None
    given_on_host: frozenset[int] = frozenset()

    def open(self) -> tuple[Callable[..., Any], Any, Any]:
        """(step, state, batches), as they were submitted or as the entrypoint makes them."""
        if isinstance(self.job, bytes):
            step, state, batches = pickle.loads(self.job).make()
            return step, state, batches
        assert self.state is not None  # it is sent with the job
        step, batches, skeleton = (_unpack(one) for one in self.job)
        return step, self.state.unpack(jax.tree.structure(skeleton)), batches


def pack_job(
    step: Any,
    state: Any,
    batches: Any,
    *,
    name: str,
    device: Device,
    first: int,
    checkpoints: Path | None,
    given_on_host: frozenset[int] = frozenset(),
) -> Payload:
    """The payload of a job that runs on `device`.

    Args:
        step: a function, or an `Entrypoint`; an entrypoint makes state and batches in the job's process.
        first: how many steps are done already. If it is not 0, an entrypoint's job reads its state from the folder `checkpoints`.
        given_on_host: the positions of the arrays of `state` that the user has put in host memory.

    Raises:
        TypeError: step, state or batches cannot be sent; the message names which of them.
    """
    if isinstance(step, Entrypoint):
        job = _pack("step", step)
        return Payload(name, _environment(job, device), job, None, first, checkpoints if first else None)
    job = _pack("step", step), _pack("batches", batches), pack_structure(state)
    return Payload(name, _environment(job, device), job, pack_tree(state), first, None, given_on_host)


def pack_structure(tree: Any) -> bytes:
    """A pickle whose content has the structure of `tree`.

    Raises:
        TypeError: it cannot be sent.
    """
    structure = jax.tree.structure(tree)
    return _pack("state", jax.tree.unflatten(structure, range(structure.num_leaves)))


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
        if name.find() is value:  # also for functions decorated with jax.jit, which pickle cannot send by name
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
