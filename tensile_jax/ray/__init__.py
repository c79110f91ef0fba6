"""Trains jobs on all devices of a Ray cluster. Takes jobs and a shared folder or URL; gives the jobs' events and last states.

    run = tensile.ray.submit([ClusterJob(tensile.Entrypoint("cnn"), steps=500)], budget="8GiB", checkpoints="/shared/run")
    for event in run.events(): ...
    state = run.result("cnn")

This package needs Ray (the extra `ray`), and imports Ray when a function is first called. The modules are:

    client         `submit`, `attach`, and the `ClusterRun` that they return
    coordinator    the actor that knows all devices and jobs; `coordinator.py` lists all messages
    scheduler      decides what happens to the jobs, as a pure state machine
    placement      decides to which device a job goes, by pure functions
    device_actor   the actor that holds a device, or a group of them, with a `Runtime` in it (`device_jobs`)
    shared/        where the checkpoints of jobs are, and how another device takes over a job
"""

from tensile_jax.ray.client import ClusterJob, ClusterRun, attach, submit
from tensile_jax.ray.records import ClusterEvent, ClusterStatus, DeviceStatus, StartAfter

__all__ = ["ClusterEvent", "ClusterJob", "ClusterRun", "ClusterStatus", "DeviceStatus", "StartAfter", "attach", "submit"]
