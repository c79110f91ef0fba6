"""One job's Executor and Swap Executor (TENSILE section III-D): what the runtime and its dispatcher ask of them.

    LocalActor     in this process (`local_actor.py`)
    IsolatedActor  in a process of its own (`isolated_actor.py`), where a LocalActor does it

An actor holds a job's state and carries out single moves of its plan. Whatever takes time is not waited for: the call gives
back a function that waits, for another thread to call, or None where there is nothing to wait for.

    own -> trace -> prepare -> use -> admit -> (unpark -> begin, moves, end ... -> park -> state)* -> close
"""

from collections.abc import Callable
from typing import Any, Protocol

from tensile_jax.exec.checkpoint.checkpoints import Checkpoints
from tensile_jax.exec.step.compile import Compiler
from tensile_jax.exec.step.prepared_step import Options
from tensile_jax.ir import TensorId
from tensile_jax.plan.multi_job.memory_profile import MemoryProfile
from tensile_jax.plan_format import Plan

Wait = Callable[[], Any]
"""Returns when what was issued is over; raises what went wrong with it. For a copy: the lane and the bytes that it took."""


class Kept(Protocol):
    """A job's state as it was at one rest. Both calls may take a while, and may raise."""

    def save(self, checkpoints: Checkpoints, step: int) -> str:
        """Make a checkpoint of it, as that after `step`; gives back what `Checkpoints.save` does."""
        ...

    def fetch(self) -> Any:
        """The state itself, on the host."""
        ...


class Traced(Protocol):
    """A job's step, as it was traced."""

    def without_swaps(self) -> "Traced":
        """The same, of which only plans without swaps are made."""
        ...


class Program(Protocol):
    """A compiled plan, not yet on the device, and what it asks of memory; `kept_out` is what `keep_out` has added to it."""

    @property
    def prepared(self) -> Traced: ...
    @property
    def plan(self) -> Plan: ...
    @property
    def demand(self) -> MemoryProfile: ...
    @property
    def kept_out(self) -> frozenset[TensorId]: ...

    def keep_out(self, tensors: frozenset[TensorId]) -> "Program":
        """The same segments with these state tensors on the host between their uses."""
        ...

    def may_stay_out(self) -> tuple[tuple[TensorId, int], ...]:
        """State tensors that `keep_out` could send out and that are not out yet, and their bytes."""
        ...


class Actor(Protocol):
    """What the dispatcher asks of a job, from its own thread. The `Wait`s are called in others."""

    def admit(self) -> None:
        """The job has its seat: from now on its plan may be carried out."""
        ...

    def begin(self, batch: Any, *, watch: bool) -> None:
        """Move 0: an iteration on the state and on `batch`. With `watch` live bytes are looked at."""
        ...

    def issue(self, move: int) -> Wait | None:
        """Any other move."""
        ...

    def take_metrics(self) -> Wait:
        """The metrics of the iteration that has ended, once, as NumPy arrays."""
        ...

    def park(self) -> Wait:
        """The state goes to the host."""
        ...

    def unpark(self) -> Wait:
        """The state goes where the plan expects it."""
        ...

    def adopt(self) -> None:
        """The renewed plan holds; the state is on the host."""
        ...

    def live_bytes(self) -> Wait:
        """What the job's arrays on the device come to at the time of the call; None where that cannot be seen."""
        ...

    def watched_bytes(self) -> Wait:
        """Live bytes and workspace at the latest launch; None if the iteration is not watched."""
        ...

    def state(self) -> Kept:
        """The state, on the host; only while it is parked."""
        ...

    def counts(self) -> tuple[int, int]:
        """(passive swap-ins, times that the device was out of memory) so far."""
        ...

    def retire(self) -> None:
        """The last iteration is over: give back what is left on the device. A state that was asked for stays."""
        ...

    def rescue(self) -> tuple[Kept, Wait] | None:
        """The job is about to be dropped: its state between iterations, on its way to the host; None where it is not whole."""
        ...

    def drop(self) -> None:
        """Give back everything that is on the device, whatever is under way."""
        ...


class JobActor(Actor, Protocol):
    """What the runtime asks beside that. `trace`, `prepare` and what they give may take long: for the scheduler's thread."""

    @property
    def state_bytes(self) -> int:
        """What the state comes to, as far as is known."""
        ...

    @property
    def program(self) -> Program:
        """What is carried out. It must have been prepared."""
        ...

    def own(self) -> None:
        """Take the state over, to the host; what of it lay on the device is given back, as a donated argument is."""
        ...

    def trace(self, batch: Any, options: Options, compiler: Compiler) -> Traced:
        """The job's step, traced on its state and on shapes like those of `batch`.

        Raises:
            TraceError: it is given mutable references, or does not return (state, metrics) with the state as it was given.
        """
        ...

    def prepare(self, prepared: Any, budget_bytes: int) -> Program:
        """The plan under a budget of what `trace` has given, compiled.

        Raises:
            BudgetTooSmall: there is none.
        """
        ...

    def use(self, program: Any) -> None:
        """`program`, one of this actor's, is what will be run: from `admit` on; or, if it was admitted, from `adopt` on."""
        ...

    def close(self) -> None:
        """The job has ended, and nothing more will be asked. Must return at once."""
        ...

    def join(self) -> None:
        """Wait, after `close`, until nothing of it is left."""
        ...
