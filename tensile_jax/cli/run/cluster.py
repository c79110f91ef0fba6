"""Submits the jobs of a jobs file to a Ray cluster, and follows them until they have ended.

On a cluster, the table `[device]` of the jobs file applies to each device by itself. `budget = "80%"` means 80 % of the memory
of the device; for `tensile run`, it means 80 % of the sum of the jobs' peaks under plain `jax.jit`.

Three keys that a job may have in the file are refused unless they have their default values: `policy`, `max_swap_rate` and
`renew_above`. With other values, a job's plan may depend on the other jobs of its device or on measured times. A job of a
cluster must have the same plan on every device: another plan rounds differently, and a job that moves to another device must
have the results that it would have had on the first one, bit for bit.
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
