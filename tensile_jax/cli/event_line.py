"""One event of a job as one line: `12.3 s  gpt: queued after step 0, planned 310 MiB (waits for memory)`."""

from tensile_jax.plan_format import format_bytes
from tensile_jax.runtime_records import JobEvent


def event_line(event: JobEvent) -> str:
    """The line, without its end.

    >>> event_line(JobEvent(12.34, "step", "gpt", 7, values={"loss": 0.69314}))
    '12.3 s  gpt: step 7, loss 0.6931'
    >>> event_line(JobEvent(0.5, "checkpoint_failed", "gpt", 7, "No space left on device"))
    '0.5 s  gpt: checkpoint failed after step 7 (No space left on device)'
    """
    what = event.kind.replace("_", " ") + (f" {event.step}" if event.kind == "step" else f" after step {event.step}")
    parts = [what, *(_value(name, value) for name, value in event.values.items())]
    note = one_line(event.note)
    return f"{event.time_s:.1f} s  {one_line(event.job)}: {', '.join(parts)}" + (f" ({note})" if note else "")


def one_line(text: str) -> str:
    """`text` without line breaks or other characters that move a terminal's cursor.

    >>> one_line("out of memory:\\n  2 GiB\\x1b[2J")
    'out of memory: 2 GiB[2J'
    """
    return "".join(c for c in " ".join(text.split()) if c.isprintable())


def _value(name: str, value: float) -> str:
    name = one_line(name)
    if name.endswith("_bytes"):
        return f"{name.removesuffix('_bytes').replace('_', ' ')} {format_bytes(value)}"
    return f"{name} {value:.4g}"
