"""Several jobs on one device, under one budget: `Runtime`.

    with tensile.Runtime(budget="8GiB") as runtime:
        a = runtime.submit(step_a, state_a, batches_a, steps=200, name="resnet", priority=2)
        b = runtime.submit(step_b, state_b, batches_b, steps=500, name="gpt")
        for event in runtime.events(): ...
        state = a.result()

The paper's four components (TENSILE section III-D) are the *Global Controller* (`exec/controller/machine.py`), the
*Memory Scheduler* (`exec/runtime/planner_thread.py`), and for each job an *Executor* and a *Swap Executor*
(`exec/actor/actor.py`, `exec/actor/local_actor.py`).

A job's segments are chosen once, when it is prepared; who else is there changes what leaves the device and when, never a
result. Only where the budget is lowered below what a job needs are its segments chosen again, which changes rounding.
"""

import itertools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import jax

from tensile_jax.exec.actor.actor import JobActor
from tensile_jax.exec.actor.entrypoint import Entrypoint
from tensile_jax.exec.actor.feed import Feed
from tensile_jax.exec.actor.lifted_job import PutBack, lifted_job
from tensile_jax.exec.actor.local_actor import LocalActor
from tensile_jax.exec.checkpoint.checkpoints import Checkpoints
from tensile_jax.exec.checkpoint.folder_lock import FolderLock
from tensile_jax.exec.controller.events import Budgeted
from tensile_jax.exec.controller.state import JobId, State
from tensile_jax.exec.process.isolated_actor import IsolatedActor
from tensile_jax.exec.runtime.course import Course
from tensile_jax.exec.runtime.dispatcher import Dispatcher
from tensile_jax.exec.runtime.job import Job
from tensile_jax.exec.runtime.job_listener import JobListener
from tensile_jax.exec.runtime.planner_thread import Scheduler
from tensile_jax.exec.runtime.planning import Planning
from tensile_jax.exec.runtime.saver import Keeping
from tensile_jax.exec.runtime.status import status
from tensile_jax.exec.runtime.submission import (
    Isolation,
    Submission,
    bytes_of,
    name_of,
    refuse_half_a_job,
    refuse_unfit_name,
    refuse_unfit_state,
)
from tensile_jax.exec.step.transfer import Transfer
from tensile_jax.plan_format import PolicyName
from tensile_jax.profiles import profile_for
from tensile_jax.runtime_records import FINAL, EventName, JobEvent, Record, Status

_RUN_AHEAD = 3  # launches in flight, on a device whose memory follows the order of launches
_KEPT_EVENTS = 100_000


class Runtime:
    """One device and the jobs on it. Use it in a `with` block, which ends when all jobs have.

    Args:
        budget: of device memory for all jobs together: bytes, or a size such as `"8GiB"`.
        host_budget: of pinned host memory for what is swapped and parked; None: no limit.
        device: a `jax.Device`; the default one if None.
        device_profile: name of a profile, or path of a TOML file; by default that of the device.
        checkpoints: a folder, in which every job has one of its own. Checkpoints are made whenever a job is paused or ends, at
            Ctrl-C and if its user code fails as well.
        look: "sampled": live bytes are looked at in a job's first iterations and in every fiftieth. "always": at each launch.
    """

    def __init__(
        self,
        budget: int | str,
        *,
        host_budget: int | str | None = None,
        device: Any = None,
        device_profile: str | None = None,
        checkpoints: str | Path | None = None,
        look: Literal["sampled", "always"] = "sampled",
    ) -> None:
        if device is not None and not isinstance(device, jax.Device):
            raise TypeError(f"device must be one of jax.devices(), such as jax.devices()[0]: got {device!r}.")
        self._device = jax.devices()[0] if device is None else device
        self._on_cpu = self._device.platform == "cpu"
        self._profile = profile_for(self._device.platform, device_profile)
        self._transfer = Transfer(self._device)
        self._folder = None if checkpoints is None else Path(checkpoints).absolute()
        if look not in ("sampled", "always"):
            raise ValueError(f'look must be "sampled" or "always", got {look!r}.')
        budget_bytes = bytes_of("budget", budget)
        host_bytes = float("inf") if host_budget is None else bytes_of("host_budget", host_budget)
        self._changed = threading.Condition(threading.RLock())
        self._jobs: dict[JobId, Job] = {}
        self._reserved: set[str] = set()  # names of jobs that are being submitted
        self._numbers = itertools.count()
        self._events: deque[JobEvent] = deque(maxlen=_KEPT_EVENTS)
        self._told = 0
        self._closed = False
        self._budget_bytes = budget_bytes
        depth = 1 if self._on_cpu else _RUN_AHEAD
        state = State(budget_bytes, host_bytes, depth)
        self._dispatcher = Dispatcher(state, JobListener(self), look_always=look == "always")
        self._scheduler = Scheduler(self._device)
        self._course = Course(self)
        self._planning = Planning(self)
        self._keeping = Keeping(self)
        self._dispatcher.start()
        # the threads of a runtime that nobody holds any more, and of which no job goes on
        self._ending = weakref.finalize(self, _end_threads, self._dispatcher, self._scheduler)
        self._ending.atexit = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is not None:
            self.stop()
        self.close()

    # -- what a user asks -------------------------------------------------------------------------------------------------------

    def submit(
        self,
        step: Callable[..., Any] | Entrypoint,
        state: Any = None,
        batches: Iterable[Any] | Callable[[], Iterable[Any]] | None = None,
        *,
        steps: int,
        name: str | None = None,
        priority: float = 1.0,
        budget: int | str | None = None,
        max_swap_rate: float = 1.0,
        max_slowdown: float | None = None,
        policy: PolicyName = "auto",
        on_step: Callable[[int, Any], None] | None = None,
        checkpoint_every: int | None = None,
        resume: bool = False,
        isolation: Isolation = "thread",
    ) -> Job:
        """A new job: `steps` iterations of `step(state, batch) -> (state, metrics)`.

        The state is given away, as a donated argument is. User code (`batches`, `on_step`) runs in a thread of the job's own.

        Args:
            step: the function; or an `Entrypoint`, which makes step, state and batches, so that these are not given. It may also
                be a step that `tensile_jax.nnx.jit` has made: `state` is then the tuple of the NNX objects that it changes, and
                a batch comes after them. When the job has ended, however that is, they hold the state after its last finished
                iteration, in the CPU's memory, and `Job.result` returns them.
            batches: an iterable, or a function that gives one.
            priority: its share of the device's time, against the other jobs'.
            budget: a limit for this job alone, below the runtime's.
            max_swap_rate: the most that it may swap, as a part of what all jobs swap (TENSILE section IV-D).
            max_slowdown: as little memory as can be had for a step of at most so many times plain jit's predicted time.
            on_step: called with the number of the step and its metrics, as NumPy arrays.
            checkpoint_every: steps, after which there is one more checkpoint; needs the runtime's `checkpoints`.
            resume: go on from its latest checkpoint, if there is one. Without it there must be none.
            isolation: "thread": in this process. "process": `step` and `batches` run in a process of the job's own, whose end,
                whatever it is, is that of this job only; they and the structure of the state must be picklable. `on_step` is
                called here, and the last state comes back as NumPy arrays.

        Raises:
            ValueError: an argument cannot be; a name is taken; the state is another job's, or not on the runtime's device; an
                entrypoint cannot be made; it has checkpoints already, and `resume` is not asked for.
            TypeError: an argument is of the wrong type, or cannot be sent to another process.
            CheckpointError: its folder is in use by another run, or cannot be made; or it is to be resumed and has no checkpoint
                that can be read, but some that cannot.
        """
        refuse_half_a_job(step, state, batches)
        cap = None if budget is None else bytes_of("budget", budget)
        if (checkpoint_every is not None or resume) and self._folder is None:
            raise ValueError("checkpoint_every and resume need a folder: make the runtime with Runtime(..., checkpoints=FOLDER).")
        free = self._reserve(name, step)
        lock: FolderLock | None = None
        try:
            asked = Submission(
                step, steps, free, priority, cap, max_swap_rate, max_slowdown, policy, checkpoint_every, isolation
            )  # fmt: skip
            checkpoints, resumed = None, ""
            if self._folder is not None:
                lock = FolderLock(self._folder / asked.name)
                checkpoints, first, resumed = _open_checkpoints(lock, resume=resume)
                asked = replace(asked, first=first)
            if isinstance(step, Entrypoint) and isolation == "thread":
                step, state, batches = step.make()
            step, state, put_back = lifted_job(step, state)
            if put_back is not None and isolation == "process":
                raise ValueError(
                    f'isolation="process" cannot be had for {asked.name!r}, whose step changes objects of this process. Pass '
                    'isolation="thread", or an Entrypoint, which makes the objects in the job\'s own process.'
                )
            refuse_unfit_state(asked.name, state, self._device)
            if checkpoints is not None and asked.first and not isinstance(step, Entrypoint):  # which makes the state elsewhere
                state = checkpoints.restore(asked.first, state)
            job = self._make_job(asked, step, state, batches, put_back, on_step, checkpoints, lock)
            lock = None  # it is the job's now
        finally:
            if lock is not None:
                lock.release()
            with self._changed:
                self._reserved.discard(free)
                self._changed.notify_all()
        with self._changed:
            self._tell(job, "submitted", resumed)
        job._feed.release()
        if asked.first >= asked.steps:
            with self._changed:
                self._keeping.leave(
                    job, "finished", job._actor.state(), note=f"its checkpoint has all {asked.steps} steps already"
                )
        return job

    def _make_job(
        self,
        asked: Submission,
        step: Callable[..., Any] | Entrypoint,
        state: Any,
        batches: Any,
        put_back: PutBack | None,
        on_step: Callable[[int, Any], None] | None,
        checkpoints: Checkpoints | None,
        lock: FolderLock | None,
    ) -> Job:
        """The job of a submission, with its state given away; it is one of the runtime's jobs, and has not begun."""
        actor: JobActor
        if asked.isolation == "process":
            actor = isolated = IsolatedActor(
                step,
                state,
                batches,
                name=asked.name,
                device=self._device,
                first=asked.first,
                checkpoints=checkpoints.folder if checkpoints is not None else None,
                lock=None if lock is None else lock.descriptor,
                died=lambda error: self._course.died(job, error),
            )
            given, skip = isolated.batches(), 0
        else:
            assert not isinstance(step, Entrypoint) and batches is not None  # it was made, and they were looked at
            actor = LocalActor(step, state, self._transfer, put_back=put_back)
            given, skip = batches, asked.first
        number = JobId(next(self._numbers))
        most = skip + max(0, asked.steps - asked.first)
        feed = Feed(
            given, skip=skip, most=most, on_step=on_step, tell=lambda news: self._course.heard(job, news), name=asked.name
        )
        job = Job(self, number, asked, actor, feed, checkpoints, lock)
        feed.start(held=True)  # whatever can fail comes before the state is given away
        try:
            actor.own()
        except BaseException:
            feed.stop()
            feed.release()
            raise
        with self._changed:
            self._jobs[number] = job
        return job

    @property
    def jobs(self) -> tuple[Job, ...]:
        """All jobs, in the order in which they came."""
        with self._changed:
            return tuple(self._jobs.values())

    def events(self, *, until_closed: bool = False) -> Iterator[JobEvent]:
        """Every event from the first on, as it happens, until all jobs have ended; or until it is closed: more jobs may come.

        Raises:
            RuntimeError: it is called in a job's own `on_step`, `batches` or step, which the job would wait for.
        """
        self._refuse_to_wait("events()", "Follow the events in another thread, or outside of the callback")
        return self._follow(until_closed)

    def _follow(self, until_closed: bool) -> Iterator[JobEvent]:
        seen = 0

        def over() -> bool:
            return self._all_ended() and (self._closed or not until_closed)

        while True:
            with self._changed:
                if self._told <= seen and not over():
                    self._refuse_to_wait("events()", "Follow the events in another thread, or outside of the callback")
                self._changed.wait_for(lambda seen=seen: self._told > seen or over())
                fresh = self._told - seen
                if not fresh:
                    return
                kept = list(itertools.islice(reversed(self._events), fresh))[::-1]
                seen = self._told
            yield from kept

    def status(self) -> Status:
        """A snapshot of everything."""
        with self._changed:
            return status(tuple(self._jobs.values()), self._dispatcher)

    def record(self) -> Record:
        """What ran when, and how many bytes lay on the device, from the beginning until now."""
        return self._dispatcher.recorder.record()

    @property
    def peak_bytes(self) -> int:
        """The most device memory that was measured, all jobs together: live arrays and the running executable's workspace."""
        return self._dispatcher.peak_bytes

    @property
    def controller_us(self) -> tuple[float, int]:
        """(microseconds spent deciding, launches) so far."""
        return self._dispatcher.decided_us, self._dispatcher.launches

    def pause(self, job: str) -> None:
        """See `Job.pause`. Raises: ValueError: there is no such job, or it has ended."""
        self._course.wish(self._named(job), "pause")

    def resume(self, job: str) -> None:
        """See `Job.resume`. Raises: ValueError: there is no such job, or it has ended."""
        self._course.wish(self._named(job), "run")

    def cancel(self, job: str) -> None:
        """See `Job.cancel`. Raises: ValueError: there is no such job, or it has ended."""
        self._course.wish(self._named(job), "stop")

    def forget(self, job: str) -> None:
        """No longer keep a job that has ended: its name is free again, and its state goes with the last who holds its `Job`.

        Raises:
            ValueError: there is no such job, or it has not ended.
        """
        one = self._named(job)
        with self._changed:
            if one._state not in FINAL or one._saving:
                raise ValueError(f"{job} has not ended; it is {one._state}. Cancel it first, or wait for it.")
            del self._jobs[one._number]

    def set_budget(self, budget: int | str) -> None:
        """Another budget for all jobs together. A lower one holds once the iterations under way have ended."""
        self._dispatcher.tell(Budgeted(bytes_of("budget", budget)))

    def stop(self) -> None:
        """Cancel every job: each ends after its iteration, with a checkpoint where it makes any."""
        with self._changed:
            for job in self._jobs.values():
                if job._state not in FINAL:
                    self._course.wish(job, "stop")

    def close(self) -> None:
        """Wait until every job has ended, and end. Paused jobs are cancelled. Interrupted, it stops all; twice, it aborts.

        A runtime that was never closed ends when nobody holds it any more and its jobs have ended.

        Raises:
            RuntimeError: it is called in a job's own `on_step`, `batches` or step, which the job would wait for.
        """
        self._refuse_to_wait("close()", "Call stop() there, which lets every job end after its iteration, and close() outside")
        try:
            self._drain()
        except KeyboardInterrupt:
            self.stop()
            try:
                self._drain()
            except BaseException:
                self._dispatcher.abandon()
                for job in self.jobs:
                    job._actor.close()
                raise
        self._ending.detach()  # what is asked of the threads from now on must not keep the runtime
        self._dispatcher.stop()
        self._scheduler.close()
        self._keeping.close()
        for job in self.jobs:
            job._actor.join()

    def _refuse_to_wait(self, call: str, remedy: str) -> None:
        """Raises RuntimeError in a thread that runs a job's user code: the job does not end before that code does."""
        job = self._job_of_this_thread()
        if job is not None:
            raise RuntimeError(
                f"{call} waits until every job has ended, and was called by the code of {job.name!r} (its on_step, its batches "
                f"or its step), for which that job waits: it would never return. {remedy}."
            )

    def _job_of_this_thread(self) -> Job | None:
        """The job whose user code this thread runs."""
        with self._changed:
            return next((job for job in self._jobs.values() if job._runs_in_this_thread()), None)

    def _drain(self) -> None:
        with self._changed:
            self._closed = True
            for job in self._jobs.values():
                if job._state == "paused" or (job._wish == "pause" and job._state not in FINAL):
                    self._course.wish(job, "stop")
            self._changed.wait_for(self._all_ended)
            self._changed.notify_all()

    def _tell(
        self, job: Job | None, kind: EventName, note: str = "", values: dict[str, float] | None = None, *, step: int | None = None
    ) -> None:
        name, at = ("", 0) if job is None else (job.name, job._step if step is None else step)
        with self._changed:
            self._events.append(JobEvent(self._dispatcher.now() / 1e6, kind, name, at, note, values or {}))
            self._told += 1
            self._changed.notify_all()

    def _all_ended(self) -> bool:
        return not self._reserved and all(job._state in FINAL and not job._saving for job in self._jobs.values())

    def _reserve(self, name: str | None, step: Any) -> str:
        """The name of a new job, as given or after its step; no other has it from now on.

        Raises:
            ValueError: it is taken, or cannot be a name.
            TypeError: it is no text.
            RuntimeError: the runtime is closed.
        """
        if name is not None:
            refuse_unfit_name(name)
        with self._changed:
            if self._closed:
                raise RuntimeError("The runtime is closed. Submit jobs inside its with block.")
            taken = {job.name for job in self._jobs.values()} | self._reserved
            if name is None:
                stem = name_of(step)
                name = next(n for n in itertools.chain([stem], (f"{stem}-{k}" for k in itertools.count(2))) if n not in taken)
            elif name in taken:
                raise ValueError(f"name={name!r} is taken by another job of this runtime. Give each job a name of its own.")
            self._reserved.add(name)
        return name

    def _named(self, name: str) -> Job:
        with self._changed:
            for job in self._jobs.values():
                if job.name == name:
                    return job
            known = ", ".join(job.name for job in self._jobs.values()) or "none"
        raise ValueError(f"job {name!r} is not known. There are: {known}.")


def _end_threads(dispatcher: Dispatcher, scheduler: Scheduler) -> None:
    dispatcher.end()
    scheduler.end()


def _open_checkpoints(lock: FolderLock, *, resume: bool) -> tuple[Checkpoints, int, str]:
    """The checkpoints in a locked folder, the step from which the job goes on, and what is to be said of that.

    Raises:
        ValueError: there are checkpoints, and they are not to be resumed from.
        CheckpointError: there are checkpoints from which the job cannot be resumed.
    """
    checkpoints = Checkpoints(lock.folder)
    checkpoints.remove_leftovers()
    if not resume:
        if steps := checkpoints.steps():
            raise ValueError(
                f"{lock.folder} has a checkpoint after {steps[0]} steps, of which an earlier run may be glad: pass resume=True "
                "to go on from it, another name, or another folder to Runtime(..., checkpoints=FOLDER)."
            )
        return checkpoints, 0, ""
    step, damaged = checkpoints.find_last()
    if not step:
        return checkpoints, 0, ""
    note = f"resumed at step {step}"
    return checkpoints, step, f"{note}, since {damaged}; it was left where it is" if damaged else note
