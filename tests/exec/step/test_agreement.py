"""What processes tell one another, with threads in their place, and a store that they share without connections."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from tensile_jax.errors import BudgetTooSmall, DistributedError
from tensile_jax.exec.step import agreement
from tensile_jax.exec.step.agreement import ALONE, Together, compare, note_lost
from tensile_jax.exec.step.key_value_store import Store, Values


class Never:
    """A result for which a device waits for ever."""

    def is_ready(self) -> bool:
        return False

    def is_deleted(self) -> bool:
        return False


class Broken(Store):
    """A store whose process has ended."""

    def get(self, key: str, wait_s: float) -> bytes | None:
        raise ConnectionError("the process that holds the store has ended")


def of_processes(store: Values) -> list[Together]:
    """Three processes that find the store at once."""
    future: Future[Values] = Future()
    future.set_result(store)
    return [Together(process, (0, 1, 2), lambda: future) for process in (0, 1, 2)]


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def three(store: Store) -> list[Together]:
    return of_processes(store)


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


def test_the_store_holds_the_latest_session_only(store: Store, three: list[Together]) -> None:
    def talk(one: Together) -> None:
        for _ in range(5):
            with one.session("numbers"):
                one.gather(one.process)
                one.gather(one.process)

    assert in_all(three, talk) == [None] * 3
    assert len(store.entries("")) == 6


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
    assert [(type(e), str(e), e.budget_bytes, e.floor_bytes) for e in others] == [
        (BudgetTooSmall, "too small (Process 0 has found this.)", 1, 2)
    ] * 2


def test_a_process_that_does_not_come_is_named_when_the_time_is_over(
    three: list[Together], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agreement, "TIMEOUT_S", 0.1)
    monkeypatch.setattr(agreement, "_LOOK_S", 0.02)

    def talk(one: Together) -> None:
        with one.session("the plan of 'train_step'"):
            one.gather(0)

    first, second = in_all(three[:2], talk)
    # the first that gives up tells the other
    assert any("Process 2 has not answered for 0.1 s" in str(error) for error in (first, second))
    assert all(isinstance(error, DistributedError) and "the plan of 'train_step'" in str(error) for error in (first, second))


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


@pytest.fixture
def in_touch(three: list[Together], monkeypatch: pytest.MonkeyPatch) -> list[Together]:
    """The processes, after a first session."""
    monkeypatch.setattr(agreement, "_LOOK_S", 0.02)
    monkeypatch.setattr(agreement, "_UNFINISHED", [])

    def meet(one: Together) -> None:
        with one.session("a plan"):
            one.gather(0)

    assert in_all(three, meet) == [None] * 3
    return three


def test_who_waits_for_a_result_hears_that_another_process_has_ended(in_touch: list[Together]) -> None:
    in_touch[0].wait_for([jnp.ones(3), {"x": jnp.zeros(2)}])
    in_touch[2].say_ended("it has ended with KeyboardInterrupt")

    began = time.monotonic()
    with pytest.raises(
        DistributedError, match=r"Process 2 runs no further step \(it has ended with KeyboardInterrupt\)"
    ) as caught:
        in_touch[0].wait_for([jnp.ones(3), Never()])
    assert time.monotonic() - began < 10 and caught.value.processes == (2,)


def test_who_waits_in_the_last_step_goes_on_after_another_process_has_ended(in_touch: list[Together]) -> None:
    in_touch[2].finish_step()
    in_touch[2].say_ended("it has ended")

    class Late(Never):
        until = time.monotonic() + 0.2

        def is_ready(self) -> bool:
            return time.monotonic() > self.until

    in_touch[0].wait_for([Late()])
    in_touch[0].finish_step()
    with pytest.raises(DistributedError, match="Process 2 runs no further step"):
        in_touch[0].wait_for([Never()])


def test_a_process_whose_connection_has_ended_is_named_unless_it_has_said_why_it_ends(
    store: Store, in_touch: list[Together]
) -> None:
    in_touch[1].say_ended("it has ended with OSError: no disk")
    for process in (1, 2):
        note_lost(store, process)
    with pytest.raises(DistributedError, match="Process 1 runs no further step .it has ended with OSError: no disk."):
        in_touch[0].wait_for([Never()])
    assert not in_touch[0].knows_lost
    in_touch[1].finish_step()
    in_touch[1].say_ended("it has ended")
    with pytest.raises(DistributedError, match="Process 2 runs no further step .its connection has ended: it was killed"):
        in_touch[0].wait_for([Never()])
    assert in_touch[0].knows_lost


def test_a_result_that_fails_since_another_process_was_killed_names_it(
    store: Store, in_touch: list[Together], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []

    def fails(_: Any) -> None:
        raise jax.errors.JaxRuntimeError(told[-1])

    monkeypatch.setattr(jax, "block_until_ready", fails)
    for message in ("RESOURCE_EXHAUSTED: out of memory", "UNKNOWN: Gloo all-reduce failed"):
        told.append(message)
        with pytest.raises(jax.errors.JaxRuntimeError, match=message):  # nobody has ended
            in_touch[0].wait_for([])
    threading.Timer(0.01, note_lost, (store, 2)).start()
    with pytest.raises(DistributedError, match="Process 2 runs no further step .its connection has ended: it was killed"):
        in_touch[0].wait_for([])


def test_a_store_that_cannot_be_reached_is_the_end_of_the_process_that_holds_it() -> None:
    one = of_processes(Broken())[1]
    with pytest.raises(DistributedError, match="Process 0, through which .* has ended or cannot be reached") as caught:  # noqa: SIM117
        with one.session("a plan"):
            one.hear(int)
    assert caught.value.processes == (0,) and one.knows_lost


def test_processes_that_do_not_meet_are_refused_when_the_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "TIMEOUT_S", 0.05)
    unfinished: list[Callable[[], bool]] = []
    monkeypatch.setattr(agreement, "_UNFINISHED", unfinished)
    with pytest.raises(DistributedError, match="A process has not come for 0.05 s, while the processes 0 and 1 meet to agree"):
        Together(0, (0, 1), Future).session("a plan").__enter__()
    assert [is_over() for is_over in unfinished] == [False]


def test_after_a_step_that_failed_in_the_middle_no_other_one_begins(in_touch: list[Together]) -> None:
    in_touch[0].begin_step()
    in_touch[0].leave(OSError("no disk"))
    with pytest.raises(DistributedError, match="An earlier step has failed in the middle in process 0 .OSError: no disk."):
        in_touch[0].begin_step()
    in_touch[1].begin_step()
