"""A runtime's status as one line, for a log: `12.3 s  device 812 MiB of 1.2 GiB | resnet 14/200 loss 0.693 2.1 step/s`."""

from tensile_jax.cli.event_line import one_line
from tensile_jax.plan_format import format_bytes
from tensile_jax.runtime_records import FINAL, JobStatus, Status

_LONGEST_NOTE = 60


def status_line(status: Status) -> str:
    """The line, without its end. Jobs that have ended are only counted, unless they failed."""
    parts = [f"{status.time_s:.1f} s  device {format_bytes(status.device_bytes)} of {format_bytes(status.budget_bytes)}"]
    parts += [_job(job) for job in status.jobs if job.state not in FINAL or job.state == "failed"]
    for state in ("finished", "cancelled"):
        count = sum(job.state == state for job in status.jobs)
        if count:
            parts.append(f"{count} {state}")
    return " | ".join(parts)


def _job(job: JobStatus) -> str:
    name, note = one_line(job.name), one_line(job.note)
    if len(note) > _LONGEST_NOTE:
        note = note[: _LONGEST_NOTE - 3].rstrip() + "..."  # all of it was told when it happened
    if job.state != "running":
        return f"{name} {job.state}" + (f" at {job.step}/{job.steps}" if job.step else "") + (f" ({note})" if note else "")
    loss = "" if job.loss is None else f" loss {job.loss:.3g}"
    speed = "" if job.steps_per_s is None else f" {job.steps_per_s:.2g} step/s"
    return f"{name} {job.step}/{job.steps}{loss}{speed}"
