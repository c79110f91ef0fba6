"""What says that a checkpoint is all there and as it was written: sizes and checksums of its files, beside them.

    checkpoint.json ::= Sealed,  Sealed ::= crc32 Description,  Description ::= ... Leaf* (path size crc32)*

CRC-32 finds a disk's mistakes, not an enemy's.
"""

import os
import platform
import zlib
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import msgspec

from tensile_jax.exec.leaves import Leaf

_FORMAT = 1
_DESCRIPTION = "checkpoint.json"
STATE = "state"
"""The folder inside a checkpoint's that is sealed."""


@dataclass(frozen=True, slots=True)
class Description:
    """What lies beside the bytes. `files`: size and CRC-32 of each file under `state`, by its path there."""

    format: int
    name: str
    step: int
    versions: dict[str, str]
    leaves: tuple[Leaf, ...]
    files: dict[str, tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Sealed:
    """The content of `checkpoint.json`; `crc32` is that of the description's own JSON."""

    crc32: int
    description: Description


def seal(folder: Path, *, name: str, step: int, leaves: tuple[Leaf, ...]) -> None:
    """Bring every file to the disk, and write down what they are."""
    packages = {package: metadata.version(package) for package in ("jax", "jaxlib", "numpy", "orbax-checkpoint")}
    description = Description(
        format=_FORMAT,
        name=name,
        step=step,
        versions={"python": platform.python_version(), **packages},
        leaves=leaves,
        files={str(path.relative_to(folder / STATE)): _sum(path) for path in _files(folder / STATE)},
    )
    sealed = Sealed(zlib.crc32(msgspec.json.encode(description)), description)
    (folder / _DESCRIPTION).write_bytes(msgspec.json.format(msgspec.json.encode(sealed), indent=1) + b"\n")
    for path in (*_files(folder), *(path for path in folder.rglob("*") if path.is_dir()), folder):
        sync(path)


def read_sealed(folder: Path) -> Description | str:
    """The description of a checkpoint whose files are all as they were written, or else what is wrong with it."""
    try:
        sealed = msgspec.json.decode((folder / _DESCRIPTION).read_bytes(), type=Sealed)
        description = sealed.description
        if description.format != _FORMAT:
            return f"{folder / _DESCRIPTION} has format {description.format}, and this version reads {_FORMAT}"
        if zlib.crc32(msgspec.json.encode(description)) != sealed.crc32:
            return f"{folder / _DESCRIPTION} is not as it was written"
        for name, expected in description.files.items():
            if _sum(folder / STATE / name, expected[0]) != expected:
                return f"{folder / STATE / name} is not as it was written"
    except (OSError, ValueError) as error:
        return f"it is damaged: {error}"
    return description


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _sum(path: Path, expected: int | None = None) -> tuple[int, int]:
    """Size and CRC-32; of a file that has not the size expected, it is not asked what is in it."""
    size = path.stat().st_size
    if expected is not None and size != expected:
        return size, 0
    crc = 0
    with path.open("rb") as file:
        while part := file.read(1 << 20):
            crc = zlib.crc32(part, crc)
    return size, crc


def sync(path: Path) -> None:
    """Wait until a file, or the list of what is in a folder, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
