"""Formats times, shares, losses, events and tables for the command line. `units.format_bytes` formats sizes."""

from typing import Any

from rich.console import Console
from rich.table import Table

from tensile_jax.runtime_records import JobEvent
from tensile_jax.units import format_bytes


def format_us(us: float) -> str:
    """A time in seconds, milliseconds or microseconds, with four digits.

    >>> [format_us(us) for us in (0, 41.7, 4171.8, 3_251_600.0)]
    ['0 us', '41.7 us', '4.172 ms', '3.252 s']
    """
    for unit, size in (("s", 1e6), ("ms", 1e3)):
        if us >= size:
            return f"{us / size:.4g} {unit}"
    return f"{us:.4g} us"


def format_share(part: float, whole: float) -> str:
    """`part` in per cent of `whole`.

    >>> format_share(1, 3)
    '33.3%'
    """
    return f"{part / whole:.1%}"


def format_accuracy(accuracy: float | None) -> str:
    """An accuracy in per cent; empty where it was not measured."""
    return "" if accuracy is None else f"{accuracy:.2%}"


def format_losses(first: float | None, last: float | None) -> str:
    """From the first loss to the last.

    >>> format_losses(10.33612, 2.19357), format_losses(0.5, None), format_losses(None, None)
    ('10.34 -> 2.194', '0.5 -> ?', '')
    """
    if first is None:
        return ""
    return f"{first:.4g} -> {'?' if last is None else format(last, '.4g')}"


def one_line(text: str) -> str:
    """`text` without line breaks or other characters that move a terminal's cursor.

    >>> one_line("out of memory:\\n  2 GiB\\x1b[2J")
    'out of memory: 2 GiB[2J'
    """
    return "".join(c for c in " ".join(text.split()) if c.isprintable())


def event_line(event: JobEvent) -> str:
    """One event of a job as one line, without its end.

    >>> event_line(JobEvent(12.34, "step", "gpt", 7, values={"loss": 0.69314}))
    '12.3 s  gpt: step 7, loss 0.6931'
    >>> event_line(JobEvent(0.5, "checkpoint_failed", "gpt", 7, "No space left on device"))
    '0.5 s  gpt: checkpoint failed after step 7 (No space left on device)'
    >>> event_line(JobEvent(0.5, "preparing", "gpt", 0, "compiling 12 segments"))
    '0.5 s  gpt: preparing: compiling 12 segments'
    """
    if event.kind == "preparing":
        return f"{event.time_s:.1f} s  {one_line(event.job)}: preparing: {one_line(event.note)}"
    parts = [event.kind.replace("_", " ") + (f" {event.step}" if event.kind == "step" else f" after step {event.step}")]
    for name, value in event.values.items():
        name = one_line(name)
        is_size = name.endswith("_bytes")
        parts.append(
            f"{name.removesuffix('_bytes').replace('_', ' ')} {format_bytes(value)}" if is_size else f"{name} {value:.4g}"
        )
    note = one_line(event.note)
    return f"{event.time_s:.1f} s  {one_line(event.job)}: {', '.join(parts)}" + (f" ({note})" if note else "")


def readable_console(width: int, **options: Any) -> Console:
    """A console on stdout. If stdout is a pipe or a file, it is at least `width` columns wide; rich alone would assume 80."""
    console = Console(**options)
    if not console.is_terminal:
        console.width = max(console.width, width)
    return console


def table_of(title: str, *columns: str) -> Table:
    """An empty table with lines. A column whose name begins with `>` is aligned to the right."""
    table = Table(title=title, title_justify="left", title_style="bold", caption_justify="left")
    for name in columns:
        right = name.startswith(">")
        table.add_column(name.removeprefix(">"), justify="right" if right else "left", overflow="fold", no_wrap=right)
    return table


def job_table(count: int, where: str, *columns: str, caption: str | None = None) -> Table:
    """An empty table for one row per job: no lines, narrow enough for 80 columns; names are cut off before figures."""
    title = f"{count} {'job' if count == 1 else 'jobs'} on {where}"
    looks: dict[str, Any] = {"title_justify": "left", "title_style": "bold", "caption_justify": "left"}
    table = Table(title=title, caption=caption, box=None, padding=(0, 1, 0, 0), **looks)
    table.add_column("job", overflow="ellipsis", min_width=8)  # what may wrap is made narrower first
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    return table
