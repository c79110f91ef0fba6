"""How the checkpoints of a job go from one device to the next in a folder that all nodes have."""

from pathlib import Path

import numpy as np
import pytest

from tensile_jax.errors import CheckpointError
from tensile_jax.exec.checkpoint.checkpoints import Checkpoints
from tensile_jax.exec.checkpoint.folder_lock import FolderLock
from tensile_jax.ray.shared.folder import SharedFolder


def save(folder: Path, step: int) -> None:
    Checkpoints(folder).save(step, {"w": np.full(3, step)})


def steps(folder: Path) -> tuple[int, ...]:
    return Checkpoints(folder).steps()


def test_a_job_takes_its_folder_and_gives_it_back(tmp_path: Path) -> None:
    SharedFolder(tmp_path).take_over("job", 1, patience_s=0.0)
    assert not SharedFolder(tmp_path).has_checkpoints("job")
    save(tmp_path / "job@1", 10)
    assert SharedFolder(tmp_path).latest_attempt("job") == 1
    with SharedFolder(tmp_path).fetched("job") as folder:
        assert folder == tmp_path / "job@1"
    SharedFolder(tmp_path).take_over("job", 2, patience_s=0.0)
    assert steps(tmp_path / "job@2") == (10,)
    SharedFolder(tmp_path).give_back("job", 2)
    assert steps(tmp_path / "job") == (10,)
    assert SharedFolder(tmp_path).has_checkpoints("job")
    SharedFolder(tmp_path).take_over("job", 7, patience_s=0.0)
    assert [path.name for path in tmp_path.iterdir()] == ["job@7"]


def test_a_device_that_is_cut_off_but_alive_cannot_change_what_its_successor_has(tmp_path: Path) -> None:
    SharedFolder(tmp_path).take_over("job", 1, patience_s=0.0)
    old = tmp_path / "job@1"
    save(old, 10)
    SharedFolder(tmp_path).take_over("job", 2, patience_s=0.0)
    save(tmp_path / "job@2", 60)
    save(old, 20)  # which would remove the checkpoint of step 60
    assert steps(tmp_path / "job@2") == (60, 10)
    SharedFolder(tmp_path).give_back("job", 1)
    assert not (tmp_path / "job").exists()
    SharedFolder(tmp_path).take_over("job", 3, patience_s=0.0)
    assert steps(tmp_path / "job@3") == (60, 10)


def test_an_order_that_comes_late_is_refused(tmp_path: Path) -> None:
    SharedFolder(tmp_path).take_over("job", 2, patience_s=0.0)
    save(tmp_path / "job@2", 10)
    with pytest.raises(CheckpointError, match="was taken over by attempt 2, and this is attempt 1"):
        SharedFolder(tmp_path).take_over("job", 1, patience_s=0.0)


def test_a_job_waits_for_the_process_that_has_its_folder(tmp_path: Path) -> None:
    SharedFolder(tmp_path).take_over("job", 1, patience_s=0.0)
    save(tmp_path / "job@1", 10)
    lock = FolderLock(tmp_path / "job@1")
    with pytest.raises(CheckpointError, match="is in use by"):
        SharedFolder(tmp_path).take_over("job", 2, patience_s=0.3)
    lock.release()
    SharedFolder(tmp_path).take_over("job", 2, patience_s=0.3)


def test_jobs_whose_names_begin_alike_do_not_take_each_others_folders(tmp_path: Path) -> None:
    save(tmp_path / "job-b@4", 10)
    save(tmp_path / "job.b", 10)
    assert SharedFolder(tmp_path).latest_attempt("job") == 0
    assert not SharedFolder(tmp_path).has_checkpoints("job")


def test_how_many_jobs_share_a_device_is_kept_and_added_to(tmp_path: Path) -> None:
    assert SharedFolder(tmp_path).read_neighbours() == {}
    SharedFolder(tmp_path).write_neighbours({"x": 5})
    SharedFolder(tmp_path).write_neighbours({"y": 6})
    assert SharedFolder(tmp_path).read_neighbours() == {"x": 5, "y": 6}
