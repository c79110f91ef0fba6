"""Keeps the checkpoints of a cluster's jobs in a folder that is mounted at the same path on all nodes.

    FOLDER/JOB              the checkpoints of a job that does not run now (`exec/checkpoint`)
    FOLDER/JOB@ATTEMPT      the same while the job runs, or after its device has died
    FOLDER/tensile-cluster.json    how many jobs shared a device when the jobs were first submitted (`placement.py`)

When a device takes over a job, it first renames the job's folder, from FOLDER/JOB or from the previous device's JOB@ATTEMPT, to
JOB@ATTEMPT with the new attempt's number (`take_over`). The rename is atomic. The previous device still uses the previous name.
There it finds no folder, or makes a new folder that nobody reads. So a device that is cut off, but alive, can neither add
checkpoints to the job's folder nor remove those of its successor. There are two further safeguards. A device that notices that it
is cut off ends its own process (`device_actor.py`). And on a shared file system with locks, the folder's lock keeps a second
writer out.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tensile_jax.atomic_file import write_whole
from tensile_jax.errors import CheckpointError
from tensile_jax.exec.checkpoint.file_names import newest_first
from tensile_jax.ray.shared.place import SharedPlace, attempts_in, refuse_late, running_name

_AGAIN_S = 0.2  # between two attempts to lock a folder


class SharedFolder(SharedPlace):
    """The `SharedPlace` in a folder that all nodes have at the same path."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.name = str(folder)

    def local(self) -> Path:
        return self._folder

    def prepare(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)

    def attempts(self, job: str) -> dict[int, str]:
        return attempts_in((path.name for path in self._folder.iterdir()), job) if self._folder.is_dir() else {}

    def has_checkpoints(self, job: str) -> bool:
        folder = self._folder_of(job)
        return folder.is_dir() and bool(newest_first(path.name for path in folder.iterdir() if path.is_dir()))

    def take_over(self, job: str, attempt: int, *, patience_s: float) -> None:
        from tensile_jax.exec.checkpoint.folder_lock import FolderLock  # imports JAX

        latest = self.latest_attempt(job)
        refuse_late(self.name, job, attempt, latest)
        mine = self._folder / running_name(job, attempt)
        with suppress(FileNotFoundError):
            if latest < attempt:
                self._folder_of(job).rename(mine)
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

    def publish(self, job: str, attempt: int) -> str:
        return ""

    def give_back(self, job: str, attempt: int) -> str:
        """Rename the folder back to the job's name, unless there is a folder of that name."""
        with suppress(FileNotFoundError):
            if self.latest_attempt(job) == attempt and not (self._folder / job).exists():
                (self._folder / running_name(job, attempt)).rename(self._folder / job)
        return ""

    @contextmanager
    def fetched(self, job: str) -> Iterator[Path]:
        yield self._folder_of(job)

    def read(self, name: str) -> bytes:
        return (self._folder / name).read_bytes()

    def write(self, name: str, content: bytes) -> None:
        write_whole(self._folder / name, content)

    def remove(self, *names: str) -> None:
        for name in names:
            (self._folder / name).unlink(missing_ok=True)

    def _folder_of(self, job: str) -> Path:
        """The folder with the latest checkpoints of a job, which need not exist."""
        attempts = self.attempts(job)
        return self._folder / (attempts[max(attempts)] if attempts else job)
