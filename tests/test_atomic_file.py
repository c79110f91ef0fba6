"""A file is whole or as it was, whichever of the system's calls fails."""

import os
import stat
import threading
from pathlib import Path

import pytest

from tensile_jax.atomic_file import remove_unfinished, try_to_write, write_whole
from tensile_jax.plan_format import Plan
from tests.cli.plans import PLAN
from tests.full_disk import FullDisk


def calls_of_one_write(folder: Path) -> int:
    with pytest.MonkeyPatch.context() as patch:
        disk = FullDisk(patch, lambda number: False)
        write_whole(folder / "counted", b"new")
        return disk.calls


@pytest.mark.parametrize("before", [None, b"old and longer"])
def test_whichever_call_fails_the_file_is_as_it_was_and_nothing_lies_beside_it(tmp_path: Path, before: bytes | None) -> None:
    calls = calls_of_one_write(tmp_path)
    (tmp_path / "counted").unlink()
    assert calls == 4  # open, write, fsync, replace
    file = tmp_path / "file"
    for failing in range(calls):
        if before is not None:
            file.write_bytes(before)
        with pytest.MonkeyPatch.context() as patch:
            FullDisk(patch, lambda number, failing=failing: number == failing)
            with pytest.raises(OSError, match="No space left on device: .*file") as refused:
                write_whole(file, b"new")
        assert refused.value.filename == str(file)
        assert [path.read_bytes() for path in tmp_path.iterdir()] == ([] if before is None else [before])


def test_a_disk_that_takes_a_byte_at_a_time_is_written_to_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, content: write(descriptor, content[:1]))
    write_whole(tmp_path / "file", b"content")
    assert (tmp_path / "file").read_bytes() == b"content"


def test_a_file_that_is_replaced_keeps_its_permissions_and_a_link_goes_on_leading_to_it(tmp_path: Path) -> None:
    file, link = tmp_path / "file", tmp_path / "link"
    file.write_bytes(b"old")
    file.chmod(0o640)
    link.symlink_to("file")
    write_whole(link, b"new")
    assert (file.read_bytes(), stat.S_IMODE(file.stat().st_mode), link.is_symlink()) == (b"new", 0o640, True)


def test_a_new_file_has_the_permissions_that_the_umask_leaves(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_whole(tmp_path / "file", b"")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o640


def test_what_is_no_regular_file_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    got: list[bytes] = []
    reader = threading.Thread(target=lambda: got.append(pipe.read_bytes()))
    reader.start()
    write_whole(pipe, b"content")
    reader.join()
    assert (got, stat.S_ISFIFO(pipe.stat().st_mode)) == ([b"content"], True)
    write_whole("/dev/null", b"content")
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)


def test_trying_leaves_nothing_and_changes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "file"
    try_to_write(file)
    assert list(tmp_path.iterdir()) == []
    file.write_bytes(b"old")
    try_to_write(file)
    assert (file.read_bytes(), list(tmp_path.iterdir())) == (b"old", [file])
    for wrong in (tmp_path, tmp_path / ("x" * 300), tmp_path / "none" / "file"):
        with pytest.raises(OSError):
            try_to_write(wrong)


def test_what_is_under_way_is_removed_when_the_process_is_about_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def look(descriptor: int) -> None:
        del descriptor
        seen.extend(os.listdir(tmp_path))
        remove_unfinished()
        assert os.listdir(tmp_path) == []

    monkeypatch.setattr(os, "fsync", look)
    with pytest.raises(FileNotFoundError):
        write_whole(tmp_path / "file", b"content")
    assert len(seen) == 1


def test_a_plan_that_cannot_be_saved_leaves_the_one_before(tmp_path: Path) -> None:
    PLAN.save(tmp_path / "plan.json")
    with pytest.MonkeyPatch.context() as patch:
        FullDisk(patch, lambda number: number == 1)
        with pytest.raises(OSError, match="No space left on device"):
            PLAN.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == PLAN
