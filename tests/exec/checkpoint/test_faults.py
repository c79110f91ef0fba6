"""Checkpoints under faults: at every point where something is written the disk is full, or the process is killed.

After each fault the checkpoint before it is restored bit for bit, what the user has in the folder is as it was, and a run that is
resumed ends as one that nothing has disturbed.
"""

import errno
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
import pytest

import tensile_jax as tensile
from tensile_jax.errors import CheckpointError
from tensile_jax.exec.checkpoint import checkpoints as checkpoints_module
from tensile_jax.exec.checkpoint.checkpoints import Checkpoints
from tests.exec.checkpoint.faulty_disk import FaultyDisk
from tests.exec.checkpoint.test_checkpoints import contents
from tests.exec.conftest import MakeRuntime
from tests.exec.small_jobs import counting, total

SAVES = (1, 2, 3)  # of which the first is removed at the end
Kind = Literal["once", "from then on"]


def state_of(step: int) -> list[Any]:
    return [np.full(1000, step), {"n": step, "key": np.arange(7, dtype=np.uint32)}]


def same(found: Any, step: int) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(state_of(step)), strict=True))


def users_files(folder: Path) -> dict[str, bytes | None]:
    """Put some there: beside checkpoints, with their names, and under the names that are used while they are written."""
    for path in ("thesis.txt", "2024/thesis.txt", "2/thesis.txt", ".tensile-writing-3-1/thesis.txt"):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(f"this is {path}")
    return contents(folder)


def save_all(folder: Path) -> int | None:
    """Save each step in its turn, go on where one cannot be saved; the last that was."""
    checkpoints, last = Checkpoints(folder), None
    for step in SAVES:
        try:
            checkpoints.save(step, state_of(step))
            last = step
        except CheckpointError:
            continue
    return last


def expect_nothing_lost(folder: Path, users: dict[str, bytes | None], saved: int | None) -> None:
    """What was saved last can be restored by whoever comes next, and so can what is saved then."""
    reopened = Checkpoints(folder)
    reopened.remove_leftovers()
    found = reopened.latest()
    assert found is not None or saved is None
    assert found is None or (found >= (saved or 0) and same(reopened.restore(found, state_of(found)), found))
    reopened.find_last()
    reopened.save(10, state_of(10))
    reopened.save(11, state_of(11))
    assert reopened.steps() == (11, 10)
    now = contents(folder)
    assert now.items() >= users.items()
    ours = {"10", "11", "tensile.json"}
    assert {path for path in now if "/" not in path} == {path for path in users if "/" not in path} | ours


def count_writes(tmp_path: Path) -> int:
    """The least number of them: orbax writes into a different number of files each time."""
    counts = list[int]()
    for i in range(3):
        with FaultyDisk(tmp_path / f"counted-{i}") as disk:
            assert save_all(tmp_path / f"counted-{i}") == SAVES[-1]
        counts.append(disk.calls)
    assert min(counts) > 40
    return min(counts) - 3


AT_SOME = pytest.param(7, id="some writes")
AT_EVERY = pytest.param(1, id="every write", marks=pytest.mark.slow)


@pytest.mark.parametrize("every", [AT_SOME, AT_EVERY])
@pytest.mark.parametrize("kind", ["once", "from then on"])
def test_a_disk_that_is_full_at_any_write_loses_nothing(tmp_path: Path, kind: Kind, every: int) -> None:
    for k in range(0, count_writes(tmp_path), every):
        folder = tmp_path / f"job-{k}"
        users = users_files(folder)
        with FaultyDisk(folder, fail_at=k, once=kind == "once"):
            saved = save_all(folder)
        expect_nothing_lost(folder, users, saved)


@pytest.mark.parametrize("every", [AT_SOME, AT_EVERY])
def test_an_interrupt_at_any_write_loses_nothing(tmp_path: Path, every: int) -> None:
    for k in range(0, count_writes(tmp_path), every):
        folder = tmp_path / f"job-{k}"
        users = users_files(folder)
        with FaultyDisk(folder, fail_at=k, error=KeyboardInterrupt):
            with pytest.raises(KeyboardInterrupt):
                save_all(folder)
        expect_nothing_lost(folder, users, None)


def test_a_disk_without_room_for_the_state_is_told_and_the_next_save_succeeds(tmp_path: Path) -> None:
    """A limit on the size of files, beyond which the kernel refuses to write."""
    script = f"""
import os, resource
from pathlib import Path
import numpy as np
from tensile_jax.errors import CheckpointError
from tensile_jax.exec.checkpoint.checkpoints import Checkpoints
checkpoints, state = Checkpoints(Path({str(tmp_path)!r})), [np.arange(100_000)]
checkpoints.save(1, state)
resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, resource.RLIM_INFINITY))
try:
    checkpoints.save(2, state)
except CheckpointError as error:
    print(error)
print(sorted(os.listdir(checkpoints.folder)), checkpoints.latest())
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
checkpoints.save(3, state)
print(checkpoints.latest())
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(tensile.__file__).parents[1]), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-W", "error", "-c", script]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    told, rest = done.stdout.split("\n", 1)
    assert told == f"The checkpoint of step 2 in {tmp_path} could not be saved: [Errno {errno.EFBIG}] File too large"
    assert (rest, done.stderr, done.returncode) == ("['1', 'tensile.json'] 1\n3\n", "", 0)


KILLED = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from tests.exec.checkpoint.faulty_disk import FaultyDisk
from tests.exec.checkpoint.test_faults import save_all
with FaultyDisk(Path({folder!r}), fail_at={k}, error=lambda: os.kill(os.getpid(), signal.SIGKILL)):
    save_all(Path({folder!r}))
"""


def killed(folder: Path, k: int) -> "subprocess.CompletedProcess[str]":
    """Save in a process that is killed at its k-th write."""
    root = str(Path(tensile.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": root, "JAX_PLATFORMS": "cpu"}
    script = KILLED.format(tests=root, folder=str(folder), k=k)
    return subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120)


def expect_killed(tmp_path: Path, k: int) -> None:
    folder = tmp_path / f"job-{k}"
    users = users_files(folder)
    done = killed(folder, k)
    assert done.returncode == -signal.SIGKILL, done.stderr
    expect_nothing_lost(folder, users, None)


def test_a_process_that_is_killed_while_it_saves_loses_nothing(tmp_path: Path) -> None:
    """While it writes the state of the second checkpoint; the slow form below kills it everywhere."""
    expect_killed(tmp_path, count_writes(tmp_path) // len(SAVES) + 8)


@pytest.mark.slow
def test_a_process_that_is_killed_at_any_write_loses_nothing(tmp_path: Path) -> None:
    for k in range(count_writes(tmp_path)):
        expect_killed(tmp_path, k)


# -- in a runtime -------------------------------------------------------------------------------------------------------------

STEPS = 6


def run_job(make: Callable[..., Any], folder: Path, **options: Any) -> Any:
    work = counting()
    with make(checkpoints=folder) as run:
        try:
            job = run.submit(work.step, work.state(), work.batches, steps=STEPS, name="job", checkpoint_every=2, **options)
        except CheckpointError:
            return None
    return job


def expect_resumed(make: Callable[..., Any], folder: Path, users: dict[str, bytes | None]) -> None:
    job = run_job(make, folder, resume=True)
    assert job.status.state == "finished", job.status.note
    assert total(job) == STEPS * (STEPS + 1) / 2
    assert contents(folder / "job").items() >= users.items()


@pytest.mark.parametrize("every", [pytest.param(17, id="some writes"), AT_EVERY])
def test_a_run_on_a_disk_that_fills_up_loses_nothing_and_is_resumed(runtime: MakeRuntime, tmp_path: Path, every: int) -> None:
    with FaultyDisk(tmp_path) as disk:
        run_job(runtime, tmp_path / "counted")
    for k in range(0, disk.calls, every):
        folder = tmp_path / f"run-{k}"
        users = users_files(folder / "job")
        with FaultyDisk(folder, fail_at=k, once=False):
            job = run_job(runtime, folder)
        if job is not None:  # the last of its checkpoints could not be written, or only an older one not be removed
            ended = job.status
            assert ended.step == STEPS
            assert (ended.state == "failed") == isinstance(job.exception(), CheckpointError)
            # it has also failed where all is written, and the disk does not say that it has it
            assert ended.state == "failed" or Checkpoints(folder / "job").latest() == STEPS
            if ended.state == "failed":
                with pytest.raises(tensile.JobFailed, match="could not be saved") as caught:
                    job.result()
                assert float(caught.value.state["total"][0]) == STEPS * (STEPS + 1) / 2
        expect_resumed(runtime, folder, users)


RUN_ON_A_FULL_DISK = """
    import errno, os, sys
    from pathlib import Path
    import tensile_jax as tensile
    from tests.exec.checkpoint.faulty_disk import FaultyDisk
    from tests.exec.small_jobs import counting
    work = counting()
    with FaultyDisk(Path(sys.argv[1]), fail_at=12, once=False):
        with tensile.Runtime("64MiB", checkpoints=Path(sys.argv[1])) as run:
            job = run.submit(work.step, work.state(), work.batches, steps=40, name="job", checkpoint_every=1)
    print(job.status.state, sum(event.kind == "checkpoint_failed" for event in run.events()))
"""


def test_a_run_in_which_no_checkpoint_can_be_written_fails_and_says_nothing_else(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(tensile.__file__).parents[1]), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(RUN_ON_A_FULL_DISK), str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    state, failed = done.stdout.split()
    assert (state, done.stderr, done.returncode) == ("failed", "", 0)
    assert int(failed) >= 1


RUN_AND_BE_KILLED = """
    import os, signal, sys
    from pathlib import Path
    import tensile_jax as tensile
    from tests.exec.checkpoint.faulty_disk import FaultyDisk
    from tests.exec.checkpoint.test_faults import run_job
    folder, k = Path(sys.argv[1]), int(sys.argv[2])
    with FaultyDisk(folder, fail_at=k, error=lambda: os.kill(os.getpid(), signal.SIGKILL)):
        run_job(lambda **options: tensile.Runtime("64MiB", **options), folder)
"""


@pytest.mark.slow
def test_a_run_that_is_killed_at_any_write_is_resumed(runtime: MakeRuntime, tmp_path: Path) -> None:
    with FaultyDisk(tmp_path) as disk:
        run_job(runtime, tmp_path / "counted")
    environment = {**os.environ, "PYTHONPATH": str(Path(tensile.__file__).parents[1]), "JAX_PLATFORMS": "cpu"}
    for k in range(0, disk.calls - 5, 2):  # orbax writes into a different number of files each time
        folder = tmp_path / f"run-{k}"
        users = users_files(folder / "job")
        command = [sys.executable, "-c", textwrap.dedent(RUN_AND_BE_KILLED), str(folder), str(k)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == -signal.SIGKILL, done.stderr
        expect_resumed(runtime, folder, users)


def test_what_threads_still_write_after_a_failure_is_removed_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As threads of tensorstore do on a busy machine, when one of them has found the disk full."""
    writers: list[threading.Thread] = []

    def failing(folder: Path, **_: Any) -> None:
        state = folder / "state.orbax-checkpoint-tmp-1" / "d"
        state.mkdir(parents=True)
        end = time.monotonic() + 0.3

        def write() -> None:
            number = 0
            while time.monotonic() < end:
                with suppress(FileNotFoundError, FileExistsError):  # the folder is removed between two calls of the system
                    state.mkdir(exist_ok=True)
                    (state / str(number)).write_text("late")
                number += 1

        writers.append(threading.Thread(target=write))
        writers[0].start()
        while not any(state.iterdir()):
            time.sleep(0.001)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoints_module, "write_checkpoint", failing)
    with pytest.raises(CheckpointError, match="No space left"):
        Checkpoints(tmp_path / "job").save(1, state_of(1))
    writers[0].join()
    assert not [name for name in os.listdir(tmp_path / "job") if name.startswith(".tensile")]
