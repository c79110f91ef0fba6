"""Checkpoints of one job's state, with orbax: complete or not there, and bit for bit.

    folder/
      120/                  the state after step 120
        checkpoint.json     Description: step, versions, the leaves, size and checksum of every file of `state`
        state/              orbax's: the bytes of the leaves, by position
      120-1/                the same step, saved once more; the higher number counts
      .writing-2-PID/       being written by that process; if that has died it is removed when the folder is next opened
      .removing-1-PID/      being removed, likewise

A checkpoint is written under another name and renamed once all of it is on the disk, so that no crash and no full disk damages
those which are there. Whatever is read is first compared with its checksums. One process at a time may write into a folder.
Everything happens in the calling thread's time, which need not be the main one: no thread is left behind.
"""

import logging
import operator
import os
import re
import shutil
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from tensile_jax.errors import CheckpointError
from tensile_jax.exec.leaves import Leaf, describe, find_difference, from_bytes, to_bytes
from tensile_jax.exec.seal import STATE, read_sealed, seal, sync

_NAME = re.compile(r"(\d+)(?:-(\d+))?\Z")
_WRITING, _REMOVING = ".writing-", ".removing-"


class Checkpoints:
    """The checkpoints in one folder, of which the newest `keep` stay. It is made when the first is saved.

    To save a step declares that whatever was saved after it belongs to a past that was given up: later ones go as well.
    """

    def __init__(self, folder: Path, *, keep: int = 2) -> None:
        if keep < 1:
            raise ValueError(f"keep must be at least 1, got {keep}.")
        self.folder = Path(folder).absolute()
        self._keep = keep
        self._one_at_a_time = threading.Lock()
        self._closed = False
        self._remove_leftovers()

    def save(self, step: int, state: Any) -> None:
        """Write `state` as that after `step` steps; its arrays are only read, and must stay as they are until this returns.

        Needs host memory of the size of what lies on a device, and no device memory.

        Raises:
            CheckpointError: it could not be written, or an older one not be removed; the older ones are as they were.
            TypeError: a leaf is neither array nor number.
            ValueError: `step` is below zero.
        """
        if (step := operator.index(step)) < 0:
            raise ValueError(f"step must not be below zero, got {step}. It is the number of steps that the state has seen.")
        leaves = describe(state)
        with self._one_at_a_time, self._told_as(step, "saved"):
            if self._closed:
                raise ValueError("it was closed")
            final = self._next_name(step)
            writing = self.folder / f"{_WRITING}{final.name}-{os.getpid()}"
            try:
                writing.mkdir(parents=True)
                _write(writing / STATE, leaves, state)
                seal(writing, name=self.folder.name, step=step, leaves=leaves)
                writing.rename(final)
                sync(self.folder)
            except BaseException:
                shutil.rmtree(writing, ignore_errors=True)  # what stays is removed when the folder is next opened
                raise
            self._remove_past(step, final)

    def latest(self) -> int | None:
        """The newest step whose checkpoint is complete and as it was written; None where there is none."""
        with self._one_at_a_time:
            return next((step for step, _, path in self._found() if not isinstance(read_sealed(path), str)), None)

    def restore(self, step: int, like: Any) -> Any:
        """The state after `step`, in the structure of `like`, whose leaves are arrays, `ShapeDtypeStruct`s or Python scalars.

        Leaves come back as they were saved: arrays as NumPy arrays, weakly typed ones and keys as `jax.Array`s in pinned host
        memory, Python scalars as such.

        Raises:
            CheckpointError: there is none of that step, it is damaged, or of another structure, shape or dtype.
        """
        wanted, structure = describe(like), jax.tree.structure(like)
        with self._one_at_a_time, self._told_as(step, "restored"):
            paths = [path for found, _, path in self._found() if found == step]
            if not paths:
                raise ValueError(f"there is none; there are those of steps {sorted({found for found, *_ in self._found()})}")
            readings = [(path, read_sealed(path)) for path in paths]
            path, description = next(((p, r) for p, r in readings if not isinstance(r, str)), readings[0])
            if isinstance(description, str):
                raise ValueError(f"{description}. Restore an older one: latest() names the newest that is whole")
            if difference := find_difference(description.leaves, wanted):
                raise ValueError(f"{difference}. Pass a state of the step that was saved")
            return jax.tree.unflatten(structure, _load(path / STATE, description.leaves))

    def close(self) -> None:
        """Waits for what another thread does here; nothing is saved afterwards."""
        with self._one_at_a_time:
            self._closed = True

    @contextmanager
    def _told_as(self, step: int, what: str) -> Iterator[None]:
        """Turn what goes wrong inside, be it orbax's, the disk's or the device's, into an error that says which checkpoint."""
        try:
            with _quiet():
                yield
        except Exception as error:
            raise CheckpointError(
                f"The checkpoint of step {step} in {self.folder} could not be {what}: {error}", folder=str(self.folder), step=step
            ) from error

    def _found(self) -> list[tuple[int, int, Path]]:
        """Step, number and path of what bears the name of a checkpoint, the newest first."""
        paths = list(self.folder.iterdir()) if self.folder.is_dir() else []
        matches = [(match, path) for path in paths if (match := _NAME.match(path.name))]
        return sorted(((int(match[1]), int(match[2] or 0), path) for match, path in matches), reverse=True)

    def _next_name(self, step: int) -> Path:
        numbers = [number for found, number, _ in self._found() if found == step]
        return self.folder / (f"{step}-{max(numbers) + 1}" if numbers else f"{step}")

    def _remove_past(self, step: int, final: Path) -> None:
        kept = 1
        for found, _, path in self._found():
            if path == final or (found < step and kept < self._keep):
                kept += path != final
            else:
                self._remove(path)

    def _remove(self, path: Path) -> None:
        doomed = path.with_name(f"{_REMOVING}{path.name}-{os.getpid()}")
        path.rename(doomed)  # or half of it might be taken for a checkpoint
        shutil.rmtree(doomed)

    def _remove_leftovers(self) -> None:
        with suppress(OSError):  # a folder that cannot be read says so when it is used
            for path in self.folder.iterdir():
                if path.name.startswith((_WRITING, _REMOVING)) and not _is_alive(path.name.rpartition("-")[2]):
                    shutil.rmtree(path, ignore_errors=True)


def _is_alive(pid: str) -> bool:
    """Whether there is a process of that number; this one is."""
    try:
        os.kill(int(pid), 0)
    except PermissionError:
        return True  # somebody else's
    except (ValueError, OSError, OverflowError):
        return False
    return True


def _write(folder: Path, leaves: tuple[Leaf, ...], state: Any) -> None:
    values = jax.tree.leaves(state)
    stored = {str(i): to_bytes(value) for i, (leaf, value) in enumerate(zip(leaves, values, strict=True)) if leaf.stored}
    if not stored:
        folder.mkdir()  # orbax refuses to write nothing
        return
    with _orbax() as checkpointer:
        checkpointer.save(folder, args=ocp.args.PyTreeSave(stored))


def _load(folder: Path, leaves: tuple[Leaf, ...]) -> list[Any]:
    as_numpy = {str(i): ocp.RestoreArgs(restore_type=np.ndarray) for i, leaf in enumerate(leaves) if leaf.stored}
    stored: Mapping[str, np.ndarray] = {}
    if as_numpy:
        with _orbax() as checkpointer:
            stored = checkpointer.restore(folder, args=ocp.args.PyTreeRestore(restore_args=as_numpy))
    return [from_bytes(leaf, stored.get(str(i))) for i, leaf in enumerate(leaves)]


def _orbax() -> ocp.Checkpointer:
    return ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_compression=False))  # weights hardly shrink


@contextmanager
def _quiet() -> Iterator[None]:
    """Without orbax's log, which says in several tracebacks what the exception says as well."""
    logger = logging.getLogger("absl")

    def from_elsewhere(record: logging.LogRecord) -> bool:
        return "orbax" not in Path(record.pathname).parts

    logger.addFilter(from_elsewhere)
    try:
        yield
    finally:
        logger.removeFilter(from_elsewhere)
