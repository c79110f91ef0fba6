"""The actor of a job that runs in a process of its own, as every job does in the paper (TENSILE section III-D).

An `IsolatedActor` is an object in the runtime's process. For each of its methods, it sends a request to the job's process
(`exec/process/child.py`), which has a `LocalActor` and the user's step and batches. That process answers the requests in their
order. Without a request it only draws batches in advance. A method that starts something returns a function that waits for the
answer (`Wait` in `exec/actor/actor.py`).

The job's process keeps objects for the runtime: a traced step, compiled plans, and states. In the runtime's process,
`RemoteStep`, `RemoteProgram` and `RemoteState` refer to these objects by a key. When such a reference is deleted, the job's
process forgets the object.
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
from tensile_jax.exec.compiling.compiler import Compiler
from tensile_jax.exec.compiling.step import Options
from tensile_jax.exec.process.carried_exception import CarriedException
from tensile_jax.exec.process.job_process import JobProcess
from tensile_jax.exec.process.payload import PackedTree, pack_job
from tensile_jax.exec.transfer import Device, on_host
from tensile_jax.ir import TensorId
from tensile_jax.plan.analysis.access import AccessSequence
from tensile_jax.plan.multi_job.memory_profile import LAUNCH, WAIT, MemoryProfile
from tensile_jax.plan.policies.tensile.swap_scheduling import SwappedOut
from tensile_jax.plan.update import Tracked
from tensile_jax.plan_format import Plan


@dataclass(frozen=True, slots=True)
class Made:
    """News: the process has made the job. `structure` is the pickled structure of its state, unless the runtime knows it."""

    state_bytes: int
    structure: bytes | None


@dataclass(frozen=True, slots=True)
class Summary:
    """What the runtime needs to know of a compiled plan. `copies` are the numbers of the moves that start copies."""

    plan: Plan
    memory: MemoryProfile
    offloaded: frozenset[TensorId]
    may_be_offloaded: tuple[tuple[TensorId, int], ...]
    copies: frozenset[int]


class _Remote:
    """A reference to an object that the process keeps under `key`, until this reference is deleted."""

    def __init__(self, actor: "IsolatedActor") -> None:
        self.actor = actor
        self.key = actor.new_key()

    def __del__(self) -> None:
        self.actor.process.forget(self.key)


class RemoteStep(_Remote):
    """A reference to a traced step, with what is known of it here: its accesses, and the swaps on which jobs have agreed."""

    def __init__(self, actor: "IsolatedActor") -> None:
        super().__init__(actor)
        self._accesses: list[AccessSequence | None] = []  # one, once it was asked for
        self._swaps: tuple[SwappedOut, ...] | None = None

    def with_host_limit(self, host_limit: float) -> "RemoteStep":
        """The same step, from which plans are made that have so many bytes in host memory at most; zero: without swaps."""
        found = RemoteStep(self.actor)
        self.actor.process.ask("with_host_limit", found.key, self.key, host_limit)()
        return found

    def swapping_accesses(self) -> AccessSequence | None:
        """The accesses from which swaps are chosen for several jobs together; None if the policy does not take part in that."""
        if not self._accesses:
            self._accesses.append(self.actor.process.ask("swapping_accesses", self.key)())
        return self._accesses[0]

    def with_swaps(self, swaps: tuple[SwappedOut, ...]) -> "RemoteStep":
        """The same step, for which several jobs have agreed on these swaps; itself, if it has them already."""
        if swaps == self._swaps:
            return self
        found = RemoteStep(self.actor)
        found._accesses, found._swaps = self._accesses, swaps
        self.actor.process.ask("with_swaps", found.key, self.key, swaps)()
        return found


class RemoteProgram(_Remote):
    """A reference to a compiled plan."""

    def __init__(self, actor: "IsolatedActor", prepared: RemoteStep, what: str, *args: Any) -> None:
        super().__init__(actor)
        self.prepared = prepared
        self.summary: Summary = actor.process.ask(what, self.key, *args)()
        self.plan, self.memory, self.offloaded = self.summary.plan, self.summary.memory, self.summary.offloaded

    def offload_state(self, tensors: frozenset[TensorId]) -> "RemoteProgram":
        """The same segments with these state tensors on the host between their uses."""
        return RemoteProgram(self.actor, self.prepared, "offload_state", self.key, tensors)

    def renewed(self, tracked: Tracked, reason: str) -> "RemoteProgram":
        """The next plan of the step, from what was measured of this one's segments."""
        step = RemoteStep(self.actor)
        step._swaps = self.prepared._swaps
        return RemoteProgram(self.actor, step, "renew", step.key, self.key, tracked, reason)

    def may_be_offloaded(self) -> tuple[tuple[TensorId, int], ...]:
        """(tensor, bytes) of each state tensor that `offload_state` could keep on the host and that is not kept there yet."""
        return self.summary.may_be_offloaded


class RemoteState(_Remote):
    """A reference to a state between two iterations."""

    def save(self, checkpoints: Checkpoints, step: int) -> str:
        """Have the process write the checkpoint; the state is not sent to the runtime for that."""
        return self.actor.process.ask("save", self.key, checkpoints.folder, step)()

    def fetch(self) -> Any:
        """The state, as NumPy arrays. Weakly typed arrays and keys come as `jax.Array`s in host memory.

        If the process has not made the job yet, it is ended, since the user's code may hang there. The result is then the state
        that was submitted.

        Raises:
            RuntimeError: the process had not made the job yet, and was to make the state itself.
        """
        if (found := self.actor.end_before_made()) is not None:
            return found.unpack(self.actor.structure)
        return self.actor.process.ask("fetch", self.key)().unpack(self.actor.structure)


class IsolatedActor:
    """The actor of a job in a process of its own. The process is started by the first request.

    Args:
        step: a function, or an `Entrypoint`, which makes the job in the process.
        first: how many steps are done already. If it is not 0, the state of an entrypoint is read from the folder `checkpoints`.
        lock: the descriptor of a locked file. The process keeps the file open, so the lock holds until the process has ended.
        died: called once, in another thread, if the process ends without being asked to.

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
        given_on_host: frozenset[int] = frozenset(),
        lock: int | None,
        died: Callable[[BaseException], None],
    ) -> None:
        resumed = checkpoints if first else None
        payload = pack_job(
            step, state, batches, name=name, device=device, first=first, checkpoints=resumed, given_on_host=given_on_host
        )
        self.structure = jax.tree.structure(state)
        self.state_bytes = 0 if payload.state is None else payload.state.nbytes
        self.process = JobProcess(payload, lock=lock, receive=self._heard, died=died)
        self._unmade: PackedTree | None = payload.state  # the submitted state, until the process has made the job
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
        """The compiled plan in use. There must be one."""
        assert self._program is not None
        return self._program

    def new_key(self) -> int:
        """A key that was not used before."""
        return next(self._keys)

    def batches(self) -> Iterator[Any]:
        """Yields a placeholder for each batch that the process has drawn; raises what the user's code raised in the process."""
        self.process.tell("draw")
        while True:
            news = self._drawn.get()
            if isinstance(news, CarriedException):
                raise news.exception()
            if not isinstance(news, BatchReady):
                return
            yield np.int32(0)

    def _heard(self, news: Any) -> None:
        """Handle news from the process. In the thread that reads from it."""
        if isinstance(news, Made):
            self._is_made, self._unmade = True, None
            self.state_bytes = news.state_bytes
            if news.structure is not None:
                self.structure = jax.tree.structure(pickle.loads(news.structure))
        else:
            self._drawn.put(news)

    def end_before_made(self) -> PackedTree | None:
        """If the process has not made the job yet, end it and return the state that was submitted; otherwise None.

        Raises:
            RuntimeError: the process has not made the job, and was to make the state itself.
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
        for leaf in self._given:  # a copy of the state is in the payload
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
        del batch  # a placeholder; the process has the batches
        self._watch = watch
        self.process.tell("begin", watch)

    def issue(self, begin: int, end: int) -> Wait | None:
        summary = self.program.summary
        kinds = summary.memory.kinds[begin:end]
        if LAUNCH in kinds or WAIT in kinds or (self._watch and begin in summary.copies):
            return self.process.ask("issue", begin, end)
        self.process.tell("issue", begin, end)
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
        return None  # after a failed move the process ends, and its state with it

    def drop(self) -> None:
        self.process.kill()

    def close(self) -> None:
        self.process.close()
        self._drawn.put(None)

    def join(self) -> None:
        self.process.join()
