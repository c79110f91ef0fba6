"""Lets the processes that run one step together (`jax.distributed`) agree on what they launch.

Devices of several processes exchange data while a program runs. So every process must launch the same programs in the same order,
or all of them wait for ever. If one process learns something that changes what is launched (a measured size, an error, its free
memory), it must first tell all others:

    session      a conversation of all processes of a step, about one plan, for instance. The processes open the same sessions in
                 the same order
    gather       every process gives a value, and gets the values of all processes
    tell, hear   the first process of the step, which plans for all of them, tells a value, and the others hear it

Every process takes part in every exchange of a session, even a process that has failed. A failed process gives its error as its
value, and all processes raise an error. In the last exchange of a session, each process says that it has come to the end.

A process that dies says nothing. The others then wait inside a program on their devices, as they do under plain `jax.jit`, until
`jax.distributed` ends them.
"""

import atexit
import logging
import os
import sys
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, Protocol, TypeVar

import jax
import msgspec

from tensile_jax.errors import BudgetTooSmall, DistributedError, PlanFileError, TensileError, TraceError
from tensile_jax.exec.processes.conversation import TIMEOUT_S, Conversation, Exchange
from tensile_jax.exec.processes.exchange import exchanged
from tensile_jax.exec.transfer import Device

_END_S = 5.0  # how long a process that ends waits until the others have heard why; not tuned
_Value = TypeVar("_Value")


class Agreement(Protocol):
    """How a process agrees with the others that run the same step. Outside of a session, every process is by itself.

    Attributes:
        processes: the numbers of the processes, ascending.
        leads: whether this process plans for all of them.
    """

    @property
    def processes(self) -> tuple[int, ...]: ...

    @property
    def leads(self) -> bool: ...

    def session(self, what: str) -> Any:
        """`with agreement.session(what):` is a session about `what`, which error messages name.

        Raises:
            DistributedError: another process has failed in the session, or does not answer.
            TensileError: the error of a process that has failed.
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

    def leave(self, error: BaseException) -> None:
        """Take note that a step has failed in the middle, so that this process runs no further step with the others."""
        ...

    def begin_step(self) -> None:
        """Begin a step.

        Raises:
            DistributedError: an earlier one has failed in the middle in this process. The others may still wait in it.
        """
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

    def leave(self, error: BaseException) -> None:
        pass

    def begin_step(self) -> None:
        pass


ALONE = Alone()


class _Failure(msgspec.Struct, frozen=True):
    """Why a process has left a session: the type and the text of its error, and what a `BudgetTooSmall` has in addition."""

    kind: str
    message: str
    budget_bytes: int = 0
    floor_bytes: int = 0


class _Said(msgspec.Struct, frozen=True):
    """What a process gives in an exchange: a value as JSON, or why it has failed."""

    value: msgspec.Raw = msgspec.Raw(b"null")
    failure: _Failure | None = None


class Together:
    """The agreement of several processes.

    Args:
        process: the number of this process.
        processes: the numbers of all processes that take part, ascending.
        exchange: gives this process's bytes to all others, and returns those of all, in their order.
    """

    def __init__(self, process: int, processes: tuple[int, ...], exchange: Exchange) -> None:
        self.process = process
        self.processes = processes
        self.leads = process == processes[0]
        self._exchange = exchange
        self._latest: Conversation | None = None
        self._about = ""  # what the open session is about; empty if there is none
        self._left = ""  # the error of the step that has failed in the middle

    def wait_for_the_others(self, timeout_s: float) -> bool:
        """Wait until the latest session has ended for the others, too; whether it has."""
        return self._latest is None or self._latest.wait(timeout_s)

    @contextmanager
    def session(self, what: str) -> Iterator[None]:
        self.wait_for_the_others(TIMEOUT_S)  # they may not have heard yet why this process has left the session before
        self._latest, self._about = Conversation(self._exchange, what, _names(self.processes)), what
        try:
            yield
            self._say(_Said(), last=True)
        except BaseException as error:  # also a KeyboardInterrupt: the others must not wait for this process
            self._latest.leave(_packed(_Said(failure=_failure_of(error))))
            raise
        finally:
            self._about = ""

    def gather(self, value: _Value) -> list[_Value]:
        if not self._about:
            return [value]
        return [msgspec.json.decode(said.value) for said in self._say(_Said(msgspec.Raw(msgspec.json.encode(value))))]

    def tell(self, value: Any) -> None:
        if self._about and self.leads:
            self._say(_Said(msgspec.Raw(msgspec.json.encode(value))))

    def hear(self, kind: Any) -> Any:
        first, *_ = self._say(_Said())
        return msgspec.json.decode(first.value, type=kind)

    def _say(self, said: _Said, *, last: bool = False) -> list[_Said]:
        """What all processes have said.

        Raises:
            TensileError: the error of the first process that has failed.
        """
        assert self._latest is not None, "only in a session"
        found = [_unpacked(content) for content in self._latest.say(_packed(said), last=last)]
        for process, one in zip(self.processes, found, strict=True):
            if one.failure is not None:
                raise _error_of(one.failure, process, self._about)
        return found

    def leave(self, error: BaseException) -> None:
        self._left = _told(error)

    def begin_step(self) -> None:
        if self._left:
            raise DistributedError(
                f"An earlier step has failed in the middle in process {self.process} ({self._left}), and the other processes of "
                f"{_names(self.processes)} may wait in it. Begin all processes again, from the last checkpoint.",
                processes=(self.process,),
            )


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
    firsts = tuple(min((d for d in devices if d.process_index == p), key=lambda d: d.id) for p in processes)
    return _together(process, processes, firsts)


@cache
def _together(process: int, processes: tuple[int, ...], devices: tuple[Device, ...]) -> Together:
    found = Together(process, processes, partial(exchanged, devices, process))
    atexit.register(_end_with, found)
    return found


def writes_files() -> bool:
    """Whether this process writes what is written once for all processes: it is alone, or process 0 of `jax.distributed`."""
    return not jax.distributed.is_initialized() or jax.process_index() == 0


def _end_with(agreement: Together) -> None:
    """At the exit of the interpreter: end the process, where one of its threads waits in a device for others that do not come.

    Freeing JAX's devices would wait for that for ever.
    """
    if not agreement.wait_for_the_others(_END_S):
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def _packed(said: _Said) -> bytes:
    return zlib.compress(msgspec.json.encode(said), 1)


def _unpacked(content: bytes) -> _Said:
    return msgspec.json.decode(zlib.decompress(content), type=_Said)


def _told(error: BaseException) -> str:
    """The type of an error, and the first line of its text."""
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


_SAME_EVERYWHERE: Mapping[str, type[TensileError]] = {"PlanFileError": PlanFileError, "TraceError": TraceError}


def _failure_of(error: BaseException) -> _Failure:
    if isinstance(error, BudgetTooSmall):
        return _Failure("BudgetTooSmall", error.message, error.budget_bytes, error.floor_bytes)
    if isinstance(error, TraceError):
        return _Failure("TraceError", error.message)
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
