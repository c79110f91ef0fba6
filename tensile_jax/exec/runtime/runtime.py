"""`Runtime`: runs several jobs on one device under one memory budget.

    with tensile.Runtime(budget="8GiB") as runtime:
        a = runtime.submit(step_a, state_a, batches_a, steps=200, name="resnet", priority=2)
        b = runtime.submit(step_b, state_b, batches_b, steps=500, name="gpt")
        for event in runtime.events(): ...
        state = a.result()

The runtime itself decides little. It checks the user's arguments. It gives the events of every job to the job's lifecycle
(`lifecycle.py`), and carries out the instructions that the lifecycle returns. All of this happens under the lock of the store
(`store.py`). A runtime has these parts:

    lifecycle        decides what becomes of one job               pure
    controller       decides who holds memory and who runs next    pure; "Global Controller" (TENSILE section III-D)
    dispatcher       carries out the controller's instructions     a lock, and the threads that take it
    planner          makes plans                                   a thread; "Memory Scheduler"
    saver            writes checkpoints, fetches last states       two threads
    actor            one for each job: state and compiled plan     "Executor" and "Swap Executor"
    feed             one for each job: runs its user code          a thread

The *segments* of a job are the parts of its step that are compiled as one executable each. They are chosen once, when the job
is prepared. Other jobs may affect at which times this job's tensors are in host memory, but they never affect its results.
Segments are chosen again in two cases: the budget is lowered below what the job needs, or the user asked for new plans when
latencies drift (`renew_above`). Other segments round the job's results differently.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import jax

from tensile_jax.budget import parse_budget, parse_host_budget
from tensile_jax.exec.actor.actor import Actor
from tensile_jax.exec.actor.entrypoint import Entrypoint
from tensile_jax.exec.actor.feed import Feed
from tensile_jax.exec.actor.local_actor import LocalActor
from tensile_jax.exec.actor.pure_job import PutBack, pure_job
from tensile_jax.exec.calibration.calibrate import profile_of
from tensile_jax.exec.call.host_memory import free_host_memory
from tensile_jax.exec.checkpoint.checkpoints import Checkpoints
from tensile_jax.exec.checkpoint.folder_lock import FolderLock
from tensile_jax.exec.child_process.isolated_actor import IsolatedActor
from tensile_jax.exec.child_process.payload import pack_job
from tensile_jax.exec.compiling.compiler import Compiler
from tensile_jax.exec.controller.state import JobId, State, Wish
from tensile_jax.exec.runtime import messages
from tensile_jax.exec.runtime.dispatcher import Dispatcher
from tensile_jax.exec.runtime.job import Job
from tensile_jax.exec.runtime.lifecycle import Lifecycle
from tensile_jax.exec.runtime.messages import Event, Instruction
from tensile_jax.exec.runtime.planner import JobPlanner, PlannerThread
from tensile_jax.exec.runtime.results import Results
from tensile_jax.exec.runtime.saver import Saver
from tensile_jax.exec.runtime.share_of_peaks import ShareOfPeaks
from tensile_jax.exec.runtime.status import status
from tensile_jax.exec.runtime.store import Post, Store, StoredJob
from tensile_jax.exec.runtime.submission import Isolation, Submission, bytes_of, refuse_incomplete_job, refuse_unfit_state
from tensile_jax.exec.transfer import Transfer, placed_like, places_on_host
from tensile_jax.plan import PolicyName
from tensile_jax.runtime_records import JobEvent, Record, Status
from tensile_jax.tracebacks import methods_hide_frames
from tensile_jax.units import format_bytes

_RUN_AHEAD = 3  # launches in flight, on a device that allocates memory in the order of launches
_PAST_TENSE: dict[Wish, str] = {"run": "resumed", "pause": "paused", "stop": "cancelled"}


@methods_hide_frames
class Runtime:
    """A device, or several, and the jobs there. Use it in a `with` block: the end of the block waits until all jobs have ended.

    Args:
        budget: the device memory for all jobs together: bytes, a size such as `"8GiB"`, or a share such as `"60%"` of the sum of
            the peaks that the submitted jobs have under plain `jax.jit`, which is compiled for that. The budget grows with each
            job that is submitted, and a job that ends still counts. A job is planned when the peaks of all jobs are known that
            were submitted before it, for the budget of that moment; `status().budget_of` says what it is of. To have one budget
            from the beginning, add up `tensile_jax.jit(step, donate_argnums=0).jit_peak_bytes(state, batch)` of all jobs.
        host_budget: the pinned host memory for tensors that are swapped out and for parked states, for each device: bytes, or a
            size. None: what is free for the process now, less a reserve, as for `tensile_jax.jit`.
        device: a `jax.Device`; by default the first of `jax.devices()`.
        devices: several `jax.Device`s, instead of `device`. A job whose state is divided among some or all of them runs on
            these, under the budget on each. Every other job runs on the first one. All budgets and sizes are those of one device.
            Each job counts as if it ran on all of them.
        device_profile: the name of a device profile, or the path of a TOML file; by default the one for the device.
        checkpoints: a folder, in which every job has a folder of its own. A checkpoint is made whenever a job is paused or ends,
            also if it ends by Ctrl-C or because its user code failed.
        look: "sampled": the bytes of live arrays are read in a job's first iterations and in every fiftieth. "always": at each
            launch.
    """

    def __init__(
        self,
        budget: int | str,
        *,
        host_budget: int | str | None = None,
        device: Any = None,
        devices: Sequence[Any] | None = None,
        device_profile: str | None = None,
        checkpoints: str | Path | None = None,
        look: Literal["sampled", "always"] = "sampled",
    ) -> None:
        self._devices = _devices_of(device, devices)
        self._device = self._devices[0]
        self._on_cpu = self._device.platform == "cpu"
        self._profile = profile_of(self._device, device_profile)
        self._transfer = Transfer(self._device)
        self._folder = None if checkpoints is None else Path(checkpoints).absolute()
        if look not in ("sampled", "always"):
            raise ValueError(f'look must be "sampled" or "always", got {look!r}.')
        asked = parse_budget(budget)
        share = None if asked.share is None else ShareOfPeaks(asked.share)
        budget_bytes = asked.resolve(0) if share is None else share.budget_bytes
        free = free_host_memory(self._devices) if host_budget is None else None
        host_bytes = float("inf") if free is None else free.resolve(0)
        if host_budget is not None:
            host_bytes = parse_host_budget(host_budget)
        depth = 1 if self._on_cpu else _RUN_AHEAD
        post, applied = _weakly(self)
        self._dispatcher = Dispatcher(State(budget_bytes, host_bytes, depth), post, applied, look_always=look == "always")
        self._store = Store(self._dispatcher.now)
        self._planner = JobPlanner(self._store, self._dispatcher, post, self._profile, Compiler(self._device), share)
        self._results = Results(self._store, self._dispatcher, self._transfer)
        self._saver = Saver(self._store, post)
        self._jobs: dict[JobId, Job] = {}
        self._dispatcher.start()
        # ends the threads of a runtime that was not closed, when nobody refers to it and its jobs have ended
        self._ending = weakref.finalize(self, _end_threads, self._dispatcher, self._planner.thread)
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
        plan_for: int | str | None = None,
        policy: PolicyName = "auto",
        renew_above: float | None = None,
        on_step: Callable[[int, Any], None] | None = None,
        checkpoint_every: int | None = None,
        resume: bool = False,
        isolation: Isolation = "thread",
    ) -> Job:
        """Submit a new job: `steps` iterations of `step(state, batch) -> (state, metrics)`.

        The state must not be used afterwards, as with a donated argument. User code (`batches`, `on_step`) runs in a thread that
        belongs to the job.

        Args:
            step: the function; or an `Entrypoint`, which makes step, state and batches. Then state and batches are not given. It
                may also be a step that `tensile_jax.nnx.jit` has made: `state` is then the tuple of the NNX objects that the step
                changes, and the step takes the batch after them. When the job has ended, in whatever way, these objects hold
                the state after its last finished iteration, in the CPU's memory, and `Job.result` returns them.
            batches: an iterable, or a function that returns one.
            priority: the job's share of the device's time, in proportion to the priorities of the other jobs.
            budget: a limit for this job alone, below the runtime's.
            max_swap_rate: the most bytes that the job may swap, as a part of what all jobs swap (TENSILE section IV-D).
            max_slowdown: use the least memory with which a step takes at most `max_slowdown` times plain jit's predicted time.
            plan_for: the device memory for which the job is planned, independently of the other jobs. A job then has the same
                segments, and the same results to the bit, on each runtime with this budget. None: what the other jobs leave free.
            renew_above: the drift of the segments' latencies above which the job's plan is renewed, as in `tensile_jax.jit`. The
                results of such a job are rounded differently from then on. None: only its copies may change.
            on_step: called with the number of the step and its metrics, as NumPy arrays.
            checkpoint_every: a checkpoint is made after every `checkpoint_every` steps; needs the runtime's `checkpoints`.
            resume: continue from the job's latest checkpoint, if there is one. Without `resume` there must be no checkpoint.
            isolation: "thread": the job runs in this process. "process": `step` and `batches` run in a process of this job.
                If that process ends or crashes, only this job fails. `step`, `batches` and the structure of the state must be
                picklable. `on_step` is called in this process, and the last state comes back as NumPy arrays.

        Raises:
            ValueError: an argument has a value that is not allowed; the name is taken; the state belongs to another job, or is
                not on the runtime's device; the entrypoint raised an error; the job has checkpoints, and `resume` is false.
            TypeError: an argument is of the wrong type, or cannot be sent to another process.
            CheckpointError: the job's folder is in use by another run, or cannot be made; or the job is to be resumed and has
                checkpoints, none of which can be read.
        """
        refuse_incomplete_job(step, state, batches)
        cap = None if budget is None else bytes_of("budget", budget)
        plan_for_bytes = None if plan_for is None else bytes_of("plan_for", plan_for)
        if (checkpoint_every is not None or resume) and self._folder is None:
            raise ValueError("checkpoint_every and resume need a folder: make the runtime with Runtime(..., checkpoints=FOLDER).")
        free = self._store.reserve(name, step)
        lock: FolderLock | None = None
        try:
            asked = Submission(
                step, steps, free, priority, cap, max_swap_rate, max_slowdown, policy, checkpoint_every, isolation,
                renew_above, plan_for_bytes,
            )  # fmt: skip
            checkpoints, resumed = None, ""
            if self._folder is not None:
                lock = FolderLock(self._folder / asked.name)
                checkpoints, first, resumed = _open_checkpoints(lock, resume=resume)
                asked = replace(asked, first=first)
            if isinstance(step, Entrypoint) and isolation == "thread":
                step, state, batches = step.make()
            step, state, write_to_objects = pure_job(step, state)
            if write_to_objects is not None and isolation == "process":
                raise ValueError(
                    f'isolation="process" cannot be had for {asked.name!r}, whose step changes objects of this process. Pass '
                    'isolation="thread", or an Entrypoint, which makes the objects in the job\'s own process.'
                )
            refuse_unfit_state(asked.name, state, self._devices, isolation)
            on_host = places_on_host(state)
            # in its own process, an entrypoint makes the state there
            if checkpoints is not None and asked.first and not isinstance(step, Entrypoint):
                state = placed_like(checkpoints.restore(asked.first, state), state)
            job = self._make_job(asked, step, state, batches, on_host, write_to_objects, on_step, checkpoints, lock, resumed)
            lock = None  # the job will release it
        finally:
            if lock is not None:
                lock.release()
            self._store.unreserve(free)
        return job

    def _make_job(
        self,
        asked: Submission,
        step: Callable[..., Any] | Entrypoint,
        state: Any,
        batches: Any,
        on_host: frozenset[int],
        write_to_objects: PutBack | None,
        on_step: Callable[[int, Any], None] | None,
        checkpoints: Checkpoints | None,
        lock: FolderLock | None,
        resumed: str,
    ) -> Job:
        """Make the job of a submission: take its state from the user, and add it to the runtime's jobs."""
        number = self._store.new_number()
        actor: Actor
        if asked.isolation == "process":
            payload = pack_job(
                step,
                state,
                batches,
                name=asked.name,
                device=self._device,
                first=asked.first,
                checkpoints=None if checkpoints is None else checkpoints.folder,
                given_on_host=on_host,
            )
            actor = isolated = IsolatedActor(
                payload,
                state,
                lock=None if lock is None else lock.descriptor,
                died=lambda error: self._hear(number, messages.ProcessDied(error)),
            )
            given, skip = isolated.batches(), 0
        else:
            # the entrypoint was made above, and the batches were checked
            assert not isinstance(step, Entrypoint) and batches is not None
            actor = LocalActor(step, state, self._transfer, write_to_objects=write_to_objects, given_on_host=on_host)
            given, skip = batches, asked.first
        feed = Feed(
            given,
            skip=skip,
            most=skip + max(0, asked.steps - asked.first),
            on_step=on_step,
            tell=lambda event: self._hear(number, event),  # this refers to the runtime, so the runtime lives while the job runs
            name=asked.name,
        )
        life = Lifecycle(
            number, asked.name, asked.steps, asked.first, asked.priority, checkpoints is not None, asked.checkpoint_every,
            done=asked.first,
        )  # fmt: skip
        stored = StoredJob(asked, actor, feed, checkpoints, lock, life)
        job = Job(stored, self._store, self._dispatcher, self._results, partial(self._wish, stored))
        feed.start(held=True)  # whatever can fail is done before the state is taken from the user
        try:
            actor.own()
        except BaseException:
            feed.stop()
            feed.release()
            raise
        with self._store.changed:
            self._store.jobs[number], self._jobs[number] = stored, job
            self._hear(number, messages.Submitted(resumed))
        feed.release()
        return job

    @property
    def jobs(self) -> tuple[Job, ...]:
        """All jobs, in the order in which they were submitted."""
        with self._store.changed:
            return tuple(self._jobs.values())

    def events(self, *, until_closed: bool = False) -> Iterator[JobEvent]:
        """Every event from the first on, as it happens, until all jobs have ended.

        With `until_closed` the events go on until the runtime is closed, since more jobs may be submitted.

        Raises:
            RuntimeError: this is called in a job's own `on_step`, `batches` or step: the job would wait for itself.
        """
        self._store.refuse_to_wait("events()", "Follow the events in another thread, or outside of the callback")
        return self._store.follow(until_closed=until_closed)

    def status(self) -> Status:
        """A snapshot of the runtime and of all its jobs."""
        with self._store.changed:
            return status(self._store, self._dispatcher, self._planner.share)

    def record(self) -> Record:
        """When each launch and copy ran, how many bytes were on the device, and what each job did before its first iteration."""
        return replace(self._dispatcher.recorder.record(), stages=self._store.stages())

    @property
    def peak_bytes(self) -> int:
        """The most device memory that was measured, in bytes: live arrays of all jobs and the running executable's workspace."""
        return self._dispatcher.peak_bytes

    @property
    def controller_us(self) -> tuple[float, int]:
        """(microseconds of CPU time that the controller has used, number of launches) so far."""
        return self._dispatcher.decided_us, self._dispatcher.launches

    def pause(self, job: str) -> None:
        """See `Job.pause`. Raises: ValueError: there is no such job, or it has ended."""
        self._wish(self._store.named(job), "pause")

    def resume(self, job: str) -> None:
        """See `Job.resume`. Raises: ValueError: there is no such job, or it has ended."""
        self._wish(self._store.named(job), "run")

    def cancel(self, job: str) -> None:
        """See `Job.cancel`. Raises: ValueError: there is no such job, or it has ended."""
        self._wish(self._store.named(job), "stop")

    def forget(self, job: str) -> None:
        """Forget a job that has ended: its name may be used again, and its state is freed once nobody refers to its `Job`.

        Raises:
            ValueError: there is no such job, or it has not ended.
        """
        one = self._store.named(job)
        with self._store.changed:
            if not one.life.is_over:
                raise ValueError(f"{job} has not ended; it is {one.life.state}. Cancel it first, or wait for it.")
            del self._store.jobs[one.number], self._jobs[one.number]

    def set_budget(self, budget: int | str) -> None:
        """Change the budget of all jobs together, to bytes or a size. A budget that was a share no longer grows then.

        A lower budget is applied once the iterations under way have ended.
        """
        self._planner.set_budget(bytes_of("budget", budget))

    def stop(self) -> None:
        """Cancel every job: each ends after its iteration, with a checkpoint if it makes checkpoints."""
        with self._store.changed:
            for number in self._store.jobs:
                self._hear(number, messages.UserWished("stop"))

    def close(self) -> None:
        """Wait until every job has ended, then end the runtime. Paused jobs are cancelled.

        Ctrl-C while this waits stops every job; a second Ctrl-C aborts. A runtime that was never closed ends when nobody refers
        to it and its jobs have ended.

        Raises:
            RuntimeError: this is called in a job's own `on_step`, `batches` or step: the job would wait for itself.
        """
        self._store.refuse_to_wait("close()", "Call stop() there, which ends every job after its iteration, and close() outside")
        try:
            self._drain()
        except KeyboardInterrupt:
            self.stop()
            try:
                self._drain()
            except BaseException:
                self._dispatcher.abandon()
                for job in self._store.jobs.values():
                    job.actor.close()
                raise
        self._ending.detach()  # the threads are ended here instead
        self._dispatcher.stop()
        self._planner.thread.close()
        self._saver.close()
        for job in self._store.jobs.values():
            job.actor.join()

    def _drain(self) -> None:
        with self._store.changed:
            self._store.close()
            for job in self._store.jobs.values():
                if job.life.state == "paused" or job.life.wish == "pause":
                    self._hear(job.number, messages.UserWished("stop"))
            self._store.changed.wait_for(self._store.all_ended)
            self._store.changed.notify_all()

    # -- what happens to jobs ---------------------------------------------------------------------------------------------------

    def _wish(self, job: StoredJob, wish: Wish) -> None:
        """Pass on what the user asks of a job.

        Raises:
            ValueError: the job has ended; or it is to be paused and the runtime is closing, after which nobody could resume it.
        """
        with self._store.changed:
            life = job.life
            if life.has_ended:
                raise ValueError(f"{job.name} is {life.state}; it cannot be {_PAST_TENSE[wish]}.")
            if wish == "pause" and life.wish != "stop" and self._store.closed:
                raise ValueError(f"{job.name} cannot be paused: its runtime is closing, which waits for its end. Cancel it.")
            self._hear(job.number, messages.UserWished(wish))

    def _hear(self, number: JobId, event: Event) -> None:
        """Give an event of a job to its lifecycle and carry out the instructions. May be called in any thread."""
        with self._store.changed:
            job = self._store.jobs.get(number)
            if job is not None:
                for instruction in job.handle(event):
                    self._perform(job, instruction)

    def _perform(self, job: StoredJob, instruction: Instruction) -> None:
        """Carry out one instruction. Nothing here may wait, since the store's lock is held."""
        match instruction:
            case messages.Report(kind, steps, note, values):
                self._store.report(kind, job.name, steps, note, values)
            case messages.StartPreparing():
                self._planner.start(job)
            case messages.JoinController(record):
                self._dispatcher.call(lambda: self._planner.join_controller(job, record))
            case messages.TellController(event):
                self._dispatcher.tell(event)
            case messages.LoseJob(error):
                self._dispatcher.fail(job.number, error)
            case messages.ExplainWait():
                self._dispatcher.call(lambda: self._planner.explain_wait(job))
            case messages.UsePlan(plan, steps):
                self._planner.use_plan(job, plan, steps)
            case messages.PlanAgain(tracked, reason):
                self._planner.renew_drifted(job, tracked, reason)
            case messages.DropPlan(plan):
                self._planner.drop_plan(job, plan)
            case messages.ShareState():
                self._planner.share_state()
            case messages.Deliver(steps, metrics):
                job.feed.deliver(steps, metrics)
            case messages.StartSaving():
                self._saver.start(job)
            case messages.StopFeed():
                job.feed.stop()
            case messages.Close():
                job.feed.stop()
                job.actor.close()
                job.drop_first_batch()
                self._planner.forget_closed()
            case messages.ReleaseFolder():
                if job.lock is not None:
                    job.lock.release()
                self._store.changed.notify_all()

    def _apply_budget(self, nbytes: int) -> None:
        """Report and use a budget that the controller has applied. Called under the dispatcher's lock."""
        with self._store.changed:
            self._store.report("budget", note=format_bytes(nbytes), values={"budget_bytes": nbytes})
            self._planner.use_budget(nbytes)


def _weakly(runtime: Runtime) -> tuple[Post, Callable[[int], None]]:
    """`post` and `applied` for the runtime's threads, by a weak reference: the threads must not keep the runtime alive."""
    held = weakref.ref(runtime)

    def post(job: JobId, event: Event) -> None:
        if (one := held()) is not None:
            one._hear(job, event)

    def applied(nbytes: int) -> None:
        if (one := held()) is not None:
            one._apply_budget(nbytes)

    return post, applied


def _devices_of(device: Any, devices: Any) -> tuple[Any, ...]:
    """The devices of a runtime, from its arguments.

    Raises:
        TypeError: something else than devices of JAX was given.
        ValueError: both arguments were given, or no device, or one twice, or one of another process or platform.
    """
    if device is not None and devices is not None:
        raise ValueError(f"device={device!r} and devices={devices!r} both say where jobs run. Pass one of them.")
    found = (jax.local_devices()[0] if device is None else device,) if devices is None else tuple(devices)
    for one in found:
        if not isinstance(one, jax.Device):
            name = "device" if devices is None else "devices"
            raise TypeError(f"{name} must be one of jax.devices(), such as jax.devices()[0]: got {one!r}.")
    elsewhere = [one for one in found if one.process_index != jax.process_index()]
    if elsewhere:
        raise ValueError(
            f"devices must be devices of this process, of which jax.local_devices() are some: {elsewhere[0]} is of process "
            f"{elsewhere[0].process_index}, and this is process {jax.process_index()}. Jobs that run at different times in each "
            "process would launch in different orders. Train one step on devices of several processes with tensile_jax.jit."
        )
    if not found or len(set(found)) < len(found) or any(one.platform != found[0].platform for one in found):
        raise ValueError(f"devices must be different devices of this process and of one platform: got {devices!r}.")
    return found


def _end_threads(dispatcher: Dispatcher, planner: PlannerThread) -> None:
    dispatcher.end()
    planner.end()


def _open_checkpoints(lock: FolderLock, *, resume: bool) -> tuple[Checkpoints, int, str]:
    """The checkpoints in a locked folder, the step from which the job continues (0 if from none), and a note for the user.

    Raises:
        ValueError: there are checkpoints, and they are not to be resumed from.
        CheckpointError: there are checkpoints from which the job cannot be resumed.
    """
    checkpoints = Checkpoints(lock.folder)
    checkpoints.remove_leftovers()
    if not resume:
        if steps := checkpoints.steps():
            raise ValueError(
                f"{lock.folder} has a checkpoint after {steps[0]} steps from an earlier run: pass resume=True "
                "to go on from it, another name, or another folder to Runtime(..., checkpoints=FOLDER)."
            )
        return checkpoints, 0, ""
    step, damaged = checkpoints.find_last()
    if not step:
        return checkpoints, 0, ""
    note = f"resumed at step {step}"
    return checkpoints, step, f"{note}, since {damaged}; it was left where it is" if damaged else note
