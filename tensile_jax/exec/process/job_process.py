"""A job's own process, as its runtime sees it: started, asked, listened to, and buried.

    runtime's threads --Ask--> outbox --writer--> socket --> `exec/process/child.py`
                      <-- a Future is done <--reader-- socket <-- Answer, Refused, News, Alive

Whatever the process does, be it that it ends, hangs or sends garbage, it is killed if need be and its end is waited for; then
everything that waits for it fails with one and the same error. What it held on the device is free by the time anybody hears.

It is started when it is first asked for something, afresh and not by a fork, which JAX's threads would not survive. Python's
own exit does not wait for it: it ends when its runtime's process does.
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
from tensile_jax.exec.process.channel import Alive, Answer, Ask, Channel, Garbled, News, Refused
from tensile_jax.exec.process.payload import Parcel, Setting

_PATIENCE_S = 30.0  # without a sign of life, of which there should be one every two seconds; twice
_START_S = 300.0  # until the first one: it imports JAX
_FAREWELL_S = 5.0  # for the user's generator to end
_COMMAND = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[2]); "
    "from tensile_jax.exec.process.child import main; main(int(sys.argv[1]))"
)
_UNGUARDED = (
    "A job's own process imports the main module, which starts a job's own process when it is imported. Put what the script does "
    'under: if __name__ == "__main__":'
)

importing_main = threading.Event()
"""Set in a job's own process, while it imports the main module."""


class JobProcess:
    """One process, which keeps the file `lock` open as well.

    `hear` is called with its news, `died` once if it ends on its own; both in a thread of this object's.
    """

    def __init__(
        self,
        setting: Setting,
        parcel: Parcel,
        *,
        lock: int | None,
        hear: Callable[[Any], None],
        died: Callable[[BaseException], None],
    ) -> None:
        self._name = parcel.name
        self._inherited = [] if lock is None else [lock]
        self._unsent: tuple[Any, ...] = (setting, parcel)
        self._hear = hear
        self._died = died
        self._outbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._numbers = itertools.count()
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: Channel | None = None
        self._threads: list[threading.Thread] = []
        self._story = ""  # why it had to be killed
        # under the lock
        self._lock = threading.Lock()
        self._waiting: dict[int, Future[Any]] = {}
        self._broken: BaseException | None = None
        self._closed_at: float | None = None

    @property
    def pid(self) -> int | None:
        """Its number, once it is started."""
        return None if self._process is None else self._process.pid

    def ask(self, what: str, *args: Any) -> Wait:
        """Have it do `what`; the answer."""
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
        """Have it do `what`. If it cannot, it ends."""
        with self._lock:
            self._start()
            self._outbox.put(Ask(what, args))

    def forget(self, key: int) -> None:
        """It need not keep what it holds under that key. Any thread may call this in the middle of anything."""
        self._outbox.put(Ask("forget", (key,)))

    def kill(self) -> None:
        """End it, now."""
        if self._process is not None:
            self._process.kill()

    def close(self) -> None:
        """Let it end; nothing is waited for."""
        with self._lock:
            self._closed_at = self._closed_at or time.monotonic()
            self._broken = self._broken or RuntimeError(f"{self._name} has ended.")
            self._unsent = ()
            self._outbox.put(Ask("close"))
            self._outbox.put(None)

    def join(self) -> None:
        """Wait until it is gone; it must have been closed, and is killed if it takes its time."""
        for thread in self._threads:
            thread.join()

    # -- its life ---------------------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        """Unless it was; the lock is held."""
        if self._process is not None or self._broken is not None:
            return
        if importing_main.is_set():
            raise RuntimeError(_UNGUARDED)
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-c", _COMMAND, str(theirs.fileno()), json.dumps(sys.path)]
        environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}  # the device is shared
        with theirs:
            self._process = subprocess.Popen(
                command, pass_fds=[theirs.fileno(), *self._inherited], stdin=subprocess.DEVNULL, env=environment, process_group=0
            )
        self._channel = Channel(ours, patience_s=_START_S)
        for work in (self._write, self._read, self._bury):
            thread = threading.Thread(target=work, name=f"tensile-{self._name}-{work.__name__[1:]}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def _write(self) -> None:
        assert self._channel is not None
        try:
            while self._unsent:
                first, *rest = self._unsent
                self._channel.send(first)
                del first  # a state, maybe
                self._unsent = tuple(rest)
            while (message := self._outbox.get()) is not None:
                self._channel.send(message)
        except Exception as error:  # that it is gone, or does not listen; the reader says so
            if not isinstance(error, BrokenPipeError | ConnectionError):
                self._story = self._story or f"it could not be told what to do ({type(error).__name__}: {error})"
            self.kill()

    def _bury(self) -> None:
        """A process of the user's own, started by it, may hold its end of the socket open after it."""
        assert self._process is not None and self._channel is not None
        self._process.wait()
        self._channel.end()
        self._outbox.put(None)

    def _read(self) -> None:
        error: BaseException | None = None
        try:
            error = self._received()
            assert self._channel is not None
            self._channel.expect_within(_PATIENCE_S)
            while error is None:
                error = self._received()
        except TimeoutError:
            self._story = self._story or f"it gave no sign of life for {2 * _PATIENCE_S:g} s"
        except Garbled as garbled:
            self._story = self._story or f"it sent something that is no message ({garbled})"
        except (EOFError, OSError):
            self._story = self._story or ""
        except Exception as unexpected:
            self._story = self._story or f"it sent something that nobody expected ({type(unexpected).__name__}: {unexpected})"
        self._end(error)

    def _received(self) -> BaseException | None:
        """Take one message in; what has made an end of the job, if that is what it says."""
        assert self._channel is not None
        message = self._channel.receive()
        if isinstance(message, News):
            self._hear(message.what)
        elif isinstance(message, Answer):
            self._waited_for(message.number).set_result(message.value)
        elif isinstance(message, Refused):
            error = message.thrown.caught()
            if message.fatal:
                return error
            assert message.number is not None  # only what is fatal has none
            self._waited_for(message.number).set_exception(error)
        elif not isinstance(message, Alive):
            raise Garbled(f"a {type(message).__name__}")
        if self._closed_at is not None and time.monotonic() > self._closed_at + _FAREWELL_S:
            raise EOFError
        return None

    def _waited_for(self, number: int) -> "Future[Any]":
        with self._lock:
            return self._waiting.pop(number)

    def _end(self, error: BaseException | None) -> None:
        """It is over: make sure of that, then tell everybody."""
        assert self._process is not None and self._channel is not None
        if error is not None or self._story or self._closed_at is not None:
            self.kill()
        try:
            code = self._process.wait(_FAREWELL_S)
        except subprocess.TimeoutExpired:  # it has closed its end, and goes on
            self._story = "it closed its socket"
            self.kill()
            code = self._process.wait()
        self._channel.close()
        if error is None:
            why = f" because {self._story}" if self._story else ""
            story = f"The process of {self._name!r} (pid {self._process.pid}) {_ending(code)}{why}."
            error = ProcessDied(story, job=self._name, exit_code=code)
        with self._lock:
            unexpected = self._broken is None
            self._broken = self._broken or error
            waiting, self._waiting = list(self._waiting.values()), {}
        for answer in waiting:
            answer.set_exception(error)
        if unexpected:
            self._died(error)


def _ending(code: int) -> str:
    """In words."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
