"""Hold Ctrl-C back between the donation of a state and the return of the new one.

While an iteration runs, the old state has been given away and the new one is not there yet. A `KeyboardInterrupt` that was
raised in between would lose both. The two classes here take note of SIGINT in the time of a block instead of having it handled:

    InterruptsHeld        for a step that returns its new state. SIGINT is handled as soon as the results are the caller's: when
                          the caller's frame has gone on from the call, or at the beginning of the next call if that comes first.
                          At both times every array that the caller holds is alive. If the iteration does not end (a hanging
                          device), the third Ctrl-C is handled at once.
    InterruptsHeldUnless  for a step that changes objects in place. SIGINT is handled at once while nothing has happened to the
                          objects, and otherwise at the end of the block, when they hold the results of the iteration.

Only the main thread handles signals; in another thread, and where no handler was installed from Python, nothing is held. Nor is
it where the handler has the attribute `raises_nothing`. The handler of the command line has it, since a thread of its own acts on
signals.
"""

import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

_AT_ONCE = 3
"""Of several interrupts within one iteration, this one does not wait for its end."""

_LOOK_S = 0.001
"""Seconds between two looks at whether the caller has its results."""


class _HandlerReplaced:
    """Puts another handler of SIGINT in the place of the user's `_own`, which is None where nothing is replaced."""

    __slots__ = ("_own",)

    def __init__(self) -> None:
        self._own: Any = None

    def _replace(self) -> None:
        own = signal.getsignal(signal.SIGINT)
        here = threading.current_thread() is threading.main_thread()
        if here and callable(own) and not getattr(own, "raises_nothing", False):
            self._own = own
            signal.signal(signal.SIGINT, self._hear)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        raise NotImplementedError


class InterruptsHeldUnless(_HandlerReplaced):
    """`with InterruptsHeldUnless(nothing_happened):` holds SIGINT back to the end of the block, unless nothing has happened.

    Args:
        nothing_happened: whether an exception would leave everything as it was before the block; asked when a signal comes.
    """

    __slots__ = ("_nothing_happened", "_waiting")

    def __init__(self, nothing_happened: Callable[[], bool]) -> None:
        super().__init__()
        self._nothing_happened = nothing_happened
        self._waiting: tuple[int, FrameType | None] | None = None

    def __enter__(self) -> None:
        self._replace()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._own is not None:
            signal.signal(signal.SIGINT, self._own)
            if self._waiting is not None:
                self._own(*self._waiting)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if self._nothing_happened():
            self._own(number, frame)
        else:
            self._waiting = number, frame


class InterruptsHeld(_HandlerReplaced):
    """`with InterruptsHeld():` holds SIGINT back for the time of the block, and until the function with this block has returned.

    The block must return what the function is to return. Entering raises what the handler raises (`KeyboardInterrupt`) if an
    earlier interrupt is still to be handled; nothing of the block has run then. A block within a block does nothing.
    """

    __slots__ = ("_count",)

    def __init__(self) -> None:
        super().__init__()
        self._count = 0

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread() and not _DELIVERY.held:
            _DELIVERY.now()
            self._replace()
            _DELIVERY.held = self._own is not None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._own is not None:
            signal.signal(signal.SIGINT, self._own)  # from here to the caller there is next to nothing
            _DELIVERY.held = False
            if _DELIVERY.pending:
                _DELIVERY.after(_ReturnWatcher(sys._getframe(1)))

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self._count += 1
        _DELIVERY.pending = True
        if self._count >= _AT_ONCE:
            self._count, _DELIVERY.pending = 0, False
            self._own(number, frame)


class _ReturnWatcher:
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


class _PendingInterrupt:
    """The interrupt, at most one, that was held back and is still to be handled.

    Attributes:
        pending: whether there is one.
        held: whether the main thread is in a block that holds interrupts back; the end of the block sees to what is pending.
    """

    def __init__(self) -> None:
        self.pending = False
        self.held = False
        self._latest: _ReturnWatcher | None = None
        self._lock = threading.Lock()

    def now(self) -> None:
        """Handle it now, in the main thread, if there is one."""
        if self.pending and self._taken():
            signal.raise_signal(signal.SIGINT)

    def after(self, value: _ReturnWatcher) -> None:
        """Have it handled, in the main thread, once the caller has the value."""
        self._latest = value
        threading.Thread(target=self._wait, args=(value,), name="tensile-interrupt", daemon=True).start()

    def _wait(self, value: _ReturnWatcher) -> None:
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


_DELIVERY = _PendingInterrupt()
