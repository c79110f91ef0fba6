"""The planner's thread: which tasks go first, and that a mistake in one task leaves the rest to be done."""

import threading
from collections.abc import Iterator

import pytest

from tensile_jax.exec.runtime.planner import PlannerThread

LIMIT_S = 10.0


@pytest.fixture
def thread() -> Iterator[PlannerThread]:
    one = PlannerThread()
    yield one
    one.close()
    assert not one.is_alive()


def test_what_concerns_running_jobs_goes_first_and_all_is_done_before_it_ends(thread: PlannerThread) -> None:
    go, done = threading.Event(), list[str]()
    thread.call(lambda: done.append("first") if go.wait(LIMIT_S) else None)
    thread.call(lambda: done.append("new"))
    thread.call(lambda: done.append("newer"))
    thread.call(lambda: done.append("running"), soon=True)
    thread.call(lambda: done.append("also running"), soon=True)
    go.set()
    thread.close()
    assert done[0] == "first" or done[:2] == ["running", "also running"]  # before it was begun, or after
    assert [one for one in done if one != "first"] == ["running", "also running", "new", "newer"]


def test_what_raises_is_told_and_the_next_is_done(thread: PlannerThread, monkeypatch: pytest.MonkeyPatch) -> None:
    told, done = list[BaseException | None](), threading.Event()
    monkeypatch.setattr(threading, "excepthook", lambda args: told.append(args.exc_value))

    def fail() -> None:
        raise ZeroDivisionError("a mistake")

    thread.call(fail)
    thread.call(done.set)
    assert done.wait(LIMIT_S)
    assert [str(error) for error in told] == ["a mistake"]
