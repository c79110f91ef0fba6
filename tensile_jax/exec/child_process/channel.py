"""Sends messages between a runtime and a job's own process, over a pair of sockets.

    runtime -> process    Payload Ask*
    process -> runtime    (Heartbeat | News | Answer | Refused)*

The `Payload` is the job itself (`payload.py`). An `Ask` is a request; `News` answers no request; `Refused` carries the error of a
request. A message has several *parts*: a pickle (protocol 5) and its out-of-band buffers, so that arrays are sent without a
copy. The sender sends the sizes of the parts first, and then each part in chunks, through a `multiprocessing` connection on its
socket. Both processes run the code of the same user, so each may unpickle what the other sends. Bytes that are no message raise
an error in the receiver.
"""

import json
import os
import pickle
import socket
import threading
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from tensile_jax.exec.child_process.carried_exception import CarriedException

_CHUNK = 1 << 24  # bytes; text that another program writes into the socket is read as a larger size


@dataclass(frozen=True, slots=True)
class Ask:
    """A request to do `what`. If `number` is not None, the sender waits for an `Answer` or a `Refused` with that number."""

    what: str
    args: tuple[Any, ...] = ()
    number: int | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of an `Ask`."""

    number: int
    value: Any


@dataclass(frozen=True, slots=True)
class Refused:
    """The error of an `Ask`. If it is `fatal`, the process is of no use any more and is ended."""

    number: int | None
    error: CarriedException
    fatal: bool


@dataclass(frozen=True, slots=True)
class News:
    """A message that answers no `Ask`."""

    what: Any


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A message that says only that the process is alive."""


class InvalidMessage(ValueError):
    """The bytes that came over the socket are not a message."""


class Channel:
    """One end of a pair of sockets. Any thread may send; one thread receives. `received` counts the chunks that have come."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._connection = Connection(os.dup(end.fileno()))
        self._sending = threading.Lock()
        self.received = 0

    def send(self, message: Any) -> None:
        """Send `message`, all of it.

        Raises:
            OSError: the other end is closed.
        """
        buffers: list[pickle.PickleBuffer] = []
        pickled = pickle.dumps(message, protocol=5, buffer_callback=buffers.append)
        parts = [memoryview(pickled), *(buffer.raw() for buffer in buffers)]
        with self._sending:
            self._connection.send_bytes(json.dumps([part.nbytes for part in parts]).encode())
            for part in parts:
                for begin in range(0, part.nbytes, _CHUNK):
                    self._connection.send_bytes(part[begin : begin + _CHUNK])  # pyright: ignore[reportArgumentType] # any buffer

    def receive(self) -> Any:
        """The next message.

        Raises:
            EOFError, OSError: the other end is closed.
            InvalidMessage: the other end has sent bytes that are not a message.
        """
        try:
            pickled, *buffers = [self._next_part(size) for size in json.loads(self._next_chunk())]
            return pickle.loads(pickled, buffers=buffers)
        except (EOFError, OSError, InvalidMessage):
            raise
        except Exception as error:
            raise InvalidMessage(f"{type(error).__name__}: {error}") from error

    def end(self) -> None:
        """Shut the connection down. A waiting `receive` ends. What has arrived before can still be received."""
        try:
            self._end.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # it was closed already

    def close(self) -> None:
        """Close the socket. Called by the thread that receives."""
        self.end()
        self._end.close()
        self._connection.close()

    def _next_part(self, size: int) -> bytearray:
        part = bytearray()
        while len(part) < size:  # the array grows only as bytes arrive, whatever size was announced
            part += self._next_chunk()
        return part

    def _next_chunk(self) -> bytes:
        try:
            chunk = self._connection.recv_bytes(_CHUNK)
        except OSError as error:
            if not self._connection.readable:  # a connection stays readable after all other errors
                raise InvalidMessage(f"more than {_CHUNK} bytes at once") from error
            raise
        self.received += 1
        return chunk
