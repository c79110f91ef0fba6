"""Simulates a disk that fails at one chosen point, such as a disk that is full at the third write.

Python code changes a disk only through the functions of `os` below, or by opening a file for writing, which Python's audit events
report. `FaultyDisk` counts these operations below one folder, and makes one of them fail. A write that fails has written half of
its bytes. Orbax writes arrays through the C++ library tensorstore, which this module does not see; `test_orbax_faults.py` tests
real faults of the disk instead.
"""

import errno
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

_BY_PATH = ("mkdir", "rename", "replace", "unlink", "rmdir")
_BY_DESCRIPTOR = ("write", "pwrite", "ftruncate", "fsync")
_current: "FaultyDisk | None" = None
_hooked = False


class FaultyDisk:
    """Use it in a `with` block.

    Args:
        folder: only what is below it counts.
        fail_at: the number of the call that fails, from zero; None: none does.
        once: the next calls succeed.
        error: called to make what is raised; an OSError of a full disk by default.
    """

    def __init__(
        self, folder: Path, *, fail_at: int | None = None, once: bool = True, error: Callable[[], Any] | None = None
    ) -> None:
        self.calls = 0
        self._folder = str(folder.absolute())
        self._fail_at = fail_at
        self._once = once
        self._error = error or (lambda: OSError(errno.ENOSPC, "No space left on device"))
        self._real: dict[str, Any] = {}
        self._opening = threading.local()
        self._counting = threading.Lock()

    def __enter__(self) -> Self:
        global _current, _hooked
        for name in (*_BY_PATH, *_BY_DESCRIPTOR, "open"):
            self._real[name] = getattr(os, name)
            setattr(os, name, self._wrapped(name, self._real[name]))
        _current = self
        if not _hooked:
            sys.addaudithook(_hear)  # stays until the process ends
            _hooked = True
        return self

    def __exit__(self, *error: object) -> None:
        global _current
        _current = None
        for name, real in self._real.items():
            setattr(os, name, real)

    def _wrapped(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if name == "open":
                if not args[1] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) or not self._is_below(args[0]):
                    return real(*args, **kwargs)
            elif not self._is_below(args[0] if name in _BY_PATH else f"/proc/self/fd/{args[0]}"):
                return real(*args, **kwargs)
            self._count(name, real, args)
            if name == "fsync":
                return None  # it takes long, and no test takes the disk away
            self._opening.it = name == "open"
            try:
                return real(*args, **kwargs)
            finally:
                self._opening.it = False

        return call

    def _count(self, name: str, real: Callable[..., Any], args: Any) -> None:
        with self._counting:
            number, self.calls = self.calls, self.calls + 1
        if self._fail_at is None or number < self._fail_at or (self._once and number > self._fail_at):
            return
        if name == "write":
            real(args[0], args[1][: len(args[1]) // 2])
        raise self._error()

    def _is_below(self, path: Any) -> bool:
        if str(path).startswith("/proc/self/fd/"):
            path = os.readlink(path)
        return os.path.abspath(os.fspath(path)).startswith(self._folder)

    def hear_open(self, path: Any, flags: int) -> None:
        """A file is opened in some way."""
        if flags & (os.O_WRONLY | os.O_RDWR) and not getattr(self._opening, "it", False) and self._is_below(path):
            self._count("open", lambda *args: None, (path, flags))


def _hear(event: str, args: tuple[Any, ...]) -> None:
    if event == "open" and _current is not None and isinstance(args[0], str | bytes | os.PathLike):
        _current.hear_open(args[0] if not isinstance(args[0], bytes) else args[0].decode(), args[2])
