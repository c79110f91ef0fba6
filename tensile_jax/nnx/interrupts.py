"""Ctrl-C during one call of an NNX step: the user's objects never hold half of an iteration, or arrays that are gone.

A signal is heard between two Python instructions of the main thread. At that time one of two things is true:

    Nothing has happened to the objects yet.     KeyboardInterrupt is raised at once, and the objects are as they were.
    An array of theirs was donated, or their     KeyboardInterrupt is raised when the objects hold the results of the
    new values are being written.                iteration, at the end of the call.
"""

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Self


class Interrupts:
    """Use it in a `with` block around the call. Other threads than the main one hear no signals and need none of this.

    Args:
        may_interrupt: whether nothing has happened yet; it is asked when a signal comes.
    """

    def __init__(self, may_interrupt: Callable[[], bool]) -> None:
        self._may_interrupt = may_interrupt
        self._handler: Callable[[int, FrameType | None], object] | None = None
        self._waiting: tuple[int, FrameType | None] | None = None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            handler = signal.getsignal(signal.SIGINT)
            if callable(handler):  # otherwise the signal is ignored, or ends the process at once
                self._handler = handler
                signal.signal(signal.SIGINT, self._hear)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._handler is None:
            return
        signal.signal(signal.SIGINT, self._handler)
        if self._waiting is not None:
            self._handler(*self._waiting)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        assert self._handler is not None
        if self._may_interrupt():
            self._handler(number, frame)
        else:
            self._waiting = number, frame
