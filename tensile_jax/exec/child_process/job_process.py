"""Represents a job's own process in the runtime: starts it, sends requests, receives messages, and makes sure that it ends.

    runtime's threads --Ask--> outbox --writer--> socket --> `child.py`
                      <-- a Future is done <--reader-- socket <-- Answer, Refused, News, Heartbeat
    watcher: kills the process if it sends no heartbeat, and shuts the connection down when the process has ended

`Answer` and `Refused` (an error) reply to an `Ask`; `News` is what the process reports by itself (`channel.py`).

The process may end, hang or send garbage. In each case, a thread of this module kills the process if it still exists, and waits
for its end. Only then do all unanswered requests fail, with one error. So code that receives this error knows that the device
memory of the process is free.

The first request starts the process, which ends when the runtime's process ends. The process is a new interpreter and not a fork,
since JAX's threads do not survive a fork. It is no `multiprocessing.Process` either, since that always imports the main module.
Besides, a daemonic `multiprocessing.Process` may not start processes, and the interpreter waits at exit for one that is not
daemonic.
"""

import itertools
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from tensile_jax.errors import ProcessDied
from tensile_jax.exec.actor.actor import Wait
from tensile_jax.exec.child_process.channel import Answer, Ask, Channel, Heartbeat, InvalidMessage, News, Refused
from tensile_jax.exec.child_process.payload import Payload, importing_main

_SILENCE_S = 60.0  # the longest time without a heartbeat; there should be one every two seconds
_START_S = 600.0  # the longest time until the first heartbeat: the process imports JAX
_LOOK_S = 1.0  # seconds between two looks of the watcher
_END_S = 5.0  # how long the process may take to end, with the user's generator
_COMMAND = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[2]); "
    "from tensile_jax.exec.child_process.child import main; main(int(sys.argv[1]))"
)
_UNGUARDED = (
    "A job's own process imports the main module, which starts a job's own process when it is imported. Put what the script does "
    'under: if __name__ == "__main__":'
)


class JobProcess:
    """One process. It inherits the file descriptor `lock`, so that the lock on that file holds until the process has ended.

    `receive` is called with the news of the process. `died` is called once if the process ends without being asked to. Both are
    called in a thread of this object.
    """

    def __init__(
        self, payload: Payload, *, lock: int | None, receive: Callable[[Any], None], died: Callable[[BaseException], None]
    ) -> None:
        self._name = payload.name
        self._inherited = [] if lock is None else [lock]
        self._hear = receive
        self._died = died
        self._outbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._outbox.put(payload)
        self._numbers = itertools.count()
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: Channel | None = None
        self._threads: list[threading.Thread] = []
        self._over = threading.Event()
        self._story = ""  # why the process had to be killed
        # the fields below change only while the lock is held
        self._lock = threading.Lock()
        self._waiting: dict[int, Future[Any]] = {}
        self._broken: BaseException | None = None
        self._closed_at: float | None = None

    @property
    def pid(self) -> int | None:
        """The process id, once the process is started."""
        return None if self._process is None else self._process.pid

    def ask(self, what: str, *args: Any) -> Wait:
        """Request `what` from the process. Returns a function that waits for the answer."""
        answer: Future[Any] = Future()
        with self._lock:
            self._start()
            if self._broken is not None:
                answer.set_exception(self._broken)
            else:
                number = next(self._numbers)
                self._waiting[number] = answer
                self._outbox.put(Ask(what, args, number))
        return answer.result

    def tell(self, what: str, *args: Any) -> None:
        """Request `what` from the process, without an answer. If the request fails, the process is ended."""
        with self._lock:
            self._start()
            self._outbox.put(Ask(what, args))

    def kill(self) -> None:
        """Kill the process now."""
        if self._process is not None:
            self._process.kill()

    def close(self) -> None:
        """Let the process end; does not wait for that."""
        with self._lock:
            self._closed_at = self._closed_at or time.monotonic()
            self._broken = self._broken or RuntimeError(f"{self._name} has ended.")
            if self._process is None:
                self._outbox = queue.SimpleQueue()  # drops the payload with the state, which was never sent
            self._outbox.put(Ask("close"))
            self._outbox.put(None)

    def join(self) -> None:
        """Wait until the process has ended. `close` must have been called; a process that takes too long is killed."""
        for thread in self._threads:
            thread.join()

    # -- from its start to its end -----------------------------------------------------------------------------------------------

    def _start(self) -> None:
        """Start the process, unless it was started before. The lock must be held."""
        if self._process is not None or self._broken is not None:
            return
        if importing_main.is_set():
            raise RuntimeError(_UNGUARDED)
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-c", _COMMAND, str(theirs.fileno()), json.dumps(sys.path)]
        environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}  # jobs share the device
        with theirs:
            self._process = subprocess.Popen(
                command, pass_fds=[theirs.fileno(), *self._inherited], stdin=subprocess.DEVNULL, env=environment, process_group=0
            )
        self._channel = Channel(ours)
        for name, work in (("write", self._write), ("read", self._read), ("watch", self._watch)):
            thread = threading.Thread(
                target=work, args=(self._process, self._channel), name=f"tensile-{self._name}-{name}", daemon=True
            )
            thread.start()
            self._threads.append(thread)

    def _write(self, process: "subprocess.Popen[bytes]", channel: Channel) -> None:
        try:
            while (message := self._outbox.get()) is not None:
                channel.send(message)
                del message  # it may hold a state, which can now be freed
        except Exception as error:  # the process has ended or does not read; the reader reports that
            if not isinstance(error, BrokenPipeError | ConnectionError):
                self._story = self._story or f"it could not be told what to do ({type(error).__name__}: {error})"
            process.kill()

    def _watch(self, process: "subprocess.Popen[bytes]", channel: Channel) -> None:
        """Kill the process if it is silent for too long; when it has ended, shut the connection down.

        Looks are counted instead of seconds, since the runtime's own process may be stopped for a while. The connection must be
        shut down here, since a process that the user's code has started may still hold the other end open.
        """
        looks = before = 0
        while process.poll() is None and not self._over.wait(_LOOK_S):
            looks = looks + 1 if channel.received == before else 0
            before = channel.received
            limit = _SILENCE_S if before else _START_S
            if looks * _LOOK_S > limit:
                self._story = self._story or f"it gave no sign of life for {limit:g} s"
                process.kill()
            if self._closed_at is not None and time.monotonic() > self._closed_at + _END_S:
                process.kill()
        channel.end()
        self._outbox.put(None)

    def _read(self, process: "subprocess.Popen[bytes]", channel: Channel) -> None:
        error: BaseException | None = None
        try:
            while error is None:
                error = self._take_in(channel.receive())
        except InvalidMessage as garbled:
            self._story = self._story or f"it sent something that is no message ({garbled})"
        except (EOFError, OSError):
            pass  # the process has ended, or is about to
        except Exception as unexpected:
            self._story = self._story or f"it sent something that nobody expected ({type(unexpected).__name__}: {unexpected})"
        self._end(error, process)
        self._over.set()
        channel.close()

    def _take_in(self, message: Any) -> BaseException | None:
        """Handle one message. Returns the error that ends the job, if the message has one."""
        if isinstance(message, News):
            self._hear(message.what)
        elif isinstance(message, Answer):
            self._take_waiting(message.number).set_result(message.value)
        elif isinstance(message, Refused):
            error = message.error.exception()
            if message.fatal:
                return error
            assert message.number is not None  # only a fatal error has no number
            self._take_waiting(message.number).set_exception(error)
        elif not isinstance(message, Heartbeat):
            raise InvalidMessage(f"a {type(message).__name__}")
        return None

    def _take_waiting(self, number: int) -> "Future[Any]":
        with self._lock:
            return self._waiting.pop(number)

    def _end(self, error: BaseException | None, process: "subprocess.Popen[bytes]") -> None:
        """Make sure that the process has ended; then everything that waits for it fails."""
        if error is not None or self._story or self._closed_at is not None:
            process.kill()
        try:
            code = process.wait(_END_S)
        except subprocess.TimeoutExpired:  # the process has closed its socket and runs on
            self._story = "it closed its socket"
            process.kill()
            code = process.wait()
        if error is None:
            why = f" because {self._story}" if self._story else ""
            story = f"The process of {self._name!r} (pid {process.pid}) {_in_words(code)}{why}."
            error = ProcessDied(story, job=self._name, exit_code=code)
        with self._lock:
            unexpected = self._broken is None
            self._broken = self._broken or error
            waiting, self._waiting = list(self._waiting.values()), {}
        for answer in waiting:
            answer.set_exception(error)
        if unexpected:
            self._died(error)


def _in_words(exit_code: int) -> str:
    if exit_code >= 0:
        return f"ended with exit code {exit_code}"
    try:
        return f"was killed by {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"was killed by signal {-exit_code}"
