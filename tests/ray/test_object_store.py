"""How the checkpoints of a job go from one device to the next under a URL, which here is one of files."""

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensile_jax.errors import CheckpointError
from tensile_jax.exec.checkpoint.checkpoints import Checkpoints
from tensile_jax.exec.checkpoint.folder_lock import FolderLock
from tensile_jax.ray.shared import object_store
from tensile_jax.ray.shared.object_store import ObjectStore
from tensile_jax.ray.shared.opened import open_place

LIKE = {"w": np.zeros(3)}


@pytest.fixture(autouse=True)
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for temporary files of the processes."""
    made = tmp_path / "scratch"
    made.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(made))
    monkeypatch.setattr(object_store, "_AGAIN_S", 0.0)
    return made


@pytest.fixture
def bucket(tmp_path: Path) -> Path:
    return tmp_path / "bucket"


@pytest.fixture
def process(bucket: Path) -> Callable[[], ObjectStore]:
    """Makes the store as another process of the cluster sees it."""

    def made() -> ObjectStore:
        found = open_place(f"file://{bucket}/")
        assert isinstance(found, ObjectStore)
        return found

    return made


def start(store: ObjectStore, attempt: int) -> Checkpoints:
    store.take_over("job", attempt, patience_s=0.0)
    return Checkpoints(store.local() / f"job@{attempt}")


def save(checkpoints: Checkpoints, *steps: int) -> None:
    for step in steps:
        checkpoints.save(step, {"w": np.full(3, float(step))})


def steps_in(bucket: Path, attempt: int) -> list[str]:
    """The complete checkpoints of an attempt, and, with a question mark, what is unfinished."""
    paths = sorted((bucket / f"job@{attempt}").glob("[0-9]*"), key=lambda path: int(path.name))
    files = [path for path in paths if any(one.is_file() for one in path.rglob("*"))]
    return [path.name + ("" if (path / "manifest.json").exists() else "?") for path in files]


def test_a_job_goes_on_in_another_process_from_its_latest_checkpoint(
    process: Callable[[], ObjectStore], bucket: Path, scratch: Path
) -> None:
    one = process()
    one.prepare()
    assert list(bucket.iterdir()) == []
    assert not one.has_checkpoints("job") and one.latest_attempt("job") == 0
    first = start(one, 1)
    assert (one.latest_attempt("job"), one.has_checkpoints("job")) == (1, False)
    for step in (10, 20, 30):
        save(first, step)
        assert one.publish("job", 1) == ""
    assert steps_in(bucket, 1) == ["20", "30"]  # the two that the job itself keeps

    other = process()
    assert (other.latest_attempt("job"), other.has_checkpoints("job")) == (1, True)
    second = start(other, 2)
    assert second.find_last() == (30, "")
    np.testing.assert_array_equal(second.restore(30, LIKE)["w"], [30.0] * 3)
    assert other.publish("job", 2) == "" and steps_in(bucket, 2) == []  # it is there already, under the other name
    save(second, 40)
    assert other.give_back("job", 2) == ""
    assert steps_in(bucket, 2) == ["40"]
    assert not (bucket / "job@1").exists()
    assert [path.name for path in other.local().iterdir() if path.is_dir()] == []
    with process().fetched("job") as folder:
        np.testing.assert_array_equal(Checkpoints(folder).restore(40, LIKE)["w"], [40.0] * 3)
    assert not folder.exists()


def test_a_process_that_is_cut_off_but_alive_changes_nothing_for_its_successor(
    process: Callable[[], ObjectStore], bucket: Path
) -> None:
    old, new = process(), process()
    first = start(old, 1)
    save(first, 10)
    old.publish("job", 1)
    second = start(new, 2)
    save(second, 20)
    new.publish("job", 2)
    save(first, 50)
    old.publish("job", 1)
    assert steps_in(bucket, 2) == ["20"]
    assert start(process(), 3).find_last() == (20, "")
    with pytest.raises(CheckpointError, match=r"bucket/job was taken over by attempt 3, and this is attempt 2"):
        new.take_over("job", 2, patience_s=0.0)


def test_a_process_without_an_attempts_checkpoints_removes_none_of_them(process: Callable[[], ObjectStore], bucket: Path) -> None:
    one, other = process(), process()
    save(start(one, 1), 10)
    one.publish("job", 1)
    assert other.give_back("job", 1) == ""  # its start was refused
    assert steps_in(bucket, 1) == ["10"]


def test_earlier_attempts_are_removed_once_there_are_two_checkpoints_and_files_of_the_user_stay(
    process: Callable[[], ObjectStore], bucket: Path
) -> None:
    one, other = process(), process()
    save(start(one, 1), 10)
    one.publish("job", 1)
    (bucket / "job@1" / "10" / "notes.txt").write_text("mine")
    second = start(other, 2)
    save(second, 20)
    other.publish("job", 2)
    assert steps_in(bucket, 1) == ["10"]
    save(second, 30)
    other.publish("job", 2)
    assert [path.relative_to(bucket).as_posix() for path in (bucket / "job@1").rglob("*") if path.is_file()] == [
        "job@1/10/notes.txt"
    ]


def test_what_was_not_copied_to_its_end_does_not_count(process: Callable[[], ObjectStore], bucket: Path) -> None:
    one = process()
    first = start(one, 1)
    save(first, 10, 20)
    one.publish("job", 1)
    (bucket / "job@1" / "20" / "manifest.json").unlink()
    other = process()
    second = start(other, 2)
    assert second.find_last() == (10, "")
    save(second, 20, 30)
    other.publish("job", 2)
    assert not (bucket / "job@1").exists()


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_is_used(process: Callable[[], ObjectStore], bucket: Path) -> None:
    one = process()
    save(start(one, 1), 10, 20)
    one.publish("job", 1)
    damaged = next(path for path in (bucket / "job@1" / "20" / "state").rglob("*") if path.is_file())
    damaged.write_bytes(b"damaged")
    step, problem = start(process(), 2).find_last()
    assert step == 10
    assert "the checkpoint 20 cannot be read" in problem
    shutil.rmtree(bucket / "job@1" / "10")
    with pytest.raises(CheckpointError, match=r"cannot be resumed.*the checkpoint 20 cannot be read"):
        start(process(), 3).find_last()


def test_what_cannot_be_copied_is_kept_on_the_node_and_said(
    process: Callable[[], ObjectStore], bucket: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = process()
    first = start(one, 1)
    save(first, 10)

    class Unavailable(Exception):
        """Such as the packages behind fsspec raise."""

    def put(*_: Any) -> None:
        raise Unavailable("Too many requests\nfor this bucket")

    with monkeypatch.context() as patch:
        patch.setattr(one._files, "put", put, raising=False)
        assert one.publish("job", 1) == (
            f"the checkpoint could not be copied to file://{bucket}: file://{bucket}/job@1/10: Unavailable: Too many requests"
        )
        save(first, 20)
        problem = one.give_back("job", 1)
    (kept,) = scratch.glob("tensile-kept-job@1-*")
    assert f"It is in {kept} on " in problem and f": copy {kept} to file://{bucket}/job@1" in problem
    assert Checkpoints(kept).steps() == (20, 10)
    process().local()  # which removes what processes that have died have left, and not this
    assert kept.exists()


def test_a_checkpoint_that_is_removed_while_it_is_copied_is_left_out(
    process: Callable[[], ObjectStore], bucket: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = process()
    first = start(one, 1)
    save(first, 10)
    put = one._files.put

    def removed(*arguments: Any) -> None:
        save(first, 20, 30)  # which removes step 10
        put(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(one._files, "put", removed, raising=False)
        assert one.publish("job", 1) == ""
    assert steps_in(bucket, 1) == []
    assert one.publish("job", 1) == ""
    assert steps_in(bucket, 1) == ["20", "30"]


def test_a_list_that_changes_while_it_is_read_is_read_again(
    process: Callable[[], ObjectStore], bucket: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = process(), process()
    first = start(one, 1)
    save(first, 10)
    one.publish("job", 1)
    get = other._files.get

    def late(*arguments: Any) -> None:
        if steps_in(bucket, 1) == ["10"]:
            save(first, 20, 30)
            one.publish("job", 1)
        get(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(other._files, "get", late, raising=False)
        assert start(other, 2).find_last() == (30, "")


def test_folders_of_processes_that_have_died_are_removed_and_those_of_others_stay(
    process: Callable[[], ObjectStore], scratch: Path
) -> None:
    living = process()
    local = living.local()
    dead = scratch / "tensile-jobs-dead"
    FolderLock(dead).release()
    (dead / "job@1").mkdir()
    assert process().local() not in (local, dead)
    assert local.exists()
    assert not dead.exists()


def test_a_folder_of_checkpoints_that_was_copied_there_is_gone_on_from(process: Callable[[], ObjectStore], bucket: Path) -> None:
    save(Checkpoints(bucket / "job"), 10)
    one = process()
    assert (one.has_checkpoints("job"), one.latest_attempt("job")) == (True, 0)
    assert start(one, 1).find_last() == (10, "")
    assert not one.has_checkpoints("jo") and not one.has_checkpoints("b")


def test_small_files_are_written_and_read(process: Callable[[], ObjectStore], bucket: Path) -> None:
    one = process()
    with pytest.raises(FileNotFoundError, match="bucket/x does not exist"):
        one.read("x")
    one.write("x", b"1")
    assert process().read("x") == b"1"
    one.remove("x", "y")
    assert not (bucket / "x").exists()
    assert one.read_neighbours() == {}
    one.write_neighbours({"x": 5})
    one.write_neighbours({"y": 6})
    assert process().read_neighbours() == {"x": 5, "y": 6}


def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file://.*file/.tensile-.*: (NotADirectory|FileExists)Error"):
        open_place(f"file://{tmp_path}/file").prepare()
