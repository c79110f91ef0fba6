"""Writes the jobs' checkpoints, and fetches their last states for the user. Two threads do this, so two jobs are saved at a time.

The record of a job's life (`lifecycle.py`) lists the saves that are to be made. They are made one after another, in this order.
A job that resumes at an earlier step leaves checkpoints of later steps behind. When it writes a checkpoint, the checkpoints of
all later steps are removed, since the job will make them again. If saves were made out of order, one could remove a newer
checkpoint.
"""

from concurrent.futures import ThreadPoolExecutor

from tensile_jax.exec.actor.missing import NO_STATE
from tensile_jax.exec.runtime.lifecycle import SaveCheckpoint, SaveEnd
from tensile_jax.exec.runtime.messages import CheckpointMade, StateFetched
from tensile_jax.exec.runtime.store import Post, Store, StoredJob

_THREADS = 2


class Saver:
    """The two threads. The end of every save is posted: `CheckpointMade`, `StateFetched`, or both in that order."""

    def __init__(self, store: Store, post: Post) -> None:
        self._store = store
        self._post = post
        self._pool = ThreadPoolExecutor(_THREADS, "tensile-saver")

    def start(self, job: StoredJob) -> None:
        """Start to make the job's saves, until none is left. The list of saves must have been empty until now."""
        self._pool.submit(self._save_all, job)

    def close(self) -> None:
        """Wait until everything is saved."""
        self._pool.shutdown()

    def _save_all(self, job: StoredJob) -> None:
        while True:
            event = self._save(job, job.life.saves[0])
            with self._store.changed:  # a save that is added later is either seen here or calls `start` again
                self._post(job.number, event)
                if not job.life.saves:
                    return

    def _save(self, job: StoredJob, one: SaveCheckpoint | SaveEnd) -> CheckpointMade | StateFetched:
        """Make one save. Returns its last event, which the caller must post."""
        if isinstance(one, SaveCheckpoint):
            event = self._checkpoint(job, one)
            one.kept.release()
            return event
        if job.checkpoints is not None and one.steps is not None:
            self._post(job.number, self._checkpoint(job, one))
        try:
            kept = job.actor.state() if one.kept is None else one.kept
            return StateFetched(kept.fetch(), None)
        except Exception as error:
            return StateFetched(NO_STATE, error)

    def _checkpoint(self, job: StoredJob, one: SaveCheckpoint | SaveEnd) -> CheckpointMade:
        # true for every save of which a checkpoint is made
        assert job.checkpoints is not None and job.lock is not None and one.steps is not None
        try:
            job.lock.renew()
            trouble = one.kept.save(job.checkpoints, one.steps)
        except Exception as error:
            return CheckpointMade(one.steps, str(error), error)
        return CheckpointMade(one.steps, f"step {one.steps}" + (f"; {trouble}" if trouble else ""), None)
