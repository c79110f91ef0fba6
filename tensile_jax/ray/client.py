"""Lets a program or a terminal submit jobs to a cluster (`submit`), and follow and steer jobs that are there (`attach`).

Everything goes through the coordinator, a named actor of the cluster. Each call has a time limit, so no caller waits forever for
a cluster that has died.
"""

import hashlib
import os
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from tensile_jax.arguments import MOST, read_count, read_number, shown
from tensile_jax.budget import parse_budget, parse_host_budget
from tensile_jax.errors import ClusterError, JobFailed
from tensile_jax.exec.actor.entrypoint import Entrypoint, Made
from tensile_jax.ray.placement import refuse_devices
from tensile_jax.ray.records import ClusterEvent, ClusterStatus, DeviceSettings, NewJob, StartAfter, Wish, Work
from tensile_jax.ray.shared.opened import open_place
from tensile_jax.ray.shared.place import SharedPlace
from tensile_jax.tracebacks import hides_frames, methods_hide_frames

_CONNECT_S = 10.0
_ANSWER_S = 30.0  # that the coordinator may take to answer; it answers within two seconds
_SUBMIT_S = 300.0  # that a submission may take, in which JAX starts on all devices
_NAME = "tensile:coordinator"  # as in `coordinator.py`, which imports Ray
_NAMESPACE = "tensile"


@dataclass(frozen=True, slots=True)
class ClusterJob:
    """A job for a cluster.

    Attributes:
        make: an `Entrypoint`, or a function without arguments that returns (step, state, batches). It is called where the job
            runs, and again wherever the job goes on. A function must be picklable. Its batches must come in the same order again.
        steps: how many iterations the job does.
        name: letters, digits, `_`, `-` and `.`; the first is no `-` or `.`. None: the name of the entrypoint or function.
        priority: the job's share of its device's time, in proportion to the other jobs there.
        max_slowdown: see `tensile_jax.Runtime.submit`.
        checkpoint_every: a checkpoint is made after every `checkpoint_every` steps; if a device dies, its jobs go on from their
            latest checkpoints. None: checkpoints are made only when the job is paused or has ended.
        isolation: "thread": in the process of the device. "process": in a process of its own.
        start_after: seconds after the submission, or another job of the cluster; None: at once.
        devices: among how many devices of one host the job's state is divided: its mesh is one of `jax.devices()`.
    """

    make: Entrypoint | Callable[[], Made]
    steps: int
    name: str | None = None
    priority: float = 1.0
    max_slowdown: float | None = None
    checkpoint_every: int | None = 100
    isolation: Literal["thread", "process"] = "thread"
    start_after: float | StartAfter | None = None
    devices: int = 1

    def __post_init__(self) -> None:
        if not callable(self.make) and not isinstance(self.make, Entrypoint):
            raise TypeError(
                f"make must be an Entrypoint, or a function that returns (step, state, batches): got {shown(self.make)}."
            )
        name = self.name
        if name is None:
            name = self.make.name if isinstance(self.make, Entrypoint) else getattr(self.make, "__name__", "job").strip("<>")
            object.__setattr__(self, "name", name)
        if not isinstance(name, str) or not 0 < len(name) <= 100 or not _may_be_a_name(name):
            raise ValueError(
                f"name must have 1 to 100 letters, digits, _, - and ., and begin with a letter, a digit or _: got {shown(name)}."
            )
        for argument in ("steps", "devices", "checkpoint_every"):
            value = getattr(self, argument)
            if read_count(value) is None and not (argument == "checkpoint_every" and value is None):
                raise ValueError(f"{argument} of {name} must be a whole number of at least 1, got {shown(value)}.")
        priority, slowdown = read_number(self.priority), read_number(self.max_slowdown)
        if priority is None or not 0 < priority < MOST:
            raise ValueError(f"priority of {name} must be a number above zero, got {shown(self.priority)}.")
        if self.max_slowdown is not None and (slowdown is None or not 1 <= slowdown < MOST):
            raise ValueError(f"max_slowdown of {name} must be at least 1, got {shown(self.max_slowdown)}.")
        if self.isolation not in ("thread", "process"):
            raise ValueError(f'isolation of {name} must be "thread" or "process", got {self.isolation!r}.')
        if self.isolation == "process" and not isinstance(self.make, Entrypoint):
            raise TypeError(f'isolation="process" of {name} needs an Entrypoint, got {shown(self.make)}.')
        if self.isolation == "process" and self.devices > 1:
            raise ValueError(
                f'isolation="process" of {name} is for jobs of one device, and devices={self.devices}. Leave it out.'
            )
        if isinstance(self.start_after, int):
            object.__setattr__(self, "start_after", float(self.start_after))


@hides_frames
def submit(
    jobs: Sequence[ClusterJob],
    *,
    checkpoints: str | Path,
    budget: int | str,
    address: str | None = None,
    host_budget: int | str | None = None,
    device_profile: str | None = None,
    resume: bool = False,
    devices_per_actor: int | None = None,
) -> "ClusterRun":
    """Train jobs on the devices of a Ray cluster. Returns when the jobs are accepted; they go on if this program ends.

    Args:
        checkpoints: a folder that all nodes have at the same path, or a URL that fsspec can open on all of them, such as
            `"gs://bucket/runs"`. Each job has a folder there.
        budget: device memory of each device, for the jobs that are there: bytes, a size such as `"8GiB"`, or a share such as
            `"90%"` of what the device has.
        address: of the cluster, such as `"10.0.0.1:6379"`; None: the one to which this process is connected, or else the one
            that `RAY_ADDRESS` names, or that runs on this machine.
        host_budget: host memory of each device, for what is swapped and parked; None: the device's part of what is free on its
            machine when its process begins, less some room.
        device_profile: see `tensile_jax.Runtime`.
        resume: go on from the jobs' latest checkpoints in the folder. Without `resume` there must be none.
        devices_per_actor: how many devices of a node form a group, in which jobs of several devices run; the rest of a node are
            single devices. None: as many as one of the jobs needs. It matters if such jobs are submitted later.

    Raises:
        ValueError: a name is given twice, or is that of a job that runs on the cluster; the folder has checkpoints; the folder is
            not shared; the cluster has no devices, or no node has enough of them; or other jobs run there now with another
            budget, folder or number of devices.
        ClusterError: the cluster cannot be reached, or dies.
        ImportError: Ray is not installed.
    """
    jobs = list(jobs)
    names = [_named(job) for job in jobs]
    if not jobs:
        raise ValueError("jobs is empty. Give at least one ClusterJob.")
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"name={name!r} is the name of two jobs. Give each job a name of its own.")
    for job in jobs:
        start = job.start_after
        if isinstance(start, StartAfter) and (start.job not in names or start.job == job.name):
            raise ValueError(f"start_after of {job.name} must be another job of this submission, got {start.job!r}.")
    if devices_per_actor is not None:
        if read_count(devices_per_actor) is None:
            raise ValueError(f"devices_per_actor must be a whole number of at least 1, got {shown(devices_per_actor)}.")
        story = f"devices_per_actor={devices_per_actor}, so that no actor holds more. Pass at least as many, or leave it out"
        refuse_devices({_named(job): job.devices for job in jobs}, None, devices_per_actor, story)
    parse_budget(budget)
    if host_budget is not None:
        parse_host_budget(host_budget)
    place = open_place(checkpoints)
    ray = _connect(address)
    settings = DeviceSettings(budget, host_budget, device_profile, place.name, (os.getcwd(),), devices_per_actor)
    works = {name: _work(ray, job) for name, job in zip(names, jobs, strict=True)}
    new = [
        NewJob(name, _source(works[name]), job.steps, float(job.priority), job.devices, job.start_after)
        for name, job in zip(names, jobs, strict=True)
    ]
    from tensile_jax.ray import coordinator  # imports Ray

    handle = (
        ray.remote(coordinator.Coordinator)
        .options(
            name=_NAME,
            namespace=_NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            num_cpus=0,
            resources={"node:__internal_head__": 0.001},
        )
        .remote()
    )
    run = ClusterRun(
        handle,
        names=tuple(names),
        seen=0,
        checkpoints=place,
        jobs=dict(zip(names, jobs, strict=True)),
    )
    run._seen = run._call(handle.submit.remote(settings, new, works, resume=resume), timeout_s=_SUBMIT_S)
    return run


@hides_frames
def attach(address: str | None = None) -> "ClusterRun":
    """Find the jobs that anyone has submitted to a cluster, to follow and to steer them.

    Raises:
        ValueError: no jobs were submitted to this cluster.
        ClusterError: the cluster cannot be reached.
    """
    ray = _connect(address)
    try:
        handle = ray.get_actor(_NAME, namespace=_NAMESPACE)
    except ValueError as error:
        raise ValueError(
            "address: no jobs were submitted to this cluster since it began. Submit some: tensile submit JOBS.toml --ray ADDRESS"
        ) from error
    run = ClusterRun(handle, names=(), seen=0, checkpoints=None, jobs={})
    run._names = tuple(job.name for job in run.status().jobs)
    return run


@methods_hide_frames
class ClusterRun:
    """Jobs on a cluster; made by `submit` and `attach`."""

    def __init__(
        self,
        coordinator: Any,
        *,
        names: tuple[str, ...],
        seen: int,
        checkpoints: SharedPlace | None,
        jobs: dict[str, ClusterJob],
    ) -> None:
        self._coordinator = coordinator
        self._names = names
        self._seen = seen
        self._checkpoints = checkpoints
        self._jobs = jobs

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the jobs."""
        return self._names

    def events(self) -> Iterator[ClusterEvent]:
        """The events of these jobs, and of all devices, from the submission on, until all of these jobs have ended.

        Raises:
            ClusterError: the cluster has died. The jobs' checkpoints are in the folder.
        """
        seen = self._seen
        while True:
            found = self._call(self._coordinator.follow.remote(seen, self._names))
            seen = found.seen
            yield from (event for event in found.events if not event.job or event.job in self._names)
            if not found.going:
                return

    def wait(self) -> ClusterStatus:
        """Wait until all of these jobs have ended. Returns the status then."""
        for _ in self.events():
            pass
        return self.status()

    def status(self) -> ClusterStatus:
        """A snapshot of the cluster's devices and of all its jobs."""
        return self._call(self._coordinator.status.remote())

    def pause(self, job: str) -> None:
        """Pause a job after its running iteration, with a checkpoint. Raises ValueError: there is no such job, or it ended."""
        self._wish(job, "pause")

    def resume(self, job: str) -> None:
        """Let a paused job go on. Raises ValueError: there is no such job, or it has ended."""
        self._wish(job, "run")

    def cancel(self, job: str) -> None:
        """End a job after its running iteration, with a checkpoint. Raises ValueError: there is no such job, or it has ended."""
        self._wish(job, "stop")

    def stop(self) -> None:
        """Cancel all of these jobs that have not ended."""
        for job in self._names:
            with suppress(ValueError):  # it has ended
                self.cancel(job)

    def result(self, job: str) -> Any:
        """The last state of a job that has ended, from its last checkpoint, as whole NumPy arrays; waits for the job's end.

        The job's state is made here once more, for its structure.

        Raises:
            JobFailed: the job failed, or was cancelled before it had a checkpoint.
            ValueError: this run does not have that job; or a job of several devices cannot be made here, where there are fewer.
            CheckpointError: the checkpoint cannot be read.
        """
        if job not in self._jobs or self._checkpoints is None:
            raise ValueError(f"job={job!r} was not submitted by this run. It has: {', '.join(self._jobs) or 'none'}.")
        status = next(one for one in self._wait_for(job).jobs if one.name == job)
        from tensile_jax.exec.checkpoint.checkpoints import Checkpoints

        if status.state == "failed":
            raise JobFailed(f"{job} failed after {status.step} steps: {status.note}", job=job, step=status.step)
        with self._checkpoints.fetched(job) as folder:
            checkpoints = Checkpoints(folder)
            latest = checkpoints.latest()
            if latest is None:
                raise JobFailed(f"{job} is {status.state} and has no state: {status.note}", job=job, step=status.step)
            return checkpoints.restore(latest, _state_of(self._jobs[job]))

    def _wait_for(self, job: str) -> ClusterStatus:
        while self._call(self._coordinator.follow.remote(MOST, (job,))).going:
            pass
        return self.status()

    def _wish(self, job: str, wish: Wish) -> None:
        self._call(self._coordinator.wish.remote(job, wish))

    def _call(self, reference: Any, *, timeout_s: float = _ANSWER_S) -> Any:
        """What the coordinator answers.

        Raises:
            ClusterError: it has died, or does not answer in time.
            ValueError: it refuses.
        """
        ray: Any = import_module("ray")
        where = "in their folder" if self._checkpoints is None else f"in {self._checkpoints.name}"
        remedy = f"The jobs' checkpoints are {where}: start the cluster again, and submit the jobs with resume=True."
        try:
            return ray.get(reference, timeout=timeout_s)
        except ray.exceptions.GetTimeoutError as error:
            raise ClusterError(f"The head node of the cluster did not answer for {timeout_s:.0f} s. {remedy}") from error
        except ray.exceptions.RayTaskError as error:
            cause = error.cause
            if isinstance(cause, ValueError):
                raise ValueError(str(cause)) from None
            raise ClusterError(f"The coordinator of the cluster failed: {type(cause).__name__}: {cause}") from error
        except ray.exceptions.RayError as error:
            raise ClusterError(f"The head node of the cluster has died, or the coordinator there. {remedy}") from error


# -- jobs ---------------------------------------------------------------------------------------------------------------------


def _may_be_a_name(name: str) -> bool:
    return name.isascii() and name[0] not in "-." and all(c.isalnum() or c in "_-." for c in name)


def _named(job: ClusterJob) -> str:
    assert job.name is not None  # a job without a name was given one
    return job.name


def _work(ray: Any, job: ClusterJob) -> Work:
    try:
        make = ray.cloudpickle.dumps(job.make)
    except Exception as error:
        raise TypeError(f"make of {job.name} cannot be sent to another process: {error}. Pass an Entrypoint.") from error
    priority = float(job.priority)
    return Work(
        _named(job), make, job.steps, priority, job.max_slowdown, job.checkpoint_every, job.isolation, job.devices
    )  # fmt: skip


def _state_of(job: ClusterJob) -> Any:
    """The first state of a job, made here.

    Raises:
        ValueError: the job is for several devices, and cannot be made with those of this process.
    """
    try:
        _, state, _ = job.make.make() if isinstance(job.make, Entrypoint) else job.make()
        return state
    except Exception as error:
        if job.devices == 1:
            raise
        raise ValueError(
            f"{_named(job)} is for devices={job.devices} and cannot be made in this program, which needs the structure of its "
            f"state: {error}. Start the program with JAX_PLATFORMS=cpu and JAX_NUM_CPU_DEVICES={job.devices}, or let the job "
            "make its mesh of as many of jax.devices() as there are."
        ) from error


def _source(work: Work) -> str:
    return hashlib.sha256(work.make + repr((work.max_slowdown, work.devices)).encode()).hexdigest()


# -- connecting -----------------------------------------------------------------------------------------------------------------


def _connect(address: str | None) -> Any:
    """The module `ray`, connected to the cluster.

    Raises:
        ImportError: Ray is not installed.
        ValueError: the address cannot be read.
        ClusterError: nothing answers there.
    """
    try:
        ray: Any = import_module("ray")
    except ImportError as error:
        raise ImportError(f"Ray is not installed ({error}). Install it: pip install 'tensile_jax[ray]'.") from error
    if ray.is_initialized():
        here = str(ray.get_runtime_context().gcs_address)
        if address not in (None, "auto", here):
            raise ValueError(f"address={address!r}: this process is connected to {here}. Call ray.shutdown() first.")
        return ray
    _refuse_unreachable(address)
    handler = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address or "auto", namespace=_NAMESPACE, log_to_driver=False, logging_level="ERROR", configure_logging=False)
    except Exception as error:
        story = str(error).strip().splitlines() or [type(error).__name__]
        raise ClusterError(
            f"The cluster at address={address or 'auto'!r} cannot be used: {story[0]} Call this on a machine of the cluster, and "
            "look at `ray status` there."
        ) from error
    finally:
        with suppress(ValueError):  # not in the main thread, where Ray sets no handler either
            signal.signal(signal.SIGTERM, handler)
    return ray


def _refuse_unreachable(address: str | None) -> None:
    """Refuse an address at which nothing listens. Ray itself would try for a minute."""
    found = address
    if found in (None, "auto"):
        found = os.environ.get("RAY_ADDRESS") or _address_here()
    if found is None:  # Ray looks for a cluster of this machine itself, and says at once that there is none
        return
    host, colon, port = found.rpartition(":")
    if "://" in found or not colon or not port.isdigit() or not host:
        raise ValueError(f'address={found!r} must be HOST:PORT of the head node, as `ray start --head` prints it, or "auto".')
    try:
        with closing(socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S)):
            pass
    except (OSError, OverflowError) as error:
        raise ClusterError(
            f"Nothing answers at address={found!r}: {error}. Is the head node up? `ray start --head` prints its address."
        ) from error


def _address_here() -> str | None:
    """The address of the cluster that was started on this machine last, which may have ended, as `ray start` notes it."""
    try:
        return Path(os.environ.get("RAY_TMPDIR", "/tmp"), "ray", "ray_current_cluster").read_text().strip() or None
    except OSError:
        return None
