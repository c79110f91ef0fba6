"""How jobs' states are kept: checkpoints while they go on, and at their ends; each job's one after another, in other threads."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Literal

from tensile_jax.exec.actor import Kept
from tensile_jax.exec.job import Job
from tensile_jax.jobs import EventName

if TYPE_CHECKING:  # they name each other
    from tensile_jax.exec.runtime import Runtime


class Keeping:
    """The checkpoints and last states of a runtime's jobs."""

    def __init__(self, runtime: "Runtime") -> None:
        self._runtime = runtime
        self._savers = ThreadPoolExecutor(2, "tensile-saver")

    def close(self) -> None:
        """Wait until everything is kept."""
        self._savers.shutdown()

    def save(self, job: Job, step: int, kept: Kept, *, then: Callable[[], None] = lambda: None) -> None:
        """A checkpoint, in another thread; `then` is called with the lock held.

        The lock is held: one that is saved later would take those for given up that come after it.
        """
        if job._checkpoints is None:
            then()
            return

        def save() -> None:
            self._checkpoint(job, step, kept)
            with self._runtime._changed:
                then()

        self._do_in_turn(job, save)

    def leave(
        self,
        job: Job,
        state_name: Literal["finished", "failed", "cancelled"],
        kept: Kept,
        *,
        step: int | None = None,
        error: BaseException | None = None,
        note: str | None = None,
    ) -> None:
        """The job's end, in another thread: with `step` its last checkpoint, if it makes any; then its state is fetched."""

        def leave() -> None:
            state, failed = None, error
            if step is not None and job._checkpoints is not None:
                self._checkpoint(job, step, kept)
            try:
                state = kept.fetch()
            except Exception as lost:
                failed = failed or lost
            course = self._runtime._course
            with self._runtime._changed:
                if failed is not None:
                    course.end(job, "failed", state=state, error=failed, note=note)
                elif state_name == "finished":
                    course.finish(job, state=state, note=note)
                else:
                    course.end(job, state_name, state=state, note=note)

        self._do_in_turn(job, leave)

    def _checkpoint(self, job: Job, step: int, kept: Kept) -> None:
        kind: EventName = "checkpointed"
        note = f"step {step}"
        try:
            kept.save(job._checkpoints, step)
        except Exception as error:
            kind, note = "checkpoint_failed", str(error)
        self._runtime._tell(job, kind, note, step=step)

    def _do_in_turn(self, job: Job, what: Callable[[], None]) -> None:
        """`what`, in another thread, after all else that was asked for the job."""
        job._to_save.append(what)
        job._saving += 1
        if job._saving == 1:
            self._savers.submit(self._do_all, job)

    def _do_all(self, job: Job) -> None:
        while True:
            what = job._to_save.popleft()
            what()
            del what  # and its state, before the next one comes
            with self._runtime._changed:
                job._saving -= 1
                self._runtime._changed.notify_all()
                if not job._saving:
                    return
