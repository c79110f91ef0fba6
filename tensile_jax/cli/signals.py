"""Handles Ctrl-C, SIGTERM and SIGHUP in a process of the command line.

    outside of `stopping_on_signals()`   the signal ends the process at once
    inside `stopping_on_signals()`       the first signal asks the run to stop in good order; the second ends the process at once

The exit code is 128 + the number of the signal, as in a shell: 130 for Ctrl-C, 143 for SIGTERM.

This module turns no signal into an exception. By default, Python turns Ctrl-C into a `KeyboardInterrupt` between any two
instructions of the main thread. In a process that uses JAX, four things go wrong with this exception. JAX's callback for the
garbage collector swallows the exception, so the run goes on. An extension module that is being imported turns the exception into
an `ImportError`. While XLA compiles in the main thread, Python does not raise the exception. And if the interpreter shuts down
while XLA compiles in other threads, the process aborts (SIGABRT).

So a thread of this module reads the signals from a pipe (`signal.set_wakeup_fd`) and ends the process by `os._exit`, which runs
neither Python's nor XLA's shutdown. Only the unfinished work of the command is lost: files are written under another name first
(`atomic_file.py`), and printed lines were flushed before.

The command line imports this module before all others, so this module imports as little as possible.
"""

import atexit
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from select import select
from types import FrameType
from typing import Any

from tensile_jax.atomic_file import remove_unfinished

INTERRUPTED = 128 + signal.SIGINT

_MESSAGES = {signal.SIGINT: "Interrupted.", signal.SIGTERM: "Ended by SIGTERM.", signal.SIGHUP: "Ended by SIGHUP."}
_SHOW_CURSOR = "\x1b[?25h"  # a live view hides it


class StopRequest:
    """A request to a run to stop in good order.

    Attributes:
        asked: whether the stop has been asked for.
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
        """Call `then` when the stop is asked for, or now if it has been asked for already."""
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
        """The exit code of a run that was asked to stop: that of the first signal, or of Ctrl-C if no signal has come."""
        return INTERRUPTED if self._first is None else 128 + self._first

    def receive(self, number: int) -> None:
        """Handle the arrival of signal `number`."""
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
        """A context that yields a `StopRequest`. The first signal asks it to stop, at once if that signal has come already."""
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
    """Passes the signals of this process to `signals` from `begin` to `end`.

    In a thread other than the main one, Python cannot set signal handlers, and `begin` changes nothing. A signal that is ignored
    when `begin` is called, such as SIGHUP under `nohup`, stays ignored. SIGINT is the exception: a shell ignores it for the
    commands that it starts in the background, and scripts use it to stop a run.
    """

    def __init__(self, signals: StopSignals = _SIGNALS) -> None:
        self._signals = signals
        self._before: dict[int, Any] = {}
        self._read, self._write = -1, -1
        self._wakeup_before = -1

    def begin(self) -> None:
        """Start to pass on signals."""
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
        """Stop passing on signals, and restore the earlier handlers.

        A forked child calls this method too, because its signals are not meant for this run. The child may then call it a
        second time.
        """
        if self._write < 0:
            return
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup_before)
        os.close(self._write)  # which ends the thread
        self._write = -1

    def ignore(self) -> None:
        """Ignore all further signals, because the command is over and its exit code is known."""
        for number in self._before:
            signal.signal(number, signal.SIG_IGN)

    def _listen(self, read: int) -> None:
        while numbers := os.read(read, 64):
            for number in numbers:
                if number in self._before:
                    self._signals.receive(number)
        os.close(read)


class ProcessEnd:
    """Ends the process by `os._exit` with the exit code of the command, as the last of the functions of `atexit`.

    The interpreter's own shutdown comes after these functions. It would abort the process if a thread were still inside XLA, for
    example because a run was stopped while it compiled. Without a code, the interpreter shuts down.
    """

    def __init__(self) -> None:
        self.code: int | None = None

    def __call__(self) -> None:
        if self.code is not None:
            with suppress(OSError):
                flush_output()
            os._exit(self.code)


_END = ProcessEnd()
atexit.register(_END)  # when this module is imported, before all others: `atexit` runs its functions in the reverse order


def listen_to_the_end() -> ProcessEnd:
    """Handle signals until the process ends, also while Python waits for threads and runs the functions of `atexit`.

    Signals that come after the functions which are registered with `atexit` from now on are ignored. The caller sets the `code`
    of what is returned to the exit code of the command.
    """
    listener = Listener()
    listener.begin()
    atexit.register(listener.ignore)
    return _END


def _open_what_is_closed() -> None:
    """Open /dev/null as stdin, stdout or stderr if that descriptor was closed (`2>&-`).

    Otherwise the next file to be opened would get the number of that descriptor, and XLA would print into that file.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free


class _NoOpHandler:
    """A signal handler that does nothing. Python writes the number of a signal into the pipe only if the signal has a handler.

    Attributes:
        raises_nothing: tells a planned step (`exec/call/interrupts.py`) that it need not delay the signal and send it again.
    """

    raises_nothing = True

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Nothing."""


def _print_on_stderr(line: str) -> None:
    """Print without Python's buffers, whose locks the main thread may hold, and without waiting for a reader."""
    try:
        begin = f"{_SHOW_CURSOR}\n" if os.isatty(2) else ""
        if select([], [2], [], 0)[1]:
            os.write(2, f"{begin}{line}\n".encode())
    except (OSError, ValueError):
        return  # there is no stderr


def flush_output() -> None:
    """Flush stdout and stderr.

    Raises:
        OSError: a stream cannot be written. Its text is dropped then, so that Python reports no second error when it ends.
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
