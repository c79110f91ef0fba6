"""Controls a job that runs in a process of its own, as every job of the paper does (TENSILE section III-D).

An `IsolatedActor` is an object in the runtime's process. Each of its methods sends a request to the job's process (`child.py`),
in which a `LocalActor` runs the user's step. The job's process answers the requests in their order. Without a request, the
process only draws batches in advance. A method that starts something returns a function that waits for the answer (`Wait` in
`exec/actor/actor.py`).

Requests for plans and their answers are plain data (`exec/actor/plans.py`), which are sent unchanged. The compiled plans stay in
the job's process. Snapshots, copies of the job's state between two iterations, stay there too, until the runtime releases them.
"""

import itertools
import pickle
import queue
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from tensile_jax.exec.actor.actor import StateSnapshot, Wait
from tensile_jax.exec.actor.feed_events import BatchReady
from tensile_jax.exec.actor.plans import PlanId, PlanRequest, PlanSummary
from tensile_jax.exec.checkpoint.checkpoints import Checkpoints
from tensile_jax.exec.child_process.carried_exception import CarriedException
from tensile_jax.exec.child_process.job_process import JobProcess
from tensile_jax.exec.child_process.payload import PackedTree, Payload
from tensile_jax.exec.compiling.compiler import Compiler
from tensile_jax.exec.compiling.step import Options
from tensile_jax.exec.transfer import on_host
from tensile_jax.plan.analysis.access import AccessSequence
from tensile_jax.plan.multi_job.memory_profile import LAUNCH, WAIT
from tensile_jax.progress.phases import Progress


@dataclass(frozen=True, slots=True)
class Made:
    """News: the process has made the job. `structure` is the pickled structure of its state, unless the runtime knows it."""

    state_bytes: int
    structure: bytes | None


@dataclass(frozen=True, slots=True)
class Told:
    """News: what the process is doing to plan the job, as `progress(what, done, of)` is told it."""

    what: str
    done: int
    of: int


@dataclass(frozen=True, slots=True, eq=False)
class IsolatedState:
    """A state between two iterations, which the job's process keeps under a number; see `StateSnapshot`."""

    actor: "IsolatedActor"
    number: int

    def save(self, checkpoints: Checkpoints, step: int) -> str:
        """Have the process write the checkpoint; the state is not sent to the runtime for that."""
        return self.actor.process.ask("save", self.number, checkpoints.folder, step)()

    def fetch(self) -> Any:
        """The state, as NumPy arrays. Weakly typed arrays and keys come as `jax.Array`s in host memory.

        If the process has not made the job yet, it is ended, since the user's code may hang there. The result is then the state
        that was submitted.

        Raises:
            RuntimeError: the process had not made the job yet, and was to make the state itself.
        """
        if (found := self.actor.end_before_made()) is not None:
            return found.unpack(self.actor.structure)
        return self.actor.process.ask("fetch", self.number)().unpack(self.actor.structure)

    def release(self) -> None:
        """Let the process free the state."""
        self.actor.process.tell("release", self.number)


class IsolatedActor:
    """The actor of a job in a process of its own. The process is started by the first request.

    Args:
        payload: the job, packed (`pack_job`).
        state: the state that was submitted; None if an `Entrypoint` makes it.
        lock: the descriptor of a locked file. The process keeps the file open, so the lock holds until the process has ended.
        died: called once, in another thread, if the process ends without being asked to.
    """

    def __init__(self, payload: Payload, state: Any, *, lock: int | None, died: Callable[[BaseException], None]) -> None:
        self.structure = jax.tree.structure(state)
        self.state_bytes = 0 if payload.state is None else payload.state.nbytes
        self.process = JobProcess(payload, lock=lock, receive=self._heard, died=died)
        self._unmade: PackedTree | None = payload.state  # the submitted state, until the process has made the job
        self._is_made = False
        self._progress: Progress | None = None
        self._given = [leaf for leaf in jax.tree.leaves(state) if isinstance(leaf, jax.Array) and not on_host(leaf)]
        self._snapshots = itertools.count()
        self._drawn: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._made: dict[PlanId, PlanSummary] = {}  # a thread that plans adds to it, and the one that calls `use` takes away
        self._in_use: PlanSummary | None = None
        self._watch = False
        self._counts = (0, 0)  # at the end of the latest iteration

    @property
    def stays_on_host(self) -> frozenset[int]:
        return frozenset()  # the state comes back as arrays of NumPy, which are in no memory of JAX

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
        elif isinstance(news, Told):
            if self._progress is not None:
                self._progress(news.what, news.done, news.of)
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

    def trace(self, batch: Any, options: Options, compiler: Compiler) -> AccessSequence | None:
        del batch, compiler  # the process has its own
        self._progress = options.progress
        return self.process.ask("trace", replace(options, progress=None))()

    def jit_peak_bytes(self) -> int:
        return self.process.ask("jit_peak_bytes")()

    def plan(self, request: PlanRequest) -> PlanSummary:
        summary: PlanSummary = self.process.ask("plan", request)()
        self._made[summary.id] = summary
        return summary

    # -- what the dispatcher asks -----------------------------------------------------------------------------------------------

    def use(self, plan: PlanId) -> None:
        self._in_use = self._made[plan]
        for other in list(self._made):
            if other < plan:
                del self._made[other]
        self.process.tell("use", plan)

    def begin(self, batch: Any, *, watch: bool) -> None:
        del batch  # a placeholder; the process has the batches
        self._watch = watch
        self.process.tell("begin", watch)

    def issue(self, begin: int, end: int) -> Wait | None:
        plan = self._in_use
        assert plan is not None
        kinds = plan.memory.kinds[begin:end]
        if LAUNCH in kinds or WAIT in kinds or (self._watch and begin in plan.copies):
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
        kept = IsolatedState(self, next(self._snapshots))
        self.process.tell("keep", kept.number)
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
