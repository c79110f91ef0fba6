"""Records when each run and copy was carried out, and how many bytes were on the device.

A *run* is a group of consecutive launches and other moves of one iteration. The recorder's own memory is bounded, however long
the jobs run:

    spans    the latest `_MOST` runs and copies
    levels   the bytes on the device over the whole time. When there are `_MOST` levels, only the higher one of each pair of
             neighbours is kept. So half as many remain, and no peak is lost

The dispatcher only appends the controller's states, which are immutable. Another thread computes levels from them later: when
somebody reads the record, or when `_MOST_STATES` states wait.
"""

import threading
from collections import deque
from dataclasses import replace

from tensile_jax.exec.controller.state import JobId, State
from tensile_jax.runtime_records import Level, Record, Span

_MOST = 200_000
_MOST_STATES = 1000


class Recorder:
    """The dispatcher's threads append to it, which is atomic. Any thread may read it.

    `names` are the names of all jobs, by their numbers.
    """

    def __init__(self, *, most: int = _MOST) -> None:
        self._most = most
        self.names: dict[JobId, str] = {}
        self.spans: deque[Span] = deque(maxlen=most)
        self._states: deque[tuple[float, State, int | None]] = deque()
        self._condensing = threading.Lock()
        self._levels: list[Level] = []

    def add(self, time_us: float, state: State, measured_bytes: int | None = None) -> bool:
        """Add a state of the controller, later than all before it. Only one thread at a time may call this.

        Returns whether so many states wait that `condense` should be called, in another thread.
        """
        self._states.append((time_us, state, measured_bytes))
        return not len(self._states) % _MOST_STATES

    def condense(self) -> None:
        """Compute the levels of the states that wait."""
        with self._condensing:
            for _ in range(len(self._states)):
                self._add_level(self._level(*self._states.popleft()))

    def record(self) -> Record:
        """Everything that is kept, in order of time."""
        self.condense()
        return Record(tuple(sorted(self.spans.copy(), key=lambda s: s.begin_us)), tuple(self._levels))

    def _level(self, time_us: float, state: State, measured_bytes: int | None) -> Level:
        jobs = {self.names[r.job]: r.held_bytes for r in state.records}
        for job, transient in state.in_flight[:1]:
            name = self.names[job]
            jobs[name] = jobs.get(name, 0) + transient
        return Level(time_us, state.budget_bytes, jobs, measured_bytes)

    def _add_level(self, level: Level) -> None:
        """Add a level, unless nothing has changed since the last one."""
        levels = self._levels
        last = levels[-1] if levels else None
        same = last is not None and last.jobs == level.jobs and last.budget_bytes == level.budget_bytes
        if same and level.measured_bytes is None:
            return
        levels.append(level)
        if len(levels) >= self._most:
            self._levels = [_higher(*pair) for pair in zip(levels[::2], levels[1::2], strict=False)]


def _higher(a: Level, b: Level) -> Level:
    measured = [one.measured_bytes for one in (a, b) if one.measured_bytes is not None]
    return replace(max(a, b, key=lambda one: one.planned_bytes), measured_bytes=max(measured, default=None))
