"""Writes, finds, restores and removes the checkpoints of one job in a folder.

    folder/
      tensile.json                      says that the folder holds the checkpoints of a job
      tensile.lock                      says which run uses the folder now (`folder_lock.py`)
      120/                              the state after step 120 (for the files in it see `format.py`)
      120-1/                            the same step, saved once more; the higher number counts
      .tensile-writing-120-PID/         the process PID is writing it
      .tensile-removing-60-PID/         the process PID is removing it

A checkpoint is written under another name, and renamed when all of it is on the disk. So neither a crash nor a full disk damages
an existing checkpoint. Before a checkpoint is read, its files are compared with the checksums that were saved with them.

The folder belongs to the user. Only two things are ever removed: complete checkpoints that are no longer needed, and what
interrupted writes and removals have left. Everything else stays until the user removes it: a damaged checkpoint, one that a later
version has written, one with a file of the user in it, and any other file or folder.
"""

import operator
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tensile_jax.atomic_file import UNFINISHED
from tensile_jax.errors import CheckpointError
from tensile_jax.exec.checkpoint.file_names import checkpoint_name, newest_first, step_and_number
from tensile_jax.exec.checkpoint.format import (
    Manifest,
    Unreadable,
    erase,
    erase_unfinished,
    has_others,
    is_checkpoint,
    load_state,
    mark_folder,
    read_manifest,
    sync,
    write_checkpoint,
)
from tensile_jax.exec.checkpoint.leaves import describe, find_difference

_WRITING, _REMOVING = ".tensile-writing-", ".tensile-removing-"


@dataclass(frozen=True, slots=True)
class _Found:
    """A checkpoint, complete or damaged. `number` counts how often its step was saved before."""

    step: int
    number: int
    path: Path


class Checkpoints:
    """The checkpoints in one folder. The newest `keep` of them are kept. The first save makes the folder.

    Saving a step also removes checkpoints of later steps, since the job then continues from this step. The caller of `save`
    must hold the folder's lock.
    """

    def __init__(self, folder: Path, *, keep: int = 2) -> None:
        if keep < 1:
            raise ValueError(f"keep must be at least 1, got {keep}.")
        self.folder = Path(folder).absolute()
        self._keep = keep
        self._one_at_a_time = threading.Lock()
        self._closed = False
        self._whole: dict[Path, Manifest] = {}  # of checkpoints that this object has written, or has found to be complete

    def save(self, step: int, state: Any) -> str:
        """Write `state` as the state after `step` steps. Its arrays must not be changed until this returns.

        Needs host memory for a copy of those arrays that NumPy cannot read in place, and no device memory.

        Returns:
            Why an older checkpoint could not be removed; empty if all went well.

        Raises:
            CheckpointError: the checkpoint could not be written. Older checkpoints are unchanged.
            TypeError: a leaf is neither array nor number.
            ValueError: `step` is below zero.
        """
        if (step := operator.index(step)) < 0:
            raise ValueError(f"step must not be below zero, got {step}. It is the number of steps that the state has seen.")
        leaves = describe(state)
        with self._one_at_a_time:
            if not self._closed:
                mark_folder(self.folder)
            with self._errors_named(step, "saved"):
                if self._closed:
                    raise ValueError("it was closed")
                final = self._free_path(step)
                writing = self._hidden(_WRITING, final)
                try:
                    manifest = write_checkpoint(writing, job=self.folder.name, step=step, leaves=leaves, state=state)
                    writing.rename(final)
                    sync(self.folder)
                except BaseException:
                    with suppress(OSError):  # files that are left are removed when the folder is used next
                        erase_unfinished(writing)
                    raise
                self._whole[final] = manifest
            try:
                self._remove_past(step, final)
            except OSError as error:
                return f"an older checkpoint could not be removed: {error}"
            return ""

    def latest(self) -> int | None:
        """The newest step with a complete checkpoint; None if there is none."""
        with self._one_at_a_time:
            return next((one.step for one in self._found() if not isinstance(self._read(one), Unreadable)), None)

    def steps(self) -> tuple[int, ...]:
        """The steps of all checkpoints, complete or damaged, the newest first."""
        return tuple(one.step for one in self._found())

    def find_last(self) -> tuple[int | None, str]:
        """(step from which a run continues, what is wrong with newer checkpoints that are damaged).

        The step is None if there are no checkpoints.

        Raises:
            CheckpointError: no checkpoint can be read, or a later version has written the newest ones. A run that began at
                step 0, or at an older step, would lose what they hold.
        """
        bad: list[str] = []
        with self._one_at_a_time:
            for one in self._found():
                found = self._read(one)
                if not isinstance(found, Unreadable):
                    return one.step, "; ".join(bad)
                bad.append(f"the checkpoint {one.path.name} cannot be read: {found.reason}")
                if found.later:
                    remedy = "Resume with that version of tensile_jax, or begin anew in another folder"
                    raise self._refusal("; ".join(bad), remedy, one.step)
            if bad:
                remedy = (
                    "Nothing was changed. Bring them back from a copy; or, to begin anew, move them away, give the job another "
                    "name, or the runtime another folder"
                )
                raise self._refusal("; ".join(bad), remedy, None)
        return None, ""

    def restore(self, step: int, like: Any) -> Any:
        """The state after `step`, in the structure of `like`, whose leaves are arrays, `ShapeDtypeStruct`s or Python scalars.

        Arrays come back as NumPy arrays, weakly typed arrays and keys as `jax.Array`s in pinned host memory, and Python scalars
        as Python scalars.

        Raises:
            CheckpointError: there is no checkpoint of that step, it is damaged, or its structure, a shape or a dtype differs.
        """
        wanted = describe(like)
        with self._one_at_a_time, self._errors_named(step, "restored"):
            ones = [one for one in self._found() if one.step == step]
            if not ones:
                raise ValueError(f"there is none; there are those of steps {sorted(set(self.steps()))}")
            readings = [(one, self._read(one)) for one in ones]
            one, manifest = next(((o, r) for o, r in readings if not isinstance(r, Unreadable)), readings[0])
            if isinstance(manifest, Unreadable):
                raise ValueError(f"{manifest.reason}. Restore an older one: latest() names the newest that is whole")
            if difference := find_difference(manifest.leaves, wanted):
                raise ValueError(f"{difference}. Pass a state of the step that was saved")
            return load_state(one.path, manifest, like)

    def remove_leftovers(self) -> None:
        """Remove what processes that have died were writing or removing. The caller must hold the folder's lock."""
        with suppress(OSError):  # an unreadable folder raises an error when it is used
            for path in (*self.folder.glob(f"{_WRITING}*"), *self.folder.glob(f"{_REMOVING}*"), *self.folder.glob(UNFINISHED)):
                with suppress(OSError):
                    erase(path) if path.is_dir() else path.unlink()

    def close(self) -> None:
        """Wait until no other thread saves or restores here. Nothing can be saved afterwards."""
        with self._one_at_a_time:
            self._closed = True

    @contextmanager
    def _errors_named(self, step: int, what: str) -> Iterator[None]:
        """Turn every exception in the block into a `CheckpointError` that names the checkpoint."""
        try:
            yield
        except Exception as error:
            raise CheckpointError(
                f"The checkpoint of step {step} in {self.folder} could not be {what}: {error}", folder=str(self.folder), step=step
            ) from error

    def _refusal(self, what: str, remedy: str, step: int | None) -> CheckpointError:
        return CheckpointError(
            f"The job in {self.folder} cannot be resumed: {what}. {remedy}.", folder=str(self.folder), step=step
        )

    def _found(self) -> list[_Found]:
        """All checkpoints, the newest first."""
        names = newest_first(path.name for path in self.folder.iterdir()) if self.folder.is_dir() else []
        return [_Found(*step_and_number(name), self.folder / name) for name in names if is_checkpoint(self.folder / name)]

    def _read(self, one: _Found) -> Manifest | Unreadable:
        found = read_manifest(one.path, one.step)
        if not isinstance(found, Unreadable):
            self._whole[one.path] = found
        return found

    def _free_path(self, step: int) -> Path:
        """An unused name for a new checkpoint of that step, with a higher number than the step's other checkpoints have."""
        number = max((one.number + 1 for one in self._found() if one.step == step), default=0)
        while os.path.lexists(path := self.folder / checkpoint_name(step, number)):
            number += 1
        return path

    def _hidden(self, prefix: str, path: Path) -> Path:
        """The name of a checkpoint while it is written or removed. What an earlier attempt left under that name is removed."""
        hidden = path.with_name(f"{prefix}{path.name}-{os.getpid()}")
        erase(hidden)
        return hidden

    def _remove_past(self, step: int, final: Path) -> None:
        """Remove the checkpoints that are not needed now that `final`, that of `step`, exists."""
        kept = 1
        for one in self._found():
            if one.path == final:
                continue
            manifest = self._whole.get(one.path) or self._read(one)
            if isinstance(manifest, Unreadable):
                continue
            if one.step < step and kept < self._keep:
                kept += 1
            elif not has_others(one.path, manifest):
                self._remove(one.path)

    def _remove(self, path: Path) -> None:
        doomed = self._hidden(_REMOVING, path)
        path.rename(doomed)  # otherwise a half removed checkpoint might be taken for a complete one
        erase(doomed)
        self._whole.pop(path, None)
