"""The jobs of a run that its runtime does not have yet: those that wait until they are due, and those that are being made.

    waiting -> making -> (with the runtime)
       |          |
       +----------+----> cancelled

Asked from several threads: by who runs the jobs, by who makes them, and by a second terminal.
"""

import threading
from collections.abc import Iterable, Mapping
from typing import Literal

from tensile_jax.cli.jobs_file import JobEntry
from tensile_jax.cli.start_after import AfterJob
from tensile_jax.cli.tally import Tally
from tensile_jax.runtime_records import FINAL


class Lobby:
    """Begins with all of `entries` waiting; times are seconds since the run began."""

    def __init__(self, entries: Iterable[JobEntry]) -> None:
        self._lock = threading.Lock()
        self._waiting = {entry.name: entry for entry in entries}
        self._making: set[str] = set()
        self._unwanted: set[str] = set()  # cancelled while being made

    def state_of(self, job: str) -> tuple[Literal["queued", "preparing"], str] | None:
        """As what the job is shown, and why; None if it is not here."""
        with self._lock:
            if job in self._waiting:
                return "queued", _when(self._waiting[job])
            return ("preparing", "is being made") if job in self._making else None

    def take_due(self, time_s: float, tallies: Mapping[str, Tally]) -> list[JobEntry]:
        """Those that are due now; from here on they are being made."""
        with self._lock:
            due = [entry for entry in self._waiting.values() if _is_due(entry, time_s, tallies)]
            for entry in due:
                del self._waiting[entry.name]
                self._making.add(entry.name)
            return due

    def next_start_s(self) -> float | None:
        """When the clock makes one due; None if none waits for it."""
        with self._lock:
            return min((e.start_after for e in self._waiting.values() if not isinstance(e.start_after, AfterJob)), default=None)

    def leave(self, job: str) -> bool:
        """It has been made, or could not be. Whether it was cancelled in the meantime."""
        with self._lock:
            self._making.discard(job)
            return job in self._unwanted

    def cancel(self, job: str) -> Literal["at once", "when made", "not here"]:
        """A waiting job never begins; one that is being made is to be cancelled when that is over."""
        with self._lock:
            if job in self._making:
                self._unwanted.add(job)
                return "when made"
            return "not here" if self._waiting.pop(job, None) is None else "at once"

    def clear(self) -> list[str]:
        """None of these begins any more."""
        with self._lock:
            names = [*self._waiting, *self._making]
            self._waiting.clear()
            self._making.clear()
            return names


def _is_due(entry: JobEntry, time_s: float, tallies: Mapping[str, Tally]) -> bool:
    start = entry.start_after
    if not isinstance(start, AfterJob):
        return time_s >= start
    other = tallies[start.job]
    return other.state in FINAL or (start.step is not None and other.step >= start.step)


def _when(entry: JobEntry) -> str:
    start = entry.start_after
    if not isinstance(start, AfterJob):
        return f"starts {start:g} s after the run" if start > 0 else "starts at once"
    return f"starts after {start.job}" if start.step is None else f"starts after step {start.step} of {start.job}"
