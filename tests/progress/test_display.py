"""Calls that take long are shown in one place, and nothing of them remains."""

import threading
from collections.abc import Sequence
from typing import Any

import pytest

from tensile_jax.progress.display import Display, told_by
from tensile_jax.progress.phases import CallPhases


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.s = 0.0

    def __call__(self) -> float:
        return self.s


class Drawn:
    """A screen that remembers the names and phases of the calls that are shown on it."""

    def __init__(self) -> None:
        self.shown: list[tuple[str, ...]] = []
        self.cleared = False

    def show(self, calls: Sequence[CallPhases], now_s: float) -> None:
        self.shown.append(tuple(f"{call.name}: {call.what}" for call in calls))

    def clear(self) -> None:
        self.cleared = True

    def leave(self) -> None:
        pass


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def screens() -> list[Drawn]:
    return []


@pytest.fixture
def display(clock: Clock, screens: list[Drawn]) -> Display:
    def screen() -> Drawn:
        screens.append(Drawn())
        return screens[-1]

    return Display(now_s=clock, screen=screen, by_default=lambda: True, looks=False)


def test_a_call_is_shown_after_three_seconds_until_its_end(display: Display, clock: Clock, screens: list[Drawn]) -> None:
    with display.call("step", None):
        display.tell("planning", 0, 2)
        clock.s = 2.9
        assert not display.look() and not screens
        clock.s = 3.0
        assert display.look()
        display.tell("compiling segments", 0, 4)
        assert not screens[0].cleared
    assert screens[0].shown == [("step: planning",), ("step: compiling segments",)]
    assert screens[0].cleared and len(screens) == 1


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_an_error_removes_what_is_shown(display: Display, clock: Clock, screens: list[Drawn], error: type[BaseException]) -> None:
    with pytest.raises(error), display.call("step", None):
        clock.s = 5.0
        display.look()
        raise error
    assert screens[0].cleared and not display.look()


def test_calls_of_several_threads_are_shown_together(display: Display, clock: Clock, screens: list[Drawn]) -> None:
    planned, ended = threading.Event(), threading.Event()

    def other() -> None:
        with display.call("eval_step", None):
            display.tell("planning", 0, 1)
            planned.set()
            assert ended.wait(10.0)

    with display.call("train_step", None):
        clock.s = 1.0
        thread = threading.Thread(target=other)
        thread.start()
        assert planned.wait(10.0)
        clock.s = 5.0
        display.look()
    display.look()
    ended.set()
    thread.join(10.0)
    assert screens[0].shown[0] == ("train_step: starting", "eval_step: planning")
    assert screens[0].shown[-1] == ("eval_step: planning",)
    assert screens[0].cleared and len(screens) == 1


def test_what_is_told_in_a_thread_without_a_call_is_dropped(display: Display, clock: Clock, screens: list[Drawn]) -> None:
    with display.call("step", None):
        thread = threading.Thread(target=display.tell, args=("planning", 0, 1))
        thread.start()
        thread.join(10.0)
        clock.s = 5.0
        display.look()
    display.tell("planning", 0, 1)
    assert screens[0].shown == [("step: starting",)]


def test_a_call_inside_another_one_belongs_to_it(display: Display, clock: Clock, screens: list[Drawn]) -> None:
    with display.call("step", None):
        with display.call("an unknown device", None):
            display.tell("calibrating", 0, 8)
            clock.s = 5.0
            display.look()
        assert not screens[0].cleared
    assert screens[0].shown == [("step: calibrating",)]


@pytest.mark.parametrize("wanted", [False, lambda what, done, of: None])
def test_a_call_of_which_the_user_wants_nothing_shown_is_not_shown(
    display: Display, clock: Clock, screens: list[Drawn], wanted: object
) -> None:
    with display.call("step", wanted) as call:  # pyright: ignore[reportArgumentType]
        clock.s = 50.0
        display.tell("planning", 0, 1)
        assert not call.visible and not display.look()
    assert not screens


def test_by_default_a_call_is_shown_only_where_that_is_the_default(clock: Clock, screens: list[Drawn]) -> None:
    display = Display(now_s=clock, screen=Drawn, by_default=lambda: False, looks=False)
    for wanted, visible in ((None, False), (True, True)):
        with display.call("step", wanted) as call:
            assert call.visible == visible


def test_nothing_is_drawn_while_a_debugger_waits_for_the_user(display: Display, clock: Clock, screens: list[Drawn]) -> None:
    debugger: dict[str, Any] = {"__name__": "bdb", "look": display.look}
    exec("def stop(): return look()", debugger)
    with display.call("step", None):
        clock.s = 5.0
        assert debugger["stop"]() and not screens
        display.look()
    assert screens[0].shown == [("step: starting",)]


def test_a_forked_process_shows_none_of_the_calls(display: Display, clock: Clock, screens: list[Drawn]) -> None:
    with display.call("step", None):
        clock.s = 5.0
        display.look()
        display.forget()
        assert not display.look()
    assert not screens[0].cleared


def test_phases_are_told_to_the_users_function_or_to_the_display_or_to_nobody() -> None:
    seen: list[tuple[str, int, int]] = []

    def tell(what: str, done: int, of: int) -> None:
        seen.append((what, done, of))

    assert told_by(tell) is tell
    assert told_by(None) == told_by(True) != told_by(False)
    told_by(False)("planning", 0, 1)
