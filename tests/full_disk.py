"""Simulates a disk that is full from some call on, or for one call, by patching the functions of `os` that write files."""

import errno
import os
from collections.abc import Callable
from typing import Any

import pytest

_CALLS = ("open", "write", "fsync", "replace")


class FullDisk:
    """Counts the calls that need the disk, and fails those whose number, from 0, `fails` holds for.

    `open` counts where it makes a file. Only what goes through the functions of `os` is seen. That is all that the package
    writes, but not what pytest, JAX and Orbax write.
    """

    def __init__(self, patch: pytest.MonkeyPatch, fails: Callable[[int], bool]) -> None:
        self.calls = 0
        self._fails = fails
        for name in _CALLS:
            patch.setattr(os, name, self._guard(name, getattr(os, name)))

    def _guard(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(*args: Any, **kwargs: Any) -> Any:
            if name == "open" and not args[1] & os.O_CREAT:
                return real(*args, **kwargs)
            number = self.calls
            self.calls += 1
            if self._fails(number):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(*args, **kwargs)

        return guarded
