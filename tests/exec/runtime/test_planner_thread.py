"""The Memory Scheduler's thread: what goes first, and that a mistake in one thing leaves the rest to be done."""

import threading
from collections.abc import Iterator

import jax
import pytest

from tensile_jax.exec.runtime.planner_thread import Scheduler

LIMIT_S = 10.0


@pytest.fixture
def scheduler() -> Iterator[Scheduler]:
    one = Scheduler(jax.devices()[0])
    yield one
    one.close()
    assert not one._thread.is_alive()


def test_what_concerns_running_jobs_goes_first_and_all_is_done_before_it_ends(scheduler: Scheduler) -> None:
    go, done = threading.Event(), list[str]()
    scheduler.call(lambda: done.append("first") if go.wait(LIMIT_S) else None)
    scheduler.call(lambda: done.append("new"))
    scheduler.call(lambda: done.append("newer"))
    scheduler.call(lambda: done.append("running"), soon=True)
    scheduler.call(lambda: done.append("also running"), soon=True)
    go.set()
    scheduler.close()
    assert done[0] == "first" or done[:2] == ["running", "also running"]  # before it was begun, or after
    assert [one for one in done if one != "first"] == ["running", "also running", "new", "newer"]


def test_what_raises_is_told_and_the_next_is_done(scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch) -> None:
    told, done = list[BaseException | None](), threading.Event()
    monkeypatch.setattr(threading, "excepthook", lambda args: told.append(args.exc_value))

    def fail() -> None:
        raise ZeroDivisionError("a mistake")

    scheduler.call(fail)
    scheduler.call(done.set)
    assert done.wait(LIMIT_S)
    assert [str(error) for error in told] == ["a mistake"]
