"""`Job`: what a user holds of a job in a runtime."""

from collections.abc import Callable
from typing import Any

from tensile_jax.errors import JobFailed
from tensile_jax.exec.actor.missing import NO_STATE
from tensile_jax.exec.controller.state import Wish
from tensile_jax.exec.runtime.dispatcher import Dispatcher
from tensile_jax.exec.runtime.status import job_report, job_status
from tensile_jax.exec.runtime.store import Store, StoredJob
from tensile_jax.plan_format import Plan
from tensile_jax.runtime_records import JobReport, JobStatus


class Job:
    """A job of a runtime; made by `Runtime.submit`."""

    def __init__(self, stored: StoredJob, store: Store, dispatcher: Dispatcher, wish: Callable[[Wish], None]) -> None:
        self.name = stored.name
        self._stored = stored
        self._store = store
        self._dispatcher = dispatcher
        self._wish = wish  # it keeps the runtime, which must not end before who holds the job lets it go

    @property
    def status(self) -> JobStatus:
        """How the job stands now."""
        with self._store.changed:
            return job_status(self._stored, self._dispatcher)

    @property
    def plan(self) -> Plan | None:
        """The plan in use; None before there is one."""
        program = self._stored.program
        return None if program is None else program.plan

    @property
    def plans(self) -> tuple[tuple[int, Plan], ...]:
        """Every plan that the job has had, with the number of steps that were done when it came into use."""
        with self._store.changed:
            return tuple(self._stored.plans)

    def report(self) -> JobReport:
        """What was measured of the job, beside what its plan predicts.

        Raises:
            RuntimeError: the job has no plan yet.
        """
        with self._store.changed:
            return job_report(self._stored, self._dispatcher)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the job has ended; whether it has.

        Raises:
            RuntimeError: the job's own `on_step`, `batches` or step calls this without a timeout, and would wait for itself.
                `result` and `exception` raise it too.
        """
        return self._store.wait_for_end(self._stored, timeout_s)

    def result(self, timeout_s: float | None = None) -> Any:
        """The job's last state, in host memory, once the job has ended; `tensile_jax.to_device` brings it to the device.

        Raises:
            JobFailed: the job failed; the reason is its `__cause__`, and `state` is what it had reached. Or the job was cancelled
                before its own process had made a state.
            TimeoutError: the job has not ended in time.
        """
        self._wait_or_raise(timeout_s)
        life = self._stored.life
        state = None if life.result is NO_STATE else life.result
        story = f"{self.name} failed after {life.done} steps: {life.note}"
        if life.state != "failed":
            if life.result is not NO_STATE:
                return state
            story = f"{self.name} is {life.state} and has no state{f': {life.note}' if life.note else '.'}"
        raise JobFailed(story, job=self.name, step=life.done, state=state) from life.error

    def exception(self, timeout_s: float | None = None) -> BaseException | None:
        """What made the job fail, once it has ended; None if it did not fail.

        Raises:
            TimeoutError: the job has not ended in time.
        """
        self._wait_or_raise(timeout_s)
        return self._stored.life.error

    def _wait_or_raise(self, timeout_s: float | None) -> None:
        if not self.wait(timeout_s):
            life = self._stored.life
            raise TimeoutError(f"{self.name} has not ended within {timeout_s} s; it is {life.state}, at step {life.done}.")

    def pause(self) -> None:
        """Pause the job after the iteration under way. Its state is in host memory until it is resumed."""
        self._wish("pause")

    def resume(self) -> None:
        """Let a paused job go on."""
        self._wish("run")

    def cancel(self) -> None:
        """End the job after the iteration under way. `result` returns its state."""
        self._wish("stop")
