"""Delays Ctrl-C (SIGINT) during an iteration, so that a `KeyboardInterrupt` cannot lose a state that was donated.

While an iteration runs, the old state has been donated and the new state does not exist yet. A `KeyboardInterrupt` at that time
would lose both. Two context managers therefore only note a SIGINT that arrives during their block, and let its handler run later:

    InterruptsHeld        for a step that returns its new state. SIGINT is handled as soon as the caller has the results: when the
                          caller's code goes on after the call, or at the beginning of the next call, as in `step(step(x))`. At
                          both times every array to which the caller refers is alive. If an iteration does not end (a hanging
                          device), the third Ctrl-C is handled at once.
    InterruptsHeldUnless  for a step that changes objects in place. While the objects are unchanged, SIGINT is handled at once.
                          After that, it is handled at the end of the block, when the objects hold the results of the iteration.

Nothing is delayed in three cases: the call is not in the main thread (only that thread handles signals); the handler of SIGINT
was not installed from Python; or the handler has the attribute `raises_nothing`, like that of the command line, which handles
signals in a thread of its own.
"""

import signal
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

_AT_ONCE = 3
"""Of several interrupts within one iteration, this one does not wait for its end."""

_LOOK_S = 0.001
"""Seconds between two looks at whether the caller has its results."""


class _HandlerReplaced(ABC):
    """Replaces the user's handler of SIGINT. `_own` is the user's handler, or None if it was not replaced."""

    __slots__ = ("_own",)

    def __init__(self) -> None:
        self._own: Any = None

    def _replace(self) -> None:
        own = signal.getsignal(signal.SIGINT)
        here = threading.current_thread() is threading.main_thread()
        if here and callable(own) and not getattr(own, "raises_nothing", False):
            self._own = own
            signal.signal(signal.SIGINT, self._hear)

    @abstractmethod
    def _hear(self, number: int, frame: FrameType | None) -> None:
        """Handle a SIGINT in place of the user's handler."""


class InterruptsHeldUnless(_HandlerReplaced):
    """`with InterruptsHeldUnless(nothing_happened):` delays SIGINT to the end of the block, unless nothing has happened.

    Args:
        nothing_happened: returns whether everything is still as it was before the block; called when a signal arrives.
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
    """`with InterruptsHeld():` delays SIGINT during the block, and until the function that contains the block has returned.

    The block must contain the function's `return`. If an earlier interrupt is still to be handled, entering the block handles it,
    which usually raises `KeyboardInterrupt` before anything of the block has run. A block inside another block does nothing.
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
            signal.signal(signal.SIGINT, self._own)  # very little runs between here and the return to the caller
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
    """Watches, from another thread, whether a function of the main thread has returned its value to its caller.

    CPython may handle a signal after a call, but before the instruction that stores the call's value. So the caller has the value
    once its frame has gone on to another instruction. If the caller has returned as well, its own caller has the value.
    """

    def __init__(self, function: FrameType) -> None:
        self._function = function
        self._callers: list[tuple[FrameType, int]] = []
        frame = function.f_back
        while frame is not None:
            self._callers.append((frame, frame.f_lasti))
            frame = frame.f_back

    def is_over(self) -> bool:
        """Whether a calling frame has stored the value, or all calling frames have returned."""
        running: set[int] = set()
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        while frame is not None:
            running.add(id(frame))
            frame = frame.f_back
        if id(self._function) in running:
            return False
        return next((caller.f_lasti != at for caller, at in self._callers if id(caller) in running), True)


class _PendingInterrupt:
    """The delayed interrupt that is still to be handled. There is at most one.

    Attributes:
        pending: whether there is one.
        held: whether the main thread is in a block that delays interrupts. The pending interrupt is handled at the end of that
            block.
    """

    def __init__(self) -> None:
        self.pending = False
        self.held = False
        self._latest: _ReturnWatcher | None = None
        self._lock = threading.Lock()

    def now(self) -> None:
        """Handle the interrupt now, if there is one. Called in the main thread."""
        if self.pending and self._taken():
            signal.raise_signal(signal.SIGINT)

    def after(self, value: _ReturnWatcher) -> None:
        """Have the interrupt handled in the main thread, once the caller has the value that `value` watches."""
        self._latest = value
        threading.Thread(target=self._wait, args=(value,), name="tensile-interrupt", daemon=True).start()

    def _wait(self, value: _ReturnWatcher) -> None:
        """Wait until the caller has the value, in a thread for this alone. It ends early if a later block has ended meanwhile."""
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
