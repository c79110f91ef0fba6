"""Runs jobs in a `Runtime` on one device of a cluster or on a group, and finds how much memory a job would need there.

This is the part of a device's actor (`device_actor.py`) that uses JAX. This module does not use Ray. The actor gives it a
function `tell`, which the module calls with a `JobNews` for every event of the jobs, in the order of the events.

All devices of the process belong to the `Runtime`. A job whose state is divided among devices runs on all of them, and any other
job runs on the first one. A job's state must be on as many devices as the job has asked for. Otherwise the job's results would
depend on the place where it runs.
"""

import os
import pickle
import sys
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import Any

import jax

from tensile_jax.budget import parse_budget
from tensile_jax.errors import BudgetTooSmall
from tensile_jax.exec.actor.entrypoint import Entrypoint, Made
from tensile_jax.exec.actor.local_actor import LocalActor
from tensile_jax.exec.actor.plans import PlanWithin
from tensile_jax.exec.calibration.calibrate import profile_of
from tensile_jax.exec.call.host_memory import free_host_memory
from tensile_jax.exec.compiling.compiler import Compiler, memory_of
from tensile_jax.exec.compiling.step import Options
from tensile_jax.exec.runtime.runtime import Runtime
from tensile_jax.exec.runtime.submission import refuse_unfit_state
from tensile_jax.exec.transfer import Transfer, is_divided
from tensile_jax.plan.multi_job.admission import JobLimits
from tensile_jax.ray.placement import limit_of
from tensile_jax.ray.records import Device, DeviceId, DeviceSettings, JobNews, Kind, Outline, Wish, Work
from tensile_jax.ray.shared.place import SharedPlace, running_name
from tensile_jax.runtime_records import FINAL, JobEvent, Status
from tensile_jax.trace import shape_struct

_PATIENCE_S = 60.0  # that a job waits for the process that had its folder to end
_MOMENT_S = 0.01


class DeviceJobs:
    """The jobs on the JAX devices of this process.

    Args:
        place: where the jobs' checkpoints are to be found by other devices.
        tell: is called with all news; from any thread.
        devices: how many devices this process must have.
        neighbours: how many devices this node has. They share its host memory, which is all of their memory if they are CPUs.

    Raises:
        ValueError: the process has another number of devices.
    """

    def __init__(
        self,
        id: DeviceId,
        settings: DeviceSettings,
        place: SharedPlace,
        tell: Callable[[JobNews], None],
        *,
        devices: int,
        neighbours: int,
    ) -> None:
        sys.path += [path for path in settings.paths if path not in sys.path]
        self._tell = tell
        self._lock = threading.Lock()
        self._making: dict[str, Wish] = {}  # jobs that are being made, and what the user wants of them
        self._devices = jax.devices()
        if len(self._devices) != devices:
            raise ValueError(f"Ray gives {devices} devices to the process, and JAX sees {len(self._devices)} there")
        self._device = self._devices[0]
        self._place = place
        self._profile = profile_of(self._device, settings.device_profile, lambda what, done, of: None)
        budget = parse_budget(settings.budget).resolve(_memory_of(self._device, neighbours))
        free = free_host_memory(self._devices, others=neighbours - devices) if settings.host_budget is None else None
        self._runtime = Runtime(
            budget,
            host_budget=settings.host_budget if free is None else free.nbytes,
            devices=self._devices,
            device_profile=settings.device_profile,
            checkpoints=place.local(),
        )
        host = self._runtime.status().host_budget_bytes
        kind = Kind(f"{devices} x {self._device.device_kind}, {self._profile.name}, {budget} bytes")
        self.device = Device(id, kind, budget, host, devices)
        threading.Thread(target=self._follow, name="tensile-follower", daemon=True).start()

    def outline(self, work: Work, neighbours: int) -> Outline | str:
        """What the job needs on this device; or why it cannot be made. Nothing is compiled, and the state is freed again."""
        try:
            step, state, batches = _made(work)
            if why := _other_devices(work, state):
                return why
            refuse_unfit_state(work.name, state, self._devices, work.isolation)
            given = batches if isinstance(batches, Iterable) else batches()
            batch = _shapes_of(next(iter(given)))
            state = _shapes_of(state)
            actor = LocalActor(step, state, Transfer(self._device))
            options = Options("auto", self._profile, "any", max_slowdown=work.max_slowdown)
            actor.trace(batch, options, Compiler(self._device))
        except StopIteration:
            return "its batches gave nothing. Give at least one batch."
        except Exception as error:
            return f"it cannot be made: {type(error).__name__}: {error}"
        budget = self.device.budget_bytes
        limit = limit_of(budget, actor.state_bytes, neighbours)
        try:
            plan = actor.plan(PlanWithin(JobLimits(limit, budget), compiled=False))
        except BudgetTooSmall as error:
            return Outline(limit, error.floor_bytes, None)
        memory = replace(plan.memory, host_bytes=plan.memory.host_bytes + actor.state_bytes)
        return Outline(limit, 0, memory)

    def start(self, work: Work, attempt: int, limit_bytes: int) -> None:
        """Start a job, in a thread of its own: making it may take long. If it cannot be started, the news says so."""
        with self._lock:
            self._making[running_name(work.name, attempt)] = "run"
        threading.Thread(
            target=self._start, args=(work, attempt, limit_bytes), name=f"tensile-{work.name}-start", daemon=True
        ).start()

    def _start(self, work: Work, attempt: int, limit_bytes: int) -> None:
        name = running_name(work.name, attempt)
        try:
            self._place.take_over(work.name, attempt, patience_s=_PATIENCE_S)
            made: Any = pickle.loads(work.make)
            if not isinstance(made, Entrypoint):
                made = made()
            step, state, batches = (made, None, None) if isinstance(made, Entrypoint) else made
            self._runtime.submit(
                step,
                state,
                batches,
                steps=work.steps,
                name=name,
                priority=work.priority,
                max_slowdown=work.max_slowdown,
                plan_for=limit_bytes,
                checkpoint_every=work.checkpoint_every,
                resume=True,
                isolation=work.isolation,
            )
        except BaseException as error:  # SystemExit in the user's code ends the job, and not the actor
            problem = _problem(self._place.give_back, work.name, attempt)
            note = "; ".join(part for part in (f"{type(error).__name__}: {error}", problem) if part)
            self._tell(JobNews(self.device.id, work.name, attempt, "failed", 0, note))
        with self._lock:
            wish = self._making.pop(name)
        if wish != "run":
            with suppress(ValueError):  # it has ended already
                self._steer(name, wish)

    def steer(self, job: str, attempt: int, wish: Wish) -> None:
        """Pass on what the user wants of a job; once the job is made, if it is being made now."""
        name = running_name(job, attempt)
        with self._lock:
            if name in self._making:
                self._making[name] = wish
                return
        with suppress(ValueError):  # it has ended: the news says so
            self._steer(name, wish)

    def _steer(self, name: str, wish: Wish) -> None:
        {"run": self._runtime.resume, "pause": self._runtime.pause, "stop": self._runtime.cancel}[wish](name)

    def status(self) -> Status:
        """The status of the runtime. The jobs have the names that the user gave them."""
        status = self._runtime.status()
        return replace(status, jobs=tuple(replace(job, name=job.name.rpartition("@")[0]) for job in status.jobs))

    def _follow(self) -> None:
        lines: dict[str, ThreadPoolExecutor] = {}  # a thread for each job: copying checkpoints may take long
        for event in self._runtime.events(until_closed=True):
            if "@" not in event.job:
                continue  # an event of the runtime as a whole
            if event.job not in lines:
                lines[event.job] = ThreadPoolExecutor(1, f"tensile-{event.job}-news")
            lines[event.job].submit(self._pass_on, event)
            if event.kind in FINAL:
                lines.pop(event.job).shutdown(wait=False)

    def _pass_on(self, event: JobEvent) -> None:
        """Tell an event of a job, now that what it says holds for other processes, too."""
        name, _, number = event.job.rpartition("@")
        attempt, kind, note, values = int(number), event.kind, event.note, dict(event.values)
        if kind == "checkpointed" and (problem := _problem(self._place.publish, name, attempt)):
            kind, note = "checkpoint_failed", problem
        if kind in FINAL:
            values |= self._forget(event.job)
            if problem := _problem(self._place.give_back, name, attempt):
                kind, note = "failed", f"{kind}, but {problem}"
        self._tell(JobNews(self.device.id, name, attempt, kind, event.step, note, values))

    def _forget(self, name: str) -> dict[str, float]:
        """Wait until a job that has ended holds neither its folder nor memory, which takes a moment. Returns its peak."""
        peak = next((job.status.peak_bytes for job in self._runtime.jobs if job.name == name), 0)
        while True:
            try:
                self._runtime.forget(name)
                return {"peak_bytes": peak}
            except ValueError:  # a save is under way
                time.sleep(_MOMENT_S)


def _problem(passed_on: Callable[[str, int], str], name: str, attempt: int) -> str:
    """What `passed_on` says is wrong, or what it raises; without an answer, nobody would learn that the job has ended."""
    try:
        return passed_on(name, attempt)
    except Exception as error:
        return f"its checkpoints could not be passed on: {type(error).__name__}: {error}"


def _made(work: Work) -> Made:
    made: Any = pickle.loads(work.make)
    return made.make() if isinstance(made, Entrypoint) else made()


def _shapes_of(tree: Any) -> Any:
    """The shapes of arrays, and how those on several devices are divided."""
    return jax.tree.map(lambda leaf: shape_struct(leaf, leaf.sharding if is_divided(leaf) else None), tree)


def _other_devices(work: Work, state: Any) -> str:
    """Why the job may not have this state: it is on more or fewer devices than the job has asked for. Empty if it may."""
    spread = max((len(leaf.sharding.device_set) for leaf in jax.tree.leaves(state) if is_divided(leaf)), default=1)
    if spread == work.devices:
        return ""
    return (
        f"devices={work.devices} of {work.name}, and its state is on {spread} of jax.devices(). Give the job devices={spread}, "
        f"or bring its state to {work.devices} of jax.devices()."
    )


def _memory_of(device: Any, neighbours: int) -> int:
    """The memory of a device, in bytes: of a CPU, an equal part of the node's memory."""
    nbytes = memory_of(device)
    if nbytes < float("inf"):
        return int(nbytes)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // max(neighbours, 1)
