"""The run's side of the Unix socket by which a second terminal reaches it.

A thread takes connections, and each has a thread of its own, so that a client that says nothing holds up nobody; it is cut
off after some seconds. What it asks for is done by a `Controllable`, whose methods may therefore be called by several threads
at once. A `ValueError` of these is the client's mistake and is told to it, as is what is no request at all.

Only the owner of the run may connect.
"""

import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import msgspec

from tensile_jax.cli.control_wire import SOCKET, Reply, Request, connect, reachable
from tensile_jax.cli.refusal import Refusal
from tensile_jax.runtime_records import Status

_SILENCE_S = 5.0  # that is taken from a client before it is cut off
_LONGEST_REQUEST = 1 << 16
_POLL_S = 0.1  # how soon the server notices that it is to end


class Controllable(Protocol):
    """What can be steered: a runtime, or a stand-in for it. May be called by several threads at once.

    All but `status` raise ValueError, with a message for people, where the job is not known or in a state in which it cannot
    be done, or the budget cannot be kept.
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


@contextmanager
def serving(folder: Path, controllable: Controllable) -> Iterator[None]:
    """Inside it, `tensile status`, `pause`, ... reach `controllable` by way of `folder`.

    Raises:
        Refusal: another run is alive in the folder.
        OSError: there can be no socket in it.
    """
    _take_place(folder)
    with _Server(folder, controllable) as server:
        thread = threading.Thread(target=server.serve_forever, args=(_POLL_S,), name="tensile-control", daemon=True)
        thread.start()
        try:
            yield
        finally:
            server.shutdown()
            thread.join()
            (folder / SOCKET).unlink(missing_ok=True)


def _take_place(folder: Path) -> None:
    """Remove the socket of a run that was killed."""
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
            with reachable(folder) as name:
                self.socket.bind(name)
            (folder / SOCKET).chmod(0o600)  # nobody can have connected: it does not listen yet
            self.server_activate()
        except BaseException:
            self.server_close()
            raise

    def answer(self, line: bytes) -> Reply:
        """What comes of a request; never an exception, since that would end a thread and not reach anybody."""
        try:
            request = msgspec.json.decode(line, type=Request)
        except msgspec.DecodeError as error:
            return Reply(error=f"the request cannot be read: {error}. Use the same version of tensile_jax as the run.")
        try:
            return self._done(request)
        except ValueError as error:
            return Reply(error=str(error))
        except Exception as error:
            return Reply(error=f"the run failed to do it: {type(error).__name__}: {error}")

    def _done(self, request: Request) -> Reply:
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
