"""How the folder of a job's checkpoints goes from one device to the next."""

from pathlib import Path

import numpy as np
import pytest

from tensile_jax.errors import CheckpointError
from tensile_jax.exec.checkpoint.checkpoints import Checkpoints
from tensile_jax.exec.checkpoint.folder_lock import FolderLock
from tensile_jax.ray.job_folder import (
    folder_of,
    give_back,
    has_checkpoints,
    latest_attempt,
    read_neighbours,
    running_name,
    take_over,
    write_neighbours,
)


def save(folder: Path, step: int) -> None:
    Checkpoints(folder).save(step, {"w": np.full(3, step)})


def steps(folder: Path) -> tuple[int, ...]:
    return Checkpoints(folder).steps()


def test_a_job_takes_its_folder_and_gives_it_back(tmp_path: Path) -> None:
    take_over(tmp_path, "job", 1, patience_s=0.0)
    assert not has_checkpoints(tmp_path, "job")
    save(tmp_path / running_name("job", 1), 10)
    assert (latest_attempt(tmp_path, "job"), folder_of(tmp_path, "job").name) == (1, "job@1")
    take_over(tmp_path, "job", 2, patience_s=0.0)
    assert steps(tmp_path / "job@2") == (10,)
    give_back(tmp_path, "job", 2)
    assert steps(tmp_path / "job") == (10,)
    assert has_checkpoints(tmp_path, "job")
    take_over(tmp_path, "job", 7, patience_s=0.0)
    assert [path.name for path in tmp_path.iterdir()] == ["job@7"]


def test_a_device_that_is_cut_off_but_alive_cannot_change_what_its_successor_has(tmp_path: Path) -> None:
    take_over(tmp_path, "job", 1, patience_s=0.0)
    old = tmp_path / "job@1"
    save(old, 10)
    take_over(tmp_path, "job", 2, patience_s=0.0)
    save(tmp_path / "job@2", 60)
    save(old, 20)  # which would remove the checkpoint of step 60
    assert steps(tmp_path / "job@2") == (60, 10)
    give_back(tmp_path, "job", 1)
    assert not (tmp_path / "job").exists()
    take_over(tmp_path, "job", 3, patience_s=0.0)
    assert steps(tmp_path / "job@3") == (60, 10)


def test_an_order_that_comes_late_is_refused(tmp_path: Path) -> None:
    take_over(tmp_path, "job", 2, patience_s=0.0)
    save(tmp_path / "job@2", 10)
    with pytest.raises(CheckpointError, match="was taken over by attempt 2, and this is attempt 1"):
        take_over(tmp_path, "job", 1, patience_s=0.0)


def test_a_job_waits_for_the_process_that_has_its_folder(tmp_path: Path) -> None:
    take_over(tmp_path, "job", 1, patience_s=0.0)
    save(tmp_path / "job@1", 10)
    lock = FolderLock(tmp_path / "job@1")
    with pytest.raises(CheckpointError, match="is in use by"):
        take_over(tmp_path, "job", 2, patience_s=0.3)
    lock.release()
    take_over(tmp_path, "job", 2, patience_s=0.3)


def test_jobs_whose_names_begin_alike_do_not_take_each_others_folders(tmp_path: Path) -> None:
    save(tmp_path / "job-b@4", 10)
    save(tmp_path / "job.b", 10)
    assert latest_attempt(tmp_path, "job") == 0
    assert not has_checkpoints(tmp_path, "job")


def test_how_many_jobs_share_a_device_is_kept_and_added_to(tmp_path: Path) -> None:
    assert read_neighbours(tmp_path) == {}
    write_neighbours(tmp_path, {"x": 5})
    write_neighbours(tmp_path, {"y": 6})
    assert read_neighbours(tmp_path) == {"x": 5, "y": 6}
