"""Defines a *lane*: one thread that calls functions one after another, in the order in which they were put into its queue.

`Lane.put` costs the caller about 2 microseconds. `submit` on a `ThreadPoolExecutor` with one thread costs about 20, because it
makes a future and takes locks. When the interpreter exits, a lane drops the functions that are still queued. The interpreter
waits up to ten seconds for the function that the lane is calling, so that no thread is stopped in the middle of JAX.
"""

import atexit
import queue
import threading
import weakref
from collections.abc import Callable

_EXIT_S = 10.0  # the longest wait for one lane when the interpreter exits


class Lane:
    """A thread with a queue of functions, which must not raise. The thread starts at once."""

    def __init__(self, name: str) -> None:
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=_call_all, args=(self._queue,), name=name, daemon=True)
        self._thread.start()
        _lanes.add(self)

    def put(self, function: Callable[[], None]) -> None:
        """Queue a function. May be called in any thread."""
        self._queue.put(function)

    def end(self) -> None:
        """Let the thread end once everything in the queue is done. Takes no lock, so a finalizer may call it in any thread."""
        self._queue.put(None)

    def abandon(self) -> None:
        """Let the thread end after the function that it is in."""
        while not self._queue.empty():
            try:
                self._queue.get_nowait()
            except queue.Empty:  # the thread took it
                break
        self.end()

    def join(self, timeout_s: float | None = None) -> None:
        """Wait until the thread has ended."""
        self._thread.join(timeout_s)


def _call_all(functions: "queue.SimpleQueue[Callable[[], None] | None]") -> None:
    """Call the functions until None comes. The thread does not refer to its `Lane`."""
    while (function := functions.get()) is not None:
        function()
        del function  # drop what it refers to before the next one comes


_lanes: "weakref.WeakSet[Lane]" = weakref.WeakSet()


@atexit.register
def _end_lanes() -> None:
    """End the lanes of runtimes that were never closed."""
    lanes = list(_lanes)
    for lane in lanes:
        lane.abandon()
    for lane in lanes:
        lane.join(_EXIT_S)
