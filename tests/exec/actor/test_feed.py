"""A job's user code in its thread: order, bounds, and that whatever it does holds up nobody else.

No test sleeps: each waits for news, or for an event that the user code sets. The time limits only end a test that fails.
"""

import gc
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tensile_jax.exec.actor.feed import Feed
from tensile_jax.exec.actor.feed_events import BatchesEnded, BatchReady, CallbacksMade, FeedEvent, FeedStopped, UserCodeFailed

LIMIT_S = 10.0


class Inbox:
    """What a feed told, in order."""

    def __init__(self) -> None:
        self.news: list[FeedEvent] = []
        self.threads: set[str] = set()
        self._changed = threading.Condition()

    def __call__(self, news: FeedEvent) -> None:
        with self._changed:
            self.news.append(news)
            self.threads.add(threading.current_thread().name)
            self._changed.notify_all()

    def wait(self, count: int) -> list[FeedEvent]:
        """All news, once there are `count`."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.news) >= count, LIMIT_S), self.news
            return list(self.news)

    def first(self, kind: type) -> Any:
        """The first news of a kind, once it is there."""
        with self._changed:
            assert self._changed.wait_for(lambda: any(isinstance(news, kind) for news in self.news), LIMIT_S), self.news
            return next(news for news in self.news if isinstance(news, kind))


Make = Callable[..., tuple[Feed, Inbox]]


@pytest.fixture
def make() -> Iterator[Make]:
    """Starts feeds; when the test is over each is stopped, and its thread has ended."""
    feeds: list[tuple[Feed, Inbox]] = []

    def start(batches: Any, *, on_step: Callable[[int, Any], None] | None = None, skip: int = 0, **limits: Any) -> Any:
        inbox = Inbox()
        feed = Feed(batches, skip=skip, on_step=on_step, tell=inbox, name="job", **limits)
        feeds.append((feed, inbox))
        feed.start()
        return feed, inbox

    yield start
    for feed, inbox in feeds:
        feed.stop()
        inbox.first(FeedStopped)
        assert inbox.news[-1] == FeedStopped()
        feed._thread.join(LIMIT_S)
        assert not feed._thread.is_alive()
        assert inbox.threads == {"tensile-job"}


def wait_for(event: threading.Event) -> None:
    assert event.wait(LIMIT_S)


def numbered(count: int) -> list[np.ndarray]:
    return [np.full(2, i, np.float32) for i in range(count)]


# -- batches ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [list, iter, lambda batches: lambda: batches, lambda batches: lambda: iter(batches)])
def test_batches_come_in_order_and_end(given: Callable[[Any], Any], make: Make) -> None:
    feed, inbox = make(given(numbered(3)), ahead=4)
    assert inbox.wait(4) == [BatchReady(0), BatchReady(1), BatchReady(2), BatchesEnded(3)]
    assert [feed.take()[0] for _ in range(3)] == [0, 1, 2]


def test_a_dataset_that_can_be_called_as_well_is_iterated(make: Make) -> None:
    class Dataset(list[Any]):
        def __call__(self) -> Any:
            raise AssertionError

    _, inbox = make(Dataset(numbered(1)))
    assert inbox.wait(2) == [BatchReady(0), BatchesEnded(1)]


def test_a_dataset_that_is_only_indexed_is_iterated(make: Make) -> None:
    class Indexed:
        def __getitem__(self, index: int) -> np.ndarray:
            return numbered(2)[index]

    _, inbox = make(Indexed(), ahead=3)
    assert inbox.wait(3) == [BatchReady(0), BatchReady(1), BatchesEnded(2)]


def test_no_more_are_drawn_than_are_held(make: Make) -> None:
    drawn: list[int] = []

    def batches() -> Iterator[Any]:
        for i in range(4):
            drawn.append(i)
            yield np.zeros(1)

    feed, inbox = make(batches, ahead=2)
    assert inbox.wait(2) == [BatchReady(0), BatchReady(1)]
    feed.deliver(0, {})  # wakes the thread for nothing
    assert drawn == [0, 1]
    feed.take()
    assert inbox.wait(3)[2:] == [BatchReady(2)]
    assert drawn == [0, 1, 2]
    feed.take()
    assert inbox.wait(4)[3:] == [BatchReady(3)]
    assert len(feed._ready) == 2


def test_what_was_taken_is_not_held(make: Make) -> None:
    feed, inbox = make(iter(numbered(1)))
    inbox.first(BatchesEnded)
    batch = feed.take()
    seen = weakref.ref(batch)
    del batch
    gc.collect()
    assert seen() is None


def test_skipped_batches_are_drawn_and_thrown_away(make: Make) -> None:
    feed, inbox = make(numbered(5), skip=3, ahead=3)
    assert inbox.wait(3) == [BatchReady(3), BatchReady(4), BatchesEnded(5)]
    assert [feed.take()[0], feed.take()[0]] == [3, 4]


def test_batches_that_end_among_the_skipped_say_so(make: Make) -> None:
    _, inbox = make(numbered(2), skip=3)
    assert inbox.wait(1) == [BatchesEnded(2)]


def test_leaves_become_arrays_and_arrays_of_jax_stay_what_they_are(make: Make) -> None:
    ours = jnp.arange(3)
    keys = jax.random.key(0)
    feed, inbox = make([{"a": ours, "b": 1.5, "c": [np.int8(2), None, True], "k": keys}], ahead=1)
    inbox.first(BatchReady)
    got = feed.take()
    assert got["a"] is ours
    assert got["k"] is keys
    kinds = [(type(x), x.dtype.name, x.shape, x.tolist()) for x in (got["b"], got["c"][0], got["c"][2])]
    assert kinds == [(np.ndarray, "float64", (), 1.5), (np.ndarray, "int8", (), 2), (np.ndarray, "bool", (), True)]


def test_a_loader_may_fill_the_same_buffer_again(make: Make) -> None:
    def batches() -> Iterator[Any]:
        buffer = np.zeros(1)
        for i in range(3):
            buffer[:] = i
            yield buffer

    feed, inbox = make(batches, ahead=4)
    inbox.first(BatchesEnded)
    assert [feed.take()[0] for _ in range(3)] == [0, 1, 2]


def test_a_batch_can_be_taken_while_it_is_announced() -> None:
    taken: list[Any] = []
    ended = threading.Event()

    def tell(news: FeedEvent) -> None:
        if isinstance(news, BatchReady):
            taken.append(feed.take()[0])
        if isinstance(news, BatchesEnded):
            ended.set()

    feed = Feed(numbered(5), skip=0, ahead=1, on_step=None, tell=tell, name="job")
    feed.start()
    wait_for(ended)
    assert taken == [0, 1, 2, 3, 4]
    feed.stop()


def test_taking_what_was_not_announced_is_refused(make: Make) -> None:
    feed, inbox = make([])
    inbox.first(BatchesEnded)
    with pytest.raises(RuntimeError, match="tensile-job: no batch is ready"):
        feed.take()


# -- batches unlike the first -----------------------------------------------------------------------------------------------


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("first", "second", "story"),
    [
        (
            {"x": np.zeros((8, 2))},
            {"x": np.zeros((5, 2))},
            r"batch\['x'\] is float32\[5, 2\] in batch 1, .* float32\[8, 2\] in the",
        ),
        ([np.zeros(1, np.int32)], [np.zeros(1)], r"batch\[0\] is float32\[1\] in batch 1, .* and was int32\[1\] in the first"),
        ({"x": 1}, {"x": 1, "y": 2}, r"batch\['y'\] is int32\[\] in batch 1, .* and the first batch had no such leaf"),
        ({"x": 1, "y": 2}, {"x": 1}, r"batch\['y'\] was int32\[\] in the first batch, and batch 1, .* has no such leaf"),
        (1.0, {"x": 1.0}, r"batch\['x'\] is float32\[\] in batch 1, .* and the first batch had no such leaf"),
    ],
)
@pytest.mark.parametrize("skip", [0, 1, 2])
def test_a_batch_unlike_the_first_is_refused_by_its_leaf(first: Any, second: Any, story: str, skip: int, make: Make) -> None:
    _, inbox = make([first, second, first], skip=skip)
    failed = inbox.first(UserCodeFailed)
    assert failed.where == "batches"
    with pytest.raises(ValueError, match=f"{story}.* drop a last batch that is smaller, or pad"):
        raise failed.error
    assert inbox.news == [BatchReady(0), failed][min(skip, 1) :]


def test_what_jax_takes_for_the_same_is_the_same(make: Make) -> None:
    same = [np.zeros(2), np.zeros(2, np.float32), jnp.zeros(2), jnp.full(2, 1.0)]
    _, inbox = make(same, ahead=5)
    assert inbox.wait(5)[-1] == BatchesEnded(4)


def test_a_leaf_with_which_jax_does_not_compute_is_refused(make: Make) -> None:
    _, inbox = make([{"x": 1, "label": "cat"}])
    with pytest.raises(TypeError, match=r"batch\['label'\] is of <U3 in batch 0, .* Give numbers"):
        raise inbox.first(UserCodeFailed).error


# -- user code that raises --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [ValueError("mine"), SystemExit(3), KeyboardInterrupt(), GeneratorExit()])
def test_a_generator_that_raises_is_told_after_its_batches_and_with_its_traceback(error: BaseException, make: Make) -> None:
    def batches() -> Iterator[Any]:
        yield np.zeros(1)
        raise error

    feed, inbox = make(batches())
    ready, failed = inbox.wait(2)
    assert ready == BatchReady(0)
    assert isinstance(failed, UserCodeFailed)
    assert (failed.error, failed.where) == (error, "batches")
    assert traceback.extract_tb(failed.error.__traceback__)[-1].name == "batches"
    assert feed.take() == [0]


@pytest.mark.parametrize("error", [ValueError("mine"), StopIteration(), SystemExit()])
def test_a_dataset_that_cannot_be_made_is_told(error: BaseException, make: Make) -> None:
    def open_dataset() -> Any:
        raise error

    _, inbox = make(open_dataset)
    failed = inbox.first(UserCodeFailed)
    assert (failed.error, failed.where) == (error, "batches")


def test_a_function_that_gives_no_iterable_is_told(make: Make) -> None:
    _, inbox = make(lambda: 3)
    assert isinstance(inbox.first(UserCodeFailed).error, TypeError)


@pytest.mark.parametrize("error", [ValueError("mine"), StopIteration(), SystemExit()])
def test_a_callback_that_raises_is_told_and_no_user_code_runs_after_it(error: BaseException, make: Make) -> None:
    entered, release = threading.Event(), threading.Event()
    called: list[int] = []

    def on_step(step: int, metrics: Any) -> None:
        called.append(step)
        entered.set()
        wait_for(release)
        raise error

    feed, inbox = make(numbered(9), on_step=on_step, ahead=1)
    inbox.wait(1)
    feed.deliver(1, {})
    wait_for(entered)
    feed.deliver(2, {})
    feed.take()  # makes room for another batch
    release.set()
    failed = inbox.first(UserCodeFailed)
    assert (failed.error, failed.where) == (error, "callback")
    feed.deliver(3, {})
    assert not feed._drawing
    feed.stop()
    inbox.first(FeedStopped)
    assert (called, inbox.news) == ([1], [BatchReady(0), failed, CallbacksMade(), FeedStopped()])


# -- user code that hangs or is slow ----------------------------------------------------------------------------------------


def test_a_generator_that_hangs_holds_up_neither_stopping_nor_another_job(make: Make) -> None:
    hanging, release = threading.Event(), threading.Event()

    def hang() -> Iterator[Any]:
        hanging.set()
        wait_for(release)
        yield np.zeros(1)

    feed, inbox = make(hang)
    wait_for(hanging)
    other, others = make(numbered(1))
    others.first(BatchReady)
    assert other.take()[0] == 0
    feed.deliver(1, {})
    feed.stop()
    assert inbox.news == []
    assert feed._thread.daemon
    release.set()
    assert inbox.wait(2) == [CallbacksMade(), FeedStopped()]
    with pytest.raises(RuntimeError, match="no batch is ready"):
        feed.take()


def test_a_constructor_that_hangs_does_not_hold_up_stopping(make: Make) -> None:
    hanging, release = threading.Event(), threading.Event()

    def hang() -> Any:
        hanging.set()
        wait_for(release)
        return numbered(1)

    feed, inbox = make(hang)
    wait_for(hanging)
    feed.stop()
    release.set()
    assert inbox.wait(2) == [CallbacksMade(), FeedStopped()]


def test_a_slow_callback_gets_every_step_in_order_and_holds_back_the_batches(make: Make) -> None:
    entered, release = threading.Event(), threading.Event()
    called: list[tuple[int, Any, str]] = []

    def on_step(step: int, metrics: Any) -> None:
        entered.set()
        wait_for(release)
        called.append((step, metrics, threading.current_thread().name))

    feed, inbox = make(numbered(3), on_step=on_step, ahead=1)
    inbox.wait(1)
    feed.deliver(1, {"loss": 0.5})
    wait_for(entered)
    feed.take()
    for step in (2, 3, 4):
        feed.deliver(step, {})
    assert inbox.news == [BatchReady(0)]
    release.set()
    assert inbox.wait(2)[1:] == [BatchReady(1)]
    assert called == [(1, {"loss": 0.5}, "tensile-job"), *((step, {}, "tensile-job") for step in (2, 3, 4))]


# -- stopping ---------------------------------------------------------------------------------------------------------------


def test_what_was_delivered_before_stopping_is_still_called(make: Make) -> None:
    entered, release = threading.Event(), threading.Event()
    called: list[int] = []

    def on_step(step: int, metrics: Any) -> None:
        entered.set()
        wait_for(release)
        called.append(step)

    feed, inbox = make([], on_step=on_step)
    for step in (1, 2, 3):
        feed.deliver(step, {})
    wait_for(entered)
    feed.stop()
    feed.deliver(4, {})
    release.set()
    inbox.first(FeedStopped)
    assert called == [1, 2, 3]


def test_a_generator_is_closed_in_its_own_thread(make: Make) -> None:
    closed: list[str] = []

    def batches() -> Iterator[Any]:
        try:
            while True:
                yield np.zeros(1)
        finally:
            closed.append(threading.current_thread().name)

    feed, inbox = make(batches())
    inbox.wait(2)
    feed.stop()
    with pytest.raises(RuntimeError, match="none after stop"):
        feed.take()
    inbox.first(FeedStopped)
    assert closed == ["tensile-job"]


def test_a_generator_that_raises_when_it_is_closed_is_told(make: Make) -> None:
    def batches() -> Iterator[Any]:
        try:
            yield np.zeros(1)
        finally:
            raise ValueError("cannot close")

    feed, inbox = make(batches(), ahead=1)
    inbox.wait(1)
    feed.stop()
    failed = inbox.first(UserCodeFailed)
    assert (str(failed.error), failed.where) == ("cannot close", "batches")


def test_a_feed_that_is_stopped_before_it_starts_draws_nothing() -> None:
    inbox = Inbox()
    drawn: list[int] = []
    feed = Feed(lambda: drawn.append(1) or [], skip=0, on_step=None, tell=inbox, name="job")
    feed.stop()
    feed.start()
    assert inbox.wait(2) == [CallbacksMade(), FeedStopped()]
    assert drawn == []


@pytest.mark.parametrize(("skip", "most", "announced"), [(0, 3, 3), (2, 3, 1), (0, 0, 0)])
def test_no_more_is_drawn_than_is_needed(make: Make, skip: int, most: int, announced: int) -> None:
    drawn: list[int] = []

    def batches() -> Iterator[Any]:
        for k in range(9):
            drawn.append(k)
            yield np.zeros(1)

    feed, inbox = make(batches(), skip=skip, ahead=9, most=most)
    inbox.wait(announced)
    feed.stop()
    inbox.first(FeedStopped)
    assert inbox.news == [*(BatchReady(skip + k) for k in range(announced)), CallbacksMade(), FeedStopped()]
    assert drawn == list(range(most))


def test_callbacks_have_been_made_when_that_is_told_though_the_generator_hangs_at_its_end(make: Make) -> None:
    release, called = threading.Event(), list[int]()

    def batches() -> Iterator[Any]:
        try:
            yield np.zeros(1)
        finally:
            wait_for(release)

    feed, inbox = make(batches(), ahead=1, on_step=lambda step, metrics: called.append(step))
    inbox.wait(1)
    feed.deliver(1, {})
    feed.stop()
    inbox.first(CallbacksMade)
    assert called == [1]
    release.set()


def test_a_callback_may_stop_its_own_feed(make: Make) -> None:
    feed, inbox = make(numbered(9), on_step=lambda step, metrics: feed.stop())
    inbox.wait(2)
    feed.deliver(1, {})
    assert inbox.wait(4)[2:] == [CallbacksMade(), FeedStopped()]


# -- arguments --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "story"),
    [
        ({"skip": -1}, "skip must not be below zero, got -1"),
        ({"ahead": 0}, "ahead must be at least 1, got 0"),
        ({"batches": 3}, "batches must be an iterable or a function that gives one, got a int"),
    ],
)
def test_arguments_out_of_range_are_refused(change: dict[str, Any], story: str) -> None:
    arguments: dict[str, Any] = {"batches": [], "skip": 0, "on_step": None, "tell": Inbox(), "name": "job", **change}
    with pytest.raises((TypeError, ValueError), match=story):
        Feed(arguments.pop("batches"), **arguments)
