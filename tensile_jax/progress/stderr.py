"""Writes to standard error, and ignores errors such as a closed pipe or a full disk."""

import sys
from contextlib import suppress
from typing import IO, Any, cast

from rich.console import Console


class _IgnoringErrors:
    """A stream without its errors: a closed pipe or terminal, or a full disk, must not end a training run."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @property
    def encoding(self) -> str:
        """The encoding of the stream."""
        return getattr(self._stream, "encoding", None) or "utf-8"

    def isatty(self) -> bool:
        """Whether the stream is a terminal."""
        return is_terminal(self._stream)

    def write(self, text: str) -> int:
        """Write the text, or drop it. Characters that the stream cannot write are replaced."""
        with suppress(OSError, ValueError, AttributeError):  # ValueError: it is closed; AttributeError: it is None
            self._stream.write(text.encode(self.encoding, "replace").decode(self.encoding))
        return len(text)

    def flush(self) -> None:
        """Flush the stream, or do nothing if that fails."""
        with suppress(OSError, ValueError, AttributeError):
            self._stream.flush()


def is_terminal(stream: Any) -> bool:
    """Whether a stream is a terminal. It is not if it is closed, or None, as where Python began without standard error."""
    try:
        return stream is not None and stream.isatty()
    except (AttributeError, ValueError):
        return False


def stderr_console(stream: Any = None, **options: Any) -> Console:
    """A console on standard error, or on the stream that is given in its place, that never raises an error of the system."""
    return Console(file=cast(IO[str], _IgnoringErrors(sys.stderr if stream is None else stream)), **options)
