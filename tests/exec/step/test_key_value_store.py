"""The key-value store of several processes: over real connections, all in this process."""

import socket
import threading
import time
from collections.abc import Callable
from multiprocessing import connection as mp

import pytest

from tensile_jax.exec.step.key_value_store import Address, RemoteStore, Server, Store, Values


class Lost(list[int]):
    """The processes whose connections have ended."""

    def __init__(self) -> None:
        self._changed = threading.Condition()

    def append(self, process: int) -> None:
        with self._changed:
            super().append(process)
            self._changed.notify_all()

    def expect(self, *processes: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: sorted(self) == sorted(processes), 10), self


@pytest.fixture
def lost() -> Lost:
    return Lost()


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def address(store: Store, lost: Lost) -> Address:
    return Server(store, lost.append).address


@pytest.fixture(params=["in this process", "in another process"])
def values(request: pytest.FixtureRequest, store: Store, address: Address) -> Values:
    return store if request.param == "in this process" else RemoteStore(address, 1)


def test_values_are_set_read_listed_and_forgotten(values: Values) -> None:
    values.put("1/b", b"old")
    values.put("1/b", b"\x00\xff")
    values.put("1/a", b"")
    values.put("11/a", b"other")
    assert values.get("1/b", 0) == b"\x00\xff" and values.get("1/a", 0) == b"" and values.get("1/c", 0) is None
    assert values.entries("1/") == [("1/a", b""), ("1/b", b"\x00\xff")]
    values.delete("1/")
    assert values.entries("") == [("11/a", b"other")]


def test_a_large_value_arrives_whole(store: Store, address: Address) -> None:
    content = bytes(range(256)) * 2**14
    RemoteStore(address, 1).put("plan", content)
    assert RemoteStore(address, 2).get("plan", 0) == content


def test_who_asks_waits_until_the_value_is_there(values: Values, store: Store) -> None:
    later = threading.Timer(0.05, store.put, ("key", b"value"))
    later.start()
    assert values.get("key", 30) == b"value"
    later.join()


def test_two_processes_do_not_wait_for_one_another(address: Address) -> None:
    waiting, other = RemoteStore(address, 1), RemoteStore(address, 2)
    found: list[bytes | None] = []
    thread = threading.Thread(target=lambda: found.append(waiting.get("key", 30)))
    thread.start()
    other.put("key", b"value")
    thread.join(10)
    assert found == [b"value"]


def test_a_connection_that_ends_is_noted_with_its_process(address: Address, lost: Lost) -> None:
    first, second = RemoteStore(address, 1), RemoteStore(address, 2)
    second._connection.close()
    lost.expect(2)
    first.put("key", b"")
    first._connection.close()
    lost.expect(1, 2)


def test_after_a_connection_was_closed_every_method_fails(address: Address) -> None:
    remote = RemoteStore(address, 1)
    remote._connection.close()
    for call in (lambda: remote.put("key", b""), lambda: remote.get("key", 0), lambda: remote.entries("")):
        with pytest.raises(ConnectionError):
            call()


def test_the_end_of_the_server_is_told() -> None:
    listener, key = mp.Listener(("127.0.0.1", 0)), b"key"

    def serve() -> None:
        with listener, listener.accept() as connection:
            mp.deliver_challenge(connection, key)
            mp.answer_challenge(connection, key)

    threading.Thread(target=serve, daemon=True).start()
    remote = RemoteStore(Address(["127.0.0.1"], int(listener.address[1]), key), 1)
    with pytest.raises(ConnectionError, match="the process that holds the store has ended|Broken pipe|reset by peer"):
        remote.get("key", 0)


def test_an_address_at_which_nobody_answers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[socket.socket] = []
    port = _served_by(lambda reached: held.append(reached))
    monkeypatch.setattr("tensile_jax.exec.step.key_value_store._CONNECT_S", 0.05)
    with pytest.raises(OSError, match=f"127.0.0.1:{port}: something else answers there"):
        RemoteStore(Address(["127.0.0.1"], port, b"key"), 1)


def test_the_first_address_at_which_the_key_is_known_is_taken(store: Store, address: Address) -> None:
    refusing = "127.0.0.2" if address.hosts[0] == "127.0.0.1" else "127.0.0.1"
    wrong = Address([refusing], _served_by(lambda reached: reached.close()), address.key)
    with pytest.raises(OSError, match=f"{refusing}:{wrong.port}: "):
        RemoteStore(wrong, 1)
    RemoteStore(Address(["255.255.255.255", *address.hosts], address.port, address.key), 1).put("key", b"here")
    assert store.get("key", 0) == b"here"


def test_who_does_not_know_the_key_is_refused_and_others_are_served(store: Store, address: Address, lost: Lost) -> None:
    with pytest.raises(OSError, match="digest"):
        RemoteStore(Address(["127.0.0.1"], address.port, b"another key"), 1)
    with socket.create_connection(("127.0.0.1", address.port)) as stranger:  # says nothing
        RemoteStore(address, 3).put("key", b"value")
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        RemoteStore(address, 4).put("key", b"again")
    assert store.get("key", 0) == b"again" and 1 not in lost


def test_an_interrupted_request_does_not_leave_its_answer_to_the_next_one(
    address: Address, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote = RemoteStore(address, 1)
    monkeypatch.setattr("tensile_jax.exec.step.key_value_store._ANSWER_S", -0.9)
    with pytest.raises(TimeoutError):
        remote.get("key", 1.0)
    with pytest.raises(ConnectionError, match="closed"):
        remote.get("key", 0)


def _served_by(answer: Callable[[socket.socket], None]) -> int:
    """The port of a server that does `answer` once for each of the first two callers."""
    listening = socket.create_server(("", 0))

    def serve() -> None:
        with listening:
            for _ in range(2):
                answer(listening.accept()[0])
                time.sleep(0.01)

    threading.Thread(target=serve, daemon=True).start()
    return listening.getsockname()[1]
