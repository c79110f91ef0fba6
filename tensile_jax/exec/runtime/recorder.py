"""The recorder: keeps when each launch and copy ran, and how many bytes were on the device.

Its own memory is bounded, however long a run is:

    spans    the latest `_MOST` launches and copies
    levels   the bytes on the device over the whole run. When there are `_MOST` levels, every two neighbours are merged into the
             one with more bytes, so that half as many remain and no peak is lost
"""

from collections import deque
from dataclasses import replace

from tensile_jax.runtime_records import Level, Record, Span

_MOST = 200_000


class Recorder:
    """The dispatcher's threads append to it, which is atomic. Any thread may read it."""

    def __init__(self, *, most: int = _MOST) -> None:
        self._most = most
        self.spans: deque[Span] = deque(maxlen=most)
        self._levels: list[Level] = []

    def add_level(self, level: Level) -> None:
        """Add a level, later than all before it, unless nothing has changed since the last one. From one thread only."""
        levels = self._levels
        last = levels[-1] if levels else None
        same = last is not None and last.jobs == level.jobs and last.budget_bytes == level.budget_bytes
        if same and level.measured_bytes is None:
            return
        levels.append(level)
        if len(levels) >= self._most:
            self._levels = [_higher(*pair) for pair in zip(levels[::2], levels[1::2], strict=False)]

    def record(self) -> Record:
        """Everything that is kept, in order of time."""
        return Record(tuple(sorted(self.spans.copy(), key=lambda s: s.begin_us)), tuple(self._levels))


def _higher(a: Level, b: Level) -> Level:
    measured = [one.measured_bytes for one in (a, b) if one.measured_bytes is not None]
    return replace(max(a, b, key=lambda one: one.planned_bytes), measured_bytes=max(measured, default=None))
