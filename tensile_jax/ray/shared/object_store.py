"""Keeps the checkpoints of a cluster's jobs under a URL that fsspec can open, such as gs://bucket/runs or hdfs://host/runs.

    URL/JOB@ATTEMPT/tensile.json    says that the attempt has begun
    URL/JOB@ATTEMPT/STEP/           a checkpoint: the same files as in a local folder (`exec/checkpoint/format.py`)
    URL/tensile-cluster.json        for each job, its `neighbours` when it was first submitted (`placement.py`)

An object store (gs://, s3://) cannot rename a folder in one step, and has no locks. So a job saves into a folder of its node.
When a checkpoint is complete there, it is copied to the URL (`publish`). Its manifest, the list of its files, is copied last: a
checkpoint without a manifest counts as unfinished. Each attempt has a name of its own. A new attempt reads the latest checkpoint
of the attempts before it, and writes only under its own name. Once the new attempt has two checkpoints, or has ended with one,
the checkpoints of the earlier attempts are removed.

Only files that belong to checkpoints are ever removed. When an attempt is removed, so are the files of its damaged checkpoints.
"""

import errno
import os
import posixpath
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import fsspec.core

from tensile_jax.errors import CheckpointError
from tensile_jax.exec.checkpoint.file_names import MANIFEST, MARK, STATE, checkpoint_name, newest_first, step_and_number
from tensile_jax.ray.shared.place import SharedPlace, attempts_in, refuse_late, running_name

_SCRATCH, _KEPT = "tensile-jobs-", "tensile-kept-"
_ENOUGH = 2  # checkpoints of an attempt with which those of earlier attempts are not needed any more
_READINGS = 5  # of a list of files, while a process that has not noticed its end removes some of them
_AGAIN_S = 5.0  # after which the last checkpoint of a job is copied once more, if that has failed


class ObjectStore(SharedPlace):
    """The `SharedPlace` under a URL.

    Raises:
        ValueError: fsspec does not know this kind of URL, or lacks a package for it.
    """

    def __init__(self, url: str) -> None:
        self.name = url.rstrip("/")
        try:
            self._files: Any
            self._files, root = fsspec.core.url_to_fs(self.name)
        except (ValueError, ImportError) as error:
            raise ValueError(f"checkpoints={url!r} cannot be opened: {error}. Name a folder that all nodes share.") from error
        self._root = str(root).rstrip("/")
        if getattr(self._files, "local_file", False):
            self.name = f"file://{self._root}"  # a path that is relative to this process's folder would be another one elsewhere
        self._fetched: set[Path] = set()  # what was read from earlier attempts, and need not be copied again
        self._begun: dict[str, set[str]] = {}  # by the name of an attempt, the checkpoints that this process has begun to copy
        self._published: dict[str, set[str]] = {}  # those of them that are complete there
        self._one_at_a_time = threading.Lock()  # it is held by what copies or removes checkpoints of running jobs

    def local(self) -> Path:
        return self._scratch

    @cached_property
    def _scratch(self) -> Path:
        """A new folder for temporary files of this process. Those of processes that have died are removed."""
        from tensile_jax.exec.checkpoint.folder_lock import FolderLock  # imports JAX

        parent = Path(tempfile.gettempdir())
        for old in parent.glob(f"{_SCRATCH}*/tensile.lock"):
            with suppress(CheckpointError, OSError):
                lock = FolderLock(old.parent)
                shutil.rmtree(old.parent, ignore_errors=True)
                lock.release()  # not before: a process that begins meanwhile would remove the folder, too
        made = Path(tempfile.mkdtemp(prefix=_SCRATCH))
        self._lock = FolderLock(made)
        return made

    def prepare(self) -> None:
        name = f".tensile-{os.getpid()}"
        try:
            self.write(name, b"")  # there are no folders to be made: this shows whether files can be
        except FileNotFoundError as error:
            story = f"{self.name} cannot be written. Make its bucket first"
            raise FileNotFoundError(errno.ENOENT, story, self.name) from error
        self.remove(name)

    # -- jobs -----------------------------------------------------------------------------------------------------------------

    def attempts(self, job: str) -> dict[int, str]:
        return attempts_in(self._entries(""), job)

    def has_checkpoints(self, job: str) -> bool:
        return any(self._checkpoints(name) for name in self._names(job))

    def take_over(self, job: str, attempt: int, *, patience_s: float) -> None:
        """Copy the latest checkpoint of the attempts before this one; all that are newer, too, if they are damaged."""
        from tensile_jax.exec.checkpoint.format import mark_of  # imports JAX

        del patience_s  # nobody else uses the folder of this process
        refuse_late(self.name, job, attempt, self.latest_attempt(job))
        mine = running_name(job, attempt)
        self.write(f"{mine}/{MARK}", mark_of(mine))
        self._fetch(job, self._scratch / mine)

    def publish(self, job: str, attempt: int) -> str:
        try:
            with self._one_at_a_time:
                self._publish(job, attempt)
            return ""
        except OSError as error:
            return f"the checkpoint could not be copied to {self.name}: {error.strerror}"

    def give_back(self, job: str, attempt: int) -> str:
        mine = running_name(job, attempt)
        problem = self.publish(job, attempt)
        if problem:
            time.sleep(_AGAIN_S)
            problem = self.publish(job, attempt)
        if problem:
            kept = tempfile.mkdtemp(prefix=f"{_KEPT}{mine}-")
            with suppress(OSError):
                (self._scratch / mine).rename(kept)
            return f"{problem}. It is in {kept} on {os.uname().nodename}: copy {kept} to {self.name}/{mine}"
        with suppress(OSError):  # the checkpoints are where they belong, and the others are removed with the next attempt
            if self._published.get(mine):
                self._remove_earlier(job, attempt)
        shutil.rmtree(self._scratch / mine, ignore_errors=True)
        return ""

    @contextmanager
    def fetched(self, job: str) -> Iterator[Path]:
        with tempfile.TemporaryDirectory(prefix="tensile-result-") as folder:
            self._fetch(job, Path(folder))
            yield Path(folder)

    # -- small files -----------------------------------------------------------------------------------------------------------

    def read(self, name: str) -> bytes:
        with self._errors_named(name):
            return self._files.cat_file(f"{self._root}/{name}")

    def write(self, name: str, content: bytes) -> None:
        with self._errors_named(name):
            self._make_folder_of(name)
            self._files.pipe_file(f"{self._root}/{name}", content)

    def remove(self, *names: str) -> None:
        for name in names:
            with suppress(FileNotFoundError), self._errors_named(name):
                self._files.rm_file(f"{self._root}/{name}")

    # -- what is there ---------------------------------------------------------------------------------------------------------

    def _names(self, job: str) -> list[str]:
        """The names under which the job may have checkpoints, those of the latest attempt first."""
        return [*(name for _, name in sorted(self.attempts(job).items(), reverse=True)), job]

    def _entries(self, name: str) -> list[str]:
        """The names of the files and folders in a folder, which need not exist."""
        path = f"{self._root}/{name}".rstrip("/")
        with self._errors_named(name):
            self._files.invalidate_cache()
            try:
                return [posixpath.basename(str(found).rstrip("/")) for found in self._files.ls(path, detail=False)]
            except FileNotFoundError:
                return []

    def _checkpoints(self, name: str) -> dict[str, list[str]]:
        """The files of each checkpoint under a name, complete or not, the newest checkpoint first."""
        root = f"{self._root}/{name}"
        with self._errors_named(name):
            self._files.invalidate_cache()
            try:
                paths = self._files.find(root)
            except FileNotFoundError:
                paths = []
        found: dict[str, list[str]] = {}
        for path in paths:
            step, _, file = posixpath.relpath(str(path), root).partition("/")
            if file:
                found.setdefault(step, []).append(file)
        return {step: found[step] for step in newest_first(found)}

    # -- copying ---------------------------------------------------------------------------------------------------------------

    def _fetch(self, job: str, folder: Path) -> None:
        """Copy the newest complete checkpoint into a folder, and those that are newer but damaged."""
        from tensile_jax.exec.checkpoint.format import Unreadable, read_manifest  # imports JAX

        for _ in range(_READINGS - 1):
            with suppress(FileNotFoundError):
                for name in self._names(job):
                    for step, files in self._checkpoints(name).items():
                        if MANIFEST not in files:
                            continue  # it was never finished
                        target = _free(folder / step)
                        with self._errors_named(f"{name}/{step}"):
                            target.mkdir(parents=True)
                            self._get(name, step, files, target)
                        self._fetched.add(target)
                        if not isinstance(read_manifest(target, step_and_number(step)[0]), Unreadable):
                            return
                return
            shutil.rmtree(folder, ignore_errors=True)  # a process that has not noticed its end has removed a checkpoint
        raise CheckpointError(f"The checkpoints of {job} in {self.name} change while they are read.", folder=self.name, step=None)

    def _get(self, name: str, step: str, files: list[str], target: Path) -> None:
        for file in files:
            (target / file).parent.mkdir(parents=True, exist_ok=True)
        self._files.get([f"{self._root}/{name}/{step}/{file}" for file in files], [str(target / file) for file in files])

    def _publish(self, job: str, attempt: int) -> None:
        mine = running_name(job, attempt)
        folder = self._scratch / mine
        begun, done = self._begun.setdefault(mine, set()), self._published.setdefault(mine, set())
        here = {path.parent.name for path in folder.glob(f"[0-9]*/{MANIFEST}")}
        for step in reversed(newest_first(here - done)):
            if folder / step not in self._fetched:
                begun.add(step)
                if self._put(mine, step):
                    done.add(step)
        for step in begun - here:  # the job has removed it here
            self._remove_checkpoint(mine, step)
            begun.discard(step)
            done.discard(step)
        if len(done) >= _ENOUGH:
            self._remove_earlier(job, attempt)

    def _put(self, mine: str, step: str) -> bool:
        """Copy a checkpoint of this machine; False if it was removed here in the meantime, since there are newer ones."""
        folder = self._scratch / mine / step
        try:
            manifest = (folder / MANIFEST).read_bytes()
            paths = [path for path in (folder / STATE).rglob("*") if path.is_file()] + [folder / MARK]
            names = [f"{mine}/{step}/{path.relative_to(folder).as_posix()}" for path in paths]
            with self._errors_named(f"{mine}/{step}"):
                for name in {posixpath.dirname(name): name for name in names}.values():
                    self._make_folder_of(name)
                self._files.put([str(path) for path in paths], [f"{self._root}/{name}" for name in names])
        except FileNotFoundError:
            if folder.exists():
                raise
            return False
        self.write(f"{mine}/{step}/{MANIFEST}", manifest)
        return True

    def _remove_earlier(self, job: str, attempt: int) -> None:
        for number, name in self.attempts(job).items():
            if number < attempt:
                for step in self._checkpoints(name):
                    self._remove_checkpoint(name, step)
                self.remove(f"{name}/{MARK}")
                self._remove_folder(name)

    def _remove_checkpoint(self, name: str, step: str) -> None:
        path = f"{self._root}/{name}/{step}"
        self.remove(f"{name}/{step}/{MANIFEST}")
        with suppress(FileNotFoundError), self._errors_named(f"{name}/{step}"):
            self._files.rm(f"{path}/{STATE}", recursive=True)
        self.remove(f"{name}/{step}/{MARK}")
        self._remove_folder(f"{name}/{step}")

    # -- folders, which object stores do not have -----------------------------------------------------------------------------

    def _make_folder_of(self, name: str) -> None:
        if self._files.root_marker:
            self._files.makedirs(posixpath.dirname(f"{self._root}/{name}"), exist_ok=True)

    def _remove_folder(self, name: str) -> None:
        if self._files.root_marker:
            with suppress(OSError):  # it has files of the user
                self._files.rmdir(f"{self._root}/{name}")

    @contextmanager
    def _errors_named(self, name: str) -> Iterator[None]:
        """Turn what the packages behind fsspec raise into an OSError that names the URL."""
        where = f"{self.name}/{name}".rstrip("/")
        try:
            yield
        except FileNotFoundError as error:
            raise FileNotFoundError(errno.ENOENT, f"{where} does not exist", where) from error
        except Exception as error:
            story = str(error).strip().splitlines() or [""]
            raise OSError(errno.EIO, f"{where}: {type(error).__name__}: {story[0]}", where) from error


def _free(path: Path) -> Path:
    """An unused name for a checkpoint, with a higher number if there is one of that name."""
    step, number = step_and_number(path.name)
    while path.exists():
        number += 1
        path = path.with_name(checkpoint_name(step, number))
    return path
