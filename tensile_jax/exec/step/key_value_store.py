"""A key-value store that several processes share: what `exec/step/agreement.py` writes its messages to.

One process holds the values, in a `Store`. It serves them to the others (`Server`), and each of these reaches them by a
`RemoteStore`, which is the same to use. A request and its answer are MessagePack, over `multiprocessing.connection`. Both ends of
a connection prove first that they know a secret key (HMAC, as in `multiprocessing`), so nobody else can read or write values.
Nothing that is received is executed: it is not unpickled.

A process seldom knows the address under which other machines reach it. So a server names all addresses of its machine, and a
client takes the first one at which somebody knows the key.
"""

import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import AuthenticationError
from multiprocessing import connection as mp
from typing import Any, Protocol

import msgspec

_CONNECT_S = 5.0  # for reaching one address; a machine on the same network answers in milliseconds. Not tuned
_ANSWER_S = 60.0  # for the answer to a request, beyond what the request itself waits. Not tuned
_MOST_HOSTS = 8
_NOT_OURS = (OSError, EOFError, AuthenticationError, AssertionError)  # `answer_challenge` asserts what it receives


class Values(Protocol):
    """What a store does, in the process that holds the values and in the others.

    Every method may raise an `OSError` where the values are in another process: that process has ended, or cannot be reached.
    """

    def put(self, key: str, value: bytes) -> None:
        """Set the value of a key, whether it has one or not."""
        ...

    def get(self, key: str, wait_s: float) -> bytes | None:
        """The value of a key, for which this waits at most `wait_s` seconds; None if there is none then."""
        ...

    def entries(self, prefix: str) -> list[tuple[str, bytes]]:
        """(key, value) of all keys that begin with `prefix`, in the order of the keys."""
        ...

    def delete(self, prefix: str) -> None:
        """Forget all keys that begin with `prefix`."""
        ...


class Store:
    """The values, in the process that holds them. May be used from several threads."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def put(self, key: str, value: bytes) -> None:
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def get(self, key: str, wait_s: float) -> bytes | None:
        with self._changed:
            self._changed.wait_for(lambda: key in self._values, wait_s)
            return self._values.get(key)

    def entries(self, prefix: str) -> list[tuple[str, bytes]]:
        with self._changed:
            return sorted((key, value) for key, value in self._values.items() if key.startswith(prefix))

    def delete(self, prefix: str) -> None:
        with self._changed:
            self._values = {key: value for key, value in self._values.items() if not key.startswith(prefix)}


class Address(msgspec.Struct, frozen=True):
    """Where a store is served.

    Attributes:
        hosts: IPv4 addresses of the machine, the likeliest first.
        port: the TCP port, on each of them.
        key: the secret that both ends of a connection know.
    """

    hosts: list[str]
    port: int
    key: bytes


class _Request(msgspec.Struct, frozen=True, array_like=True):
    """A method of a store, by its name, with its arguments."""

    method: str
    key: str
    value: bytes = b""
    wait_s: float = 0.0


class Server:
    """Serves a store, by threads that end with this process.

    Args:
        store: the values.
        on_lost: called with the number of a process whose connection has ended, in a thread of the server.
    """

    def __init__(self, store: Store, on_lost: Callable[[int], None]) -> None:
        self._store = store
        self._on_lost = on_lost
        self._key = secrets.token_bytes(32)
        self._listener = mp.Listener(("0.0.0.0", 0), backlog=1024)
        self._port = int(self._listener.address[1])
        threading.Thread(target=self._accept, name="tensile store", daemon=True).start()

    @property
    def address(self) -> Address:
        return Address(_hosts(), self._port, self._key)

    def _accept(self) -> None:
        while True:
            try:
                connection = self._listener.accept()
            except OSError:  # who called has gone again, or this process has too many open files
                time.sleep(0.1)
                continue
            threading.Thread(target=self._answer, args=(connection,), name="tensile store", daemon=True).start()

    def _answer(self, connection: "mp.Connection[Any, Any]") -> None:
        """Answer the requests of one connection until it ends."""
        process = None
        with connection, suppress(*_NOT_OURS, msgspec.DecodeError):
            mp.deliver_challenge(connection, self._key)
            mp.answer_challenge(connection, self._key)
            process = msgspec.msgpack.decode(connection.recv_bytes(), type=int)
            while True:
                request = msgspec.msgpack.decode(connection.recv_bytes(), type=_Request)
                connection.send_bytes(msgspec.msgpack.encode(self._done(request)))
        if process is not None:
            self._on_lost(process)

    def _done(self, request: _Request) -> Any:
        match request.method:
            case "put":
                return self._store.put(request.key, request.value)
            case "get":
                return self._store.get(request.key, request.wait_s)
            case "entries":
                return self._store.entries(request.key)
            case "delete":
                return self._store.delete(request.key)
            case other:
                raise msgspec.DecodeError(f"{other!r} is no method of a store")


class RemoteStore:
    """The values of a store that another process serves. May be used from several threads, which then wait for one another.

    Args:
        address: where the store is served.
        process: the number of this process.

    Raises:
        OSError: no address of the server can be reached, or nobody there knows the key. The message says what each one answered.
    """

    def __init__(self, address: Address, process: int) -> None:
        self._turn = threading.Lock()
        failures: list[str] = []
        for host in address.hosts:
            try:
                self._connection = _connected(host, address.port, address.key)
                break
            except _NOT_OURS as error:
                failures.append(f"{host}:{address.port}: {error or type(error).__name__}")
        else:
            raise OSError("; ".join(failures))
        self._connection.send_bytes(msgspec.msgpack.encode(process))

    def put(self, key: str, value: bytes) -> None:
        self._ask(_Request("put", key, value), None)

    def get(self, key: str, wait_s: float) -> bytes | None:
        return self._ask(_Request("get", key, wait_s=wait_s), bytes | None)

    def entries(self, prefix: str) -> list[tuple[str, bytes]]:
        return self._ask(_Request("entries", prefix), list[tuple[str, bytes]])

    def delete(self, prefix: str) -> None:
        self._ask(_Request("delete", prefix), None)

    def _ask(self, request: _Request, kind: Any) -> Any:
        with self._turn:
            if self._connection.closed:
                raise ConnectionError("the connection was closed")
            try:
                self._connection.send_bytes(msgspec.msgpack.encode(request))
                if not self._connection.poll(request.wait_s + _ANSWER_S):
                    raise TimeoutError(f"no answer for {request.wait_s + _ANSWER_S:g} s")
                return msgspec.msgpack.decode(self._connection.recv_bytes(), type=kind)
            except EOFError as error:
                raise ConnectionError("the process that holds the store has ended") from error
            except BaseException:  # an answer may still come, and would be taken for that of the next request
                self._connection.close()
                raise


def _connected(host: str, port: int, key: bytes) -> "mp.Connection[Any, Any]":
    with socket.create_connection((host, port), timeout=_CONNECT_S) as reached:
        reached.settimeout(None)
        connection: mp.Connection[Any, Any] = mp.Connection(reached.detach())
    try:
        if not connection.poll(_CONNECT_S):
            raise TimeoutError("something else answers there")
        mp.answer_challenge(connection, key)
        mp.deliver_challenge(connection, key)
    except BaseException:
        connection.close()
        raise
    return connection


def _hosts() -> list[str]:
    """IPv4 addresses of this machine: that of its way to other networks, those of its name, and the one for itself."""
    found: list[str] = []
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # an address for documentation: UDP sends nothing here, it only chooses a way
        found.append(probe.getsockname()[0])
    with suppress(OSError):
        found += socket.gethostbyname_ex(socket.gethostname())[2]
    return list(dict.fromkeys([*found[: _MOST_HOSTS - 1], "127.0.0.1"]))
