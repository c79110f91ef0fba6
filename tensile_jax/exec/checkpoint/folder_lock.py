"""Locks a job's folder of checkpoints, so that only one runtime at a time uses the folder.

The lock is `flock` on the file `tensile.lock`. The operating system holds it for as long as any process has the file open: the
process of the runtime, and the job's own process if it has one. So the lock ends with these processes, however they end. The file
itself stays. If it were removed, two processes could each lock a different file of the same name.
"""

import fcntl
import os
import warnings
import weakref
from contextlib import suppress
from pathlib import Path

from tensile_jax.errors import CheckpointError
from tensile_jax.exec.checkpoint.format import mark_folder

_LOCK = "tensile.lock"
_MOST_DIGITS = 20


class FolderLock:
    """The lock of one folder, held until `release`. The folder is made and marked if it does not exist.

    Raises:
        CheckpointError: another run uses the folder, or the folder cannot be made or is not fit.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()
        self.descriptor: int | None = None
        self.renew()
        _held.add(self)

    def renew(self) -> None:
        """Take the lock again if somebody has removed its file or the folder, since others could then lock a new file.

        Raises:
            CheckpointError: another run has locked the new file, or the folder is not fit.
        """
        folder = self.folder
        if self.descriptor is not None and _is_there(self.descriptor, folder / _LOCK):
            return
        mark_folder(folder)
        path = folder / _LOCK
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be opened: {error}.", folder=str(folder), step=None) from error
        try:
            _take(descriptor, folder)
            _write_pid(descriptor, path)
        except BaseException:
            os.close(descriptor)
            raise
        self.release()
        self.descriptor = descriptor

    def release(self) -> None:
        """Release the lock at once, even if the job's own process still has the file open for a moment."""
        descriptor, self.descriptor = self.descriptor, None
        if descriptor is not None:
            with suppress(OSError):  # on a file system without locks
                fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)

    def forget(self) -> None:
        """In a forked process: close the file without releasing the lock, which the parent process still holds."""
        descriptor, self.descriptor = self.descriptor, None
        if descriptor is not None:
            os.close(descriptor)


def _is_there(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _take(descriptor: int, folder: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        pid = os.pread(descriptor, _MOST_DIGITS, 0).decode("ascii", "replace").strip()
        who = "another job of this process" if pid == str(os.getpid()) else f"another run, that of process {pid or 'unknown'}"
        raise CheckpointError(
            f"{folder} is in use by {who}. Two runs must not write into one folder: wait until the other one has ended, give "
            "this job another name, or the runtime another folder.",
            folder=str(folder),
            step=None,
        ) from error
    except OSError as error:  # some network file systems have no locks
        warnings.warn(
            f"{folder} cannot be locked ({error}). Make sure that only one process at a time uses it.",
            RuntimeWarning,
            stacklevel=5,
        )


def _write_pid(descriptor: int, path: Path) -> None:
    """Write this process's id into the file, for the error message of another process that finds the folder locked."""
    if not os.pread(descriptor, _MOST_DIGITS + 1, 0).strip().isdigit() and os.fstat(descriptor).st_size:
        raise CheckpointError(
            f"{path} was not written by tensile_jax, which needs that name. Rename it.", folder=str(path.parent), step=None
        )
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, b"%d\n" % os.getpid(), 0)
    except OSError:
        pass  # a full disk: the lock holds all the same, and the message of the other process says "unknown"


_held: "weakref.WeakSet[FolderLock]" = weakref.WeakSet()


def _forget_in_child() -> None:
    for lock in tuple(_held):
        lock.forget()


os.register_at_fork(after_in_child=_forget_in_child)  # a data loader's worker may live longer than the run
