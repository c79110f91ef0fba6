"""Lets a second terminal look at a run and change it, through a Unix socket in the run folder.

    socket       ::= control.sock in the run folder
    connection   ::= Request newline Reply newline          one JSON object each; then the connection ends

The run is the server (`serving`). One thread accepts connections, and each connection has a thread of its own. So a client that
sends nothing delays no other client, and the server closes its connection after some seconds. For each request, the server calls
a method of a `Controllable`; several threads may do so at once. A `ValueError` of such a method is the client's mistake, and so
is a line that is not a valid request. In both cases the server sends the error's message back to the client. Only the owner of
the run may connect.

The commands of the second terminal are clients. The clients use `ask`, which needs no JAX.

The path of a Unix socket may have only about 100 bytes, and the path of a run folder may be longer. A socket in such a folder is
reached through a short symbolic link to the folder. The link is removed as soon as the socket is bound or connected.
"""

import os
import socket
import socketserver
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import msgspec

from tensile_jax.cli.errors import Refusal
from tensile_jax.runtime_records import Status

SOCKET = "control.sock"
_LONGEST_NAME = 100  # bytes: Linux takes 107, macOS 103
_SILENCE_S = 5.0  # that a client may send nothing before its connection is closed
_LONGEST_WAIT_S = 10.0  # that a client waits for the reply
_LONGEST_REQUEST = 1 << 16
_POLL_S = 0.1  # seconds until the server notices that it shall end
_SAME_VERSION = "Use the same version of tensile_jax as the run."


@dataclass(frozen=True, slots=True)
class Request:
    """`job` is the one to pause, resume or cancel, else empty. `budget_bytes` is the new budget, else zero."""

    command: Literal["status", "pause", "resume", "cancel", "budget"]
    job: str = ""
    budget_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Reply:
    """`status` is the answer to the command of that name, else None. `error` says why the request failed, else it is empty."""

    status: Status | None = None
    error: str = ""


class Controllable(Protocol):
    """What a second terminal controls: a run, or in tests a substitute for it. Several threads may call the methods at once.

    All methods but `status` raise ValueError with a message for people: if the job does not exist, if the job's state does not
    allow the change, or if the budget cannot be kept.
    """

    def status(self) -> Status:
        """The status of the run."""
        ...

    def pause(self, job: str) -> None:
        """Pause the job after its current step."""
        ...

    def resume(self, job: str) -> None:
        """Resume the job."""
        ...

    def cancel(self, job: str) -> None:
        """Cancel the job."""
        ...

    def set_budget(self, budget: int | str) -> None:
        """Set the budget of all jobs together."""
        ...


# -- both sides ---------------------------------------------------------------------------------------------------------------


@contextmanager
def _socket_name(folder: Path) -> Iterator[str]:
    """A context that gives the name by which the socket in `folder` can be bound or connected."""
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
        ConnectionRefusedError: there is a socket, but no process serves it.
        BlockingIOError: too many other clients wait for a connection already.
        OSError: the socket belongs to another user, or cannot be reached.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(timeout_s)
        with _socket_name(folder) as name:
            connection.connect(name)
    except BaseException:
        connection.close()
        raise
    return connection


# -- the run's side -----------------------------------------------------------------------------------------------------------


@contextmanager
def serving(folder: Path, controllable: Controllable) -> Iterator[None]:
    """A context in which `tensile status`, `pause`, ... reach `controllable` through the socket in `folder`.

    Raises:
        Refusal: another run is alive in the folder.
        OSError: no socket can be made in the folder.
    """
    _remove_stale_socket(folder)
    with _Server(folder, controllable) as server:
        thread = threading.Thread(target=server.serve_forever, args=(_POLL_S,), name="tensile-control", daemon=True)
        thread.start()
        try:
            yield
        finally:
            server.shutdown()
            thread.join()
            (folder / SOCKET).unlink(missing_ok=True)


def _remove_stale_socket(folder: Path) -> None:
    """Remove the socket of a run that was killed; refuse where the run is alive."""
    try:
        connect(folder, timeout_s=_SILENCE_S).close()
    except FileNotFoundError:
        return
    except ConnectionRefusedError:
        (folder / SOCKET).unlink()
        return
    except BlockingIOError:
        pass  # more clients wait than the server accepts at a time, so the run is alive
    raise Refusal(f"a run is alive in {folder}. Name another folder, or end that run: tensile cancel {folder}")


class _Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True
    request_queue_size = 128  # more clients than that at the same moment are turned away

    def __init__(self, folder: Path, controllable: Controllable) -> None:
        super().__init__("", _Conversation, bind_and_activate=False)
        self._controllable = controllable
        try:
            with _socket_name(folder) as name:
                self.socket.bind(name)
            (folder / SOCKET).chmod(0o600)  # before the socket listens, so no other user can have connected
            self.server_activate()
        except BaseException:
            self.server_close()
            raise

    def answer(self, line: bytes) -> Reply:
        """The reply to a request. Every exception becomes a reply, because otherwise it would only end a thread."""
        try:
            request = msgspec.json.decode(line, type=Request)
        except msgspec.DecodeError as error:
            return Reply(error=f"the request cannot be read: {error}. {_SAME_VERSION}")
        try:
            match request.command:
                case "status":
                    return Reply(self._controllable.status())
                case "pause":
                    self._controllable.pause(request.job)
                case "resume":
                    self._controllable.resume(request.job)
                case "cancel":
                    self._controllable.cancel(request.job)
                case "budget":
                    self._controllable.set_budget(request.budget_bytes)
        except ValueError as error:
            return Reply(error=str(error))
        except Exception as error:
            return Reply(error=f"the run failed to do it: {type(error).__name__}: {error}")
        return Reply()


class _Conversation(socketserver.StreamRequestHandler):
    timeout = _SILENCE_S

    def handle(self) -> None:
        assert isinstance(self.server, _Server)
        try:
            line = self.rfile.readline(_LONGEST_REQUEST)
            if line.strip():
                self.wfile.write(msgspec.json.encode(self.server.answer(line)) + b"\n")
        except OSError:
            return  # the client sent nothing, or has closed the connection


# -- the second terminal's side -----------------------------------------------------------------------------------------------


class NoRunAlive(Refusal):
    """No run is alive in the folder: the run has ended, was killed, or there never was one."""


def ask(folder: Path, request: Request, *, timeout_s: float = _LONGEST_WAIT_S) -> Reply:
    """The run's reply to a request that succeeded.

    Raises:
        NoRunAlive: no run is alive in the folder.
        Refusal: the run does not answer in time, or the reply is an error.
    """
    run = f"the run in {folder}"
    try:
        with connect(folder, timeout_s=timeout_s) as connection, connection.makefile("rb") as replies:
            connection.sendall(msgspec.json.encode(request) + b"\n")
            line = replies.readline()
    except (FileNotFoundError, ConnectionRefusedError) as error:
        why = "it has ended, was killed, or this is no run folder. Name the folder of one that runs."
        raise NoRunAlive(f"no run is alive in {folder}: {why}") from error
    except (TimeoutError, BlockingIOError) as error:
        remedy = "Try again, or look whether its process is stopped."
        raise Refusal(f"{run} did not answer within {timeout_s:g} s. {remedy}") from error
    except OSError as error:
        raise Refusal(
            f"{run} cannot be reached: {error.strerror or error}. Run this command as the user who began it."
        ) from error
    if not line:
        raise Refusal(f"{run} ended before it answered. Look for the outcome in its folder.")
    try:
        reply = msgspec.json.decode(line, type=Reply)
    except msgspec.DecodeError as error:
        raise Refusal(f"the reply of {run} cannot be read: {error}. {_SAME_VERSION}") from error
    if reply.error:
        raise Refusal(reply.error)
    return reply


def ask_status(folder: Path) -> Status:
    """The status of the run. Raises the same errors as `ask`."""
    status = ask(folder, Request("status")).status
    if status is None:
        raise Refusal(f"the run in {folder} answered without its status. {_SAME_VERSION}")
    return status
