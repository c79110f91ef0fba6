"""Defines `Job`, the object with which a user follows and controls one job of a runtime."""

import warnings
from collections.abc import Callable
from typing import Any

from tensile_jax.errors import JobFailed
from tensile_jax.exec.actor.missing import NO_STATE
from tensile_jax.exec.controller.state import Wish
from tensile_jax.exec.runtime.dispatcher import Dispatcher
from tensile_jax.exec.runtime.results import ResultMemory, Results, refuse_unknown_memory
from tensile_jax.exec.runtime.status import job_report, job_status
from tensile_jax.exec.runtime.store import Store, StoredJob
from tensile_jax.plan_format import Plan
from tensile_jax.runtime_records import JobReport, JobStatus
from tensile_jax.tracebacks import methods_hide_frames


@methods_hide_frames
class Job:
    """A job of a runtime; made by `Runtime.submit`."""

    def __init__(
        self, stored: StoredJob, store: Store, dispatcher: Dispatcher, results: Results, wish: Callable[[Wish], None]
    ) -> None:
        self.name = stored.name
        self._stored = stored
        self._store = store
        self._dispatcher = dispatcher
        self._results = results
        self._warned = False
        self._wish = wish  # it refers to the runtime, which must not end while a user holds this job

    def __repr__(self) -> str:
        life = self._stored.life
        return f"<Job {self.name!r}: {life.state}, {life.done} of {life.steps} steps>"

    @property
    def status(self) -> JobStatus:
        """A snapshot: how far the job is, and what it holds."""
        with self._store.changed:
            return job_status(self._stored, self._dispatcher)

    @property
    def plan(self) -> Plan | None:
        """The plan in use; None before there is one."""
        in_use = self._stored.in_use
        return None if in_use is None else in_use.plan

    @property
    def plans(self) -> tuple[tuple[int, Plan], ...]:
        """(steps, plan) for every plan that the job has used: how many steps were done when the plan came into use."""
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
        """Wait until the job has ended, at most `timeout_s` seconds. Returns whether it has ended.

        Raises:
            RuntimeError: this is called without a timeout by user code (`on_step`, `batches` or step) of the job itself, or of a
                job that this job waits for: it would never return. `result` and `exception` raise it too.
        """
        return self._store.wait_for_end(self._stored, timeout_s)

    def result(self, timeout_s: float | None = None, *, memory: ResultMemory = "device") -> Any:
        """The job's last state, once the job has ended.

        Args:
            memory: "device": a copy in device memory, which belongs to the caller. It may be donated, and the runtime's budget
                does not limit what the caller does with it. If it does not fit into the budget beside the planned peaks of the
                jobs that have not ended, the state is returned in host memory, and one warning says so. "host": the state in
                pinned host memory, which the job keeps; `tensile_jax.to_device` brings it to the device. Arrays that the step
                itself keeps in host memory stay there. The state of a job in its own process is made of NumPy arrays.

        Raises:
            ValueError: `memory` is neither of these.
            JobFailed: the job failed. The error's `__cause__` is the reason, and its `state` is the job's last state, or None if
                that is lost. Also raised if the job was cancelled before its own process had made a state.
            TimeoutError: the job has not ended in time.
        """
        refuse_unknown_memory(memory)
        self._wait_or_raise(timeout_s)
        life = self._stored.life
        state = None if life.result is NO_STATE else life.result
        if state is not None and memory == "device":
            state = self._on_device(state)
        story = f"{self.name} failed after {life.done} steps: {life.note}"
        if life.state != "failed":
            if life.result is not NO_STATE:
                return state
            story = f"{self.name} is {life.state} and has no state{f': {life.note}' if life.note else '.'}"
        raise JobFailed(story, job=self.name, step=life.done, state=state) from life.error

    def _on_device(self, state: Any) -> Any:
        """A copy of the state in device memory if it fits there. Otherwise the state itself, and one warning for the job."""
        copy = self._results.on_device(self._stored, state)
        if copy is not None:
            return copy
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"The result of {self.name} is in host memory. On the device there is no room for it beside the jobs "
                "that have not ended. JAX computes with it once it is on the device: tensile.to_device(result). To get "
                'it in host memory without this warning: result(memory="host").',
                stacklevel=3,
            )
        return state

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
