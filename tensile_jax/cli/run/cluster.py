"""Submits the jobs of a jobs file to a Ray cluster, and follows them until they have ended.

For a cluster, the table `[device]` of the jobs file describes each device. There a `budget` in per cent is a share of the
device's memory, and not of the jobs' peaks. Some keys of a job are refused, because with them the job's results would depend on
the jobs that share its device. Then the job could not continue on another device with bit-identical results.
"""

from dataclasses import replace

from rich.console import Console

from tensile_jax.cli.errors import Refusal
from tensile_jax.cli.jobs_file import AfterJob, JobEntry, JobsFile
from tensile_jax.cli.run.job_source import entrypoint_of, model_of
from tensile_jax.cli.run.live_view import LiveView
from tensile_jax.cli.signals import stopping_on_signals
from tensile_jax.ray import ClusterJob, ClusterRun, ClusterStatus, StartAfter, submit
from tensile_jax.runtime_records import Status

_STEPS_BETWEEN_CHECKPOINTS = 100


def submit_jobs(
    jobs: JobsFile, address: str, checkpoints: str, *, resume: bool, devices_per_actor: int | None
) -> ClusterRun:  # fmt: skip
    """Submit the jobs. Raises Refusal, ValueError or ClusterError: see `tensile_jax.ray.submit`."""
    for entry in jobs.jobs:
        model_of(entry)
    share, nbytes = jobs.device.budget.share, jobs.device.budget.nbytes
    return submit(
        [_cluster_job(entry) for entry in jobs.jobs],
        checkpoints=checkpoints,
        budget=f"{100 * share:.10g}%" if share is not None else nbytes or 0,
        address=address,
        host_budget=jobs.device.host_budget_bytes,
        device_profile=jobs.device.device_profile,
        resume=resume,
        devices_per_actor=devices_per_actor,
    )


def follow_jobs(run: ClusterRun, console: Console) -> tuple[ClusterStatus, bool]:
    """Show the jobs until they have ended. Returns their last status, and whether they were stopped by Ctrl-C."""

    def status() -> Status:
        return _of(run, run.status()).merged()

    with stopping_on_signals() as stop:
        stop.call(run.stop)
        with LiveView(console, status) as view:
            for event in run.events():
                view.add_event(event)
        return _of(run, run.status()), stop.asked


def _of(run: ClusterRun, status: ClusterStatus) -> ClusterStatus:
    return replace(status, jobs=tuple(job for job in status.jobs if job.name in run.names))


def _cluster_job(entry: JobEntry) -> ClusterJob:
    for key, value, usual in (
        ("policy", entry.policy, "auto"),
        ("max_swap_rate", entry.max_swap_rate, 1.0),
        ("renew_above", entry.renew_above, None),
    ):
        if value != usual:
            raise Refusal(
                f"{entry.where}.{key} = {value}: a job of a cluster has the same plan on every device, and {key} makes plans "
                "that depend on the other jobs or on time. Leave it out."
            )
    start = entry.start_after
    after = StartAfter(start.job, start.step) if isinstance(start, AfterJob) else start or None
    return ClusterJob(
        entrypoint_of(entry),
        entry.steps,
        name=entry.name,
        priority=entry.priority,
        max_slowdown=entry.max_slowdown,
        checkpoint_every=entry.checkpoint_every or _STEPS_BETWEEN_CHECKPOINTS,
        isolation=entry.isolation,
        start_after=after,
        devices=entry.devices,
    )
