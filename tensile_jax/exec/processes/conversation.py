"""Lets all processes that run one step together (`jax.distributed`) exchange messages, in rounds.

With these messages, `agreement.py` makes the processes agree on what they launch, so that all launch the same programs in the
same order. In each round, every process sends a message and receives all others. A process takes part in two ways:

    say(content)      waits until every process has said something, and returns what all of them have said
    leave(content)    says something for the last time, and does not wait

Each process has a thread that takes part in the rounds. If a process still plans or compiles and has nothing to say after two
seconds (`_PATIENCE_S`), its thread tells the others so, and the round is repeated. A longer round could fail, because Gloo,
through which CPUs exchange data, gives up after half a minute. Settings that the user changes in another thread, by
`jax.set_mesh` for instance, do not affect this thread.

The conversation is over after a round in which some process has said something for the last time.
"""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import NamedTuple

from tensile_jax.errors import DistributedError

TIMEOUT_S = 600.0
"""How long a process waits for the others, which may have to compile or to plan first. Not tuned."""
_PATIENCE_S = 2.0  # what a round waits for a process that has nothing to say yet; not tuned, but far below Gloo's 30 s
_NOTHING, _MORE, _LAST = b"", b"+", b"."  # how what is said begins: there is nothing yet, more may follow, or nothing follows

Exchange = Callable[[bytes], list[bytes]]
"""Gives a process's bytes to all others, and returns those of all processes, in their order."""


class _Said(NamedTuple):
    """What this process says, and where what all have said goes."""

    content: bytes
    heard: "Future[list[bytes]]"


class Conversation:
    """A conversation, in this process.

    Args:
        exchange: one round.
        about: what the conversation is about, for error messages.
        names: the processes, for error messages.
    """

    def __init__(self, exchange: Exchange, about: str, names: str) -> None:
        self._exchange = exchange
        self._about = about
        self._names = names
        self._to_say: queue.SimpleQueue[_Said] = queue.SimpleQueue()
        self._over = threading.Lock()  # with it, nothing is said, or the conversation ends
        self._why: DistributedError | None = None  # the error for what is said after the conversation has ended
        self._thread = threading.Thread(target=self._talk, name="tensile-processes", daemon=True)
        self._thread.start()

    def say(self, content: bytes, *, last: bool = False) -> list[bytes]:
        """What all processes have said, once each has said something. With `last`, this process says no more.

        Raises:
            DistributedError: a process does not come, or the devices cannot reach one another.
        """
        try:
            heard = self._put(content, last=last).result(TIMEOUT_S)
        except TimeoutError:
            raise DistributedError(
                f"A process has not come for {TIMEOUT_S:g} s, while the processes {self._names} meet to agree on {self._about}. "
                "All processes must call the same steps, with the same arguments but for their parts of divided arrays, in the "
                "same order.",
                processes=(),
            ) from None
        return [one[1:] for one in heard]

    def leave(self, content: bytes) -> None:
        """Say this for the last time, unless the conversation is over. The others hear it in the next round."""
        self._put(content, last=True)

    def wait(self, timeout_s: float) -> bool:
        """Wait until this process takes part in no further round; whether that is so."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _put(self, content: bytes, *, last: bool) -> "Future[list[bytes]]":
        said = _Said((_LAST if last else _MORE) + content, Future())
        with self._over:
            if self._why is None:
                self._to_say.put(said)
            else:
                said.heard.set_exception(self._why)
        return said.heard

    def _talk(self) -> None:
        """Take part in the rounds. In a thread of its own."""
        saying: _Said | None = None
        while True:
            if saying is None:
                with suppress(queue.Empty):
                    saying = self._to_say.get(timeout=_PATIENCE_S)
            try:
                heard = self._exchange(_NOTHING if saying is None else saying.content)
            except Exception as error:
                lines = str(error).splitlines()
                told = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
                self._end(saying, f"so a process may have died: {told}")
                return
            if saying is None or not all(heard):
                continue
            if any(one.startswith(_LAST) for one in heard):
                self._end(None, "since it is over")
                saying.heard.set_result(heard)
                return
            saying.heard.set_result(heard)
            saying = None

    def _end(self, saying: _Said | None, why: str) -> None:
        """Answer what is said from now on, and what waits to be said, with an error."""
        failure = DistributedError(f"The processes {self._names} cannot meet to agree on {self._about}, {why}", processes=())
        with self._over:
            self._why = failure
            waiting = [] if saying is None else [saying]
            with suppress(queue.Empty):
                while True:
                    waiting.append(self._to_say.get_nowait())
        for one in waiting:
            one.heard.set_exception(failure)
