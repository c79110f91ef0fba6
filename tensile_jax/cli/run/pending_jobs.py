"""Holds the jobs of a run that are not yet submitted to its runtime, and summarises the events of each job.

`PendingJobs` holds two kinds of jobs: those that wait for their start (`start_after`), and those whose state and batches are
being made:

    waiting -> making -> (submitted to the runtime)
       |          |
       +----------+----> cancelled

`JobProgress` summarises the events of one job: its steps, losses, time and final state. If a job waits for another one, the other
job's progress says when to start. The report at the end of the run is made from the progress of all jobs.
"""

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from tensile_jax.cli.jobs_file import AfterJob, JobEntry
from tensile_jax.runtime_records import FINAL, JobEvent, JobState


@dataclass(slots=True)
class JobProgress:
    """How far a job has come in all parts of the run: a resumed run continues the count of the earlier parts.

    `time_s` lasts from the job's submission to its last event. `state` is None before the job ends.
    """

    step: int = 0
    loss_first: float | None = None
    loss_last: float | None = None
    time_s: float = 0.0
    state: JobState | None = None
    note: str = ""
    _since_s: float | None = None
    _before_s: float = 0.0

    def resume(self) -> None:
        """Begin another part of the run, in which a job that has not finished runs again."""
        self.state = self.state if self.state == "finished" else None

    def add(self, event: JobEvent) -> None:
        """Count the next event of the job."""
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
    """At first all of `entries` wait. Times are seconds since the run began. Several threads may call the methods."""

    def __init__(self, entries: Iterable[JobEntry]) -> None:
        self._lock = threading.Lock()
        self._waiting = {entry.name: entry for entry in entries}
        self._making: set[str] = set()
        self._unwanted: set[str] = set()  # cancelled while being made

    def state_of(self, job: str) -> tuple[Literal["queued", "preparing"], str] | None:
        """The state in which the job is shown, and a note with the reason; None if the job is not pending."""
        with self._lock:
            if job in self._waiting:
                return "queued", _when(self._waiting[job])
            return ("preparing", "making its state and batches") if job in self._making else None

    def take_due(self, time_s: float, progress: Mapping[str, JobProgress]) -> list[JobEntry]:
        """Remove the jobs that are due from the waiting ones, and return them; they now count as being made."""
        with self._lock:
            due = [entry for entry in self._waiting.values() if _is_due(entry, time_s, progress)]
            for entry in due:
                del self._waiting[entry.name]
                self._making.add(entry.name)
            return due

    def next_start_s(self) -> float | None:
        """The earliest start time of the waiting jobs; None if each of them waits for another job, or none waits."""
        with self._lock:
            return min((e.start_after for e in self._waiting.values() if not isinstance(e.start_after, AfterJob)), default=None)

    def made(self, job: str) -> bool:
        """Note that the job has been made, or could not be made. Return whether the job was cancelled in the meantime."""
        with self._lock:
            self._making.discard(job)
            return job in self._unwanted

    def cancel(self, job: str) -> Literal["at once", "when made", "not pending"]:
        """Cancel a waiting job at once. Note of a job that is being made that it must be cancelled when it is made."""
        with self._lock:
            if job in self._making:
                self._unwanted.add(job)
                return "when made"
            return "not pending" if self._waiting.pop(job, None) is None else "at once"

    def clear(self) -> list[str]:
        """Forget all pending jobs, so that none of them begins, and return their names."""
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
