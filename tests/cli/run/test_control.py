"""The socket in the run folder: what reaches a run, and what must not hold it up."""

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest

from tensile_jax.cli.errors import Refusal
from tensile_jax.cli.run import control
from tensile_jax.cli.run.control import SOCKET, Reply, Request, ask, ask_status, connect, serving
from tensile_jax.runtime_records import Status
from tests.cli.fake_run import STATUS, FakeRun


@pytest.fixture
def run(tmp_path: Path) -> Iterator[FakeRun]:
    one = FakeRun()
    with serving(tmp_path, one):
        yield one


def say(folder: Path, line: bytes) -> bytes:
    """The reply to a line, as a client would get it that knows nothing of requests."""
    with connect(folder, timeout_s=10) as connection, connection.makefile("rb") as replies:
        connection.sendall(line)
        return replies.readline()


def leave_stale(folder: Path) -> None:
    """The socket of a run that was killed."""
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(folder / SOCKET))


def test_a_status_arrives_as_it_was(run: FakeRun, tmp_path: Path) -> None:
    assert ask_status(tmp_path) == run.status() == STATUS


def test_commands_arrive_in_order(run: FakeRun, tmp_path: Path) -> None:
    for request in (
        Request("pause", "cnn"),
        Request("resume", "mlp"),
        Request("cancel", "gpt"),
        Request("budget", budget_bytes=7),
    ):
        assert ask(tmp_path, request) == Reply()
    assert run.told == [("paused", "cnn"), ("running", "mlp"), ("cancelled", "gpt"), ("budget", 7)]


def test_a_refusal_travels_back(run: FakeRun, tmp_path: Path) -> None:
    with pytest.raises(Refusal, match="there is no job 'ghost'"):
        ask(tmp_path, Request("pause", "ghost"))
    assert run.told == []


def test_only_the_owner_may_connect_and_nothing_is_left_behind(tmp_path: Path) -> None:
    with serving(tmp_path, FakeRun()):
        assert (tmp_path / SOCKET).stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == []


def test_a_path_longer_than_the_name_of_a_socket_may_be_works(tmp_path: Path) -> None:
    folder = tmp_path / ("long" * 25) / ("longer" * 25)
    folder.mkdir(parents=True)
    with serving(folder, FakeRun()):
        assert ask_status(folder) == STATUS
        assert (folder / SOCKET).is_socket()
    assert list(folder.iterdir()) == []


def test_a_folder_may_be_named_from_where_one_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run").mkdir()
    monkeypatch.chdir(tmp_path)
    with serving(Path("run"), FakeRun()):
        monkeypatch.chdir(tmp_path / "run")
        assert ask_status(Path(".")) == ask_status(tmp_path / "run") == STATUS
        monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("stale", [False, True])
def test_where_no_run_is_alive_it_is_said(stale: bool, tmp_path: Path) -> None:
    if stale:
        leave_stale(tmp_path)
    with pytest.raises(Refusal, match=f"no run is alive in {tmp_path}: it has ended, was killed, or"):
        ask_status(tmp_path)


def test_a_new_run_takes_the_place_of_one_that_was_killed(tmp_path: Path) -> None:
    leave_stale(tmp_path)
    with serving(tmp_path, FakeRun()):
        assert ask_status(tmp_path) == STATUS


def test_two_runs_in_one_folder_are_refused(run: FakeRun, tmp_path: Path) -> None:
    with pytest.raises(Refusal, match="a run is alive in"), serving(tmp_path, FakeRun()):
        raise AssertionError
    assert ask_status(tmp_path) == STATUS


@pytest.mark.parametrize(
    "line",
    [b"garbage\n", b"\x00\xff\n", b"[]\n", b'{"command": "explode"}\n', b'{"command": "budget", "budget_bytes": "1"}\n'],
)
def test_what_is_no_request_is_answered_so(run: FakeRun, tmp_path: Path, line: bytes) -> None:
    assert "the request cannot be read" in msgspec.json.decode(say(tmp_path, line), type=Reply).error
    assert ask_status(tmp_path) == STATUS
    assert run.told == []


def test_a_line_without_an_end_is_cut_off_rather_than_kept(run: FakeRun, tmp_path: Path) -> None:
    with connect(tmp_path, timeout_s=10) as connection, connection.makefile("rb") as replies:
        connection.sendall(b"x" * control._LONGEST_REQUEST)  # pyright: ignore[reportPrivateUsage]  # the limit itself
        assert b"cannot be read" in replies.readline()


def test_silent_clients_hold_up_nobody(run: FakeRun, tmp_path: Path) -> None:
    silent = [connect(tmp_path, timeout_s=10) for _ in range(20)]
    assert ask_status(tmp_path) == STATUS
    for one in silent:
        one.close()


def test_a_run_that_takes_no_more_clients_does_not_answer_and_keeps_its_place(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as stopped, ExitStack() as clients:
        stopped.bind(str(tmp_path / SOCKET))
        stopped.listen(1)
        with pytest.raises(BlockingIOError):
            for _ in range(100):
                clients.enter_context(connect(tmp_path, timeout_s=10))
        with pytest.raises(Refusal, match="did not answer within"):
            ask_status(tmp_path)
        with pytest.raises(Refusal, match="a run is alive in"), serving(tmp_path, FakeRun()):
            raise AssertionError


def test_a_silent_client_is_cut_off(run: FakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control._Conversation, "timeout", 0.01)  # pyright: ignore[reportPrivateUsage]  # rather than seconds
    with connect(tmp_path, timeout_s=10) as connection:
        connection.sendall(b'{"command": ')
        assert connection.recv(1) == b""


def test_a_client_that_leaves_before_the_reply_does_no_harm(run: FakeRun, tmp_path: Path) -> None:
    for line in (b"", b'{"command": "status"}\n'):
        with connect(tmp_path, timeout_s=10) as connection:
            connection.sendall(line)
    assert ask_status(tmp_path) == STATUS


def test_many_clients_at_once_are_all_answered(run: FakeRun, tmp_path: Path) -> None:
    with ThreadPoolExecutor(16) as clients:
        assert list(clients.map(ask_status, [tmp_path] * 64)) == [STATUS] * 64


class _Broken(FakeRun):
    def __init__(self) -> None:
        super().__init__()
        self.go_on = threading.Event()

    def status(self) -> Status:
        self.go_on.wait(10)
        return super().status()

    def cancel(self, job: str) -> None:
        raise RuntimeError(f"no way to cancel {job}")


def test_a_run_that_hangs_or_fails_is_told_of(tmp_path: Path) -> None:
    broken = _Broken()
    with serving(tmp_path, broken):
        with pytest.raises(Refusal, match="did not answer within 0.02 s"):
            ask(tmp_path, Request("status"), timeout_s=0.02)
        with pytest.raises(Refusal, match="the run failed to do it: RuntimeError: no way to cancel cnn"):
            ask(tmp_path, Request("cancel", "cnn"))
        broken.go_on.set()
        assert ask_status(tmp_path) == STATUS


@pytest.mark.parametrize(
    ("reply", "story"),
    [(b"", "ended before it answered"), (b"{]\n", "cannot be read"), (b"{}\n", "answered without its status")],
)
def test_a_bad_reply_is_told_of(reply: bytes, story: str, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(tmp_path / SOCKET))
        other.listen()

        def answer() -> None:
            connection = other.accept()[0]
            with connection:
                connection.recv(1000)
                connection.sendall(reply)

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(Refusal, match=story):
            ask_status(tmp_path)
        thread.join()
