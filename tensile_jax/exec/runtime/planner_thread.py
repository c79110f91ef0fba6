"""The Memory Scheduler (TENSILE section III-D): plans and compiles for all jobs, one at a time, in a thread of its own.

What concerns jobs that run already goes before the preparation of new ones, which takes long. No user's code runs here: a step
is traced in a thread of its job's own, since it may hang.

Jobs share what is compiled: two with the same step compile it once. What is decided is in `joint_plan.py`.
"""

import queue
import sys
import threading
from collections import deque
from collections.abc import Callable

from tensile_jax.exec.step.compile import Compiler
from tensile_jax.exec.step.transfer import Device

Task = Callable[[], None]


class Scheduler:
    """The thread, and what has been compiled."""

    def __init__(self, device: Device) -> None:
        self.compiler = Compiler(device)
        self._soon: deque[Task] = deque()
        self._later: deque[Task] = deque()
        self._ready: queue.SimpleQueue[bool] = queue.SimpleQueue()  # True for each task; False: end. Has no lock to wait for
        self._thread = threading.Thread(target=self._run, name="tensile-scheduler", daemon=True)
        self._thread.start()

    def call(self, what: Task, *, soon: bool = False) -> None:
        """Run `what` in the scheduler's thread, after all that was asked for before; `soon`, before all that is not."""
        (self._soon if soon else self._later).append(what)
        self._ready.put(True)

    def end(self) -> None:
        """Let the thread end once everything asked for is done. May be called in the middle of anything."""
        self._ready.put(False)

    def close(self) -> None:
        """End, once everything asked for is done."""
        self.end()
        self._thread.join()

    def _run(self) -> None:
        while self._ready.get():
            what = (self._soon or self._later).popleft()
            try:
                what()
            except Exception:  # a mistake of ours: it is said as Python says it, and all jobs go on as they are
                threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), self._thread)))
            del what  # and what it names, before the next one comes
