"""Runs a job's user code in a thread, the *feed*, which draws batches in advance and calls `on_step` after each step.

Time runs from left to right. The upper line shows what the feed's thread does. The lower line shows the calls by which other
threads take batches, deliver metrics and stop the feed:

    feed's thread:  draw, draw, wait          draw, wait              on_step(1), wait          CallbacksMade, FeedStopped
    other threads:                    take()              deliver(1)                    stop()

The thread draws batches until it holds `ahead` of them, here two. Then it waits until a batch is taken, metrics are delivered, or
the feed is stopped. It reports events (`feed_events.py`) to the function `tell`, and holds no lock while it does so. After each
draw, `BatchReady` says that one more batch can be taken. After `stop()`, `CallbacksMade` says that all queued callbacks have been
made, and `FeedStopped` that the generator of the batches is closed.

Only the feed's thread waits for user code, so code that hangs, raises or is slow affects only its own job. Callbacks come in the
order of their steps, and before batches: while a callback runs or waits, no batch is drawn. So a slow callback slows its job
down, and only few metrics ever wait for callbacks.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from tensile_jax.exec.actor.batches import BatchType, expect_same_type, signature_of, take_in, type_of
from tensile_jax.exec.actor.feed_events import BatchesEnded, BatchReady, CallbacksMade, FeedEvent, FeedStopped, UserCodeFailed


class Feed:
    """Draws from `batches` and calls `on_step` in a daemon thread, and posts events of both.

    Args:
        batches: an iterable, or a function that returns one; the function is called in the thread.
        skip: how many batches are drawn first and thrown away, for a job that is resumed.
        ahead: the most batches that are held at once.
        most: the most batches that are drawn, including those that are skipped; None: as many as there are.
        on_step: called with the number of the step and its metrics.
        tell: called in the thread with every event; must not raise.
        name: the name of the job, which becomes part of the thread's name.
    """

    def __init__(
        self,
        batches: Iterable[Any] | Callable[[], Iterable[Any]],
        *,
        skip: int,
        ahead: int = 2,
        most: int | None = None,
        on_step: Callable[[int, Any], None] | None,
        tell: Callable[[FeedEvent], None],
        name: str,
    ) -> None:
        if skip < 0:
            raise ValueError(f"skip must not be below zero, got {skip}.")
        if ahead < 1:
            raise ValueError(f"ahead must be at least 1, got {ahead}.")
        if not (isinstance(batches, Iterable) or callable(batches) or hasattr(batches, "__getitem__")):
            raise TypeError(f"batches must be an iterable or a function that gives one, got a {type(batches).__name__}.")
        self._batches = batches
        self._skip = skip
        self._ahead = ahead
        self._on_step = on_step
        self._tell = tell
        self._thread = threading.Thread(target=self._run, name=f"tensile-{name}", daemon=True)
        # The fields below are shared with other threads; they change only while the condition is held.
        self._changed = threading.Condition()
        self._ready: deque[Any] = deque()
        self._calls: deque[tuple[int, Any]] = deque()
        self._stopping = self._held = False
        # Only the thread uses the fields below.
        self._iterator: Iterator[Any] | None = None
        self._most = float("inf") if most is None else most
        self._drawing = self._most > 0
        self._calling = on_step is not None
        self._drawn = 0
        self._type: BatchType | None = None
        self._signature: Any = None  # of the latest batch

    def start(self, *, held: bool = False) -> None:
        """Start the thread. It draws at once or, if `held`, once `release` is called."""
        self._held = held
        self._thread.start()

    def release(self) -> None:
        """Begin to draw, after a held start."""
        with self._changed:
            self._held = False
            self._changed.notify()

    @property
    def is_current(self) -> bool:
        """Whether the calling thread is this feed's thread, in which the user's code runs."""
        return threading.current_thread() is self._thread

    def take(self) -> Any:
        """The next batch, for which there must have been a `BatchReady`; never waits."""
        with self._changed:
            if not self._ready:
                raise RuntimeError(
                    f"{self._thread.name}: no batch is ready. Take one for each BatchReady, and none after stop()."
                )
            batch = self._ready.popleft()
            self._changed.notify()
        return batch

    def deliver(self, step: int, metrics: Any) -> None:
        """Queue a call `on_step(step, metrics)`; never waits. Does nothing after `stop()`, or once `on_step` has raised."""
        with self._changed:
            if self._calling and not self._stopping:
                self._calls.append((step, metrics))
                self._changed.notify()

    def stop(self) -> None:
        """Draw no more batches; never waits. The thread still makes the callbacks that were queued, and closes the generator.

        Nobody waits for a thread that hangs in user code. If that code returns after all, the thread does the rest then.
        """
        with self._changed:
            self._stopping = True
            self._ready.clear()
            self._changed.notify()

    def _run(self) -> None:
        while self._serve_once():
            pass
        self._tell(CallbacksMade())
        self._close()
        self._tell(FeedStopped())

    def _serve_once(self) -> bool:
        """Run user code for one callback or one batch, whichever is next; False when all is done."""
        with self._changed:
            self._changed.wait_for(
                lambda: not self._held and (self._calls or self._stopping or (self._drawing and len(self._ready) < self._ahead))
            )
            call = self._calls.popleft() if self._calls else None
            if call is None and self._stopping:
                return False
        if call is None:
            self._draw()
        else:
            self._call(*call)
        return True

    def _call(self, step: int, metrics: Any) -> None:
        assert self._on_step is not None
        try:
            self._on_step(step, metrics)
        except BaseException as error:  # SystemExit in user code ends the job, not silently its thread
            with self._changed:
                self._calling = self._drawing = False
                self._calls.clear()
            self._tell(UserCodeFailed(error, "callback"))

    def _draw(self) -> None:
        index = self._drawn
        try:
            if self._iterator is None:
                self._iterator = self._open()
            more, given = self._next(self._iterator)
            batch = self._take_in(given, index) if more else None
        except BaseException as error:
            self._drawing = False
            self._tell(UserCodeFailed(error, "batches"))
            return
        if not more:
            self._drawing = False
            self._tell(BatchesEnded(index))
            return
        self._drawn += 1
        self._drawing = self._drawn < self._most
        if index < self._skip:
            return
        with self._changed:
            if self._stopping:
                return
            self._ready.append(batch)
        self._tell(BatchReady(index))

    def _open(self) -> Iterator[Any]:
        if isinstance(self._batches, Iterable) or not callable(self._batches):  # a dataset may be both iterable and callable
            return iter(self._batches)
        return iter(self._batches())

    @staticmethod
    def _next(iterator: Iterator[Any]) -> tuple[bool, Any]:
        try:
            return True, next(iterator)
        except StopIteration:
            return False, None

    def _take_in(self, given: Any, index: int) -> Any:
        batch = take_in(given)
        signature = signature_of(batch)
        if signature != self._signature:
            found = type_of(batch, index=index)
            if self._type is None:
                self._type = found
            expect_same_type(self._type, found, index=index)
            self._signature = signature
        return batch

    def _close(self) -> None:
        close = getattr(self._iterator, "close", None)
        try:
            if close is not None:
                close()
        except BaseException as error:
            self._tell(UserCodeFailed(error, "batches"))
        self._iterator, self._batches, self._on_step = None, (), None  # these are the user's and may be large
