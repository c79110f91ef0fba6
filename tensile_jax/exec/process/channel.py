"""Sends messages between a runtime and a job's own process, over a pair of sockets.

    runtime -> process    Payload Ask*
    process -> runtime    (Heartbeat | News | Answer | Refused)*

A message consists of its pickle (protocol 5) and of the pickle's buffers, so that arrays are sent without a copy. A connection of
`multiprocessing` carries the list of their sizes first, then each of them in chunks. Both ends run the same user's code, so they
may unpickle what the other one sends. What cannot be read is an error to its receiver and does no other harm.
"""

import json
import os
import pickle
import socket
import threading
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from tensile_jax.exec.process.carried_exception import CarriedException

_CHUNK = 1 << 24  # bytes; text that somebody else writes into the socket is read as a larger number


@dataclass(frozen=True, slots=True)
class Ask:
    """Do `what`; if `number` is not None, an `Answer` or a `Refused` of that number is waited for."""

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
    """What went wrong with an `Ask`. If it is `fatal`, nothing more can be done with the process."""

    number: int | None
    error: CarriedException
    fatal: bool


@dataclass(frozen=True, slots=True)
class News:
    """Something that nobody asked for."""

    what: Any


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A sign of life."""


class InvalidMessage(ValueError):
    """What came over the socket is no message."""


class Channel:
    """One end of a pair of sockets. Any thread may send; one thread receives. `received` counts what has come."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._connection = Connection(os.dup(end.fileno()))
        self._sending = threading.Lock()
        self.received = 0

    def send(self, message: Any) -> None:
        """Send `message`, all of it.

        Raises:
            OSError: the other end is gone.
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
            EOFError, OSError: the other end is gone.
            InvalidMessage: it sent something else.
        """
        try:
            pickled, *buffers = [self._next_part(size) for size in json.loads(self._next_chunk())]
            return pickle.loads(pickled, buffers=buffers)
        except (EOFError, OSError, InvalidMessage):
            raise
        except Exception as error:
            raise InvalidMessage(f"{type(error).__name__}: {error}") from error

    def end(self) -> None:
        """Nothing more goes over it; whoever waits for something to come is told so. What has come can still be received."""
        try:
            self._end.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # it was closed already

    def close(self) -> None:
        """Give the socket back. For the thread that receives."""
        self.end()
        self._end.close()
        self._connection.close()

    def _next_part(self, size: int) -> bytearray:
        part = bytearray()
        while len(part) < size:  # it grows as bytes come, whatever size was announced
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
