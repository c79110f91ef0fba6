"""The folders of checkpoints of a cluster's jobs, and how a job's new device takes a folder from the device that had it.

    SHARED/JOB              the checkpoints of a job that does not run now (`exec/checkpoint`)
    SHARED/JOB@ATTEMPT      the same while the job runs, or after its device has died
    SHARED/tensile-cluster.json    how many jobs shared a device when the jobs were first submitted (`placement.py`)

The attempt is a fencing number: each start of a job has a higher one than the starts before it. The new device first renames the
folder (`take_over`), which is atomic. Whatever the old device does afterwards is done under the old name: it finds no folder
there, or makes a new one that nobody reads. So a device that is cut off, but alive, can neither add checkpoints to the folder nor
remove those of its successor. Beside this, a device that is cut off ends itself (`device_actor.py`), and the lock of the folder
holds on every shared file system that has locks.

Job names have no `@`.
"""

import re
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import msgspec

from tensile_jax.atomic_file import write_whole
from tensile_jax.errors import CheckpointError

_NEIGHBOURS = "tensile-cluster.json"
_AGAIN_S = 0.2  # between two attempts to lock a folder


def running_name(job: str, attempt: int) -> str:
    """The name of the job's folder during that attempt, which is also its name in the runtime of its device."""
    return f"{job}@{attempt}"


def latest_attempt(shared: Path, job: str) -> int:
    """The highest number of an attempt that has a folder; zero if none has."""
    return max((attempt for attempt, _ in _attempts(shared, job)), default=0)


def folder_of(shared: Path, job: str) -> Path:
    """The folder with the latest checkpoints of a job, which need not exist."""
    attempts = list(_attempts(shared, job))
    return max(attempts)[1] if attempts else shared / job


def has_checkpoints(shared: Path, job: str) -> bool:
    """Whether there is a checkpoint of that job, complete or damaged."""
    folder = folder_of(shared, job)
    return folder.is_dir() and any(path.name[0].isdigit() and path.is_dir() for path in folder.iterdir())


def take_over(shared: Path, job: str, attempt: int, *, patience_s: float) -> None:
    """Rename the job's folder, if there is one, for an attempt, and wait until no other process has locked it.

    Raises:
        CheckpointError: the folder belongs to a later attempt; or it is still locked after `patience_s` seconds.
    """
    from tensile_jax.exec.checkpoint.folder_lock import FolderLock  # imports JAX

    latest = latest_attempt(shared, job)
    if latest > attempt:
        raise CheckpointError(
            f"{shared / job} was taken over by attempt {latest}, and this is attempt {attempt}: the job runs elsewhere.",
            folder=str(shared),
            step=None,
        )
    mine = shared / running_name(job, attempt)
    with suppress(FileNotFoundError):
        if latest < attempt:
            folder_of(shared, job).rename(mine)
    if not mine.exists():
        return
    until = time.monotonic() + patience_s
    while True:
        try:
            FolderLock(mine).release()
            return
        except CheckpointError:
            if time.monotonic() > until:
                raise
            time.sleep(_AGAIN_S)


def give_back(shared: Path, job: str, attempt: int) -> None:
    """Rename the folder of an attempt that has ended back to the job's name, unless there is a folder of that name."""
    with suppress(FileNotFoundError):
        if latest_attempt(shared, job) == attempt and not (shared / job).exists():
            (shared / running_name(job, attempt)).rename(shared / job)


def _attempts(shared: Path, job: str) -> Iterator[tuple[int, Path]]:
    if not shared.is_dir():
        return
    for path in shared.iterdir():
        found = re.fullmatch(rf"{re.escape(job)}@([1-9][0-9]{{0,17}})", path.name)
        if found is not None:
            yield int(found[1]), path


# -- for which limits jobs are planned ------------------------------------------------------------------------------------------


def read_neighbours(shared: Path) -> dict[str, int]:
    """How many jobs shared a device when each job in this folder was first submitted. Without the file, nothing is known."""
    try:
        return msgspec.json.decode((shared / _NEIGHBOURS).read_bytes(), type=dict[str, int])
    except (FileNotFoundError, msgspec.DecodeError):
        return {}


def write_neighbours(shared: Path, neighbours: Mapping[str, int]) -> None:
    """Add these jobs to the file."""
    write_whole(shared / _NEIGHBOURS, msgspec.json.encode({**read_neighbours(shared), **neighbours}))
