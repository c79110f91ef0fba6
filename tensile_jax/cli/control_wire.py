"""What a second terminal and a run say to each other, and where they meet.

    meeting place  ::= control.sock, a Unix socket in the run folder
    conversation   ::= Request newline Reply newline          one JSON object each; then the connection ends

The name of a Unix socket may have about 100 bytes, a run folder more: a longer one is reached through a short link to it,
which is gone again when the socket is bound or connected.
"""

import os
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tensile_jax.runtime_records import Status

Command = Literal["status", "pause", "resume", "cancel", "budget"]

SOCKET = "control.sock"
_LONGEST_NAME = 100  # bytes: Linux takes 107, macOS 103


@dataclass(frozen=True, slots=True)
class Request:
    """`job`: which one to pause, resume or cancel. `budget_bytes`: the new budget. Empty and zero for other commands."""

    command: Command
    job: str = ""
    budget_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Reply:
    """`status`: what was asked for, with the command of that name. `error`: why not, else empty."""

    status: Status | None = None
    error: str = ""


@contextmanager
def reachable(folder: Path) -> Iterator[str]:
    """The name by which the socket in `folder` can be bound or connected, inside the block."""
    name = os.path.abspath(folder / SOCKET)
    if len(os.fsencode(name)) <= _LONGEST_NAME:
        yield name
        return
    with tempfile.TemporaryDirectory(prefix="run") as short:
        link = Path(short, "r")
        link.symlink_to(os.path.abspath(folder), target_is_directory=True)
        yield str(link / SOCKET)


def connect(folder: Path, *, timeout_s: float) -> socket.socket:
    """A connection to the run in `folder`.

    Raises:
        FileNotFoundError: there is no socket.
        ConnectionRefusedError: there is one, and nobody listens.
        BlockingIOError: too many others wait for it already.
        OSError: it is not ours, or cannot be reached.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(timeout_s)
        with reachable(folder) as name:
            connection.connect(name)
    except BaseException:
        connection.close()
        raise
    return connection
