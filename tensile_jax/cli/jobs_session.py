"""What `tensile run JOBS.toml` does once its file is read: budget, runtime, run folder, live view, outcome."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import jax
from rich.console import Console

from tensile_jax.cli.control import serving
from tensile_jax.cli.job_source import find_modules_here, model_of, same_source
from tensile_jax.cli.jobs_file import JobEntry, JobsFile
from tensile_jax.cli.jobs_outcome import JobOutcome, JobsOutcome
from tensile_jax.cli.jobs_run import JobsRun
from tensile_jax.cli.past_run import read_events
from tensile_jax.cli.plain_jit import resolve_budget
from tensile_jax.cli.progress import Live
from tensile_jax.cli.refusal import Refusal
from tensile_jax.cli.run_config import RunConfig
from tensile_jax.cli.run_folder import RunFolder
from tensile_jax.cli.stop_signals import Stopping, stopping_on_signals
from tensile_jax.cli.tally import Tally
from tensile_jax.cli.watch import Watch
from tensile_jax.exec.runtime.runtime import Runtime
from tensile_jax.exec.step.transfer import to_device
from tensile_jax.installed_models import Model
from tensile_jax.runtime_records import JobStatus, Record

CHECKPOINTS = "checkpoints"


@dataclass(frozen=True, slots=True, eq=False)
class JobsDone:
    """A run that is over: how it ended, and what it recorded."""

    outcome: JobsOutcome
    record: Record


def begin_jobs(jobs: JobsFile, path: Path, console: Console, *, jit_peaks: Mapping[str, int] | None = None) -> JobsDone:
    """A new run, in a folder of its own. `jit_peaks`, by job, are compiled for where they are needed and not given.

    Raises:
        Refusal: a job's model or `args` cannot be, or the folder cannot be made.
        OSError: the folder does not take its config, without which the run could not be resumed.
    """
    find_modules_here()
    for job in jobs.jobs:
        model_of(job)
    RunFolder.refuse_used(path)
    with Live(console) as live:
        budget_bytes, peaks = resolve_budget(jobs, live, jit_peaks)
    config = RunConfig(jobs, budget_bytes, peaks)
    with stopping_on_signals() as stopping:  # from before there is a folder, which is therefore always left in good order
        folder = RunFolder.create(path)
        try:
            folder.write_config(config)
        except OSError:
            folder.discard()
            raise
        return _run(config, folder, {}, console, stopping)


def resume_jobs(config: RunConfig, path: Path, console: Console) -> JobsDone:
    """Go on with a run that was interrupted or killed, from its jobs' latest checkpoints."""
    find_modules_here()
    tallies: dict[str, Tally] = {}
    if (path / "events.jsonl").exists():
        for event in read_events(path):
            tallies.setdefault(event.job, Tally()).hear(event)
    if all(job.name in tallies and tallies[job.name].state == "finished" for job in config.jobs_file.jobs):
        raise Refusal(f"--resume={path}: all jobs of this run have finished. Begin another one with the jobs file.")
    with stopping_on_signals() as stopping:
        return _run(config, RunFolder.reopen(path), tallies, console, stopping)


def _run(config: RunConfig, folder: RunFolder, tallies: Mapping[str, Tally], console: Console, stopping: Stopping) -> JobsDone:
    device = config.jobs_file.device
    jobs = config.jobs_file.jobs
    runtime = Runtime(
        config.budget_bytes,
        host_budget=device.host_budget_bytes,
        device_profile=device.device_profile,
        checkpoints=folder.path / CHECKPOINTS,
    )
    run = JobsRun(runtime, folder, jobs, tallies)
    stopping.call(run.stop)
    with runtime, serving(folder.path, run.control):
        date = datetime.now().astimezone().isoformat(timespec="seconds")
        folder.write_versions(device_kind=jax.devices()[0].device_kind, date=date)
        console.print(f"Run folder: {folder.path}; from another terminal: tensile status {folder.path}", markup=False)
        with Watch(console, run.control.status) as watch:
            run.run(watch.tell)
        record = runtime.record()
        folder.write_record(record)
        outcome = _outcome(config, folder, runtime, run)
        folder.write_outcome(outcome)
    return JobsDone(outcome, record)


def _outcome(config: RunConfig, folder: RunFolder, runtime: Runtime, run: JobsRun) -> JobsOutcome:
    status = run.control.status()
    accuracies = {} if run.interrupted else _accuracies(config.jobs_file.jobs, runtime)
    known = {job.name: job for job in status.jobs}
    return JobsOutcome(
        folder=str(folder.path),
        device=jax.devices()[0].device_kind,
        interrupted=run.interrupted,
        budget_bytes=status.budget_bytes,
        host_budget_bytes=config.jobs_file.device.host_budget_bytes,
        peak_bytes=runtime.peak_bytes,
        time_s=max((event.time_s for event in runtime.events()), default=0.0),
        troubles=folder.troubles,
        jobs=tuple(
            _job_outcome(entry, run.tallies[entry.name], known[entry.name], config.jit_peaks, accuracies)
            for entry in config.jobs_file.jobs
        ),
    )


def _job_outcome(
    entry: JobEntry, tally: Tally, status: JobStatus, jit_peaks: Mapping[str, int], accuracies: Mapping[str, float]
) -> JobOutcome:
    return JobOutcome(
        name=entry.name,
        model=entry.model,
        entrypoint=entry.entrypoint,
        state=tally.state or "cancelled",
        note=tally.note,
        steps_asked=entry.steps,
        steps_done=tally.step,
        loss_first=tally.loss_first,
        loss_last=tally.loss_last,
        peak_bytes=status.peak_bytes or None,
        planned_peak_bytes=status.planned_bytes or None,
        jit_peak_bytes=jit_peaks.get(entry.name),
        time_s=tally.time_s,
        test_accuracy=accuracies.get(entry.name),
    )


def _accuracies(entries: tuple[JobEntry, ...], runtime: Runtime) -> dict[str, float]:
    """Of models that have a test set, once they have finished: measured now, when nothing else is on the device."""
    finished = {job.name: job for job in runtime.jobs if job.status.state == "finished"}
    models: dict[bytes, Model | None] = {}
    found: dict[str, float] = {}
    for entry in entries:
        if entry.name in finished:
            source = same_source(entry)
            model = models[source] = models[source] if source in models else model_of(entry)
            if model is not None and model.evaluate is not None:
                found[entry.name] = model.evaluate(to_device(finished[entry.name].result()))
    return found
