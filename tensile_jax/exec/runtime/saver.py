"""How jobs' states are kept: checkpoints while they go on, and at their ends; each job's one after another, in other threads."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Literal

from tensile_jax.exec.actor.actor import Kept
from tensile_jax.exec.actor.missing import NO_STATE
from tensile_jax.exec.runtime.job import Job
from tensile_jax.runtime_records import FINAL, EventName

if TYPE_CHECKING:  # they name each other
    from tensile_jax.exec.runtime.runtime import Runtime


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

        job._left = True

        def leave() -> None:
            state: Any = NO_STATE
            failed, said = error, note
            if step is not None and job._checkpoints is not None and (unkept := self._checkpoint(job, step, kept)) is not None:
                failed = failed or unkept
            try:
                state = kept.fetch()
            except Exception as lost:
                if state_name == "cancelled" and not job._joined:
                    said = f"cancelled before its first step; {lost}"
                else:
                    failed = failed or lost
            course = self._runtime._course
            with self._runtime._changed:
                if failed is not None:
                    course.end(job, "failed", state=state, error=failed, note=said)
                elif state_name == "finished":
                    course.finish(job, state=state, note=said)
                else:
                    course.end(job, state_name, state=state, note=said)

        self._do_in_turn(job, leave)

    def leave_early(self, job: Job, error: BaseException) -> None:
        """The job has failed before it had a seat; it has the state that it was given. The lock is held."""
        try:
            kept = job._actor.state()
        except Exception:  # its own process cannot even be started
            self._runtime._course.end(job, "failed", error=error)
        else:
            self.leave(job, "failed", kept, error=error)

    def _checkpoint(self, job: Job, step: int, kept: Kept) -> Exception | None:
        """Save it, and tell what came of that; why it could not be saved."""
        assert job._checkpoints is not None  # it was looked at
        kind: EventName = "checkpointed"
        note, failed = f"step {step}", None
        try:
            assert job._lock is not None  # with checkpoints there is one
            job._lock.renew()
            if trouble := kept.save(job._checkpoints, step):
                note += f"; {trouble}"
        except Exception as error:
            kind, note, failed = "checkpoint_failed", str(error), error
        self._runtime._tell(job, kind, note, step=step)
        return failed

    def let_go(self, job: Job) -> None:
        """Let others have the job's folder, if the job has ended and nothing is being saved. The lock is held."""
        if job._lock is not None and job._state in FINAL and not job._saving:
            job._lock.release()

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
                self.let_go(job)
                self._runtime._changed.notify_all()
                if not job._saving:
                    return
