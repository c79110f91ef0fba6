"""A pseudo-terminal in the place of standard output and standard error."""

import os
import pty
import select
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


class Terminal:
    """A terminal of 80 columns; `read` returns what has been written to it since the last time."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def read(self) -> str:
        found = b""
        while select.select([self._descriptor], [], [], 0.0)[0]:
            found += os.read(self._descriptor, 1 << 16)
        return found.decode().replace("\r\n", "\n")


@contextmanager
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    """Standard output and standard error are a terminal during the block."""
    ours, theirs = pty.openpty()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    with os.fdopen(theirs, "w", buffering=1) as out, os.fdopen(os.dup(theirs), "w", buffering=1) as err:
        with monkeypatch.context() as patched:
            patched.setattr(sys, "stdout", out)
            patched.setattr(sys, "stderr", err)
            yield Terminal(ours)
    os.close(ours)


def visible(text: str) -> list[str]:
    """The lines that a terminal shows once `text` was written to it: as far as this project's line needs it.

    >>> visible("hello\\n\\r\\x1b[2Kplanning\\r\\r\\x1b[2K\\x1b[2mcompiling\\x1b[0m\\rDone")
    ['hello', 'Doneiling']
    """
    rows, column = [""], 0
    for part in _parts(text):
        match part:
            case "\n":
                rows.append("")
                column = 0
            case "\r":
                column = 0
            case "\x1b[2K":
                rows[-1] = ""
            case style if style.startswith("\x1b["):
                pass
            case character:
                rows[-1] = rows[-1].ljust(column)[:column] + character + rows[-1][column + 1 :]
                column += 1
    return rows


def _parts(text: str) -> Iterator[str]:
    while text:
        end = 1
        if text.startswith("\x1b["):
            end = next(i for i, c in enumerate(text) if c.isalpha()) + 1
        yield text[:end]
        text = text[end:]
