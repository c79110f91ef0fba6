"""The runtime's end of a job that runs in a process of its own, as every job does in the paper (TENSILE section III-D).

The runtime decides every move and asks the process to carry it out. The process (`exec/process/child.py`) has a `LocalActor` and
the user's step and batches; the only thing that it does unasked is to draw batches ahead. It carries out the moves in the order
in which they are asked for. A `Wait` waits for the process's answer.

The process keeps objects for the runtime: a traced step, programs, states at rest. `RemoteStep`, `RemoteProgram` and
`RemoteState` stand for them here, each with a key. The process forgets an object when the one that stands for it is gone.
"""

import itertools
import pickle
import queue
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from tensile_jax.exec.actor.actor import StateSnapshot, Wait
from tensile_jax.exec.actor.entrypoint import Entrypoint
from tensile_jax.exec.actor.feed_news import BatchReady
from tensile_jax.exec.checkpoint.checkpoints import Checkpoints
from tensile_jax.exec.process.carried_exception import CarriedException
from tensile_jax.exec.process.job_process import JobProcess
from tensile_jax.exec.process.payload import PackedTree, pack_job
from tensile_jax.exec.step.compile import Compiler
from tensile_jax.exec.step.prepared_step import Options
from tensile_jax.exec.step.transfer import Device, on_host
from tensile_jax.ir import TensorId
from tensile_jax.plan.multi_job.memory_profile import INSTANT, MemoryProfile
from tensile_jax.plan_format import Plan


@dataclass(frozen=True, slots=True)
class Made:
    """News: the job is made. `structure` is that of its state, pickled, where the runtime does not know it."""

    state_bytes: int
    structure: bytes | None


@dataclass(frozen=True, slots=True)
class Summary:
    """What the runtime gets to know of a program; `copies` are the moves that start copies."""

    plan: Plan
    demand: MemoryProfile
    offloaded: frozenset[TensorId]
    may_be_offloaded: tuple[tuple[TensorId, int], ...]
    copies: frozenset[int]


class _Remote:
    """Something that the process keeps under `key`, until this end of it is gone."""

    def __init__(self, actor: "IsolatedActor") -> None:
        self.actor = actor
        self.key = actor.new_key()

    def __del__(self) -> None:
        self.actor.process.forget(self.key)


class RemoteStep(_Remote):
    """A traced step."""

    def without_swaps(self) -> "RemoteStep":
        """The same, of which only plans without swaps are made."""
        found = RemoteStep(self.actor)
        self.actor.process.ask("without_swaps", found.key, self.key)()
        return found


class RemoteProgram(_Remote):
    """A compiled plan."""

    def __init__(self, actor: "IsolatedActor", prepared: RemoteStep, what: str, *args: Any) -> None:
        super().__init__(actor)
        self.prepared = prepared
        self.summary: Summary = actor.process.ask(what, self.key, *args)()
        self.plan, self.demand, self.offloaded = self.summary.plan, self.summary.demand, self.summary.offloaded

    def offload_state(self, tensors: frozenset[TensorId]) -> "RemoteProgram":
        """The same segments with these state tensors on the host between their uses."""
        return RemoteProgram(self.actor, self.prepared, "offload_state", self.key, tensors)

    def may_be_offloaded(self) -> tuple[tuple[TensorId, int], ...]:
        """State tensors that `offload_state` could send out and that are not out yet, and their bytes."""
        return self.summary.may_be_offloaded


class RemoteState(_Remote):
    """A state at rest."""

    def save(self, checkpoints: Checkpoints, step: int) -> str:
        """The process writes the checkpoint; the state does not come here for that."""
        return self.actor.process.ask("save", self.key, checkpoints.folder, step)()

    def fetch(self) -> Any:
        """The state, as NumPy arrays; what those cannot be, weakly typed arrays and keys, as `jax.Array`s on the host.

        Raises:
            RuntimeError: the process has not made the job yet, and is ended, since its user's code may hang there.
        """
        if (found := self.actor.end_before_made()) is not None:
            return found.unpack(self.actor.structure)
        return self.actor.process.ask("fetch", self.key)().unpack(self.actor.structure)


class IsolatedActor:
    """The runtime's end of a job in a process of its own, which is started by the first demand on it.

    Args:
        step: a function, or an `Entrypoint` which makes the job there.
        first: so many steps are done already; then the state of an entrypoint is that in the folder `checkpoints`.
        lock: a file that the process keeps open, so that the lock on it holds until the process has ended.
        died: told once, in another thread, if the process ends on its own.

    Raises:
        TypeError: step, state or batches cannot be sent.
    """

    def __init__(
        self,
        step: Callable[..., Any] | Entrypoint,
        state: Any,
        batches: Any,
        *,
        name: str,
        device: Device,
        first: int,
        checkpoints: Path | None,
        lock: int | None,
        died: Callable[[BaseException], None],
    ) -> None:
        resumed = checkpoints if first else None
        payload = pack_job(step, state, batches, name=name, device=device, first=first, checkpoints=resumed)
        self.structure = jax.tree.structure(state)
        self.state_bytes = 0 if payload.state is None else payload.state.nbytes
        self.process = JobProcess(payload, lock=lock, receive=self._heard, died=died)
        self._unmade: PackedTree | None = payload.state  # until the process has it
        self._is_made = False
        self._given = [leaf for leaf in jax.tree.leaves(state) if isinstance(leaf, jax.Array) and not on_host(leaf)]
        self._keys = itertools.count()
        self._drawn: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._program: RemoteProgram | None = None
        self._renewed: RemoteProgram | None = None
        self._admitted = False
        self._watch = False
        self._counts = (0, 0)  # at the end of the latest iteration

    @property
    def program(self) -> RemoteProgram:
        """What is carried out. It must have been prepared."""
        assert self._program is not None
        return self._program

    def new_key(self) -> int:
        """One that was not used before."""
        return next(self._keys)

    def batches(self) -> Iterator[Any]:
        """A token for each batch that the process has drawn; raises what the user's code has raised there."""
        self.process.tell("draw")
        while True:
            news = self._drawn.get()
            if isinstance(news, CarriedException):
                raise news.exception()
            if not isinstance(news, BatchReady):
                return
            yield np.int32(0)

    def _heard(self, news: Any) -> None:
        """In the process's reader."""
        if isinstance(news, Made):
            self._is_made, self._unmade = True, None
            self.state_bytes = news.state_bytes
            if news.structure is not None:
                self.structure = jax.tree.structure(pickle.loads(news.structure))
        else:
            self._drawn.put(news)

    def end_before_made(self) -> PackedTree | None:
        """If the process has not made the job yet: end it; the state as it was given. None if it has made the job.

        Raises:
            RuntimeError: it has not, and the state was to be made there.
        """
        unmade = self._unmade
        if self._is_made:
            return None
        self.process.close()
        self.process.kill()
        if unmade is None:
            raise RuntimeError("its own process had not made it yet, and was ended")
        return unmade

    # -- before it is admitted --------------------------------------------------------------------------------------------------

    def own(self) -> None:
        for leaf in self._given:  # their bytes are on their way
            leaf.delete()
        self._given = []

    def trace(self, batch: Any, options: Options, compiler: Compiler) -> RemoteStep:
        del batch, compiler  # the process has its own
        step = RemoteStep(self)
        self.process.ask("trace", step.key, replace(options, progress=None))()
        return step

    def prepare(self, prepared: RemoteStep, budget_bytes: int) -> RemoteProgram:
        return RemoteProgram(self, prepared, "prepare", prepared.key, budget_bytes)

    def use(self, program: RemoteProgram) -> None:
        if self._admitted:
            self._renewed = program
        else:
            self._program = program
        self.process.tell("use", program.key)

    # -- an Actor ---------------------------------------------------------------------------------------------------------------

    def admit(self) -> None:
        self._admitted = True
        self.process.tell("admit")

    def adopt(self) -> None:
        self._program, self._renewed = self._renewed, None
        self.process.tell("adopt")

    def begin(self, batch: Any, *, watch: bool) -> None:
        del batch  # a token; the process has the batches
        self._watch = watch
        self.process.tell("begin", watch)

    def issue(self, move: int) -> Wait | None:
        summary = self.program.summary
        if summary.demand.kinds[move] != INSTANT or (self._watch and move in summary.copies):
            return self.process.ask("issue", move)
        self.process.tell("issue", move)
        return None

    def take_metrics(self) -> Wait:
        answer = self.process.ask("take_metrics")

        def wait() -> Any:
            metrics, self._counts = answer()
            return metrics

        return wait

    def park(self) -> Wait:
        return self.process.ask("park")

    def unpark(self) -> Wait:
        return self.process.ask("unpark")

    def live_bytes(self) -> Wait:
        return self.process.ask("live_bytes")

    def watched_bytes(self) -> Wait:
        return self.process.ask("watched_bytes")

    def state(self) -> StateSnapshot:
        kept = RemoteState(self)
        self.process.tell("keep", kept.key)
        return kept

    def counts(self) -> tuple[int, int]:
        return self._counts

    def free_device_arrays(self) -> None:
        self.process.tell("free_device_arrays")

    def save_before_dropping(self) -> tuple[StateSnapshot, Wait] | None:
        return None  # a process in which a move has failed ends

    def drop(self) -> None:
        self.process.kill()

    def close(self) -> None:
        self.process.close()
        self._drawn.put(None)

    def join(self) -> None:
        self.process.join()
