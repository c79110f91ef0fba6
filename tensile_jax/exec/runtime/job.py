"""`Job`: what a user holds of a job in a runtime. Its fields belong to the runtime, and change under the runtime's lock."""

import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tensile_jax.errors import JobFailed
from tensile_jax.exec.actor.actor import JobActor, Program
from tensile_jax.exec.actor.feed import Feed
from tensile_jax.exec.actor.missing import NO_BATCH, NO_STATE
from tensile_jax.exec.checkpoint.checkpoints import Checkpoints
from tensile_jax.exec.checkpoint.folder_lock import FolderLock
from tensile_jax.exec.controller.state import JobId, Wish
from tensile_jax.exec.runtime.status import job_report, job_status
from tensile_jax.exec.runtime.submission import Submission
from tensile_jax.plan_format import Plan
from tensile_jax.runtime_records import FINAL, JobReport, JobState, JobStatus

if TYPE_CHECKING:  # they name each other
    from tensile_jax.exec.runtime.runtime import Runtime

_RECENT_STEPS = 16  # over which the speed is taken
_TIMED_STEPS = 200  # whose times are kept


class Job:
    """A job of a runtime; made by `Runtime.submit`."""

    def __init__(
        self,
        runtime: "Runtime",
        number: JobId,
        asked: Submission,
        actor: JobActor,
        feed: Feed,
        checkpoints: Checkpoints | None,
        lock: FolderLock | None,
    ) -> None:
        self.name = asked.name
        self._runtime = runtime
        self._number = number
        self._asked = asked
        self._actor = actor
        self._feed = feed
        self._checkpoints = checkpoints
        self._lock = lock  # of the folder of its checkpoints, until nothing more is written there
        # under the runtime's lock:
        self._state: JobState = "preparing"
        self._note = ""
        self._wish: Wish = "run"
        self._loaded = 0
        self._first_batch: Any = NO_BATCH
        self._joined = False
        self._tracing: threading.Thread | None = None  # the thread in which its step is traced
        self._awaited: Job | None = None  # for whose end its user code waits
        self._program: Program | None = None  # in use
        self._renewed: Program | None = None  # about to be
        self._own_program: Program | None = None  # the same without what is kept out for others' sake
        self._plans: list[tuple[int, Plan]] = []
        self._step = asked.first
        self._limit: int | None = None  # batches there are
        self._loss: float | None = None
        self._step_ends: deque[float] = deque(maxlen=_RECENT_STEPS)
        self._step_us: deque[float] = deque(maxlen=_TIMED_STEPS)
        self._error: BaseException | None = None
        self._result: Any = NO_STATE
        self._called_back = False  # its last callback has been made
        self._last_words: Callable[[], None] | None = None  # what ends it then: all its steps are done, and its state is kept
        self._left = False  # its end is under way: its state is being kept
        self._saving = 0  # how many checkpoints are being made, its end included, or wait for that
        self._to_save: deque[Callable[[], None]] = deque()

    # -- what a user asks -------------------------------------------------------------------------------------------------------

    @property
    def status(self) -> JobStatus:
        """As it stands."""
        with self._runtime._changed:
            return job_status(self, self._runtime._dispatcher)

    @property
    def plan(self) -> Plan | None:
        """The plan in use; None before there is one."""
        return self._program.plan if self._program is not None else None

    @property
    def plans(self) -> tuple[tuple[int, Plan], ...]:
        """Every plan that it has had, with the number of steps that were done when it came into use."""
        with self._runtime._changed:
            return tuple(self._plans)

    def report(self) -> JobReport:
        """What was measured of it, beside what was predicted.

        Raises:
            RuntimeError: it has no plan yet.
        """
        with self._runtime._changed:
            return job_report(self, self._runtime._dispatcher)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Until it has ended; whether it has.

        Raises:
            RuntimeError: its own `on_step`, `batches` or step calls this, without a timeout, and would wait for itself; so do
                `result` and `exception`.
        """
        with self._runtime._changed:
            if self._state in FINAL:
                return True
            waiter = self._runtime._job_of_this_thread() if timeout_s is None else None
            if waiter is not None:
                waiter._await(self)
            try:
                return self._runtime._changed.wait_for(lambda: self._state in FINAL, timeout_s)
            finally:
                if waiter is not None:
                    waiter._awaited = None

    def result(self, timeout_s: float | None = None) -> Any:
        """Its last state, in host memory (`tensile_jax.to_device` brings it in), once it has ended.

        Raises:
            JobFailed: it failed; the reason is its `__cause__`, and `state` is what it had reached. Or it was cancelled before
                its own process had made a state.
            TimeoutError: it has not ended in time.
        """
        if not self.wait(timeout_s):
            raise TimeoutError(f"{self.name} has not ended within {timeout_s} s; it is {self._state}, at step {self._step}.")
        state = None if self._result is NO_STATE else self._result
        story = f"{self.name} failed after {self._step} steps: {self._note}"
        if self._state != "failed":
            if self._result is not NO_STATE:
                return state
            story = f"{self.name} is {self._state} and has no state{f': {self._note}' if self._note else '.'}"
        raise JobFailed(story, job=self.name, step=self._step, state=state) from self._error

    def exception(self, timeout_s: float | None = None) -> BaseException | None:
        """What made it fail, once it has ended; None if it did not."""
        if not self.wait(timeout_s):
            raise TimeoutError(f"{self.name} has not ended within {timeout_s} s; it is {self._state}, at step {self._step}.")
        return self._error

    def _await(self, other: "Job") -> None:
        """This job's user code waits for the other. Raises RuntimeError where that one waits for this one. The lock is held."""
        circle, job = [self.name], other
        while job is not self:
            if job._awaited is None:
                self._awaited = other
                return
            circle.append(job.name)
            job = job._awaited
        story = "itself" if other is self else " -> ".join((*circle, self.name))
        raise RuntimeError(
            f"The code of {self.name!r} (its on_step, its batches or its step) waits for the end of {story}, and that job ends "
            "only when this code has returned: it would never return. Wait outside of the callback, or with timeout_s; on_step "
            "is given the metrics, and cancel() ends a job after its iteration."
        )

    def _runs_in_this_thread(self) -> bool:
        return self._feed.is_current or self._tracing is threading.current_thread()

    def pause(self) -> None:
        """Let it rest after the iteration under way, its state in host memory."""
        self._runtime.pause(self.name)

    def resume(self) -> None:
        """Let it go on."""
        self._runtime.resume(self.name)

    def cancel(self) -> None:
        """End it after the iteration under way. Its state is kept: `result` gives it."""
        self._runtime.cancel(self.name)


def is_leaving(job: Job) -> bool:
    """Whether it was cancelled, or has failed, before it had a seat."""
    return (job._wish == "stop" or job._left) and not job._joined
