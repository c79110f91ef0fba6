"""Defines `SharedPlace`: where all devices of a cluster find the jobs' checkpoints, and how another device takes over a job.

    folder.py           a folder that is mounted on all nodes: jobs save directly into it
    object_store.py     a URL such as gs://bucket/runs: jobs save on their node, and each checkpoint is then copied to the URL

Each start of a job is an *attempt*, and has a higher number than the starts before it. While the job runs, its checkpoints are
under the name JOB@ATTEMPT. Another device takes over the job by beginning a new attempt. The device first renames the job's
latest checkpoints to the name of the new attempt, or copies them to that name (`SharedPlace.take_over`). It then saves under
the new name only. A device that is cut off, but alive, still saves under the name of the previous attempt. So it cannot change
the checkpoints of the new attempt: the attempt's number works as a fencing token.

Job names have no `@`.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path

import msgspec

from tensile_jax.errors import CheckpointError

_NEIGHBOURS = "tensile-cluster.json"


class SharedPlace(ABC):
    """A place for checkpoints, as one process sees it. Its methods may be slow, and may be called from any thread.

    Attributes:
        name: of the place, as the user gave it.
    """

    name: str

    @abstractmethod
    def local(self) -> Path:
        """The folder in which a job of this process has its checkpoints, under its `running_name`."""

    @abstractmethod
    def prepare(self) -> None:
        """Make the place if it does not exist. Raises OSError if it cannot be made, or is not to be written into."""

    # -- jobs -----------------------------------------------------------------------------------------------------------------

    @abstractmethod
    def attempts(self, job: str) -> dict[int, str]:
        """By number, the names of the attempts that have left something here."""

    def latest_attempt(self, job: str) -> int:
        """The highest number of an attempt that has left something here; zero if none has."""
        return max(self.attempts(job), default=0)

    @abstractmethod
    def has_checkpoints(self, job: str) -> bool:
        """Whether there is a checkpoint of that job, complete or damaged."""

    @abstractmethod
    def take_over(self, job: str, attempt: int, *, patience_s: float) -> None:
        """Bring the job's latest checkpoints into `local` for an attempt, out of the reach of the attempts before it.

        Raises:
            CheckpointError: a later attempt has begun; or another process still uses the checkpoints after `patience_s` seconds.
            OSError: the checkpoints cannot be read.
        """

    @abstractmethod
    def publish(self, job: str, attempt: int) -> str:
        """Let other processes read what the running job has saved. Returns why that is not possible; empty if all went well."""

    @abstractmethod
    def give_back(self, job: str, attempt: int) -> str:
        """`publish`, now that the attempt has ended. If that is not possible, the answer says where the checkpoints are."""

    @abstractmethod
    def fetched(self, job: str) -> AbstractContextManager[Path]:
        """A `with` block in which a folder of this machine has the job's latest checkpoints. Without any, it need not exist."""

    # -- small files -----------------------------------------------------------------------------------------------------------

    @abstractmethod
    def read(self, name: str) -> bytes:
        """The content of a file. Raises OSError; FileNotFoundError if there is none."""

    @abstractmethod
    def write(self, name: str, content: bytes) -> None:
        """Write a file, whole or not at all. Raises OSError."""

    @abstractmethod
    def remove(self, *names: str) -> None:
        """Remove those of these files that there are. Raises OSError."""

    def read_neighbours(self) -> dict[str, int]:
        """How many jobs shared a device when each job here was first submitted (`placement.py`); empty if nothing is known."""
        try:
            return msgspec.json.decode(self.read(_NEIGHBOURS), type=dict[str, int])
        except (FileNotFoundError, msgspec.DecodeError):
            return {}

    def write_neighbours(self, neighbours: Mapping[str, int]) -> None:
        """Add these jobs to the file. Raises OSError."""
        self.write(_NEIGHBOURS, msgspec.json.encode({**self.read_neighbours(), **neighbours}))


def running_name(job: str, attempt: int) -> str:
    """The name of the job's checkpoints during that attempt, which is also its name in the runtime of its device."""
    return f"{job}@{attempt}"


def attempts_in(names: Iterable[str], job: str) -> dict[int, str]:
    """By number, those of `names` that are names of attempts of that job."""
    found = ((re.fullmatch(rf"{re.escape(job)}@([1-9][0-9]{{0,17}})", name), name) for name in names)
    return {int(match[1]): name for match, name in found if match is not None}


def refuse_late(place: str, job: str, attempt: int, latest: int) -> None:
    """Raises CheckpointError if a later attempt than this one has begun."""
    if latest > attempt:
        raise CheckpointError(
            f"{place}/{job} was taken over by attempt {latest}, and this is attempt {attempt}: the job runs elsewhere.",
            folder=place,
            step=None,
        )
