"""Run the jobs of a jobs file on a runtime: submit each when it is due, and write down what happens.

follower    a thread: the runtime's events, into the inbox
maker       a thread: makes one job after another and submits it; `make_job` is user code and may hang
inbox       events, jobs that could not be made, the wish to stop; taken one by one by the thread that calls `run`
"""

import queue
import threading
import traceback
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic
from typing import Any, Literal

from tensile_jax.cli.event_line import one_line
from tensile_jax.cli.job_source import entrypoint_of
from tensile_jax.cli.jobs_control import JobsControl
from tensile_jax.cli.jobs_file import JobEntry
from tensile_jax.cli.lobby import Lobby
from tensile_jax.cli.run_folder import RunFolder
from tensile_jax.cli.tally import Tally
from tensile_jax.exec.runtime.job import Job
from tensile_jax.exec.runtime.runtime import Runtime
from tensile_jax.runtime_records import FINAL, JobEvent


@dataclass(frozen=True, slots=True, eq=False)
class _NotMade:
    """A job could not be made or submitted."""

    name: str
    error: BaseException


class _Stop:
    """Every job is to end after its iteration."""


class JobsRun:
    """A run. `tallies` are what earlier parts of it came to: jobs that had finished are not run again.

    Attributes:
        control: for a second terminal, and for whoever looks.
        tallies: by name; what the jobs have come to so far.
        interrupted: `stop` was called before all had ended.
    """

    def __init__(self, runtime: Runtime, folder: RunFolder, entries: Iterable[JobEntry], tallies: Mapping[str, Tally]) -> None:
        self._runtime = runtime
        self._folder = folder
        self._began = monotonic()
        self._inbox: queue.SimpleQueue[JobEvent | _NotMade | _Stop] = queue.SimpleQueue()
        self._to_make: queue.SimpleQueue[JobEntry | None] = queue.SimpleQueue()
        self._plans_written: dict[str, int] = {}
        self._submitting = threading.Lock()  # nothing is submitted once all is to stop
        every = {entry.name: entry for entry in entries}
        self.tallies = {name: tallies.get(name, Tally()) for name in every}
        for tally in self.tallies.values():
            tally.state = tally.state if tally.state == "finished" else None
        self._lobby = Lobby(entry for name, entry in every.items() if self.tallies[name].state is None)
        self.control = JobsControl(
            runtime, self._lobby, every, self.tallies, ended=lambda name: self._say(name, "cancelled", "before it was due")
        )
        self.interrupted = False

    def stop(self) -> None:
        """Let every job end after its iteration. Only notes it: may be called from any thread."""
        self._inbox.put(_Stop())

    def run(self, watch: Callable[[JobEvent], None]) -> None:
        """Until every job has ended, and the runtime is closed. `watch` is told all events."""
        follower = threading.Thread(target=self._follow, name="tensile-follower", daemon=True)
        threading.Thread(target=self._make_all, name="tensile-maker", daemon=True).start()
        follower.start()
        while not all(tally.state in FINAL for tally in self.tallies.values()):
            for entry in self._lobby.take_due(monotonic() - self._began, self.tallies):
                self._to_make.put(entry)
            start_s = self._lobby.next_start_s()
            with suppress(queue.Empty):
                wait_s = None if start_s is None else max(0.0, start_s - (monotonic() - self._began))
                self._take(self._inbox.get(timeout=wait_s), watch)
        self._to_make.put(None)
        self._runtime.close()
        follower.join()
        while not self._inbox.empty():
            self._take(self._inbox.get(), watch)

    def _follow(self) -> None:
        for event in self._runtime.events(until_closed=True):
            self._inbox.put(event)

    # -- what happens -----------------------------------------------------------------------------------------------------------

    def _take(self, news: JobEvent | _NotMade | _Stop, watch: Callable[[JobEvent], None]) -> None:
        if isinstance(news, JobEvent):
            self._hear(news)
            watch(news)
        elif isinstance(news, _NotMade):
            self._not_made(news)
        else:
            self._stop_all()

    def _hear(self, event: JobEvent) -> None:
        self._folder.tell(event)
        job = self._job(event.job)
        if job is not None and event.kind in ("planned", "renewed"):
            self._write_plans(job)
        if job is not None and event.kind == "failed":
            self._write_traceback(event.job, job.exception())
        if event.job in self.tallies:
            self.tallies[event.job].hear(event)

    def _write_plans(self, job: Job) -> None:
        plans = job.plans
        for _, plan in plans[self._plans_written.get(job.name, 0) :]:
            self._folder.write_plan(job.name, plan)
        self._plans_written[job.name] = len(plans)

    def _write_traceback(self, name: str, error: BaseException | None) -> None:
        if error is not None:
            self._folder.write_log(name, "".join(traceback.format_exception(error)))

    def _job(self, name: str) -> Job | None:
        return next((job for job in self._runtime.jobs if job.name == name), None)

    def _say(self, name: str, kind: Literal["failed", "cancelled"], note: str) -> None:
        """An event of a job that the runtime does not have."""
        self._inbox.put(JobEvent(self._runtime.status().time_s, kind, name, self.tallies[name].step, note))

    # -- beginnings -------------------------------------------------------------------------------------------------------------

    def _make_all(self) -> None:
        while (entry := self._to_make.get()) is not None:
            try:
                self._make(entry)
            except BaseException as error:  # SystemExit in user code ends the job, not this thread
                self._inbox.put(_NotMade(entry.name, error))

    def _make(self, entry: JobEntry) -> None:
        entrypoint = entrypoint_of(entry)
        made: tuple[Any, ...] = (entrypoint, None, None) if entry.isolation == "process" else entrypoint.make()
        with self._submitting:
            if self.interrupted:
                return
            job = self._runtime.submit(
                *made,
                steps=entry.steps,
                name=entry.name,
                priority=entry.priority,
                max_swap_rate=entry.max_swap_rate,
                max_slowdown=entry.max_slowdown,
                policy=entry.policy,
                checkpoint_every=entry.checkpoint_every,
                resume=True,  # from the run's own folder: there is nothing in it but when the run is resumed
                isolation=entry.isolation,
            )
        if self._lobby.leave(entry.name):
            with suppress(ValueError):  # it has ended already
                job.cancel()

    def _not_made(self, news: _NotMade) -> None:
        self._lobby.leave(news.name)
        if self.tallies[news.name].state is None and self._job(news.name) is None:
            self._say(news.name, "failed", one_line(f"{type(news.error).__name__}: {news.error}"))
        self._write_traceback(news.name, news.error)

    def _stop_all(self) -> None:
        with self._submitting:
            self.interrupted = True
        for name in self._lobby.clear():
            if self._job(name) is None:
                self._say(name, "cancelled", "interrupted before it began")
        self._runtime.stop()
