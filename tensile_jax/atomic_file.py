"""Writes a file so that afterwards the file either holds all of the new content or is unchanged.

The content is written to a temporary file in the same folder, and synced to the disk. Then the temporary file is renamed to the
wanted name, which the file system does in one step. The wanted file is unchanged if, before the rename, the disk is full, the
process is killed or the power fails.

A file that is not a regular file (`/dev/stdout`, a pipe) cannot be replaced and is written directly.
"""

import os
import stat
from contextlib import suppress
from itertools import count

UNFINISHED = ".tensile-[0-9]*.partial"
"""A glob pattern of the names under which files are written."""

_WRITABLE_BY_UMASK = 0o666
_NUMBERS = count()
_unfinished: set[str] = set()


def write_whole(path: "str | os.PathLike[str]", content: bytes) -> None:
    """Replace the content of the file `path`. A symbolic link is followed, and the permissions of an existing file are kept.

    Raises:
        OSError: the file cannot be written. The error names `path`, and a regular file at `path` is unchanged.
    """
    try:
        if _is_special(path):
            with open(path, "wb", buffering=0) as file:
                _write_all(file.fileno(), content)
        else:
            _replace(os.path.realpath(path), content)
    except OSError as error:
        raise OSError(error.errno, error.strerror or type(error).__name__, os.fspath(path)) from error


def try_to_write(path: "str | os.PathLike[str]") -> None:
    """Find out whether `write_whole` could write the file `path`, without changing it.

    Raises:
        OSError: `write_whole` could not write it.
    """
    if _is_special(path):
        if stat.S_ISDIR(os.stat(path).st_mode):
            raise IsADirectoryError(21, "Is a directory", os.fspath(path))
        return
    target = os.path.realpath(path)
    with suppress(FileNotFoundError):
        os.stat(target)  # raises OSError for a name that is too long
    partial, descriptor = _begin(os.path.dirname(target))
    os.close(descriptor)
    _give_up(partial)


def remove_unfinished() -> None:
    """Remove the files that this process has begun to write and has not finished. For a process that is about to end."""
    for partial in tuple(_unfinished):
        _give_up(partial)


def _is_special(path: "str | os.PathLike[str]") -> bool:
    name = os.path.abspath(path)
    if name.startswith(("/dev/", "/proc/")):  # /dev/stdout may be a regular file that another process has open
        return True
    try:
        return not stat.S_ISREG(os.stat(path).st_mode)
    except FileNotFoundError:
        return False


def _replace(target: str, content: bytes) -> None:
    partial, descriptor = _begin(os.path.dirname(target))
    try:
        try:
            with suppress(FileNotFoundError):
                os.fchmod(descriptor, stat.S_IMODE(os.stat(target).st_mode))
            _write_all(descriptor, content)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(partial, target)
        _unfinished.discard(partial)
    except BaseException:
        _give_up(partial)
        raise


def _begin(folder: str) -> tuple[str, int]:
    partial = os.path.join(folder, f".tensile-{os.getpid()}-{next(_NUMBERS)}.partial")
    _unfinished.add(partial)
    try:
        return partial, os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _WRITABLE_BY_UMASK)
    except BaseException:
        _unfinished.discard(partial)
        raise


def _give_up(partial: str) -> None:
    with suppress(OSError):
        os.unlink(partial)
    _unfinished.discard(partial)


def _write_all(descriptor: int, content: bytes) -> None:
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(descriptor, rest) :]
