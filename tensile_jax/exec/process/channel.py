"""Messages between a runtime and a job's own process, over a socket.

    runtime -> process    Setting Parcel Ask*
    process -> runtime    (Alive | News | Answer | Refused)*

    frame ::= magic count length* part*     the first part is a pickle (protocol 5), the others are its buffers, uncopied

Both ends run the same user's code, so messages are pickles. What cannot be read is an error to whoever receives it and does no
harm beyond; a process that gives no sign of life within `patience_s`, twice, is taken for hung.
"""

import pickle
import socket
import struct
import threading
from dataclasses import dataclass
from typing import Any

from tensile_jax.exec.process.carried_exception import Thrown

_MAGIC = b"tens"
_HEADER = struct.Struct("!4sI")
_MOST_PARTS = 1 << 20
_MOST_BYTES = 1 << 44
_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class Ask:
    """Do `what`; if `number` is not None, an `Answer` or a `Refused` of that number is waited for."""

    what: str
    args: tuple[Any, ...] = ()
    number: int | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of an `Ask`."""

    number: int
    value: Any


@dataclass(frozen=True, slots=True)
class Refused:
    """What went wrong with an `Ask`. If it is `fatal`, nothing more can be done with the process."""

    number: int | None
    thrown: Thrown
    fatal: bool


@dataclass(frozen=True, slots=True)
class News:
    """Something that nobody asked for."""

    what: Any


@dataclass(frozen=True, slots=True)
class Alive:
    """Nothing new."""


class Garbled(ValueError):
    """What came over the socket is no message."""


class Channel:
    """One end of a socket. Any thread may send; one receives."""

    def __init__(self, end: socket.socket, *, patience_s: float | None = None) -> None:
        end.settimeout(patience_s)
        self._end = end
        self._sending = threading.Lock()

    def expect_within(self, patience_s: float) -> None:
        """From now on the other end must give a sign of life that often."""
        self._end.settimeout(patience_s)

    def send(self, message: Any) -> None:
        """Send it, all of it.

        Raises:
            OSError: the other end is gone, or takes nothing.
        """
        buffers: list[pickle.PickleBuffer] = []
        pickled = pickle.dumps(message, protocol=5, buffer_callback=buffers.append)
        parts = [memoryview(pickled), *(buffer.raw() for buffer in buffers)]
        header = _HEADER.pack(_MAGIC, len(parts)) + struct.pack(f"!{len(parts)}Q", *(part.nbytes for part in parts))
        with self._sending:
            for part in (memoryview(header), *parts):
                for begin in range(0, part.nbytes, _CHUNK):
                    self._end.sendall(part[begin : begin + _CHUNK])

    def receive(self) -> Any:
        """The next message.

        Raises:
            EOFError: the other end is gone.
            TimeoutError: it gives no sign of life.
            Garbled: it sent something else.
        """
        magic, count = _HEADER.unpack(self._take(_HEADER.size))
        if magic != _MAGIC or not 0 < count <= _MOST_PARTS:
            raise Garbled(f"a frame begins with {magic!r}")
        sizes = struct.unpack(f"!{count}Q", self._take(8 * count))
        if sum(sizes) > _MOST_BYTES:
            raise Garbled(f"a frame of {sum(sizes)} bytes")
        try:
            pickled, *buffers = [self._take(size) for size in sizes]
            return pickle.loads(pickled, buffers=buffers)
        except (EOFError, OSError):
            raise
        except Exception as error:
            raise Garbled(f"{type(error).__name__}: {error}") from error

    def end(self) -> None:
        """Nothing more goes over it; what the other end has sent can still be received."""
        try:
            self._end.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # it was closed already

    def close(self) -> None:
        """Give the socket back. For the thread that receives."""
        self.end()
        self._end.close()

    def _take(self, size: int) -> bytearray:
        taken = bytearray()
        while len(taken) < size:  # it grows as bytes come, whatever size was announced
            filled = len(taken)
            taken.extend(bytes(min(size - filled, max(_CHUNK, filled))))
            with memoryview(taken) as view:
                while filled < len(view):
                    got = self._receive_into(view[filled:])
                    if not got:
                        raise EOFError
                    filled += got
        return taken

    def _receive_into(self, view: memoryview) -> int:
        try:
            return self._end.recv_into(view)
        except TimeoutError:  # after this process itself was stopped for a while, what was sent meanwhile is there
            return self._end.recv_into(view)
