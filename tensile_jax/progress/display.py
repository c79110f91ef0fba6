"""Shows the user the calls of this process that have taken three seconds or more, all on one screen (`screens.py`).

    with DISPLAY.call("train_step", True):     the call, in the thread that makes it; True means that it is to be shown
        DISPLAY.tell("planning", 0, 3)         what the call is doing, told in the same thread: 0 of about 3 plans are made
        ...                                    three seconds later the screen shows the call, until the end of the block

A screen is, for instance, a line of the terminal that all calls share. While there are calls, a thread redraws the screen. What
is told in a thread without such a block is dropped. For instance, a thread that plans during training has no such block, since
nobody waits for its plan.
"""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tensile_jax.progress.phases import CallPhases, Progress
from tensile_jax.progress.screens import Screen, is_shown_by_default, make_screen
from tensile_jax.progress.stderr import stderr_console

DELAY_S = 3.0
"""A call that takes less is not shown."""

_LOOK_S = 0.25


class ShownCall:
    """A call under way, in one thread.

    Attributes:
        visible: whether it is shown once it takes long.
        phases: what it was told last.
    """

    def __init__(self, phases: CallPhases, *, thread: int, visible: bool) -> None:
        self.visible = visible
        self.phases = phases
        self._thread = thread

    def tell(self, what: str, done: int, of: int, now_s: float) -> None:
        """The call is doing this now."""
        self.phases = self.phases.told(what, done, of, now_s)

    def is_debugged(self) -> bool:
        """Whether a debugger has stopped the thread: it waits for what the user types, over which no line may be drawn."""
        frame = sys._current_frames().get(self._thread)
        while frame is not None and frame.f_globals.get("__name__") != "bdb":
            frame = frame.f_back
        return frame is not None


class Display:
    """Shows calls that take long. Any thread may use it.

    Args:
        now_s: the clock.
        screen: makes what calls are shown on, when there is one to be shown.
        by_default: whether a call is shown if the user has neither asked for that nor refused it.
        looks: whether a thread looks at the clock; without it, `look` must be called.
    """

    def __init__(
        self,
        *,
        now_s: Callable[[], float] = time.monotonic,
        screen: Callable[[], Screen] = make_screen,
        by_default: Callable[[], bool] = is_shown_by_default,
        looks: bool = True,
    ) -> None:
        self._now_s = now_s
        self._make_screen = screen
        self._by_default = by_default
        self._looks = looks
        self._screen: Screen | None = None
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._lock = threading.RLock()
        self._calls: list[ShownCall] = []
        self._by_thread: dict[int, ShownCall] = {}
        self._looking = False

    @contextmanager
    def call(self, name: str, wanted: bool | Progress | None) -> Iterator[ShownCall]:
        """Show what is told in this thread during the block. A block inside another one belongs to the outer one's call.

        Args:
            wanted: True: show it wherever it is. False: do not show it. None: show it on a terminal and in a notebook. If it is
                a function, the function shows it.
        """
        thread = threading.get_ident()
        outer = self._by_thread.get(thread)
        if outer is not None:
            yield outer
            return
        visible = self._by_default() if wanted is None else wanted is True
        now_s = self._now_s()
        one = ShownCall(CallPhases(name, now_s, since_s=now_s, told_s=now_s), thread=thread, visible=visible)
        self._by_thread[thread] = one
        try:
            if visible:
                self._begin(one)
            yield one
        finally:
            self._by_thread.pop(thread, None)
            if visible:
                self._end(one)

    def tell(self, what: str, done: int, of: int) -> None:
        """The call of this thread, if there is one, is doing this now; see `Progress`."""
        one = self._by_thread.get(threading.get_ident())
        if one is None:
            return
        is_new = what != one.phases.what
        one.tell(what, done, of, self._now_s())
        if is_new and one.visible:
            self.look()

    def look(self) -> bool:
        """Draw the calls that have taken long by now; whether there are any."""
        with self._lock:
            now_s = self._now_s()
            long = [one for one in self._calls if now_s - one.phases.began_s >= DELAY_S]
            if long and not any(one.is_debugged() for one in long):
                self._screen = self._screen or self._make_screen()
                self._screen.show([one.phases for one in long], now_s)
            return bool(long)

    def say(self, text: str) -> None:
        """Print a text that stays. The calling thread has no call."""
        with self._lock:
            stderr_console(highlight=False).print(text, markup=False, soft_wrap=True)

    def _begin(self, one: ShownCall) -> None:
        with self._lock:
            self._calls.append(one)
            if self._looks and not self._looking:
                self._looking = True
                threading.Thread(target=self._follow, name="tensile-progress", daemon=True).start()

    def _end(self, one: ShownCall) -> None:
        with self._lock:
            if one in self._calls:  # it is not in a forked process
                self._calls.remove(one)
            if self._screen is not None and not self.look():
                self._screen.clear()
                self._screen = None

    def _follow(self) -> None:
        """Draw the calls again and again, until there are none."""
        while True:
            time.sleep(_LOOK_S)
            with self._lock:
                if not self._calls:
                    self._looking = False
                    return
            self.look()

    def forget(self) -> None:
        """In a process that was forked: the calls are those of the other process, which shows them."""
        if self._screen is not None:
            self._screen.leave()
        self._screen = None
        self._begin_anew()


DISPLAY = Display()
os.register_at_fork(after_in_child=DISPLAY.forget)


def told_by(progress: bool | Progress | None) -> Progress:
    """What the phases of a call are told: the user's function, the display, or, if the user wants neither, nothing."""
    if callable(progress):
        return progress
    return _say_nothing if progress is False else DISPLAY.tell


def _say_nothing(what: str, done: int, of: int) -> None:
    pass
