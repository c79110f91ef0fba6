"""The saver: writes jobs' checkpoints and fetches their last states, in threads of its own.

What is to be saved stands in a job's `Lifecycle.saves`. One job's saves are made one after another, in order, since a checkpoint
declares later ones to be given up; two jobs' saves may be made at the same time.
"""

from concurrent.futures import ThreadPoolExecutor

from tensile_jax.exec.actor.missing import NO_STATE
from tensile_jax.exec.runtime.lifecycle import SaveCheckpoint, SaveEnd
from tensile_jax.exec.runtime.messages import CheckpointMade, StateFetched
from tensile_jax.exec.runtime.store import Post, Store, StoredJob

_THREADS = 2


class Saver:
    """The threads. Every save is answered by `CheckpointMade`, `StateFetched`, or both in that order."""

    def __init__(self, store: Store, post: Post) -> None:
        self._store = store
        self._post = post
        self._pool = ThreadPoolExecutor(_THREADS, "tensile-saver")

    def start(self, job: StoredJob) -> None:
        """Make the job's saves, of which there were none before, until there are none."""
        self._pool.submit(self._save_all, job)

    def close(self) -> None:
        """Wait until everything is saved."""
        self._pool.shutdown()

    def _save_all(self, job: StoredJob) -> None:
        while True:
            news = self._save(job, job.life.saves[0])
            with self._store.changed:  # what is to be saved from now on is either seen here or starts anew
                self._post(job.number, news)
                if not job.life.saves:
                    return

    def _save(self, job: StoredJob, one: SaveCheckpoint | SaveEnd) -> CheckpointMade | StateFetched:
        """Make the save; the last news of it, which is not posted yet."""
        if isinstance(one, SaveCheckpoint):
            return self._checkpoint(job, one)
        if job.checkpoints is not None and one.steps is not None:
            self._post(job.number, self._checkpoint(job, one))
        try:
            kept = job.actor.state() if one.kept is None else one.kept
            return StateFetched(kept.fetch(), None)
        except Exception as error:
            return StateFetched(NO_STATE, error)

    def _checkpoint(self, job: StoredJob, one: SaveCheckpoint | SaveEnd) -> CheckpointMade:
        assert job.checkpoints is not None and job.lock is not None and one.steps is not None  # who saves has both
        try:
            job.lock.renew()
            trouble = one.kept.save(job.checkpoints, one.steps)
        except Exception as error:
            return CheckpointMade(one.steps, str(error), error)
        return CheckpointMade(one.steps, f"step {one.steps}" + (f"; {trouble}" if trouble else ""), None)
