"""Ctrl-C for a run of several jobs: the first one ends it in good order, the second at once.

SIGTERM, and SIGHUP for a terminal that goes away, do the same as Ctrl-C; one of these that was ignored before, as under
`nohup`, stays ignored.
"""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

INTERRUPTED = 130  # 128 + SIGINT, as shells count
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def stopping_on_signals(stop: Callable[[], None]) -> Iterator[None]:
    """Inside it, the first signal calls `stop`, which must only take note; the second ends the process.

    In a thread that cannot listen, nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    heard = False

    def hear(number: int, frame: FrameType | None) -> None:
        nonlocal heard
        del number, frame
        if heard:
            os._exit(INTERRUPTED)  # threads that compute would hold up any other way out
        heard = True
        stop()

    before = {number: signal.getsignal(number) for number in _SIGNALS}
    listened = [n for n, handler in before.items() if n == signal.SIGINT or handler is not signal.SIG_IGN]
    for number in listened:
        signal.signal(number, hear)
    try:
        yield
    finally:
        for number in listened:
            signal.signal(number, before[number])
