"""What Ctrl-C, SIGTERM and SIGHUP do to a process of the command line.

    anywhere                           the signal ends the process at once
    inside `stopping_on_signals()`     the first signal asks the run to stop in good order; the second ends the process at once

The exit code is 128 + the number of the signal, as shells count: 130 for Ctrl-C, 143 for SIGTERM.

Signals are not turned into exceptions here. Python's own way is a `KeyboardInterrupt` between any two instructions of the main
thread, and three things go wrong with that in a process that uses JAX: JAX's callback of the garbage collector swallows the
exception, so that the run goes on; an extension module that is being imported turns it into an `ImportError`; and an interpreter
that shuts down while XLA compiles in other threads aborts (SIGABRT). Moreover, it is not raised while XLA compiles in the main
thread. So a thread reads the signals from a pipe (`signal.set_wakeup_fd`), and ends the process by `os._exit`, which runs
neither Python's nor XLA's shutdown. What is lost by that is nothing but the work of the command: files are written under another
name first (`atomic_file.py`), and what has been printed was flushed.

This module is imported before all others of the command line, so it imports as little as possible.
"""

import atexit
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from select import select
from types import FrameType
from typing import Any

from tensile_jax.atomic_file import remove_unfinished

INTERRUPTED = 128 + signal.SIGINT

_MESSAGES = {signal.SIGINT: "Interrupted.", signal.SIGTERM: "Ended by SIGTERM.", signal.SIGHUP: "Ended by SIGHUP."}
_SHOW_CURSOR = "\x1b[?25h"  # a live view hides it


class StopRequest:
    """Whether a run has been asked to stop in good order.

    Attributes:
        asked: a signal has come.
    """

    def __init__(self) -> None:
        self.asked = False
        self._then: Callable[[], None] | None = None
        self._lock = threading.Lock()

    def ask(self) -> None:
        """Ask for the stop. May be called from any thread."""
        with self._lock:
            self.asked = True
            then = self._then
        if then is not None:
            then()

    def call(self, then: Callable[[], None]) -> None:
        """Have `then` called when the stop is asked for; now, if it has been asked for already."""
        with self._lock:
            self._then = then
            asked = self.asked
        if asked:
            then()


class StopSignals:
    """Decides what a signal does. `end` ends the process with an exit code, and returns only in tests."""

    def __init__(self, end: Callable[[int], None] = os._exit) -> None:
        self._end = end
        self._requests: list[StopRequest] = []
        self._first: int | None = None
        self._lock = threading.Lock()

    @property
    def exit_code(self) -> int:
        """That of a run which has been asked to stop: by the first signal, or else by a `KeyboardInterrupt`."""
        return INTERRUPTED if self._first is None else 128 + self._first

    def receive(self, number: int) -> None:
        """A signal has come."""
        with self._lock:
            first = self._first is None and bool(self._requests)
            if first:
                self._first = number
        if not first:
            remove_unfinished()
            _print_on_stderr(_MESSAGES[signal.Signals(number)])
            self._end(128 + number)
            return
        for request in tuple(self._requests):
            request.ask()

    @contextmanager
    def stopping(self) -> Iterator[StopRequest]:
        """Inside it, the first signal asks what is yielded to stop. It is asked at once if that signal has come already."""
        request = StopRequest()
        with self._lock:
            self._requests.append(request)
            late = self._first is not None
        if late:
            request.ask()
        try:
            yield request
        finally:
            with self._lock:
                self._requests.remove(request)


_SIGNALS = StopSignals()
stopping_on_signals = _SIGNALS.stopping


def exit_code() -> int:
    """The exit code of a run that has stopped in good order because it was asked to."""
    return _SIGNALS.exit_code


class Listener:
    """Hands the signals of this process to `signals` from `begin` to `end`; where it cannot listen, nothing changes.

    It cannot in a thread other than the main one. A signal that is ignored, SIGHUP under `nohup`, stays ignored, but not SIGINT,
    which a shell ignores for whatever it has begun in the background, and by which scripts stop a run.
    """

    def __init__(self, signals: StopSignals = _SIGNALS) -> None:
        self._signals = signals
        self._before: dict[int, Any] = {}
        self._read, self._write = -1, -1
        self._wakeup_before = -1

    def begin(self) -> None:
        """Listen from here on."""
        if threading.current_thread() is not threading.main_thread():
            return
        _open_what_is_closed()
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._wakeup_before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        for number in _MESSAGES:
            before = signal.getsignal(number)
            if number == signal.SIGINT or before is not signal.SIG_IGN:
                self._before[number] = before
                signal.signal(number, _NoOpHandler())
        threading.Thread(target=self._listen, args=(self._read,), name="tensile-signals", daemon=True).start()
        os.register_at_fork(after_in_child=self.end)

    def end(self) -> None:
        """Listen no longer; the handlers that were there before are there again.

        It also runs in a forked child, whose signals are not this run's, and there it may run once more.
        """
        if self._write < 0:
            return
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup_before)
        os.close(self._write)  # which ends the thread
        self._write = -1

    def ignore(self) -> None:
        """What comes now comes too late: the command is over, and its exit code is known."""
        for number in self._before:
            signal.signal(number, signal.SIG_IGN)

    def _listen(self, read: int) -> None:
        while numbers := os.read(read, 64):
            for number in numbers:
                if number in self._before:
                    self._signals.receive(number)
        os.close(read)


@contextmanager
def listening() -> Iterator[None]:
    """Inside it, signals end the process at once."""
    listener = Listener()
    listener.begin()
    try:
        yield
    finally:
        listener.end()


def listen_to_the_end() -> None:
    """Listen until the process ends, also while Python waits for threads and runs what was registered with `atexit`.

    Only what Python does after that cannot be interrupted any more. It must be called before anything else is registered with
    `atexit`, since that is run in the opposite order.
    """
    listener = Listener()
    listener.begin()
    atexit.register(listener.ignore)


def _open_what_is_closed() -> None:
    """Where stdin, stdout or stderr was closed (`2>&-`), open its number on nothing.

    Otherwise the next file to be opened would have that number, and whatever XLA prints would go into that file.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free


class _NoOpHandler:
    """The handler of every signal: where there is one, Python writes the number into the pipe. It does nothing else.

    Attributes:
        raises_nothing: so that a planned step does not hold the signal back (`exec/call/interrupts.py`) and send it once more.
    """

    raises_nothing = True

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Nothing."""


def _print_on_stderr(line: str) -> None:
    """Without Python's buffers, whose locks the main thread may hold; never waits for a reader."""
    try:
        begin = f"{_SHOW_CURSOR}\n" if os.isatty(2) else ""
        if select([], [2], [], 0)[1]:
            os.write(2, f"{begin}{line}\n".encode())
    except (OSError, ValueError):
        return  # there is no stderr


def flush_output() -> None:
    """Write what Python still holds back of stdout and stderr.

    Raises:
        OSError: it cannot be written; it is dropped then, so that Python does not complain of it once more when it ends.
    """
    for stream, descriptor in ((sys.stdout, 1), (sys.stderr, 2)):
        if stream is None:  # it was closed before the process began
            continue
        try:
            stream.flush()
        except ValueError:  # it has been closed
            continue
        except OSError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, descriptor)
            os.close(nowhere)
            raise
