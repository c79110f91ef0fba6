"""The Memory Scheduler (TENSILE section III-D): plans and compiles for all jobs, one at a time, in a thread of its own.

What concerns jobs that run already goes before the preparation of new ones, which takes long.

Jobs share what is compiled: two with the same step compile it once. What is decided is in `beside.py`.
"""

import itertools
import queue
import sys
import threading
from collections.abc import Callable

from tensile_jax.exec.compile import Compiler
from tensile_jax.exec.transfer import Device


class Scheduler:
    """The thread, and what has been compiled."""

    def __init__(self, device: Device) -> None:
        self.compiler = Compiler(device)
        self._asked: queue.PriorityQueue[tuple[int, int, Callable[[], None] | None]] = queue.PriorityQueue()
        self._numbers = itertools.count()
        self._thread = threading.Thread(target=self._run, name="tensile-scheduler", daemon=True)
        self._thread.start()

    def call(self, what: Callable[[], None], *, soon: bool = False) -> None:
        """Run `what` in the scheduler's thread, after all that was asked for before; `soon`, before all that is not."""
        self._asked.put((0 if soon else 1, next(self._numbers), what))

    def close(self) -> None:
        """End, once everything asked for is done."""
        self._asked.put((2, next(self._numbers), None))
        self._thread.join()

    def _run(self) -> None:
        while (what := self._asked.get()[2]) is not None:
            try:
                what()
            except Exception:  # a mistake of ours: it is said as Python says it, and all jobs go on as they are
                threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), self._thread)))
            del what  # and what it names, before the next one comes
