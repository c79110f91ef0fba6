"""Ctrl-C between steps rather than in the middle of one, so that no donated state is lost."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupt:
    """Whether the user has asked to stop. A second Ctrl-C, or one before the first step is over, does not wait."""

    def __init__(self) -> None:
        self.requested = False
        self.worth_waiting = False

    def hear(self, number: int, frame: FrameType | None) -> None:
        """The handler of the signal."""
        if self.requested or not self.worth_waiting:
            signal.default_int_handler(number, frame)
        self.requested = True


@contextmanager
def interrupt_between_steps() -> Iterator[Interrupt]:
    """Listen for Ctrl-C until the end of the block; in a thread that cannot, nothing changes."""
    interrupt = Interrupt()
    if threading.current_thread() is not threading.main_thread():
        yield interrupt
        return
    before = signal.signal(signal.SIGINT, interrupt.hear)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, before)
