"""Runs as the main program of a job's own process: carries out the runtime's requests, with a `LocalActor` (the job's state and
plan) and a `Feed` (the batches). A *move* is one action of a plan, such as a launch or a copy. A *run* is a group of moves that
the runtime requests together.

    listener thread    receives the requests; ends the process when the runtime's end of the socket is closed
    main thread        begins and ends iterations, and issues the moves of their runs, in order; it never waits
    other threads      wait for copies and launches; trace, plan and compile; write checkpoints; send a heartbeat every two
                       seconds, and end the process when the runtime's process has ended

On a CPU, each launch must wait for the one before it. So another thread, not the main thread, issues the moves of a run that
has launches.

If planning or saving fails, the runtime gets the error, and the process goes on. If any other request fails, the runtime ends
the process. The process ignores Ctrl-C in the terminal, since the runtime handles it.
"""

import os
import queue
import signal
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from tensile_jax.exec.actor.feed import Feed
from tensile_jax.exec.actor.feed_events import FeedEvent, FeedStopped, UserCodeFailed
from tensile_jax.exec.actor.local_actor import LocalActor
from tensile_jax.exec.actor.missing import NO_BATCH
from tensile_jax.exec.actor.pure_job import pure_job
from tensile_jax.exec.checkpoint.checkpoints import Checkpoints
from tensile_jax.exec.child_process.carried_exception import carry
from tensile_jax.exec.child_process.channel import Answer, Ask, Channel, Heartbeat, News, Refused
from tensile_jax.exec.child_process.isolated_actor import Made, Told
from tensile_jax.exec.child_process.payload import PackedTree, Payload, pack_structure, pack_tree
from tensile_jax.exec.compiling.compiler import Compiler
from tensile_jax.exec.compiling.step import Options
from tensile_jax.exec.transfer import Device, Transfer, places_on_host
from tensile_jax.plan.analysis.access import AccessSequence

_SIGN_OF_LIFE_S = 2.0
_WAITING_THREADS = 16
_END_S = 3.0  # how long the user's generator may take to end


def main(descriptor: int) -> None:
    """Serve the runtime at the other end of the socket with this file descriptor."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end = socket.socket(fileno=descriptor)
    end.set_inheritable(False)
    channel = Channel(end)
    threading.Thread(target=_send_signs_of_life, args=(channel, os.getppid()), name="tensile-alive", daemon=True).start()
    try:
        payload = channel.receive()
        assert isinstance(payload, Payload)
        device = payload.environment.apply()
        asked: queue.SimpleQueue[Ask] = queue.SimpleQueue()
        threading.Thread(target=_listen, args=(channel, asked), name="tensile-listener", daemon=True).start()
        work = _Work(channel, payload, device)
        del payload  # so that the state in it can be freed
        while (ask := asked.get()).what != "close":
            work.do(ask)
        work.close()
    except EOFError:
        os._exit(1)
    except BaseException as error:
        channel.send(Refused(None, carry(error), fatal=True))
        raise SystemExit(1) from error


def _send_signs_of_life(channel: Channel, parent: int) -> None:
    """Send heartbeats as long as the runtime's process exists; then end this process."""
    try:
        while os.getppid() == parent:
            channel.send(Heartbeat())
            time.sleep(_SIGN_OF_LIFE_S)
    finally:
        os._exit(1)


def _listen(channel: Channel, asked: "queue.SimpleQueue[Ask]") -> None:
    try:
        while True:
            asked.put(channel.receive())
    finally:
        os._exit(1)


class _Work:
    """The job in this process. `do` calls the method that is requested.

    If the method returns a function, another thread calls that function to get the answer.
    """

    def __init__(self, channel: Channel, payload: Payload, device: Device) -> None:
        self._channel = channel
        step, state, batches = payload.open()
        step, state, _ = pure_job(step, state)  # nobody else sees the user's objects here, so no state is written into them
        structure = None if payload.state is not None else pack_structure(state)
        self._checkpoints: Checkpoints | None = None
        given_on_host = payload.given_on_host if payload.state is not None else places_on_host(state)
        if payload.checkpoints is not None:
            state = self._checkpoints_in(payload.checkpoints).restore(payload.first, state)
        self._actor = LocalActor(step, state, Transfer(device), given_on_host=given_on_host)
        self._actor.own()
        self._compiler = Compiler(device)
        self._feed = Feed(batches, skip=payload.first, on_step=None, tell=self._heard, name=payload.name)
        self._feed_stopped = threading.Event()
        self._first_batch: Any = NO_BATCH
        self._snapshots: dict[int, Any] = {}
        self._planner = ThreadPoolExecutor(1, "tensile-planner")
        self._saver = ThreadPoolExecutor(1, "tensile-saver")
        self._waiters = ThreadPoolExecutor(_WAITING_THREADS, "tensile-waiter")
        self._elsewhere: dict[str, Executor] = {
            "trace": self._planner, "jit_peak_bytes": self._planner, "plan": self._planner,
            "save": self._saver, "fetch": self._saver,
        }  # fmt: skip
        channel.send(News(Made(self._actor.state_bytes, structure)))

    def do(self, ask: Ask) -> None:
        """Carry out one request."""
        method: Callable[..., Any] = getattr(self, f"on_{ask.what}", None) or getattr(self._actor, ask.what)
        pool = self._elsewhere.get(ask.what)
        if pool is not None:
            pool.submit(self._answer, ask, lambda: method(*ask.args))
            return
        try:
            found = method(*ask.args)
        except Exception as error:
            self._refuse(ask, error)
            return
        if ask.number is None:
            return
        if callable(found):
            self._waiters.submit(self._answer, ask, found)
        else:
            self._channel.send(Answer(ask.number, found))

    def close(self) -> None:
        """Stop the feed, and wait a little for the user's generator to end."""
        self._feed.stop()
        self._feed_stopped.wait(_END_S)

    def _answer(self, ask: Ask, find: Callable[[], Any]) -> None:
        assert ask.number is not None  # the runtime waits for the answer
        try:
            self._channel.send(Answer(ask.number, find()))
        except BaseException as error:
            self._refuse(ask, error)

    def _refuse(self, ask: Ask, error: BaseException) -> None:
        self._channel.send(Refused(ask.number, carry(error), fatal=ask.what not in self._elsewhere))

    def _heard(self, news: FeedEvent) -> None:
        """Send news of the feed to the runtime. In the feed's thread."""
        if isinstance(news, FeedStopped):
            self._feed_stopped.set()
        else:
            self._channel.send(News(carry(news.error) if isinstance(news, UserCodeFailed) else news))

    def _checkpoints_in(self, folder: Path) -> Checkpoints:
        if self._checkpoints is None:
            self._checkpoints = Checkpoints(folder)
        return self._checkpoints

    # -- requests beside the methods of the actor ---------------------------------------------------------------------------

    def on_draw(self) -> None:
        self._feed.start()

    def on_trace(self, options: Options) -> AccessSequence | None:
        self._first_batch = self._feed.take()
        return self._actor.trace(self._first_batch, replace(options, progress=self._tell), self._compiler)

    def _tell(self, what: str, done: int, of: int) -> None:
        self._channel.send(News(Told(what, done, of)))

    def on_begin(self, watch: bool) -> None:
        first, self._first_batch = self._first_batch, NO_BATCH
        self._actor.begin(self._feed.take() if first is NO_BATCH else first, watch=watch)

    def on_take_metrics(self) -> Callable[[], tuple[Any, tuple[int, int]]]:
        counts, wait = self._actor.counts(), self._actor.take_metrics()
        return lambda: (wait(), counts)

    def on_keep(self, number: int) -> None:
        self._snapshots[number] = self._actor.state().fetch()

    def on_save(self, number: int, folder: Path, step: int) -> str:
        return self._checkpoints_in(folder).save(step, self._snapshots[number])

    def on_fetch(self, number: int) -> PackedTree:
        return pack_tree(self._snapshots[number])

    def on_release(self, number: int) -> None:
        del self._snapshots[number]
