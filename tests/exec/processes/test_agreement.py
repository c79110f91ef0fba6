"""What processes tell one another, with threads in their place, which meet at a barrier instead of in their devices."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tensile_jax.errors import BudgetTooSmall, DistributedError
from tensile_jax.exec.processes import conversation
from tensile_jax.exec.processes.agreement import ALONE, Together, compare


class Meeting:
    """Exchanges among some processes: each waits until all of them have come."""

    def __init__(self, count: int) -> None:
        self._barrier = threading.Barrier(count)
        self._rows = [b""] * count
        self.rounds = 0

    def of(self, process: int) -> Callable[[bytes], list[bytes]]:
        def exchange(mine: bytes) -> list[bytes]:
            self._rows[process] = mine
            if not self._barrier.wait():
                self.rounds += 1
            rows = list(self._rows)
            self._barrier.wait()
            return rows

        return exchange

    def break_off(self) -> None:
        self._barrier.abort()


@pytest.fixture
def meeting(monkeypatch: pytest.MonkeyPatch) -> Iterator[Meeting]:
    monkeypatch.setattr(conversation, "_PATIENCE_S", 0.02)
    meeting = Meeting(3)
    yield meeting
    meeting.break_off()  # no thread is left


@pytest.fixture
def three(meeting: Meeting) -> list[Together]:
    return [Together(process, (0, 1, 2), meeting.of(process)) for process in (0, 1, 2)]


def in_all(processes: list[Together], do: Callable[[Together], Any]) -> list[Any]:
    """What `do` returns in each process, or the error that it raises."""

    def caught(one: Together) -> Any:
        try:
            return do(one)
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(processes)) as pool:
        return list(pool.map(caught, processes))


def test_values_are_gathered_in_the_order_of_the_processes_and_told_by_the_first(three: list[Together]) -> None:
    def talk(one: Together) -> Any:
        with one.session("numbers"):
            gathered = one.gather(10 * one.process)
            one.tell({"largest": max(gathered)})
            return gathered, None if one.leads else one.hear(dict[str, int])

    assert in_all(three, talk) == [([0, 10, 20], None), *2 * [([0, 10, 20], {"largest": 20})]]


def test_outside_of_a_session_every_process_is_by_itself(three: list[Together]) -> None:
    three[0].tell(1)
    assert [one.gather(one.process) for one in three] == [[0], [1], [2]]
    assert ALONE.gather(3) == [3]


def test_one_session_follows_another(three: list[Together]) -> None:
    def talk(one: Together) -> Any:
        found: list[Any] = []
        for i in range(5):
            with one.session("numbers"):
                found.append(one.gather(i + one.process))
        return found

    assert in_all(three, talk) == [[[i, i + 1, i + 2] for i in range(5)]] * 3


def test_a_process_that_is_busy_says_so_and_the_others_wait_for_it(meeting: Meeting, three: list[Together]) -> None:
    def talk(one: Together) -> Any:
        with one.session("a plan"):
            if one.leads:
                time.sleep(0.3)  # it plans
                one.tell("the plan")
                return "the plan"
            return one.hear(str)

    assert in_all(three, talk) == ["the plan"] * 3
    assert meeting.rounds > 3  # no round waits for as long as planning takes


def test_an_error_of_one_process_is_raised_in_all(three: list[Together]) -> None:
    def talk(one: Together) -> None:
        with one.session("a plan"):
            if one.process == 1:
                raise OSError("no disk")
            one.gather(0)

    first, second, third = in_all(three, talk)
    assert isinstance(second, OSError)
    for error in (first, third):
        assert isinstance(error, DistributedError) and error.processes == (1,)
        assert str(error) == "Process 1 has failed while the processes agreed on a plan: OSError: no disk"


def test_a_budget_that_is_too_small_is_the_same_error_in_all(three: list[Together]) -> None:
    def talk(one: Together) -> None:
        with one.session("a plan"):
            if one.leads:
                raise BudgetTooSmall("too small", budget_bytes=1, floor_bytes=2)
            one.hear(int)

    first, *others = in_all(three, talk)
    assert isinstance(first, BudgetTooSmall)
    assert [(type(e), e.message, e.budget_bytes, e.floor_bytes) for e in others] == [
        (BudgetTooSmall, "too small (Process 0 has found this.)", 1, 2)
    ] * 2


def test_an_error_at_the_end_of_a_session_is_raised_in_all(three: list[Together]) -> None:
    def talk(one: Together) -> None:
        with one.session("a plan"):
            one.gather(0)
            if one.process == 2:
                raise KeyboardInterrupt

    def caught(one: Together) -> str:
        try:
            talk(one)
        except KeyboardInterrupt:
            return "interrupted"
        return "ended"

    first, second, third = in_all(three, caught)
    assert third == "interrupted"
    for error in (first, second):
        assert isinstance(error, DistributedError) and error.processes == (2,)


def test_after_a_session_that_has_failed_the_next_one_is_as_any(three: list[Together]) -> None:
    def talk(one: Together) -> Any:
        try:
            with one.session("a plan"):
                if one.process == 1:
                    raise OSError("no disk")
                one.gather(0)
        except (OSError, DistributedError):
            pass
        with one.session("another plan"):
            return one.gather(one.process)

    assert in_all(three, talk) == [[0, 1, 2]] * 3


def test_a_process_that_does_not_come_is_an_error_when_the_time_is_over(
    three: list[Together], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversation, "TIMEOUT_S", 0.1)

    def talk(one: Together) -> None:
        with one.session("the plan of 'train_step'"):
            one.gather(0)

    first, second = in_all(three[:2], talk)
    for error in (first, second):
        assert isinstance(error, DistributedError)
        assert "A process has not come for 0.1 s, while the processes 0, 1 and 2 meet to agree on the plan of" in str(error)
    assert not three[0].wait_for_the_others(0.05)  # at the exit, the process does not wait for ever


def test_devices_that_cannot_reach_one_another_are_an_error(meeting: Meeting, three: list[Together]) -> None:
    def talk(one: Together) -> None:
        with one.session("a plan"):
            if one.leads:
                meeting.break_off()
            one.gather(0)

    for error in in_all(three, talk):
        assert isinstance(error, DistributedError)
        assert "cannot meet to agree on a plan, so a process may have died: BrokenBarrierError" in str(error)
    assert all(one.wait_for_the_others(5) for one in three)


def test_the_values_that_differ_are_named_with_their_processes(three: list[Together]) -> None:
    def talk(one: Together) -> None:
        with one.session("a plan"):
            compare(one, {"budget": "1 MiB" if one.process else "2 MiB", "policy": "auto"}, "step")

    errors = in_all(three, talk)
    assert {str(error) for error in errors} == {
        "The processes 0, 1 and 2 do not have the same step: budget is 1 MiB in process 1 and 2 MiB in process 0; budget is 1 "
        "MiB in process 2 and 2 MiB in process 0. Give all processes the same step, the same options and the same versions."
    }
    assert [error.processes for error in errors] == [(1, 2)] * 3


def test_after_a_step_that_failed_in_the_middle_no_other_one_begins(three: list[Together]) -> None:
    three[0].begin_step()
    three[0].leave(OSError("no disk"))
    with pytest.raises(DistributedError, match="An earlier step has failed in the middle in process 0 .OSError: no disk."):
        three[0].begin_step()
    three[1].begin_step()
