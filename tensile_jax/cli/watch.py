"""The live view of a run of several jobs: on a terminal a picture of its status, elsewhere a line every few seconds.

All is drawn by one thread of its own. `tell` only hands an event over, so whoever tells is never kept waiting by a slow terminal,
nor by a lock that is held while a status is taken. What goes wrong in drawing is shown, or ends the view; never the run.
"""

import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from time import monotonic
from types import TracebackType
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from tensile_jax.cli.event_line import event_line, one_line
from tensile_jax.cli.status_line import status_line
from tensile_jax.cli.status_view import status_view
from tensile_jax.runtime_records import EventName, JobEvent, Status

_REFRESH_S = 0.25
_LINES_AROUND = 8  # of a terminal's height: the header, the table's head, the shell's prompt
_LONGEST_END_S = 2.0  # to wait for the last status; it is late only if the runtime hangs

_KEPT_ABOVE: frozenset[EventName] = frozenset({"budget", "checkpoint_failed", "finished", "failed", "cancelled"})
"""Of what a terminal gets a line as well; the others are seen in the table."""


class Watch:
    """Shows `status()` on `console` until the end of the block. `every_s` is how often where it is not a terminal."""

    def __init__(self, console: Console, status: Callable[[], Status], *, every_s: float = 5.0) -> None:
        self._console = console
        self._status = status
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None
        self._period_s = _REFRESH_S if self._live else every_s
        self._events: queue.SimpleQueue[JobEvent | None] = queue.SimpleQueue()
        self._last: RenderableType = ""
        self._thread = threading.Thread(target=self._follow, name="tensile watch", daemon=True)

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._events.put(None)
        self._thread.join(_LONGEST_END_S)
        if self._live is not None:
            with suppress(OSError):  # the terminal may be gone
                self._live.stop()

    def tell(self, event: JobEvent) -> None:
        """Something happened. Returns at once and raises nothing; may be called from any thread."""
        if event.kind != "step" and (self._live is None or event.kind in _KEPT_ABOVE):
            self._events.put(event)

    def _follow(self) -> None:
        """Events as they come, the status between them and at the end. A console that is gone ends it."""
        due = monotonic()
        with suppress(OSError):
            while True:
                if monotonic() >= due:
                    self._show()
                    due = monotonic() + self._period_s
                try:
                    event = self._events.get(timeout=max(0.0, due - monotonic()))
                except queue.Empty:
                    continue
                if event is None:
                    break
                self._say(event_line(event))
            self._show()

    def _show(self) -> None:
        """An error of `status` is shown in its place; one of the console, an OSError, is left to `_follow`."""
        wrong = ""
        try:
            status = self._status()
            line = status_line(status)
            view = status_view(status, most_jobs=max(1, self._console.height - _LINES_AROUND))
            self._console.render_lines(view)  # here rather than when it is too late: `Live` draws it once more at the end
        except Exception as error:
            line, view = "", self._last
            wrong = f"The status cannot be shown: {one_line(str(error)) or type(error).__name__}"
        if self._live is None:
            self._say(wrong or line)
            return
        self._last = view
        self._live.update(Group(view, Text(self._known(wrong), "yellow")) if wrong else view, refresh=True)

    def _say(self, line: str) -> None:
        self._console.print(self._known(line), markup=False, highlight=False, soft_wrap=True)

    def _known(self, text: str) -> str:
        """In characters that the console can write."""
        return text.encode(self._console.encoding, "replace").decode(self._console.encoding)
