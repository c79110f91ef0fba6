"""Shows the user how far a long call has come: in a line of a terminal, a bar in a notebook, or lines of a log.

While the line of a terminal is shown, the program's own output appears above the line. For this, `sys.stdout` and `sys.stderr`
are replaced, if they are terminals, by streams that erase the line before they write. The line is drawn again once the
program's output has ended its own line. Output that bypasses the two streams (XLA's messages, `logging` handlers that hold the
old stream) may overwrite the line. The cursor waits at the beginning of the line, so that such output does not begin behind the
line's text.
"""

import os
import sys
import threading
from collections.abc import Sequence
from typing import Any, Literal, Protocol

from rich.console import Console
from rich.control import Control
from rich.progress_bar import ProgressBar
from rich.segment import ControlType
from rich.table import Table
from rich.text import Text

from tensile_jax.progress.phases import CallPhases, phase_title
from tensile_jax.progress.stderr import is_terminal, stderr_console

PREFIX = "tensile: "
_ERASE = Control(ControlType.CARRIAGE_RETURN, (ControlType.ERASE_IN_LINE, 2))
_BAR_WIDTH = 30


class Screen(Protocol):
    """Shows calls."""

    def show(self, calls: Sequence[CallPhases], now_s: float) -> None:
        """Show these calls, of which there is at least one, instead of what was shown before."""
        ...

    def clear(self) -> None:
        """Show nothing any more. The screen is not used again."""
        ...

    def leave(self) -> None:
        """In a forked process: give back what belongs to the process, and draw nothing. Takes no lock."""
        ...


def kind_of_screen() -> Literal["terminal", "notebook", "plain", "none"]:
    """What standard error is now; "none" if there is no such stream."""
    if sys.stderr is None:  # pyright: ignore[reportUnnecessaryComparison] # where Python began without it
        return "none"
    console = Console(file=sys.stderr)
    if console.is_jupyter:
        return "notebook"
    return "terminal" if is_terminal(sys.stderr) and not console.is_dumb_terminal else "plain"


def is_shown_by_default() -> bool:
    """Whether calls are shown to users who have not said so: on a terminal and in a notebook, but not in tests."""
    return "PYTEST_CURRENT_TEST" not in os.environ and kind_of_screen() in ("terminal", "notebook")


def make_screen() -> Screen:
    """The screen for what standard error is now."""
    match kind_of_screen():
        case "terminal":
            return TerminalLine()
        case "notebook":
            return NotebookBar()
        case _:
            return PlainLines()


def _several(calls: Sequence[CallPhases], now_s: float) -> str:
    others = f" (and {len(calls) - 1} more)" if len(calls) > 1 else ""
    return f"{PREFIX}{calls[0].text(now_s)}{others}"


class TerminalLine:
    """A line of a terminal that is rewritten, and erased at the end."""

    def __init__(self) -> None:
        self._stream = sys.stderr
        self._console = stderr_console(self._stream, highlight=False)
        self._lock = threading.RLock()  # a signal's handler may print
        self._drawn = ""  # the text of the line that is on the terminal
        self._user_writes = False  # whether the program has begun a line, and not ended it
        self._replaced = [name for name in ("stdout", "stderr") if is_terminal(getattr(sys, name))]
        for name in self._replaced:
            setattr(sys, name, _StreamAbove(getattr(sys, name), self))

    def show(self, calls: Sequence[CallPhases], now_s: float) -> None:
        text = _several(calls, now_s)
        with self._lock, self._console:  # the console writes all at once
            if self._user_writes or text == self._drawn:
                return
            line, width = Text(text, "dim"), max(self._console.width - 1, 1)
            self._console.control(_ERASE)
            self._console.print(line, end="\r", no_wrap=True, overflow="ellipsis", width=width)
            self._drawn = text

    def clear(self) -> None:
        with self._lock:
            self._erase()
            self.leave()

    def leave(self) -> None:
        for name in self._replaced:
            stream = getattr(sys, name)
            if isinstance(stream, _StreamAbove) and stream.line is self:  # otherwise the program has replaced it meanwhile
                setattr(sys, name, stream.stream)

    def write(self, stream: Any, text: str) -> int:
        """Write what the program prints to one of its streams."""
        with self._lock:
            self._erase()
            written = stream.write(text)
            stream.flush()  # before the line is drawn again
            if text:
                self._user_writes = not text.endswith("\n")
            return written

    def _erase(self) -> None:
        if self._drawn:
            self._drawn = ""
            self._console.control(_ERASE)


class _StreamAbove:
    """A stream of the program: what is written appears above the line. It stays usable when the line is gone."""

    def __init__(self, stream: Any, line: TerminalLine) -> None:
        self.stream = stream
        self.line = line

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def __iter__(self) -> Any:
        return iter(self.stream)

    def write(self, text: str) -> int:
        """Write the text above the line."""
        return self.line.write(self.stream, text)

    def writelines(self, lines: Any) -> None:
        """Write all lines above the line."""
        self.write("".join(lines))


class NotebookBar:
    """A bar below the cell of a notebook, removed at the end."""

    def __init__(self) -> None:
        self._shown = False
        self._id = f"tensile-{id(self)}"

    def show(self, calls: Sequence[CallPhases], now_s: float) -> None:
        from IPython.display import display, update_display  # pyright: ignore[reportMissingImports] # there is one in a notebook

        first = calls[0]
        bar = ProgressBar(100, 100 * (first.share or 0), width=_BAR_WIDTH, pulse=first.share is None)
        line = Table.grid(padding=(0, 1))
        line.add_row(bar, Text(_several(calls, now_s)))
        (update_display if self._shown else display)(line, display_id=self._id)
        self._shown = True

    def clear(self) -> None:
        from IPython.display import update_display  # pyright: ignore[reportMissingImports]

        if self._shown:
            update_display({"text/plain": "", "text/html": ""}, raw=True, display_id=self._id)

    def leave(self) -> None:
        pass


class PlainLines:
    """A line for each phase of each call, which stays."""

    def __init__(self) -> None:
        self._console = stderr_console(highlight=False)
        self._shown: dict[tuple[str, float], str] = {}

    def show(self, calls: Sequence[CallPhases], now_s: float) -> None:
        for one in calls:
            call = one.name, one.began_s
            if self._shown.get(call) != one.what:
                self._shown[call] = one.what
                line = f"{PREFIX}{one.name}: {phase_title(one.what, one.of)}"
                self._console.print(line, markup=False, soft_wrap=True)

    def clear(self) -> None:
        pass

    def leave(self) -> None:
        pass
