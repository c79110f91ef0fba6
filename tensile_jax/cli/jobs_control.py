"""A run of several jobs as a second terminal sees and steers it: the runtime's jobs, and those that it does not have (yet)."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from tensile_jax.cli.jobs_file import JobEntry
from tensile_jax.cli.lobby import Lobby
from tensile_jax.cli.tally import Tally
from tensile_jax.exec.runtime.runtime import Runtime
from tensile_jax.runtime_records import JobStatus, Status


class JobsControl:
    """A `Controllable`. `ended` is called with the name of a job that is cancelled before it is with the runtime."""

    def __init__(
        self,
        runtime: Runtime,
        lobby: Lobby,
        entries: Mapping[str, JobEntry],
        tallies: Mapping[str, Tally],
        *,
        ended: Callable[[str], None],
    ) -> None:
        self._runtime = runtime
        self._lobby = lobby
        self._entries = entries
        self._tallies = tallies
        self._ended = ended

    def status(self) -> Status:
        """The runtime's, with all jobs of the file in its order."""
        outside = {name: self._outside(entry) for name, entry in self._entries.items()}
        status = self._runtime.status()
        known = {job.name: job for job in status.jobs}
        return replace(status, jobs=tuple(known.get(name, outside[name]) for name in self._entries))

    def _outside(self, entry: JobEntry) -> JobStatus:
        tally = self._tallies[entry.name]
        state, note = self._lobby.state_of(entry.name) or (tally.state or "preparing", tally.note)
        return JobStatus(
            name=entry.name,
            state=state,
            priority=entry.priority,
            step=tally.step,
            steps=entry.steps,
            loss=tally.loss_last,
            steps_per_s=None,
            device_bytes=0,
            peak_bytes=0,
            planned_bytes=0,
            host_bytes=0,
            stall_us=0.0,
            swapped_bytes=0,
            note=note,
        )

    def pause(self, job: str) -> None:
        """Raises: ValueError: it has not begun, has ended, or there is no such job."""
        self._refuse_outside(job, "paused")
        self._runtime.pause(job)

    def resume(self, job: str) -> None:
        """Raises: ValueError: as `pause`."""
        self._refuse_outside(job, "resumed")
        self._runtime.resume(job)

    def cancel(self, job: str) -> None:
        """One that has not begun never will. Raises: ValueError: it has ended, or there is no such job."""
        how = self._lobby.cancel(job)
        if how == "at once":
            self._ended(job)
        elif how == "not here":
            self._refuse_outside(job, "cancelled")
            self._runtime.cancel(job)

    def set_budget(self, budget: int | str) -> None:
        """For all jobs together."""
        self._runtime.set_budget(budget)

    def _refuse_outside(self, job: str, deed: str) -> None:
        if job not in self._entries:
            raise ValueError(f"there is no job {job!r}. There are: {', '.join(self._entries)}.")
        if self._lobby.state_of(job) is not None:
            raise ValueError(f"{job} has not begun: it cannot be {deed} yet, only cancelled.")
        if job not in {one.name for one in self._runtime.jobs}:
            raise ValueError(f"{job} is {self._tallies[job].state}; it cannot be {deed}.")
