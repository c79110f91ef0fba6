"""What the thread of a job's user code (`feed.py`) tells of the job's batches and callbacks. There is no JAX here."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class BatchReady:
    """One more `Feed.take` is allowed; `index` counts from zero, skipped batches included."""

    index: int


@dataclass(frozen=True, slots=True)
class BatchesEnded:
    """There are no more batches; `drawn` were given in all, skipped ones included. Those announced can still be taken.

    The feed finds that out when it asks for one more, for which there must be room. Where no more batches are needed it does not.
    """

    drawn: int


@dataclass(frozen=True, slots=True, eq=False)
class UserCodeFailed:
    """What was raised, with its traceback, and by whom. No batch is drawn afterwards; if a callback raised, none is called."""

    error: BaseException
    where: Literal["batches", "callback"]


@dataclass(frozen=True, slots=True)
class CallbacksMade:
    """After `Feed.stop`: every callback has returned, or was given up because one has raised."""


@dataclass(frozen=True, slots=True)
class FeedStopped:
    """After that: the generator is closed and the thread ends. This is the last news."""


FeedNews = BatchReady | BatchesEnded | UserCodeFailed | CallbacksMade | FeedStopped
