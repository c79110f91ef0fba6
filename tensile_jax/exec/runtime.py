"""Several jobs on one device, under one budget: `Runtime`.

    with tensile.Runtime(budget="8GiB") as runtime:
        a = runtime.submit(step_a, state_a, batches_a, steps=200, name="resnet", priority=2)
        b = runtime.submit(step_b, state_b, batches_b, steps=500, name="gpt")
        for event in runtime.events(): ...
        state = a.result()

The paper's four components (TENSILE section III-D) are the *Global Controller* (`exec/controller.py`), the *Memory Scheduler*
(`exec/scheduler.py`), and for each job an *Executor* and a *Swap Executor* (`exec/actor.py`, `local.py`).

A job's segments are chosen once, when it is prepared; who else is there changes what leaves the device and when, never a
result. Only where the budget is lowered below what a job needs are its segments chosen again, which changes rounding.
"""

import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

import jax

from tensile_jax.exec.actor import JobActor
from tensile_jax.exec.course import Course
from tensile_jax.exec.dispatcher import Dispatcher
from tensile_jax.exec.entrypoint import Entrypoint
from tensile_jax.exec.events import Budgeted
from tensile_jax.exec.feed import Feed
from tensile_jax.exec.isolated import IsolatedActor
from tensile_jax.exec.job import Job
from tensile_jax.exec.keeping import Keeping
from tensile_jax.exec.lifted import lifted_job
from tensile_jax.exec.listener import JobListener
from tensile_jax.exec.local import LocalActor
from tensile_jax.exec.planning import Planning
from tensile_jax.exec.scheduler import Scheduler
from tensile_jax.exec.seats import JobId, State
from tensile_jax.exec.snapshot import status
from tensile_jax.exec.submission import Isolation, Submission, bytes_of, refuse_half_a_job, refuse_shared_state
from tensile_jax.exec.transfer import Transfer
from tensile_jax.jobs import FINAL, EventName, JobEvent, Record, Status
from tensile_jax.profiles import load_profile
from tensile_jax.schedule import PolicyName

if TYPE_CHECKING:
    from tensile_jax.exec.checkpoint import Checkpoints

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
        self._device = jax.devices()[0] if device is None else device
        self._on_cpu = self._device.platform == "cpu"
        self._profile = load_profile(device_profile or ("cpu" if self._on_cpu else "h200"))
        self._transfer = Transfer(self._device)
        self._folder = None if checkpoints is None else Path(checkpoints)
        if look not in ("sampled", "always"):
            raise ValueError(f'look must be "sampled" or "always", got {look!r}.')
        budget_bytes = bytes_of("budget", budget)
        host_bytes = float("inf") if host_budget is None else bytes_of("host_budget", host_budget)
        self._changed = threading.Condition(threading.RLock())
        self._jobs: dict[JobId, Job] = {}
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
            ValueError: an argument cannot be; a name is taken; the state is another job's; an entrypoint cannot be made; it has
                checkpoints already, and `resume` is not asked for.
            TypeError: an argument is of the wrong type, or cannot be sent to another process.
        """
        refuse_half_a_job(step, state, batches)
        cap = None if budget is None else bytes_of("budget", budget)
        if (checkpoint_every is not None or resume) and self._folder is None:
            raise ValueError("checkpoint_every and resume need a folder: make the runtime with Runtime(..., checkpoints=FOLDER).")
        asked = Submission(
            step,
            steps,
            self._free_name(name, step),
            priority,
            cap,
            max_swap_rate,
            max_slowdown,
            policy,
            checkpoint_every,
            isolation,
        )
        self._refuse_if_closed()
        checkpoints = None if self._folder is None else self._open_checkpoints(self._folder / asked.name, resume=resume)
        if isinstance(step, Entrypoint) and isolation == "thread":
            step, state, batches = step.make()
        step, state, put_back = lifted_job(step, state)
        if put_back is not None and isolation == "process":
            raise ValueError(
                f'isolation="process" cannot be had for {asked.name!r}, whose step changes objects of this process. Pass '
                'isolation="thread", or an Entrypoint, which makes the objects in the job\'s own process.'
            )
        if checkpoints is not None and resume and (first := checkpoints.latest()):
            asked = replace(asked, first=first)
            if not isinstance(step, Entrypoint):  # which makes the state elsewhere
                state = checkpoints.restore(first, state)
        refuse_shared_state(asked.name, state)
        actor: JobActor
        if isolation == "process":
            actor = isolated = IsolatedActor(
                step,
                state,
                batches,
                name=asked.name,
                device=self._device,
                first=asked.first,
                checkpoints=checkpoints.folder if checkpoints is not None else None,
                died=lambda error: self._course.died(job, error),
            )
            given, skip = isolated.batches(), 0
        else:
            assert not isinstance(step, Entrypoint) and batches is not None  # it was made, and they were looked at
            actor = LocalActor(step, state, self._transfer, put_back=put_back)
            given, skip = batches, asked.first
        number = JobId(next(self._numbers))
        most = skip + max(0, steps - asked.first)
        feed = Feed(
            given, skip=skip, most=most, on_step=on_step, tell=lambda news: self._course.heard(job, news), name=asked.name
        )
        job = Job(self, number, asked, actor, feed, checkpoints)
        actor.own()
        with self._changed:
            self._jobs[number] = job
            self._tell(job, "submitted", f"resumed at step {asked.first}" if asked.first else "")
        feed.start()
        if asked.first >= steps:
            with self._changed:
                self._keeping.leave(job, "finished", actor.state(), note=f"its checkpoint has all {steps} steps already")
        return job

    @property
    def jobs(self) -> tuple[Job, ...]:
        """All jobs, in the order in which they came."""
        with self._changed:
            return tuple(self._jobs.values())

    def events(self, *, until_closed: bool = False) -> Iterator[JobEvent]:
        """Every event from the first on, as it happens, until all jobs have ended; or until it is closed: more jobs may come."""
        seen = 0

        def over() -> bool:
            return self._all_ended() and (self._closed or not until_closed)

        while True:
            with self._changed:
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
        """Wait until every job has ended, and end. Paused jobs are cancelled. Interrupted, it stops all; twice, it aborts."""
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
        self._dispatcher.stop()
        self._scheduler.close()
        self._keeping.close()
        for job in self.jobs:
            job._actor.join()

    def _open_checkpoints(self, folder: Path, *, resume: bool) -> "Checkpoints":
        from tensile_jax.exec.checkpoint import Checkpoints  # imports orbax, which takes a second

        checkpoints = Checkpoints(folder)
        if not resume and (step := checkpoints.latest()) is not None:
            raise ValueError(
                f"{folder} has a checkpoint after {step} steps, of which an earlier run may be glad: pass resume=True to go on "
                "from it, another name, or another folder to Runtime(..., checkpoints=FOLDER)."
            )
        return checkpoints

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise RuntimeError("The runtime is closed. Submit jobs inside its with block.")

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
        return all(job._state in FINAL and not job._saving for job in self._jobs.values())

    def _free_name(self, name: str | None, step: Any) -> str:
        """The name of a new job: as given, or after its step."""
        with self._changed:
            taken = {job.name for job in self._jobs.values()}
        if name is None:
            stem = step.name if isinstance(step, Entrypoint) else getattr(step, "__name__", "job")
            return next(n for n in itertools.chain([stem], (f"{stem}-{k}" for k in itertools.count(2))) if n not in taken)
        if name in taken:
            raise ValueError(f"name={name!r} is taken by another job of this runtime. Give each job a name of its own.")
        return name

    def _named(self, name: str) -> Job:
        with self._changed:
            for job in self._jobs.values():
                if job.name == name:
                    return job
            known = ", ".join(job.name for job in self._jobs.values()) or "none"
        raise ValueError(f"job {name!r} is not known. There are: {known}.")
