"""The Unix socket in the run folder by which a second terminal asks a run how it stands, and changes it.

    meeting place  ::= control.sock, a Unix socket in the run folder
    conversation   ::= Request newline Reply newline          one JSON object each; then the connection ends

The run serves the socket (`serving`). One thread takes connections, and each connection has a thread of its own, so that a
client that says nothing holds up nobody; such a client is cut off after some seconds. A `Controllable` does what the requests
ask for, so several threads may call its methods at once. Its `ValueError`s are the client's mistakes and are sent back to the
client, as is the refusal of a line that is no request. Only the owner of the run may connect.

The commands of the second terminal use `ask`, which needs no JAX.

The name of a Unix socket may have about 100 bytes, and a run folder's path more: a longer path is reached through a short link to
the folder, which is removed as soon as the socket is bound or connected.
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
_SILENCE_S = 5.0  # of a client, before it is cut off
_LONGEST_WAIT_S = 10.0  # of a client, for the reply
_LONGEST_REQUEST = 1 << 16
_POLL_S = 0.1  # how soon the server notices that it is to end
_SAME_VERSION = "Use the same version of tensile_jax as the run."


@dataclass(frozen=True, slots=True)
class Request:
    """`job`: which one to pause, resume or cancel. `budget_bytes`: the new budget. Empty and zero for other commands."""

    command: Literal["status", "pause", "resume", "cancel", "budget"]
    job: str = ""
    budget_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Reply:
    """`status`: what was asked for, with the command of that name. `error`: why not, else empty."""

    status: Status | None = None
    error: str = ""


class Controllable(Protocol):
    """What a second terminal controls: a run, or a stand-in for it. Several threads may call it at once.

    All methods but `status` raise ValueError, with a message for people, where the job is not known or in a state in which this
    cannot be done, or the budget cannot be kept.
    """

    def status(self) -> Status:
        """How everything stands."""
        ...

    def pause(self, job: str) -> None:
        """Let the job stop after its present step."""
        ...

    def resume(self, job: str) -> None:
        """Let it go on."""
        ...

    def cancel(self, job: str) -> None:
        """Let it end."""
        ...

    def set_budget(self, budget: int | str) -> None:
        """A new budget for all jobs together."""
        ...


# -- both sides ---------------------------------------------------------------------------------------------------------------


@contextmanager
def _socket_name(folder: Path) -> Iterator[str]:
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
        with _socket_name(folder) as name:
            connection.connect(name)
    except BaseException:
        connection.close()
        raise
    return connection


# -- the run's side -----------------------------------------------------------------------------------------------------------


@contextmanager
def serving(folder: Path, controllable: Controllable) -> Iterator[None]:
    """Inside it, `tensile status`, `pause`, ... reach `controllable` by way of `folder`.

    Raises:
        Refusal: another run is alive in the folder.
        OSError: there can be no socket in it.
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
        pass  # more clients than it takes at a time: it is alive
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
            (folder / SOCKET).chmod(0o600)  # nobody can have connected: it does not listen yet
            self.server_activate()
        except BaseException:
            self.server_close()
            raise

    def answer(self, line: bytes) -> Reply:
        """The reply to a request; never an exception, which would end a thread and not reach anybody."""
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
            return  # the client said nothing, or is gone: there is nobody to tell


# -- the second terminal's side -----------------------------------------------------------------------------------------------


def ask(folder: Path, request: Request, *, timeout_s: float = _LONGEST_WAIT_S) -> Reply:
    """The run's reply, which has no error.

    Raises:
        Refusal: no run is alive in the folder, it does not answer in time, or it refuses.
    """
    run = f"the run in {folder}"
    try:
        with connect(folder, timeout_s=timeout_s) as connection, connection.makefile("rb") as replies:
            connection.sendall(msgspec.json.encode(request) + b"\n")
            line = replies.readline()
    except (FileNotFoundError, ConnectionRefusedError) as error:
        why = "it has ended, was killed, or this is no run folder. Name the folder of one that runs."
        raise Refusal(f"no run is alive in {folder}: {why}") from error
    except (TimeoutError, BlockingIOError) as error:
        remedy = "Try again, or look whether its process is stopped."
        raise Refusal(f"{run} did not answer within {timeout_s:g} s. {remedy}") from error
    except OSError as error:
        raise Refusal(f"{run} cannot be reached: {error.strerror or error}. Ask as the user who began it.") from error
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
    """How the run stands. Raises as `ask` does."""
    status = ask(folder, Request("status")).status
    if status is None:
        raise Refusal(f"the run in {folder} answered without its status. {_SAME_VERSION}")
    return status
