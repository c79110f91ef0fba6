"""Ctrl-C and training loops: no interrupt between the donation of a state and the return of the new one.

While an iteration runs, the old state has been given away and the new one is not there yet. A `KeyboardInterrupt` that was
raised in between would lose both. So `InterruptsHeld` takes note of SIGINT instead of handling it, and has it handled as soon
as the results are the caller's: when the caller's frame has gone on from the call, or at the beginning of the next call if that
comes first. At both times every array that the caller holds is alive.

If the iteration does not end (a hanging device), the third Ctrl-C is handled at once.

Only the main thread handles signals; in another thread, and where no handler was installed from Python, nothing is held. Nor is
it where the handler has the attribute `raises_nothing`, as that of the command line, which leaves signals to a thread of its own.
"""

import signal
import sys
import threading
import time
from types import FrameType, TracebackType
from typing import Any

_AT_ONCE = 3
"""Of several interrupts within one iteration, this one does not wait for its end."""

_LOOK_S = 0.001
"""Seconds between two looks at whether the caller has its results."""


class InterruptsHeld:
    """`with InterruptsHeld():` holds SIGINT back for the time of the block, and until the function with this block has returned.

    The block must return what the function is to return. Entering raises what the handler raises (`KeyboardInterrupt`) if an
    earlier interrupt is still to be handled; nothing of the block has run then. A block within a block does nothing.
    """

    __slots__ = ("_count", "_own")

    def __init__(self) -> None:
        self._count = 0
        self._own: Any = None

    def __enter__(self) -> None:
        if threading.current_thread() is not threading.main_thread() or _DELIVERY.held:
            return
        _DELIVERY.now()
        own = signal.getsignal(signal.SIGINT)
        if callable(own) and not getattr(own, "raises_nothing", False):
            self._own = own
            _DELIVERY.held = True
            signal.signal(signal.SIGINT, self._hold)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._own is None:
            return
        signal.signal(signal.SIGINT, self._own)  # from here to the caller there is next to nothing
        _DELIVERY.held = False
        if _DELIVERY.pending:
            _DELIVERY.after(_Return(sys._getframe(1)))

    def _hold(self, number: int, frame: FrameType | None) -> None:
        self._count += 1
        _DELIVERY.pending = True
        if self._count >= _AT_ONCE:
            self._count, _DELIVERY.pending = 0, False
            self._own(number, frame)


class _Return:
    """The return of a value from a function of the main thread to its caller, seen from another thread.

    CPython looks for signals after a call and before the next instruction, the one that stores the call's value. So the value
    is the caller's once the caller's frame is at another instruction than the call. A caller that has returned as well has
    handed the value on to its own caller.
    """

    def __init__(self, function: FrameType) -> None:
        self._function = function
        self._callers: list[tuple[FrameType, int]] = []
        frame = function.f_back
        while frame is not None:
            self._callers.append((frame, frame.f_lasti))
            frame = frame.f_back

    def is_over(self) -> bool:
        """Whether a frame that is still running has stored the value, or none of them is left."""
        running: set[int] = set()
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        while frame is not None:
            running.add(id(frame))
            frame = frame.f_back
        if id(self._function) in running:
            return False
        return next((caller.f_lasti != at for caller, at in self._callers if id(caller) in running), True)


class _Delivery:
    """The interrupt, at most one, that was held back and is still to be handled.

    Attributes:
        pending: whether there is one.
        held: whether the main thread is in a block that holds interrupts back; the end of the block sees to what is pending.
    """

    def __init__(self) -> None:
        self.pending = False
        self.held = False
        self._latest: _Return | None = None
        self._lock = threading.Lock()

    def now(self) -> None:
        """Handle it now, in the main thread, if there is one."""
        if self.pending and self._taken():
            signal.raise_signal(signal.SIGINT)

    def after(self, value: _Return) -> None:
        """Have it handled, in the main thread, once the caller has the value."""
        self._latest = value
        threading.Thread(target=self._wait, args=(value,), name="tensile-interrupt", daemon=True).start()

    def _wait(self, value: _Return) -> None:
        """In a thread of its own, which ends where a later block has taken over."""
        while self.pending and self._latest is value:
            time.sleep(_LOOK_S)
            if not self.held and value.is_over() and self._latest is value:
                if self._taken():
                    signal.raise_signal(signal.SIGINT)
                return

    def _taken(self) -> bool:
        with self._lock:
            pending, self.pending = self.pending, False
        return pending


_DELIVERY = _Delivery()
