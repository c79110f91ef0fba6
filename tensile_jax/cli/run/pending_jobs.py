"""The jobs of a run that are not with its runtime yet, and what the events of each job come to.

`PendingJobs` holds the jobs that wait until they are due, and those that are being made:

    waiting -> making -> (with the runtime)
       |          |
       +----------+----> cancelled

`JobProgress` is what a job's events come to. It decides when a job is due that waits for another one, and is what the report at
the end says of the job.
"""

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from tensile_jax.cli.jobs_file import AfterJob, JobEntry
from tensile_jax.runtime_records import FINAL, JobEvent, JobState


@dataclass(slots=True)
class JobProgress:
    """How far a job has come, in all parts of the run: a resumed run goes on counting.

    `time_s` is from the job's submission to its last event; `state` is None before the job ends.
    """

    step: int = 0
    loss_first: float | None = None
    loss_last: float | None = None
    time_s: float = 0.0
    state: JobState | None = None
    note: str = ""
    _since_s: float | None = None
    _before_s: float = 0.0

    def add(self, event: JobEvent) -> None:
        """The next event of the job."""
        self.step = event.step
        loss = event.values.get("loss")
        match event.kind:
            case "submitted":
                self._since_s, self._before_s = event.time_s, self.time_s
                self.state, self.note = None, ""
            case "step" if loss is not None:
                self.loss_first = loss if self.loss_first is None else self.loss_first
                self.loss_last = loss
            case "finished" | "failed" | "cancelled":
                self.state, self.note = event.kind, event.note
            case _:
                pass
        if self._since_s is not None:
            self.time_s = self._before_s + event.time_s - self._since_s


class PendingJobs:
    """Begins with all of `entries` waiting. Times are seconds since the run began. Several threads may call it."""

    def __init__(self, entries: Iterable[JobEntry]) -> None:
        self._lock = threading.Lock()
        self._waiting = {entry.name: entry for entry in entries}
        self._making: set[str] = set()
        self._unwanted: set[str] = set()  # cancelled while being made

    def state_of(self, job: str) -> tuple[Literal["queued", "preparing"], str] | None:
        """As what the job is shown, and why; None if it is not pending."""
        with self._lock:
            if job in self._waiting:
                return "queued", _when(self._waiting[job])
            return ("preparing", "is being made") if job in self._making else None

    def take_due(self, time_s: float, progress: Mapping[str, JobProgress]) -> list[JobEntry]:
        """The jobs that are due now; from here on they are being made."""
        with self._lock:
            due = [entry for entry in self._waiting.values() if _is_due(entry, time_s, progress)]
            for entry in due:
                del self._waiting[entry.name]
                self._making.add(entry.name)
            return due

    def next_start_s(self) -> float | None:
        """When the clock makes one due; None if none waits for the clock."""
        with self._lock:
            return min((e.start_after for e in self._waiting.values() if not isinstance(e.start_after, AfterJob)), default=None)

    def made(self, job: str) -> bool:
        """The job has been made, or could not be. Whether it was cancelled in the meantime."""
        with self._lock:
            self._making.discard(job)
            return job in self._unwanted

    def cancel(self, job: str) -> Literal["at once", "when made", "not pending"]:
        """A waiting job never begins; one that is being made is to be cancelled when it is made."""
        with self._lock:
            if job in self._making:
                self._unwanted.add(job)
                return "when made"
            return "not pending" if self._waiting.pop(job, None) is None else "at once"

    def clear(self) -> list[str]:
        """None of these begins any more."""
        with self._lock:
            names = [*self._waiting, *self._making]
            self._waiting.clear()
            self._making.clear()
            return names


def _is_due(entry: JobEntry, time_s: float, progress: Mapping[str, JobProgress]) -> bool:
    start = entry.start_after
    if not isinstance(start, AfterJob):
        return time_s >= start
    other = progress[start.job]
    return other.state in FINAL or (start.step is not None and other.step >= start.step)


def _when(entry: JobEntry) -> str:
    start = entry.start_after
    if not isinstance(start, AfterJob):
        return f"starts {start:g} s after the run" if start > 0 else "starts at once"
    return f"starts after {start.job}" if start.step is None else f"starts after step {start.step} of {start.job}"
