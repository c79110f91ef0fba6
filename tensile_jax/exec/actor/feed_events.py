"""Defines the events that a job's feed, the thread of its user code (`feed.py`), posts about batches and callbacks.

This module does not use JAX.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class BatchReady:
    """One more `Feed.take` is allowed; `index` counts from zero, skipped batches included."""

    index: int


@dataclass(frozen=True, slots=True)
class BatchesEnded:
    """There are no more batches; `drawn` were drawn in all, including those that were skipped.

    Batches with a `BatchReady` can still be taken. The feed learns that there are no more when it draws one more, which it does
    only if it has room for that batch and the job may need it.
    """

    drawn: int


@dataclass(frozen=True, slots=True, eq=False)
class UserCodeFailed:
    """User code raised `error`. No batch is drawn afterwards. If a callback raised it, no callback is called afterwards."""

    error: BaseException
    where: Literal["batches", "callback"]


@dataclass(frozen=True, slots=True)
class CallbacksMade:
    """After `Feed.stop`: every queued callback has returned, or was dropped because an earlier one raised."""


@dataclass(frozen=True, slots=True)
class FeedStopped:
    """After `CallbacksMade`: the generator is closed and the thread ends. This is the last event of a feed."""


FeedEvent = BatchReady | BatchesEnded | UserCodeFailed | CallbacksMade | FeedStopped
