"""Ctrl-C and training loops: no interrupt between the donation of a state and the return of the new one.

While an iteration runs, the old state has been given away and the new one is not there yet. A `KeyboardInterrupt` that was
raised in between would lose both. So `InterruptsHeld` takes note of SIGINT instead of handling it, and has it handled as soon
as the results are the caller's: 10 ms after the call has returned, or at the beginning of the next call if that comes first.
At both times every array that the caller holds is alive.

If the iteration does not end (a hanging device), the third Ctrl-C is handled at once.

Only the main thread handles signals; in another thread, and where no handler was installed from Python, nothing is held.
"""

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

_AT_ONCE = 3
"""Of several interrupts within one iteration, this one does not wait for its end."""

_DELAY_S = 0.01
"""By then the caller has assigned the results: another thread takes the interpreter for 5 ms at a time."""


class InterruptsHeld:
    """`with InterruptsHeld():` holds SIGINT back for the time of the block.

    Entering raises what the handler raises (`KeyboardInterrupt`) if an earlier interrupt is still to be handled; nothing of the
    block has run then.
    """

    __slots__ = ("_count", "_own")

    def __init__(self) -> None:
        self._count = 0
        self._own: Any = None

    def __enter__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        _DELIVERY.now()
        own = signal.getsignal(signal.SIGINT)
        if callable(own):
            self._own = own
            signal.signal(signal.SIGINT, self._hold)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._own is None:
            return
        if self._count:
            _DELIVERY.soon()
        signal.signal(signal.SIGINT, self._own)  # the last thing, so that next to nothing lies between it and the caller

    def _hold(self, number: int, frame: FrameType | None) -> None:
        self._count += 1
        if self._count >= _AT_ONCE:
            self._count = 0
            self._own(number, frame)


class _Delivery:
    """The interrupt, at most one, that was held back and is still to be handled."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None

    def soon(self) -> None:
        """Have it handled after the delay."""
        timer = threading.Timer(_DELAY_S, self._from_timer)
        timer.daemon = True
        with self._lock:
            self._timer = timer
        timer.start()

    def now(self) -> None:
        """Handle it now, in the main thread, if there is one."""
        if self._timer is not None and self._taken():
            signal.raise_signal(signal.SIGINT)

    def _from_timer(self) -> None:
        """In the timer's thread; the main thread runs the handler at its next instruction."""
        if self._taken():
            signal.raise_signal(signal.SIGINT)

    def _taken(self) -> bool:
        with self._lock:
            timer, self._timer = self._timer, None
        return timer is not None


_DELIVERY = _Delivery()
