"""Defines the format of a checkpoint: the files, how they are written, and how damage to them is found.

    folder of a job          tensile.json    `Mark`: says that tensile_jax keeps checkpoints here
    folder of a checkpoint   tensile.json    `Mark`: is written first; a folder without it is never touched
                             state/          an ordinary orbax checkpoint of the user's pytree (`orbax_state.py`)
                             manifest.json   `SignedManifest`: is written last; describes the leaves of the pytree, and has the
                                             SHA-256 of every file in `state`

A checkpoint is written into a folder with another name. The folder is renamed when all of it is on the disk. Later formats will
keep the form of the mark, so every version of tensile_jax can recognise a checkpoint of a later version. The checksums detect
errors of a disk; they do not protect from an attacker.
"""

import errno
import hashlib
import os
import platform
import time
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec

from tensile_jax.atomic_file import UNFINISHED, write_whole
from tensile_jax.errors import CheckpointError
from tensile_jax.exec.checkpoint.file_names import MANIFEST, MARK, STATE
from tensile_jax.exec.checkpoint.leaves import Leaf

FORMAT = 3
"""Of checkpoints. Format 1 had no mark and was never released; format 2 had the bytes of all leaves in one file."""

_ORBAX_UNFINISHED = f"{STATE}.orbax-checkpoint-tmp*"  # the name under which orbax itself writes
_PATIENCE_S = 2.0  # not tuned: so long is waited for orbax's threads after it has failed
_MANIFEST_BEFORE_3 = "checkpoint.json"
_WHAT = "checkpoints of tensile_jax"


@dataclass(frozen=True, slots=True)
class Mark:
    """The content of `tensile.json`. `what` is always the same text; `job` is the job's name."""

    what: str
    format: int
    job: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a checkpoint holds. `files` are the SHA-256 of every file in the folder `state`, by its path in that folder."""

    job: str
    step: int
    versions: dict[str, str]
    leaves: tuple[Leaf, ...]
    files: dict[str, str]


@dataclass(frozen=True, slots=True)
class SignedManifest:
    """The content of `manifest.json`. `sha256` is the SHA-256 of the manifest's own JSON, written without spaces."""

    sha256: str
    manifest: Manifest


@dataclass(frozen=True, slots=True)
class Unreadable:
    """Why a checkpoint cannot be restored. `later` says that a later version of tensile_jax has written it, and can read it."""

    reason: str
    later: bool = False


# -- a job's folder -------------------------------------------------------------------------------------------------------------


def mark_folder(folder: Path) -> None:
    """Make the folder of a job's checkpoints, and mark it as such. Files of the user in it are unchanged.

    Raises:
        CheckpointError: the folder cannot be made, a later version has marked it, or it has a `tensile.json` of another program.
    """
    try:
        found = _read_mark(folder)
        if isinstance(found, Unreadable):
            raise ValueError(found.reason)
        if found is None:
            folder.mkdir(parents=True, exist_ok=True)
            sync(folder.parent)
            _write_mark(folder, folder.name)
            sync(folder)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{folder} cannot hold the checkpoints of a job: {error}. Give the job another name, or the runtime another folder.",
            folder=str(folder),
            step=None,
        ) from error


def _read_mark(folder: Path) -> Mark | Unreadable | None:
    """The mark in a folder; None if there is none, so that tensile_jax owns nothing in the folder."""
    try:
        text = (folder / MARK).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        return Unreadable(f"{folder / MARK} cannot be read ({error})")
    try:
        mark = msgspec.json.decode(text, type=Mark)
    except ValueError as error:
        return Unreadable(f"{folder / MARK} is damaged, or not written by tensile_jax ({error})")
    if mark.what != _WHAT:
        return Unreadable(f"{folder / MARK} was not written by tensile_jax")
    if mark.format > FORMAT:
        return Unreadable(
            f"it was written by a later version of tensile_jax (format {mark.format}; this version reads {FORMAT})", later=True
        )
    return mark


def mark_of(job: str) -> bytes:
    """The content of the mark of a job's folder."""
    return msgspec.json.encode(Mark(_WHAT, FORMAT, job)) + b"\n"


def _write_mark(folder: Path, job: str) -> None:
    write_whole(folder / MARK, mark_of(job))


# -- a checkpoint ---------------------------------------------------------------------------------------------------------------


def write_checkpoint(folder: Path, *, job: str, step: int, leaves: tuple[Leaf, ...], state: Any) -> Manifest:
    """Write a checkpoint into `folder`, which must not exist, and bring all of it to the disk."""
    from tensile_jax.exec.checkpoint.orbax_state import write_state  # imports orbax, which is slow

    folder.mkdir()
    _write_mark(folder, job)
    write_state(folder / STATE, leaves, state)
    files: dict[str, str] = {}
    for parent, _, names in os.walk(folder / STATE, topdown=False):
        for path in sorted(Path(parent, name) for name in names):
            files[path.relative_to(folder / STATE).as_posix()] = _checksum(path, flush=True)
        sync(Path(parent))
    packages = {package: metadata.version(package) for package in ("jax", "jaxlib", "numpy", "orbax-checkpoint")}
    manifest = Manifest(job, step, {"python": platform.python_version(), **packages}, leaves, files)
    signed = SignedManifest(hashlib.sha256(msgspec.json.encode(manifest)).hexdigest(), manifest)
    write_whole(folder / MANIFEST, msgspec.json.format(msgspec.json.encode(signed), indent=1) + b"\n")
    sync(folder)
    return manifest


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder is a checkpoint, complete or damaged. A folder of the user whose name is a number is not one."""
    if folder.is_symlink() or not folder.is_dir():
        return False
    if (folder / MARK).is_file():
        return True
    # a checkpoint of format 1, or one that has lost its mark
    for name, key in ((MANIFEST, "manifest"), (_MANIFEST_BEFORE_3, "description")):
        with suppress(OSError, ValueError):
            return key in msgspec.json.decode((folder / name).read_bytes(), type=dict[str, Any])
    return False


def read_manifest(folder: Path, step: int) -> Manifest | Unreadable:
    """The manifest of the checkpoint of that step, if all its files are as they were written; otherwise what is wrong with it."""
    mark = _read_mark(folder)
    if isinstance(mark, Unreadable):
        return mark
    if mark is None:
        return Unreadable(f"{folder / MARK} is missing, so that the folder may belong to another program")
    if mark.format < FORMAT:
        return Unreadable(
            f"it was written by an earlier version of tensile_jax (format {mark.format}; this version reads {FORMAT})"
        )
    try:
        signed = msgspec.json.decode((folder / MANIFEST).read_bytes(), type=SignedManifest)
        manifest = signed.manifest
        if hashlib.sha256(msgspec.json.encode(manifest)).hexdigest() != signed.sha256:
            return Unreadable(f"{folder / MANIFEST} is not as it was written")
        if manifest.step != step:
            return Unreadable(f"it is that of step {manifest.step}, and its folder was renamed")
        for name, checksum in manifest.files.items():
            if _checksum(path := folder / STATE / name) != checksum:
                return Unreadable(f"{path} is not as it was written")
    except (OSError, ValueError) as error:
        return Unreadable(f"it is damaged: {error}")
    return manifest


def load_state(folder: Path, manifest: Manifest, like: Any) -> Any:
    """The state in a checkpoint that `read_manifest` has found complete, in the structure of `like`."""
    from tensile_jax.exec.checkpoint.orbax_state import read_state  # imports orbax, which is slow

    return read_state(folder / STATE, manifest.leaves, like)


def has_others(folder: Path, manifest: Manifest) -> bool:
    """Whether a checkpoint's folder contains any file or folder that tensile_jax has not written."""
    ours = {folder / MARK, folder / MANIFEST}
    for name in manifest.files:
        path = folder / STATE / name
        ours.update((path, *path.parents))
    return not ours.issuperset(folder.rglob("*"))


def erase(folder: Path) -> None:
    """Remove the files of a checkpoint that is unfinished or no longer needed, and then its folder.

    The mark is removed last, because without it the other files could not be recognised as those of a checkpoint. If the folder
    contains anything else, that stays, and so does the folder.
    """
    if folder.is_symlink() or not folder.is_dir():
        return
    states = [folder / STATE] if (folder / MARK).is_file() else []
    for state in (*states, *folder.glob(_ORBAX_UNFINISHED)):
        for parent, folders, names in os.walk(state, topdown=False):
            for name in names:
                os.unlink(os.path.join(parent, name))
            for name in folders:
                os.rmdir(os.path.join(parent, name))
        if state.is_dir():
            state.rmdir()
    for path in (*folder.glob(UNFINISHED), folder / MANIFEST, folder / MARK):
        path.unlink(missing_ok=True)
    if not any(folder.iterdir()):
        folder.rmdir()


def erase_unfinished(folder: Path) -> None:
    """Remove a checkpoint that could not be written, in which threads of orbax may still make and remove files for a moment."""
    end = time.monotonic() + _PATIENCE_S
    while True:
        try:
            erase(folder)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.ENOENT) or time.monotonic() > end:
                raise
        else:
            if not any(folder.glob(_ORBAX_UNFINISHED)) or time.monotonic() > end:
                return
        time.sleep(0.01)


# -- the disk -------------------------------------------------------------------------------------------------------------------


def _checksum(path: Path, *, flush: bool = False) -> str:
    """The SHA-256 of a file; with `flush`, the file is brought to the disk first."""
    with path.open("rb") as file:
        if flush:
            os.fsync(file.fileno())
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(folder: Path) -> None:
    """Wait until the list of what is in a folder is on the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
