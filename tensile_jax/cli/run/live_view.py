"""Shows a run of several jobs while it runs: on a terminal as a table that is drawn anew, elsewhere as a line every few seconds.

A terminal shows this table, and `tensile status` prints the same one:

    12.3 s, 3 jobs: 2 running, 1 queued
    device  ##############......|...  812 MiB of 1.2 GiB, peak 1.1 GiB
    host    ###.....................  300 MiB of 4 GiB
    link    out ###......... 31%      in ##.......... 22%
    job  state  step  step/s  ETA  loss  now  peak  plan MiB  stall

The bars are made of `#` and `|` if the terminal shows only ASCII; `|` marks the peak. Three columns are the job's bytes on the
device: `now`, the measured `peak`, and the `plan`'s peak, all in the unit of the heading. `stall` is the time per step in which
the job waits for copies. A job may have a note, such as the reason why it waits. A wide terminal shows the notes in another
column, any other terminal below the table. A narrow terminal also leaves out some columns. A log gets such lines:

    12.3 s  device 812 MiB of 1.2 GiB | resnet 14/200 loss 0.693 2.1 step/s

A thread of the live view draws everything, so that the run never waits for a slow terminal. If the status cannot be read or
laid out, the error is shown. If nothing can be written to the terminal, the live view ends. The run goes on in both cases. At
the end, the table is removed, because the table of the results follows.
"""

import queue
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from math import isfinite
from time import monotonic
from typing import Self

from rich.cells import cell_len, set_cell_size
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.table import Table
from rich.text import Text

from tensile_jax.cli.formatting import event_line, format_us, one_line
from tensile_jax.runtime_records import FINAL, NO_LIMIT, EventName, JobEvent, JobState, JobStatus, Status
from tensile_jax.units import format_bytes

_REFRESH_S = 0.25
_LINES_AROUND = 8  # lines of the terminal for the header, the head of the table and the prompt of the shell
_LONGEST_END_S = 2.0  # to wait for the last status, which is late only if the runtime hangs

_KEPT_ABOVE: frozenset[EventName] = frozenset(
    {"budget", "checkpoint_failed", "renewal_failed", "finished", "failed", "cancelled"}
)
"""Of what a terminal gets a line as well; the others are seen in the table."""

_LONGEST_NOTE = 60  # of a note in a log
_NARROW, _WIDE = 76, 120  # columns of text: below the first, figures are left out; from the second on, there is room for notes
_FIGURES_WIDTH = 88  # columns that the figures take at most in a wide terminal
_STYLES: dict[JobState, str] = {
    "preparing": "cyan", "queued": "yellow", "running": "green", "paused": "yellow",
    "finished": "dim", "failed": "bold red", "cancelled": "dim",
}  # fmt: skip


class LiveView:
    """Shows `status()` on `console` until the end of the block; if the console is no terminal, every `every_s` seconds."""

    def __init__(self, console: Console, status: Callable[[], Status], *, every_s: float = 5.0) -> None:
        self._console = console
        self._status = status
        self._live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None
        self._period_s = _REFRESH_S if self._live else every_s
        self._events: queue.SimpleQueue[JobEvent | None] = queue.SimpleQueue()
        self._last: RenderableType = ""
        self._thread = threading.Thread(target=self._follow, name="tensile-live-view", daemon=True)

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._events.put(None)
        self._thread.join(_LONGEST_END_S)
        if self._live is not None:
            with suppress(OSError):  # the terminal may be gone
                self._live.stop()

    def add_event(self, event: JobEvent) -> None:
        """Pass an event on to be printed. Returns at once and raises nothing; any thread may call it."""
        if event.kind != "step" and (self._live is None or event.kind in _KEPT_ABOVE):
            self._events.put(event)

    def _follow(self) -> None:
        """Print events as they come, and the status between them and at the end. An error of the console ends the live view."""
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
                self._print(event_line(event))
            self._show()

    def _show(self) -> None:
        """Draw the status, or the error that taking it raised. An OSError of the console is left to `_follow`."""
        wrong = ""
        try:
            status = self._status()
            line = status_line(status)
            view = StatusView(status, most_jobs=max(1, self._console.height - _LINES_AROUND))
            self._console.render_lines(view)  # raises an error here and not in `Live`, which draws the view once more at the end
        except Exception as error:
            line, view = "", self._last
            wrong = f"The status cannot be shown: {one_line(str(error)) or type(error).__name__}"
        if self._live is None:
            self._print(wrong or line)
            return
        self._last = view
        self._live.update(Group(view, Text(self._encodable(wrong), "yellow")) if wrong else view, refresh=True)

    def _print(self, line: str) -> None:
        self._console.print(self._encodable(line), markup=False, highlight=False, soft_wrap=True)

    def _encodable(self, text: str) -> str:
        """`text` with a replacement for each character that the console cannot write."""
        return text.encode(self._console.encoding, "replace").decode(self._console.encoding)


def status_line(status: Status) -> str:
    """The status as one line for a log, without a line break. Jobs that have ended are only counted, unless they failed."""
    parts = [f"{status.time_s:.1f} s  device {format_bytes(status.device_bytes)} of {format_bytes(status.budget_bytes)}"]
    parts += [_job(job) for job in status.jobs if job.state not in FINAL or job.state == "failed"]
    for state in ("finished", "cancelled"):
        count = sum(job.state == state for job in status.jobs)
        if count:
            parts.append(f"{count} {state}")
    return " | ".join(parts)


def _job(job: JobStatus) -> str:
    name, note = one_line(job.name), one_line(job.note)
    if len(note) > _LONGEST_NOTE:
        note = note[: _LONGEST_NOTE - 3].rstrip() + "..."  # the whole note was printed with its event
    if job.state == "preparing" and note:
        return f"{name} preparing: {note}"
    if job.state != "running":
        return f"{name} {job.state}" + (f" at {job.step}/{job.steps}" if job.step else "") + (f" ({note})" if note else "")
    loss = "" if job.loss is None else f" loss {job.loss:.3g}"
    speed = "" if job.steps_per_s is None else f" {job.steps_per_s:.2g} step/s"
    return f"{name} {job.step}/{job.steps}{loss}{speed}"


class StatusView:
    """A status that rich can print: as wide as the console, with at most `most_jobs` jobs, those first that have not ended.

    The text is made when it is printed, because the width is known only then.
    """

    def __init__(self, status: Status, *, most_jobs: int | None = None) -> None:
        self._status = status
        self._most_jobs = most_jobs

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        status, width, ascii_only = self._status, options.max_width, options.ascii_only
        yield Group(*_header(status, width=width, ascii_only=ascii_only))
        jobs = status.jobs
        if self._most_jobs is not None and len(jobs) > self._most_jobs:
            jobs = tuple(sorted(jobs, key=lambda job: job.state in FINAL))[: self._most_jobs]
        if not jobs:
            return
        yield _table(jobs, status, width=width, ascii_only=ascii_only)
        if len(jobs) < len(status.jobs):
            left_out = len(status.jobs) - len(jobs)
            yield Text(f"... {left_out} more {'job' if left_out == 1 else 'jobs'}", style="dim")
        for job in jobs:
            whole = self._most_jobs is None
            if job.note and (width < _WIDE or (whole and cell_len(one_line(job.note)) > width - _FIGURES_WIDTH)):
                longest = None if whole else width
                yield Text(_cut(_noted(job), longest, ascii_only=ascii_only), _STYLES[job.state])


def _noted(job: JobStatus) -> str:
    """The job's name and note. Of a job that is prepared, the note alone would not say of what it is a part."""
    return f"{job.name}: preparing: {job.note}" if job.state == "preparing" else f"{job.name}: {job.note}"


def _header(status: Status, *, width: int, ascii_only: bool) -> list[Text]:
    states = Counter(job.state for job in status.jobs)
    counted = ", ".join(f"{states[state]} {state}" for state in _STYLES if states[state])
    many = f"{len(status.jobs)} {'job' if len(status.jobs) == 1 else 'jobs'}"
    device = f"{format_bytes(status.device_bytes)} of {format_bytes(status.budget_bytes)}"
    limit = ", no limit" if status.host_budget_bytes >= NO_LIMIT else f" of {format_bytes(status.host_budget_bytes)}"
    host = f"{format_bytes(status.host_bytes)}{limit}"
    long = max(10, min(50, width - 46))
    short = max(4, (long - 12) // 2)
    filled, peak = _share(status.device_bytes, status.budget_bytes), _share(status.peak_bytes, status.budget_bytes)
    lines = [
        Text(f"{status.time_s:.1f} s, {many}" + (f": {counted}" if counted else ""), "bold"),
        Text("device  ")
        .append_text(_bar(long, filled, mark=peak, style="red" if filled > 1 else "green", ascii_only=ascii_only))
        .append(f"  {device}, peak {format_bytes(status.peak_bytes)}", "red" if peak > 1 else ""),
        Text("host    ")
        .append_text(_bar(long, _share(status.host_bytes, status.host_budget_bytes), style="blue", ascii_only=ascii_only))
        .append(f"  {host}"),
        Text("link    out ")
        .append_text(_bar(short, status.out_share, style="blue", ascii_only=ascii_only))
        .append(f" {status.out_share:>4.0%}   in ")
        .append_text(_bar(short, status.into_share, style="blue", ascii_only=ascii_only))
        .append(f" {status.into_share:>4.0%}"),
    ]
    for line in lines:
        line.truncate(width)
    return lines


def _share(part: int, whole: int) -> float:
    return part / whole if whole > 0 else 0.0


def _bar(width: int, share: float, *, style: str, ascii_only: bool, mark: float | None = None) -> Text:
    solid, light, peak = ("#", ".", "|") if ascii_only else ("█", "░", "┃")
    full = min(width, max(0, round(share * width))) if isfinite(share) else 0
    bar = Text(solid * full, style) + Text(light * (width - full), "dim")
    if mark:
        at = min(width - 1, round(mark * width))
        bar = bar[:at] + Text(peak, "bold") + bar[at + 1 :]
    return bar


def _table(jobs: tuple[JobStatus, ...], status: Status, *, width: int, ascii_only: bool) -> Table:
    largest = max([status.budget_bytes, *(max(job.peak_bytes, job.planned_bytes) for job in jobs)])
    size, unit = (2**30, "GiB") if largest >= 2**30 else (2**20, "MiB") if largest >= 2**20 else (2**10, "KiB")
    longest_name = 16 if width >= _WIDE else 12 if width >= _NARROW else 10
    rows = [_figures(job, size, unit) for job in jobs]
    shown = [name for name in rows[0] if width >= _NARROW or name not in ("ETA", "peak", "stall")]
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold underline", show_edge=False)
    table.add_column("job", no_wrap=True, overflow="crop", min_width=4)
    table.add_column("state", no_wrap=True, overflow="crop", min_width=9)
    for name in shown:
        table.add_column(name, justify="right", no_wrap=True, overflow="crop")
    if width >= _WIDE:
        table.add_column("note", no_wrap=True, overflow="crop")
    for job, row in zip(jobs, rows, strict=True):
        cells = [Text(_cut(job.name, longest_name, ascii_only=ascii_only)), Text(job.state, _STYLES[job.state])]
        cells += [Text(row[name]) for name in shown]
        if width >= _WIDE:
            cells.append(Text(_cut(job.note, width - _FIGURES_WIDTH, ascii_only=ascii_only)))
        table.add_row(*cells)
    return table


def _figures(job: JobStatus, size: int, unit: str) -> dict[str, str]:
    """From the heading of each column to the text in it."""
    return {
        "step": f"{job.step}/{job.steps}",
        "step/s": "" if job.steps_per_s is None or job.state in FINAL else f"{job.steps_per_s:.3g}",
        "ETA": "" if job.eta_s is None else _duration(job.eta_s),
        "loss": "" if job.loss is None else f"{job.loss:.3g}",
        "now": _size(job.device_bytes, size),
        "peak": _size(job.peak_bytes, size),
        f"plan {unit}": _size(job.planned_bytes, size),
        "stall": format_us(float(f"{job.stall_us:.2g}")) if job.stall_us > 0 else "",
    }


def _size(nbytes: int, size: int) -> str:
    return f"{nbytes / size:.2f}" if size == 2**30 else f"{nbytes / size:.0f}"


def _duration(seconds: float) -> str:
    """A duration in at most six characters.

    >>> [_duration(s) for s in (0.4, 59, 61, 3_700, 400_000)]
    ['0s', '59s', '1m01', '1h01', '4d15h']
    """
    if not isfinite(seconds):
        return ""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3_600:
        return f"{whole // 60}m{whole % 60:02}"
    if whole < 86_400:
        return f"{whole // 3_600}h{whole % 3_600 // 60:02}"
    days = whole // 86_400
    return f"{days}d" + (f"{whole % 86_400 // 3_600}h" if days < 100 else "")


def _cut(text: str, longest: int | None, *, ascii_only: bool) -> str:
    """`text` in one line of at most `longest` columns, in ASCII if the terminal has only that.

    >>> _cut("a name that is long", 10, ascii_only=True)
    'a name...'
    """
    text = one_line(text)
    if ascii_only:
        text = text.encode("ascii", "replace").decode()
    if longest is None or cell_len(text) <= longest:
        return text
    return set_cell_size(text, longest - 3).rstrip() + "..."
