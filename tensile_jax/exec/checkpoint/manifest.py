"""The files of one checkpoint: how they are written, and how it is found out that they are as they were written.

    folder of a job        tensile.json (Mark)                     says that tensile_jax keeps checkpoints there
    folder of a checkpoint tensile.json (Mark)                     is written first: what has no mark is not ours
                           state                                   the bytes of the leaves, one after another
                           checkpoint.json (Sealed)                is written last: sizes and checksums of what is in `state`

    Sealed ::= crc32 Description,  Description ::= name step versions Leaf* size* crc32

Later formats keep the form of the mark, so every version can say that a checkpoint was written by a later one. CRC-32 finds a
disk's mistakes, not an enemy's. Every byte is written by `write_file`, and every name is given by `os.rename`.
"""

import os
import platform
import zlib
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import msgspec
import numpy as np

from tensile_jax.errors import CheckpointError
from tensile_jax.exec.checkpoint.leaves import Leaf, from_bytes, to_bytes

FORMAT = 2
"""Of checkpoints. Format 1 was written with orbax, had no mark, and was never released."""

MARK = "tensile.json"
_STATE = "state"
_DESCRIPTION = "checkpoint.json"
_WHAT = "checkpoints of tensile_jax"
_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class Mark:
    """The content of `tensile.json`. `what` is always the same text; `job` is the job's name."""

    what: str
    format: int
    job: str


@dataclass(frozen=True, slots=True)
class Description:
    """What lies beside the bytes. `sizes`: bytes of each leaf in `state`; `crc32`: checksum of the whole file."""

    name: str
    step: int
    versions: dict[str, str]
    leaves: tuple[Leaf, ...]
    sizes: tuple[int, ...]
    crc32: int


@dataclass(frozen=True, slots=True)
class Sealed:
    """The content of `checkpoint.json`; `crc32` is that of the description's own JSON."""

    crc32: int
    description: Description


@dataclass(frozen=True, slots=True)
class _SealedSomehow:
    """What every format has in `checkpoint.json`."""

    crc32: int
    description: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Unreadable:
    """Why a checkpoint cannot be restored. `later`: a later version of tensile_jax has written it, and can read it."""

    reason: str
    later: bool = False


# -- a job's folder -------------------------------------------------------------------------------------------------------------


def mark_folder(folder: Path) -> None:
    """Make the folder of a job's checkpoints, and mark it as such. What the user has in it stays as it is.

    Raises:
        CheckpointError: it cannot be made, is a later version's, or has a `tensile.json` that is not ours.
    """
    try:
        found = read_mark(folder)
        if isinstance(found, Unreadable):
            raise ValueError(found.reason)
        if found is None:
            folder.mkdir(parents=True, exist_ok=True)
            sync(folder.parent)
            writing = folder / f".tensile-writing-mark-{os.getpid()}"
            writing.unlink(missing_ok=True)  # of an earlier attempt, which could not remove it
            try:
                write_file(writing, [_mark(folder.name)])
                writing.rename(folder / MARK)
            except BaseException:
                with suppress(OSError):
                    writing.unlink()
                raise
            sync(folder)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{folder} cannot hold the checkpoints of a job: {error}. Give the job another name, or the runtime another folder.",
            folder=str(folder),
            step=None,
        ) from error


def read_mark(folder: Path) -> Mark | Unreadable | None:
    """The mark in a folder; None where there is none, so that nothing in the folder is ours."""
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


def _mark(job: str) -> bytes:
    return msgspec.json.encode(Mark(_WHAT, FORMAT, job)) + b"\n"


# -- a checkpoint ---------------------------------------------------------------------------------------------------------------


def write_checkpoint(folder: Path, *, name: str, step: int, leaves: tuple[Leaf, ...], state: Any) -> None:
    """Write a checkpoint into `folder`, which must not be there, and bring all of it to the disk."""
    folder.mkdir()
    write_file(folder / MARK, [_mark(name)])
    sizes: list[int] = []

    def parts() -> Iterable[memoryview]:
        for leaf, value in zip(leaves, jax.tree.leaves(state), strict=True):
            raw = to_bytes(value) if leaf.stored else np.empty(0, np.uint8)
            sizes.append(raw.nbytes)
            yield raw.data

    crc = write_file(folder / _STATE, parts())
    packages = {package: metadata.version(package) for package in ("jax", "jaxlib", "numpy")}
    versions = {"python": platform.python_version(), **packages}
    description = Description(name, step, versions, leaves, tuple(sizes), crc)
    sealed = Sealed(zlib.crc32(msgspec.json.encode(description)), description)
    write_file(folder / _DESCRIPTION, [msgspec.json.format(msgspec.json.encode(sealed), indent=1) + b"\n"])
    sync(folder)


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder is a checkpoint, be it whole or damaged; a folder of the user's with a number for its name is none."""
    if folder.is_symlink() or not folder.is_dir():
        return False
    if (folder / MARK).is_file():
        return True
    with suppress(OSError, ValueError):  # one of format 1, or one that has lost its mark
        msgspec.json.decode((folder / _DESCRIPTION).read_bytes(), type=_SealedSomehow)
        return True
    return False


def read_checkpoint(folder: Path, step: int) -> Description | Unreadable:
    """The description of the checkpoint of that step, if all of it is as it was written; or what is wrong with it."""
    mark = read_mark(folder)
    if isinstance(mark, Unreadable):
        return mark
    if mark is None:
        return Unreadable(f"{folder / MARK} is missing, without which it may be anybody's")
    if mark.format < FORMAT:
        return Unreadable(f"it was written by an earlier version of tensile_jax (format {mark.format})")
    try:
        sealed = msgspec.json.decode((folder / _DESCRIPTION).read_bytes(), type=Sealed)
        description = sealed.description
        if zlib.crc32(msgspec.json.encode(description)) != sealed.crc32:
            return Unreadable(f"{folder / _DESCRIPTION} is not as it was written")
        if description.step != step:
            return Unreadable(f"it is that of step {description.step}, and its folder was renamed")
        if not _is_whole(folder / _STATE, description):
            return Unreadable(f"{folder / _STATE} is not as it was written")
    except (OSError, ValueError) as error:
        return Unreadable(f"it is damaged: {error}")
    return description


def _is_whole(path: Path, description: Description) -> bool:
    if path.stat().st_size != sum(description.sizes):
        return False
    crc = 0
    with path.open("rb") as file:
        while part := file.read(_CHUNK):
            crc = zlib.crc32(part, crc)
    return crc == description.crc32


def load_leaves(folder: Path, description: Description) -> list[Any]:
    """The leaves of a checkpoint, which was read."""
    found: list[Any] = []
    with (folder / _STATE).open("rb") as file:
        for leaf, size in zip(description.leaves, description.sizes, strict=True):
            raw = np.empty(size, np.uint8)
            if file.readinto(raw.data) != size:
                raise ValueError(f"{folder / _STATE} ends too early")
            found.append(from_bytes(leaf, raw if leaf.stored else None))
    return found


def has_others(folder: Path) -> bool:
    """Whether there is anything in a checkpoint's folder that tensile_jax has not put there."""
    return not {path.name for path in folder.iterdir()} <= {MARK, _STATE, _DESCRIPTION}


def erase(folder: Path) -> None:
    """Remove the files of a checkpoint, and its folder; anything else in the folder stays, and so does then the folder."""
    if folder.is_symlink() or not folder.is_dir():
        return
    for name in (_DESCRIPTION, _STATE, MARK):
        (folder / name).unlink(missing_ok=True)
    if not any(folder.iterdir()):
        folder.rmdir()


# -- the disk -------------------------------------------------------------------------------------------------------------------


def write_file(path: Path, parts: Iterable[bytes | memoryview]) -> int:
    """Write a new file, and bring it to the disk; its CRC-32.

    Raises:
        OSError: there is a file of that name, or it cannot be written.
    """
    crc = 0
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        for part in parts:
            view = memoryview(part).cast("B") if len(part) else memoryview(b"")
            for begin in range(0, len(view), _CHUNK):
                chunk = view[begin : begin + _CHUNK]
                crc = zlib.crc32(chunk, crc)
                while chunk:
                    chunk = chunk[os.write(descriptor, chunk) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return crc


def sync(path: Path) -> None:
    """Wait until the list of what is in a folder is on the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
