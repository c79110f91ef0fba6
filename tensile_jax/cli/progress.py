"""Shows on stderr the phases of a command (tracing, compiling, ...): as progress bars on a terminal, else as lines.

A phase with several parts also has an estimate of how long it will still take, from what its parts have taken so far.
"""

import time
from collections.abc import Callable
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from tensile_jax.progress.phases import CallPhases

_SAID_EVERY_S = 5.0  # where there is no terminal: seconds between two lines about one phase


class Phases:
    """Shows the phases of a command. `update` has the signature of `tensile_jax.jit(progress=...)`.

    Args:
        now_s: the clock.
    """

    def __init__(self, console: Console, *, now_s: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._now_s = now_s
        self._said_s = now_s()
        self._told = CallPhases("", self._said_s)
        self._bars = Progress(
            SpinnerColumn(finished_text=" "),
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[note]}"),
            console=console,
            disable=not console.is_terminal,
        )
        self._phases: dict[str, TaskID] = {}
        self._ended: set[str] = set()

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bars.stop()

    def update(self, what: str, done: int, of: int, note: str = "") -> None:
        """Show that `done` of the `of` parts of the phase `what` are done. A phase may begin again with another `of`."""
        self.begin(what)
        now_s = self._now_s()
        self._told = self._told.told(what, done, of, now_s)
        more = self._told.more_text(now_s)
        self._bars.update(self._phases[what], completed=done, total=of, note=", ".join(filter(None, (note, more))))
        if done < of:
            self._ended.discard(what)
            if more and now_s - self._said_s >= _SAID_EVERY_S:
                self._print_line(f"{what}: {done}/{of}, {more}")
            return
        if what not in self._ended:
            self._print_line(f"{what}: {done}/{of} {note}".rstrip())
        self._ended.add(what)

    def begin(self, what: str) -> None:
        """Show that the phase `what` begins, whose number of parts is not known. It ends when the next phase begins."""
        if what in self._phases:
            return
        for earlier, task in self._phases.items():
            if earlier not in self._ended:
                self._bars.update(task, total=1, completed=1)
                self._ended.add(earlier)
        self._phases[what] = self._bars.add_task(what, total=None, note="")
        self._print_line(f"{what} ...")

    def _print_line(self, line: str) -> None:
        self._said_s = self._now_s()
        if not self._console.is_terminal:
            self._console.print(line, markup=False, highlight=False)
