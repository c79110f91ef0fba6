"""Runs the jobs of a jobs file on a `Runtime`, from reading the budget to reporting the outcome (`tensile run JOBS.toml`).

`begin_jobs` makes a new run folder. `resume_jobs` (`--resume RUN`) continues in the folder of an earlier run. `JobsRun` submits
each job to the runtime when the job is due, and writes events, plans and results into the run folder. Three threads share this
work:

    caller     calls `JobsRun.run`, which takes the messages of an inbox (a queue) one by one: events, jobs that could not be
               made, and the request to stop
    follower   puts the events of the runtime into the inbox
    maker      makes one job after another and submits it; a thread of its own, since an entrypoint is user code and may hang
"""

import queue
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic
from typing import Any, Literal

import jax
from rich.console import Console

from tensile_jax.cli.errors import Refusal
from tensile_jax.cli.formatting import one_line
from tensile_jax.cli.jobs_file import JobEntry, JobsFile
from tensile_jax.cli.progress import Phases
from tensile_jax.cli.run.control import serving
from tensile_jax.cli.run.folder import RunConfig, RunFolder, read_events
from tensile_jax.cli.run.job_source import entrypoint_of, find_modules_here, model_of, resolve_budget, same_source
from tensile_jax.cli.run.live_view import LiveView
from tensile_jax.cli.run.pending_jobs import JobProgress, PendingJobs
from tensile_jax.cli.run.report import JobOutcome, JobsOutcome
from tensile_jax.cli.signals import StopRequest, stopping_on_signals
from tensile_jax.exec.runtime.job import Job
from tensile_jax.exec.runtime.runtime import Runtime
from tensile_jax.exec.transfer import to_device
from tensile_jax.installed_models import Model
from tensile_jax.plan import known_policy
from tensile_jax.runtime_records import FINAL, JobEvent, JobReport, JobStatus, Record, Stage, Status

_CHECKPOINTS = "checkpoints"


def begin_jobs(
    jobs: JobsFile, path: Path, console: Console, *, jit_peaks: Mapping[str, int] | None = None
) -> tuple[JobsOutcome, Record]:
    """Run the jobs in a new run folder, and return the outcome and the record of the run.

    `jit_peaks` are the jobs' peaks under plain jit, by name. If they are needed and not given, plain jit is compiled.

    Raises:
        Refusal: a job's model or `args` are wrong, or the folder cannot be made.
        OSError: the config of the run cannot be written, without which the run could not be resumed.
    """
    find_modules_here()
    for job in jobs.jobs:
        model_of(job)
    RunFolder.refuse_used(path)
    with Phases(console) as phases:
        budget_bytes, peaks = resolve_budget(jobs, phases, jit_peaks)
    config = RunConfig(jobs, budget_bytes, peaks)
    with stopping_on_signals() as stop:  # before the folder exists, so that no signal leaves it unfinished
        folder = RunFolder.create(path)
        try:
            folder.write_config(config)
        except OSError:
            folder.discard()
            raise
        return _run(config, folder, {}, console, stop)


def resume_jobs(config: RunConfig, path: Path, console: Console) -> tuple[JobsOutcome, Record]:
    """Continue a run that was interrupted or killed, from the latest checkpoints of its jobs."""
    find_modules_here()
    progress: dict[str, JobProgress] = {}
    if (path / "events.jsonl").exists():
        for event in read_events(path):
            progress.setdefault(event.job, JobProgress()).add(event)
    if all(job.name in progress and progress[job.name].state == "finished" for job in config.jobs_file.jobs):
        raise Refusal(f"--resume={path}: all jobs of this run have finished. Start a new run from the jobs file.")
    with stopping_on_signals() as stop:
        return _run(config, RunFolder.reopen(path), progress, console, stop)


def _run(
    config: RunConfig, folder: RunFolder, progress: Mapping[str, JobProgress], console: Console, stop: StopRequest
) -> tuple[JobsOutcome, Record]:
    device = config.jobs_file.device
    runtime = Runtime(
        config.budget_bytes,
        host_budget=device.host_budget_bytes,
        device_profile=device.device_profile,
        checkpoints=folder.path / _CHECKPOINTS,
    )
    run = JobsRun(runtime, folder, config.jobs_file.jobs, progress)
    stop.call(run.stop)
    with runtime, serving(folder.path, run):
        folder.remove_outcome()
        folder.write_versions(device_kind=jax.devices()[0].device_kind)
        console.print(f"Run folder: {folder.path}; from another terminal: tensile status {folder.path}", markup=False)
        with LiveView(console, run.status) as view:
            run.run(view.add_event)
        record = run.record()
        folder.write_record(record)
        outcome = _outcome(config, folder, runtime, run)
        folder.write_outcome(outcome)
    return outcome, record


def _outcome(config: RunConfig, folder: RunFolder, runtime: Runtime, run: "JobsRun") -> JobsOutcome:
    entries = config.jobs_file.jobs
    status = run.status()
    accuracies = {} if run.interrupted else _accuracies(entries, runtime)
    outcomes: list[JobOutcome] = []
    for entry, job in zip(entries, status.jobs, strict=True):
        progress = run.progress[entry.name]
        report = run.report(entry.name)
        outcomes.append(
            JobOutcome(
                name=entry.name,
                model=entry.model,
                entrypoint=entry.entrypoint,
                state=progress.state or "cancelled",
                note=progress.note,
                steps_asked=entry.steps,
                steps_done=progress.step,
                loss_first=progress.loss_first,
                loss_last=progress.loss_last,
                peak_bytes=job.peak_bytes or None,
                planned_peak_bytes=job.planned_bytes or None,
                jit_peak_bytes=config.jit_peaks.get(entry.name),
                time_s=progress.time_s,
                step_us=None if report is None else report.step_us,
                predicted_step_us=None if report is None else report.predicted_step_us,
                predicted_jit_step_us=None if report is None else report.predicted_jit_step_us,
                test_accuracy=accuracies.get(entry.name),
            )
        )
    return JobsOutcome(
        folder=str(folder.path),
        device=jax.devices()[0].device_kind,
        interrupted=run.interrupted,
        budget_bytes=status.budget_bytes,
        host_budget_bytes=config.jobs_file.device.host_budget_bytes,
        peak_bytes=runtime.peak_bytes,
        time_s=max((event.time_s for event in runtime.events()), default=0.0),
        troubles=folder.troubles,
        jobs=tuple(outcomes),
    )


def _accuracies(entries: Sequence[JobEntry], runtime: Runtime) -> dict[str, float]:
    """The test accuracy of each finished job whose model has a test set, measured while nothing else is on the device."""
    finished = {job.name: job for job in runtime.jobs if job.status.state == "finished"}
    models: dict[bytes, Model | None] = {}
    found: dict[str, float] = {}
    for entry in entries:
        if entry.name in finished:
            source = same_source(entry)
            model = models[source] = models[source] if source in models else model_of(entry)
            if model is not None and model.evaluate is not None:
                found[entry.name] = model.evaluate(to_device(finished[entry.name].result(memory="host")))
    return found


# -- the run ------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class _NotMade:
    """A message in the inbox: a job could not be made or submitted."""

    name: str
    error: BaseException


class _Stop:
    """A message in the inbox: every job shall end after its current iteration."""


class JobsRun:
    """A run of `entries`. It is a `Controllable`, so a second terminal can control it.

    `progress` is the progress of the jobs in earlier parts of the run. A job that has finished is not run again.

    Attributes:
        progress: the progress of each job so far, by name.
        interrupted: whether `stop` was called before all jobs had ended.
    """

    def __init__(
        self, runtime: Runtime, folder: RunFolder, entries: Sequence[JobEntry], progress: Mapping[str, JobProgress]
    ) -> None:
        self._runtime = runtime
        self._folder = folder
        self._entries = {entry.name: entry for entry in entries}
        self._began = monotonic()
        self._inbox: queue.SimpleQueue[JobEvent | _NotMade | _Stop] = queue.SimpleQueue()
        self._to_make: queue.SimpleQueue[JobEntry | None] = queue.SimpleQueue()
        self._plans_written: dict[str, int] = {}
        self._never_submitted: list[Stage] = []
        self._submitting = threading.Lock()  # so that no job is submitted after the request to stop
        self.progress = {name: progress.get(name, JobProgress()) for name in self._entries}
        for one in self.progress.values():
            one.resume()
        self._pending = PendingJobs(entry for name, entry in self._entries.items() if self.progress[name].state is None)
        self.interrupted = False

    def stop(self) -> None:
        """Ask every job to end after its current iteration. Returns at once; any thread may call it."""
        self._inbox.put(_Stop())

    def run(self, watch: Callable[[JobEvent], None]) -> None:
        """Run until every job has ended, then close the runtime. `watch` is called with every event."""
        follower = threading.Thread(target=self._follow, name="tensile-follower", daemon=True)
        threading.Thread(target=self._make_all, name="tensile-maker", daemon=True).start()
        follower.start()
        while not all(one.state in FINAL for one in self.progress.values()):
            for entry in self._pending.take_due(monotonic() - self._began, self.progress):
                self._to_make.put(entry)
            start_s = self._pending.next_start_s()
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
            self._take_event(news)
            watch(news)
        elif isinstance(news, _NotMade):
            self._pending.made(news.name)
            if self.progress[news.name].state is None and self._job(news.name) is None:
                self._put_event(news.name, "failed", one_line(f"{type(news.error).__name__}: {news.error}"))
            self._write_traceback(news.name, news.error)
        else:
            with self._submitting:
                self.interrupted = True
            for name in self._pending.clear():
                if self._job(name) is None:
                    self._put_event(name, "cancelled", "interrupted before it began")
            self._runtime.stop()

    def _take_event(self, event: JobEvent) -> None:
        self._folder.write_event(event)
        job = self._job(event.job)
        if job is not None and event.kind in ("planned", "renewed"):
            plans = job.plans
            for _, plan in plans[self._plans_written.get(job.name, 0) :]:
                self._folder.write_plan(job.name, plan)
            self._plans_written[job.name] = len(plans)
        if job is not None and event.kind == "failed":
            self._write_traceback(event.job, job.exception())
        if event.job in self.progress:
            self.progress[event.job].add(event)

    def _write_traceback(self, name: str, error: BaseException | None) -> None:
        if error is not None:
            self._folder.write_log(name, "".join(traceback.format_exception(error)))

    def record(self) -> Record:
        """The runtime's record, with the ends of jobs that were not submitted to it."""
        record = self._runtime.record()
        stages = sorted((*record.stages, *self._never_submitted), key=lambda stage: stage.begin_us)
        return replace(record, stages=tuple(stages))

    def report(self, name: str) -> JobReport | None:
        """What was measured of a job in this part of the run; None if the job had no plan in it."""
        job = self._job(name)
        return None if job is None or job.plan is None else job.report()

    def _job(self, name: str) -> Job | None:
        return next((job for job in self._runtime.jobs if job.name == name), None)

    def _put_event(self, name: str, kind: Literal["failed", "cancelled"], note: str) -> None:
        """Put an event of a job that is not submitted to the runtime into the inbox: its end."""
        event = JobEvent(self._runtime.status().time_s, kind, name, self.progress[name].step, note)
        at_us = event.time_s * 1e6
        self._never_submitted.append(Stage("preparing" if kind == "failed" else "queued", name, note, at_us, at_us, kind))
        self._inbox.put(event)

    # -- making and submitting jobs ---------------------------------------------------------------------------------------------

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
                renew_above=entry.renew_above,
                policy=known_policy(entry.policy),
                checkpoint_every=entry.checkpoint_every,
                resume=True,  # from this run's folder, which holds checkpoints only if the run is resumed
                isolation=entry.isolation,
            )
        if self._pending.made(entry.name):
            with suppress(ValueError):  # it has ended already
                job.cancel()

    # -- for a second terminal: a `Controllable` --------------------------------------------------------------------------------

    def status(self) -> Status:
        """The runtime's status, with all jobs of the file in its order."""
        outside = {name: self._status_outside(entry) for name, entry in self._entries.items()}
        status = self._runtime.status()
        known = {job.name: job for job in status.jobs}
        return replace(status, jobs=tuple(known.get(name, outside[name]) for name in self._entries))

    def _status_outside(self, entry: JobEntry) -> JobStatus:
        """The status of a job that is not submitted to the runtime."""
        progress = self.progress[entry.name]
        state, note = self._pending.state_of(entry.name) or (progress.state or "preparing", progress.note)
        return JobStatus(
            name=entry.name,
            state=state,
            priority=entry.priority,
            step=progress.step,
            steps=entry.steps,
            loss=progress.loss_last,
            steps_per_s=None,
            device_bytes=0,
            peak_bytes=0,
            planned_bytes=0,
            host_bytes=0,
            stall_us=0.0,
            swapped_bytes=0,
            note=note,
        )

    def pause(self, job: str) -> None:
        """Pause the job. Raises: ValueError: the job has not begun, has ended, or does not exist."""
        self._refuse_outside(job, "paused")
        self._runtime.pause(job)

    def resume(self, job: str) -> None:
        """Resume the job. Raises: ValueError: as `pause`."""
        self._refuse_outside(job, "resumed")
        self._runtime.resume(job)

    def cancel(self, job: str) -> None:
        """Cancel the job; a job that has not begun never begins. Raises: ValueError: the job has ended or does not exist."""
        match self._pending.cancel(job):
            case "at once":
                self._put_event(job, "cancelled", "before it was due")
            case "not pending":
                self._refuse_outside(job, "cancelled")
                self._runtime.cancel(job)
            case "when made":
                pass

    def set_budget(self, budget: int | str) -> None:
        """Set the budget of all jobs together."""
        self._runtime.set_budget(budget)

    def _refuse_outside(self, job: str, done: str) -> None:
        if job not in self._entries:
            raise ValueError(f"there is no job {job!r}. There are: {', '.join(self._entries)}.")
        if self._pending.state_of(job) is not None:
            raise ValueError(f"{job} has not begun: it cannot be {done} yet, only cancelled.")
        if self._job(job) is None:
            raise ValueError(f"{job} is {self.progress[job].state}; it cannot be {done}.")
