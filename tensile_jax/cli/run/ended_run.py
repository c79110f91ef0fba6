"""Tells how a run of several jobs ended, from its run folder: `tensile status RUN` prints this when the run is not alive.

A run that ended by itself, or by a signal, has written its outcome. A run that was killed has written none. Its outcome is then
made from the list of events in the folder. A kill can cut off only the last event of this list.
"""

from collections import Counter
from dataclasses import replace
from pathlib import Path

from tensile_jax.cli.run.folder import RunConfig, read_config, read_device, read_events, read_outcome
from tensile_jax.cli.run.pending_jobs import JobProgress
from tensile_jax.cli.run.report import JobOutcome, JobsOutcome
from tensile_jax.runtime_records import NO_LIMIT, JobStatus, Status

_CUT_OFF = "cut off with the run"


def has_begun(folder: Path) -> bool:
    """Whether `folder` is the folder of a run of several jobs in which something has happened."""
    return (folder / "config.json").is_file() and (folder / "events.jsonl").is_file()


def ended_run(folder: Path) -> JobsOutcome:
    """How the run in `folder` ended, with `folder` as its name for the folder. The run must have begun, and not be alive.

    Raises:
        Refusal: `folder` is not the folder of a run of several jobs.
    """
    config = read_config(folder)
    outcome = read_outcome(folder) or _outcome_of_killed(config, folder)
    return replace(outcome, folder=str(folder))


def how_it_ended(outcome: JobsOutcome) -> str:
    """One sentence: how the run ended, and how many jobs ended in which way."""
    counts = Counter(job.state for job in outcome.jobs)
    counted = ", ".join(f"{counts[state]} {state}" for state in ("finished", "failed", "cancelled") if counts[state])
    how = "was interrupted" if outcome.interrupted else "has ended"
    if outcome.peak_bytes is None:
        how = "was killed, or could not write how it ended"
    return f"The run {how}: {counted}."


def last_status(outcome: JobsOutcome, folder: Path) -> Status:
    """The outcome in the form of the status of a run: nothing is on the device, and every job has ended."""
    priorities = {entry.name: entry.priority for entry in read_config(folder).jobs_file.jobs}
    return Status(
        time_s=outcome.time_s,
        budget_bytes=outcome.budget_bytes,
        host_budget_bytes=outcome.host_budget_bytes or NO_LIMIT,
        device_bytes=0,
        peak_bytes=outcome.peak_bytes or 0,
        host_bytes=0,
        out_share=0.0,
        into_share=0.0,
        jobs=tuple(
            JobStatus(
                name=job.name,
                state=job.state,
                priority=priorities.get(job.name, 1.0),
                step=job.steps_done,
                steps=job.steps_asked,
                loss=job.loss_last,
                steps_per_s=None,
                device_bytes=0,
                peak_bytes=job.peak_bytes or 0,
                planned_bytes=job.planned_peak_bytes or 0,
                host_bytes=0,
                stall_us=0.0,
                swapped_bytes=0,
                note=job.note,
            )
            for job in outcome.jobs
        ),
    )


def _outcome_of_killed(config: RunConfig, folder: Path) -> JobsOutcome:
    events = read_events(folder)
    progress = {entry.name: JobProgress() for entry in config.jobs_file.jobs}
    for event in events:
        if event.job in progress:
            progress[event.job].add(event)
    return JobsOutcome(
        folder=str(folder),
        device=read_device(folder),
        interrupted=False,
        budget_bytes=config.budget_bytes,
        host_budget_bytes=config.jobs_file.device.host_budget_bytes,
        peak_bytes=None,
        time_s=max((event.time_s for event in events), default=0.0),
        troubles=(),
        jobs=tuple(
            JobOutcome(
                name=entry.name,
                model=entry.model,
                entrypoint=entry.entrypoint,
                state=one.state or "cancelled",
                note=one.note if one.state else _CUT_OFF,
                steps_asked=entry.steps,
                steps_done=one.step,
                loss_first=one.loss_first,
                loss_last=one.loss_last,
                peak_bytes=None,
                planned_peak_bytes=None,
                jit_peak_bytes=config.jit_peaks.get(entry.name),
                time_s=one.time_s,
                step_us=None,
                predicted_step_us=None,
                predicted_jit_step_us=None,
                test_accuracy=None,
            )
            for entry, one in ((entry, progress[entry.name]) for entry in config.jobs_file.jobs)
        ),
    )
