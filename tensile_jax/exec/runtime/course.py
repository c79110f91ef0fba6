"""A job's course from its submission to its end: the news of its user code, the user's wishes, and how it ends.

    preparing -> (queued) -> running <-> paused -> finished | failed | cancelled

What changes a job's fields happens under the runtime's lock.
"""

from typing import TYPE_CHECKING, Any, Literal

from tensile_jax.exec.actor.feed import BatchesEnded, BatchReady, CallbacksMade, FeedNews, UserCodeFailed
from tensile_jax.exec.actor.missing import NO_BATCH, NO_STATE
from tensile_jax.exec.controller.events import BatchReady as BatchLoaded
from tensile_jax.exec.controller.events import Wished
from tensile_jax.exec.controller.state import Wish
from tensile_jax.exec.runtime.job import Job, is_leaving
from tensile_jax.runtime_records import FINAL

if TYPE_CHECKING:  # they name each other
    from tensile_jax.exec.runtime.runtime import Runtime

_DEEDS: dict[Wish, str] = {"run": "resumed", "pause": "paused", "stop": "cancelled"}


class Course:
    """The courses of a runtime's jobs."""

    def __init__(self, runtime: "Runtime") -> None:
        self._runtime = runtime

    def heard(self, job: Job, news: FeedNews) -> None:
        """In the feed's thread."""
        with self._runtime._changed:
            if job._state in FINAL:
                return
            if isinstance(news, CallbacksMade):
                job._called_back = True
                if job._last_words is not None:
                    job._last_words()
            elif is_leaving(job):
                return
            elif isinstance(news, BatchReady):
                if job._loaded == 0:
                    job._first_batch = job._feed.take()
                    self._runtime._planning.begin(job)
                job._loaded += 1
                if job._joined:
                    self._runtime._dispatcher.tell(BatchLoaded(job._number))
            elif isinstance(news, BatchesEnded):
                if not job._loaded:
                    error = ValueError(f"batches of {job.name!r} gave nothing. Give at least one batch.")
                    if job._asked.first:
                        error = ValueError(
                            f"batches of {job.name!r} gave no more than those of the {job._asked.first} steps that are done, "
                            "which are skipped. Give them from the first one on, and more of them."
                        )
                    self._runtime._keeping.leave_early(job, error)
                    return
                if job._asked.first + job._loaded < job._asked.steps:
                    job._limit = job._asked.first + job._loaded
                    job._note = f"its batches ended: {job._limit} of {job._asked.steps} steps"
                    if job._step >= job._limit:
                        self._runtime._dispatcher.tell(Wished(job._number, "stop"))
            elif isinstance(news, UserCodeFailed):
                job._error = news.error
                job._note = f"its {news.where} raised {type(news.error).__name__}: {news.error}"
                if job._joined:
                    self._runtime._dispatcher.tell(Wished(job._number, "stop"))
                else:
                    self._runtime._keeping.leave_early(job, news.error)

    def died(self, job: Job, error: BaseException) -> None:
        """The job's own process is gone. In a thread of its actor's."""
        with self._runtime._changed:
            if job._joined:
                self._runtime._dispatcher.fail(job._number, error)
            else:
                self.end(job, "failed", error=error)

    def take_batch(self, job: Job) -> Any:
        """The next batch, of which the controller knows that it is loaded."""
        first, job._first_batch = job._first_batch, NO_BATCH
        return job._feed.take() if first is NO_BATCH else first

    def wish(self, job: Job, wish: Wish) -> None:
        """The user wishes it. Raises: ValueError: the job has ended."""
        with self._runtime._changed:
            if job._state in FINAL:
                raise ValueError(f"{job.name} is {job._state}; it cannot be {_DEEDS[wish]}.")
            if job._wish == "stop":
                return
            if wish == "pause" and self._runtime._closed:
                raise ValueError(f"{job.name} cannot be paused: its runtime is closing, which waits for its end. Cancel it.")
            before, job._wish = job._wish, wish
            if job._last_words is not None:
                if wish == "stop":
                    job._last_words()
                return
            if job._joined:
                self._runtime._dispatcher.tell(Wished(job._number, wish))
            elif wish == "stop" and not job._left:
                self._runtime._keeping.leave(job, "cancelled", job._actor.state())
            if wish == "run" and before == "pause":
                queued = any(seat.job == job._number for seat in self._runtime._dispatcher.state.queue)
                job._state = "preparing" if not job._joined else "queued" if queued else "running"
                self._runtime._tell(job, "resumed")
                self._runtime._planning.share_again()
                if job._joined:
                    self._runtime._dispatcher.call(lambda: self._runtime._planning.look_at_queue(job))

    def finish(self, job: Job, *, state: Any, note: str | None = None) -> None:
        """All its steps are done, and its state is kept: it has ended once its last callback has, or if it is cancelled."""

        def end() -> None:
            self.end(job, "failed" if job._error is not None else "finished", state=state, error=job._error, note=note)

        job._feed.stop()
        job._last_words = end
        if job._called_back or job._wish == "stop":
            end()

    def end(
        self,
        job: Job,
        state_name: Literal["finished", "failed", "cancelled"],
        *,
        state: Any = NO_STATE,
        error: BaseException | None = None,
        note: str | None = None,
    ) -> None:
        """It has ended so, and with it its feed and its actor; the others are looked at again. An end that it has stays."""
        if job._state in FINAL:
            return
        job._feed.stop()
        job._actor.close()
        job._state, job._error, job._result = state_name, error, state
        job._first_batch, job._last_words = NO_BATCH, None
        if note is not None:
            job._note = note
        elif error is not None and not job._note:
            job._note = f"{type(error).__name__}: {error}"
        elif state_name == "finished" and job._limit is None:
            job._note = ""
        self._runtime._keeping.let_go(job)
        self._runtime._tell(job, state_name, job._note)
        self._runtime._planning.share_again()
