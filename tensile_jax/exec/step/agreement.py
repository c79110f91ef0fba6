"""Lets the processes of a step that runs on devices of several processes (`jax.distributed`) agree on what they launch.

Devices of several processes exchange data while a program runs. So every process must launch the same programs in the same
order, or all of them wait for ever. What one process alone knows (a measured size, an error, its free memory) may therefore
change what is launched only after all processes have been told. They tell one another through a key-value store, which the first
process serves (`joined_store.py`), and not through their devices:

    session      a conversation of all processes of a step, about one plan, for instance. The processes open the same sessions in
                 the same order. A process that fails in a session tells the others, and all of them raise an error
    gather       every process gives a value, and gets the values of all
    tell, hear   the first process of the step, which plans for all of them, gives a value, and the others get it

Values are JSON, compressed. Keys are numbered in the order of the exchanges, which is the same in all processes:

    SESSION/EXCHANGE/PROCESS     a value
    SESSION/failed/PROCESS       why a process has left a session
    ended/PROCESS                why a process runs no further step, and how many it has run

A process that waits for a value looks for failures twice a second, and gives up after `TIMEOUT_S`. On a CPU, a process that waits
for a result of its devices looks twice a second whether another process has ended before that step, since the result then never
comes: Gloo does not fail when a peer has gone (jax 0.10.2). A process that is killed tells nobody. But its connection to the
store ends, which the first process writes down for it. If the first process is killed, all connections end.
"""

import atexit
import logging
import os
import sys
import time
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Protocol, TypeVar

import jax
import msgspec

from tensile_jax.errors import BudgetTooSmall, DistributedError, PlanFileError, TensileError, TraceError
from tensile_jax.exec.out_of_memory import is_out_of_memory
from tensile_jax.exec.step.joined_store import start_joining
from tensile_jax.exec.step.key_value_store import Store, Values
from tensile_jax.exec.transfer import Device

TIMEOUT_S = 600.0
"""How long a process waits for a value of another one, which may have to compile or to plan first. Not tuned."""
_LOOK_S = 0.5  # between two looks for failures of other processes
_SHORTEST_S, _LONGEST_S = 5e-5, 2e-3  # between two looks at whether a result is ready
_ENDED = "ended/"

_Value = TypeVar("_Value")


class Agreement(Protocol):
    """How a process agrees with the others that run the same step. Outside of a session, every process is by itself.

    Attributes:
        processes: the numbers of the processes, ascending.
        leads: whether this process plans for all of them.
    """

    processes: tuple[int, ...]
    leads: bool

    def session(self, what: str) -> Any:
        """`with agreement.session(what):` is a session about `what`, which error messages name.

        Raises:
            DistributedError: another process has failed in the session, or does not answer.
        """
        ...

    def gather(self, value: _Value) -> list[_Value]:
        """The values of all processes, in their order. `value` consists of numbers, texts, lists and dicts."""
        ...

    def tell(self, value: Any) -> None:
        """In the process that plans: give a value to the others. In the others: nothing."""
        ...

    def hear(self, kind: Any) -> Any:
        """In the other processes: the next value, of type `kind`, that the process that plans has told."""
        ...

    def wait_for(self, values: Any) -> None:
        """Wait until the arrays in the tree `values` exist.

        Raises:
            DistributedError: another process runs no further step, so that the arrays will never exist.
        """
        ...

    def leave(self, error: BaseException) -> None:
        """Tell the others that a step has failed in the middle, so that this process runs no further step with them."""
        ...

    def begin_step(self) -> None:
        """Begin a step.

        Raises:
            DistributedError: an earlier one has failed in the middle in this process. The others may still wait in it.
        """
        ...

    def finish_step(self) -> None:
        """Say that this process has done its part of the step."""
        ...


class Alone:
    """The agreement of one process with itself."""

    processes: tuple[int, ...] = (0,)
    leads = True

    @contextmanager
    def session(self, what: str) -> Iterator[None]:
        yield

    def gather(self, value: _Value) -> list[_Value]:
        return [value]

    def tell(self, value: Any) -> None:
        pass

    def hear(self, kind: Any) -> Any:
        raise AssertionError("a process that is alone plans itself")

    def wait_for(self, values: Any) -> None:
        jax.block_until_ready(values)

    def leave(self, error: BaseException) -> None:
        pass

    def begin_step(self) -> None:
        pass

    def finish_step(self) -> None:
        pass


ALONE = Alone()


class _Failure(msgspec.Struct, frozen=True):
    """Why a process has left a session: the type and the text of its error, and what a `BudgetTooSmall` has in addition."""

    kind: str
    message: str
    budget_bytes: int = 0
    floor_bytes: int = 0


class _End(msgspec.Struct, frozen=True):
    """Why a process runs no further step, and how many steps it has finished. `lost`: it has not said so itself."""

    why: str
    steps: int = 0
    lost: bool = False


class Together:
    """The agreement of several processes.

    Args:
        process: the number of this process.
        processes: the numbers of all processes that take part, ascending.
        join: starts to connect this process to the store of them all. Called at the first session.
    """

    def __init__(self, process: int, processes: tuple[int, ...], join: Callable[[], Future[Values]]) -> None:
        self.process = process
        self.processes = processes
        self.leads = process == processes[0]
        self.steps = 0  # that this process has finished
        self.knows_lost = False  # whether this process has heard of another one that was lost
        self._join = join
        self._store: Values | None = None
        self._sessions = 0
        self._exchanges = 0
        self._about: str | None = None  # what the open session is about; None if there is none
        self._heard = False  # whether another process has failed in it
        self._left = ""  # the error of the step that has failed in the middle

    # -- sessions ---------------------------------------------------------------------------------------------------

    @contextmanager
    def session(self, what: str) -> Iterator[None]:
        if self._store is None:
            self._store = self._joined(what)
        self._sessions += 1
        self._exchanges, self._about, self._heard = 0, what, False
        try:
            yield
        except BaseException as error:  # also a KeyboardInterrupt: the others must not wait for this process
            if self._heard:  # the others hear it from the process that has failed
                raise
            with suppress(OSError):  # the store may be what has failed
                self._put(f"{self._sessions}/failed/{self.process}", _failure_of(error))
            raise
        finally:
            self._about = None

    def gather(self, value: _Value) -> list[_Value]:
        if self._about is None:
            return [value]
        key = self._next()
        self._put(f"{key}/{self.process}", value)
        found = [value if p == self.process else self._wait(f"{key}/{p}", p, Any) for p in self.processes]
        if self.leads and self._exchanges == 1 and self._sessions > 1:  # all have left the session before this one
            self._values.delete(f"{self._sessions - 1}/")
        return found

    def tell(self, value: Any) -> None:
        if self._about is not None and self.leads:
            self._put(f"{self._next()}/{self.process}", value)

    def hear(self, kind: Any) -> Any:
        return self._wait(f"{self._next()}/{self.processes[0]}", self.processes[0], kind)

    @property
    def _values(self) -> Values:
        assert self._store is not None, "only in a session, and after one"
        return self._store

    def _next(self) -> str:
        self._exchanges += 1
        return f"{self._sessions}/{self._exchanges}"

    def _put(self, key: str, value: Any) -> None:
        self._values.put(key, _packed(value))

    def _joined(self, what: str) -> Values:
        """The store of these processes.

        Raises:
            DistributedError: a process does not come, or cannot connect.
        """
        names, future = _names(self.processes), self._join()
        try:
            return future.result(TIMEOUT_S)
        except TimeoutError:
            raise DistributedError(
                f"A process has not come for {TIMEOUT_S:g} s, while the processes {names} meet to agree on {what}. All processes "
                "must call the same steps, with the same arguments but for their parts of divided arrays, in the same order.",
                processes=(),
            ) from None
        except (jax.errors.JaxRuntimeError, OSError) as error:
            raise DistributedError(
                f"The processes {names} cannot meet to agree on {what}, so a process may have died: {_told(error)}", processes=()
            ) from error
        finally:
            if not future.done():
                _UNFINISHED.append(future.done)

    def _wait(self, key: str, process: int, kind: Any) -> Any:
        """The value that another process gives under a key.

        Raises:
            DistributedError: a process has failed, or `process` does not answer.
            TensileError: the error of a process that has failed.
        """
        until = time.monotonic() + TIMEOUT_S
        while True:
            with self._reaching():
                found = self._values.get(key, _LOOK_S)
            if found is not None:
                return _unpacked(found, kind)
            self._refuse_failed()
            self._refuse_ended()
            if time.monotonic() > until:
                raise DistributedError(
                    f"Process {process} has not answered for {TIMEOUT_S:g} s, while the processes {_names(self.processes)} "
                    f"agree on {self._about}. All processes must call the same steps, with the same arguments but for their "
                    "parts of divided arrays, in the same order.",
                    processes=(process,),
                )

    def _refuse_failed(self) -> None:
        """Raise the error of the first other process that has failed in this session, if one has."""
        for process, content in self._entries(f"{self._sessions}/failed/"):
            if process != self.process:
                self._heard = True
                raise _error_of(_unpacked(content, _Failure), process, self._about or "")

    def _entries(self, prefix: str) -> list[tuple[int, bytes]]:
        """(process, value) of all keys that begin with `prefix` and end with the number of a process, by that number."""
        with self._reaching():
            entries = self._values.entries(prefix)
        return sorted((int(key.rsplit("/", 1)[1]), content) for key, content in entries)

    @contextmanager
    def _reaching(self) -> Iterator[None]:
        """While this asks the store.

        Raises:
            DistributedError: the process that holds it has ended, or cannot be reached.
        """
        try:
            yield
        except OSError as error:
            first = self.processes[0]
            self.knows_lost = True
            raise DistributedError(
                f"Process {first}, through which the processes {_names(self.processes)} agree, has ended or cannot be reached "
                f"({error}), so process {self.process} cannot go on. Begin all processes again, from the last checkpoint.",
                processes=(first,),
            ) from error

    # -- steps ------------------------------------------------------------------------------------------------------

    def wait_for(self, values: Any) -> None:
        # arrays of random keys cannot be asked whether they are ready; what the same launch has made besides can
        arrays = [v for v in jax.tree.leaves(values) if hasattr(v, "is_ready") and not v.is_deleted()]
        pause, look = _SHORTEST_S, time.monotonic() + _LOOK_S
        try:
            while not all(array.is_ready() for array in arrays):
                time.sleep(pause)
                pause = min(pause * 1.5, _LONGEST_S)
                if time.monotonic() > look:
                    self._refuse_ended()
                    look = time.monotonic() + _LOOK_S
        except BaseException:
            _UNFINISHED.extend(partial(_is_over, array) for array in arrays)
            raise
        try:
            jax.block_until_ready(values)
        except jax.errors.JaxRuntimeError as error:
            if not is_out_of_memory(error, effectful=True):
                self._refuse_ended_soon()  # what has failed may be the connection of Gloo to a process that has ended
            raise

    def leave(self, error: BaseException) -> None:
        self._left = _told(error)
        self.say_ended(f"a step has failed in it with {self._left}")

    def begin_step(self) -> None:
        if self._left:
            raise DistributedError(
                f"An earlier step has failed in the middle in process {self.process} ({self._left}), and the other processes of "
                f"{_names(self.processes)} may wait in it. Begin all processes again, from the last checkpoint.",
                processes=(self.process,),
            )

    def finish_step(self) -> None:
        self.steps += 1

    def say_ended(self, why: str) -> None:
        """Tell the others that this process runs no further step."""
        if self._store is not None:
            with suppress(OSError):  # the process that holds the store may have ended already
                self._put(f"{_ENDED}{self.process}", _End(why, self.steps))

    def _refuse_ended(self) -> None:
        """Raise an error if another process has ended without its part of the step that is next, or runs, in this one.

        Raises:
            DistributedError: there is such a process.
        """
        for process, content in self._entries(_ENDED):
            ended = _unpacked(content, _End)
            if process != self.process and ended.steps <= self.steps:
                self.knows_lost |= ended.lost
                raise DistributedError(
                    f"Process {process} runs no further step ({ended.why}), so a step that needs all of the processes "
                    f"{_names(self.processes)} cannot go on in process {self.process}. Begin all processes again, from the last "
                    "checkpoint.",
                    processes=(process,),
                )

    def _refuse_ended_soon(self) -> None:
        """As `_refuse_ended`, where the end of the other process may become known in a moment."""
        until = time.monotonic() + 2 * _LOOK_S
        while time.monotonic() < until:
            self._refuse_ended()
            time.sleep(_LOOK_S / 10)


def note_lost(store: Store, process: int) -> None:
    """Write into the store that the connection of a process has ended, unless that process has said why it ends."""
    key = f"{_ENDED}{process}"
    if store.get(key, 0) is None:
        store.put(key, _packed(_End("its connection has ended: it was killed, or its machine or the network fails", lost=True)))


def compare(agreement: Agreement, mine: Mapping[str, str], what: str) -> None:
    """Refuse a session whose processes have different values of something that must be the same in all of them.

    Args:
        mine: the values in this process, by their names.

    Raises:
        DistributedError: values differ; the message names the processes and the values, and is the same in all processes.
    """
    first, *others = agreement.gather(dict(mine))
    leader, *numbers = agreement.processes
    differing: list[int] = []
    stories: list[str] = []
    for process, record in zip(numbers, others, strict=True):
        found = [name for name in first if record[name] != first[name]]
        if found:
            differing.append(process)
            stories += [f"{name} is {record[name]} in process {process} and {first[name]} in process {leader}" for name in found]
    if stories:
        raise DistributedError(
            f"The processes {_names(agreement.processes)} do not have the same {what}: {'; '.join(stories[:4])}. Give all "
            "processes the same step, the same options and the same versions.",
            processes=tuple(differing),
        )


def agreement_of(devices: Collection[Device]) -> Agreement:
    """The agreement among the processes of these devices.

    Raises:
        TraceError: this process has none of the devices, or `jax.distributed` was not initialized.
    """
    processes = tuple(sorted({device.process_index for device in devices}))
    if len(processes) < 2:
        return ALONE
    process = jax.process_index()
    if process not in processes:
        raise TraceError(
            f"The step runs on devices of the processes {_names(processes)}, and process {process}, which calls it, has none of "
            "these. Call it in these processes only, or give it a mesh with devices of all processes."
        )
    if not jax.distributed.is_initialized():
        raise TraceError(
            f"The step runs on devices of the processes {_names(processes)}. Call jax.distributed.initialize() in each of them, "
            "or use jax.jit for this step."
        )
    if processes not in _AGREEMENTS:
        if not _AGREEMENTS:
            atexit.register(_end)
        firsts = [min((d for d in devices if d.process_index == p), key=lambda d: d.id) for p in processes]
        _AGREEMENTS[processes] = Together(process, processes, lambda: start_joining(firsts, process, note_lost))
    return _AGREEMENTS[processes]


_AGREEMENTS: dict[tuple[int, ...], Together] = {}
_UNFINISHED: list[Callable[[], bool]] = []
"""Of what this process no longer waits for: whether it is over. It may never be, if another process never does its part."""


def writes_files() -> bool:
    """Whether this process writes what is written once for all processes: it is alone, or process 0 of `jax.distributed`."""
    return not jax.distributed.is_initialized() or jax.process_index() == 0


def _end() -> None:
    """At the exit of the interpreter, before JAX waits for the other processes: they shall not wait for a step of this one.

    An interpreter in which a result is never ready does not end by itself: freeing JAX's devices waits for the result. This
    process then ends here, with code 1, after what JAX and `logging` do at the exit. JAX would wait for a process that was lost,
    so it is not asked then.
    """
    error = getattr(sys, "last_value", None)
    for one in _AGREEMENTS.values():
        if not one._left:
            one.say_ended("it has ended" if error is None else f"it has ended with {_told(error)}")
    lost = any(one.knows_lost for one in _AGREEMENTS.values())
    if lost or not all(is_over() for is_over in _UNFINISHED):
        if not lost:
            jax.distributed.shutdown()
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def _is_over(result: Any) -> bool:
    return result.is_deleted() or result.is_ready()


def _packed(value: Any) -> bytes:
    return zlib.compress(msgspec.json.encode(value), 1)


def _unpacked(content: bytes, kind: Any) -> Any:
    return msgspec.json.decode(zlib.decompress(content), type=kind)


def _told(error: BaseException) -> str:
    """The type of an error, and the first line of its text."""
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


_SAME_EVERYWHERE: Mapping[str, type[TensileError]] = {"PlanFileError": PlanFileError, "TraceError": TraceError}


def _failure_of(error: BaseException) -> _Failure:
    if isinstance(error, BudgetTooSmall):
        return _Failure("BudgetTooSmall", str(error), error.budget_bytes, error.floor_bytes)
    return _Failure(type(error).__name__, str(error))


def _error_of(failure: _Failure, process: int, what: str) -> TensileError:
    """The error that other processes raise for the failure of a process."""
    if failure.kind == "BudgetTooSmall":
        return BudgetTooSmall(
            f"{failure.message} (Process {process} has found this.)",
            budget_bytes=failure.budget_bytes,
            floor_bytes=failure.floor_bytes,
        )
    if failure.kind in _SAME_EVERYWHERE:
        return _SAME_EVERYWHERE[failure.kind](f"{failure.message} (Process {process} has found this.)")
    told = f"{failure.kind}: {failure.message}" if failure.message else failure.kind
    return DistributedError(f"Process {process} has failed while the processes agreed on {what}: {told}", processes=(process,))


def _names(processes: Sequence[int]) -> str:
    if len(processes) > 8:
        return f"{processes[0]} to {processes[-1]} ({len(processes)} of them)"
    return f"{', '.join(map(str, processes[:-1]))} and {processes[-1]}"
