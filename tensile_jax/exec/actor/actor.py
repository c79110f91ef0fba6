"""An actor holds one job's state and compiled plan, and carries out single moves of the plan: the protocols.

An actor is what the paper calls a job's Executor and Swap Executor (TENSILE section III-D). There are two:

    LocalActor     runs the job in this process (`local_actor.py`)
    IsolatedActor  has a LocalActor run it in a process of its own (`exec/process/isolated_actor.py`)

A call never waits for what takes time. It returns a function that waits, for another thread to call, or None where there is
nothing to wait for. The calls come in this order, `prepare` and `use` again for a renewed plan, which `adopt` puts to use:

    own -> trace -> prepare -> use -> admit -> (unpark -> begin -> issue ... -> take_metrics -> park -> state)* ->
    free_device_arrays -> close
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
"""Returns when what was issued is over, and raises what went wrong with it. Of a copy it returns the lane and the bytes."""


class StateSnapshot(Protocol):
    """A job's state as it was at one moment between iterations. Both calls may take a while, and may raise."""

    def save(self, checkpoints: Checkpoints, step: int) -> str:
        """Make a checkpoint of it, as that after `step`; returns what `Checkpoints.save` does."""
        ...

    def fetch(self) -> Any:
        """The state itself, on the host."""
        ...


class Traced(Protocol):
    """A job's step, as it was traced."""

    def without_swaps(self) -> "Traced":
        """The same step, of which only plans without swaps are made."""
        ...


class Program(Protocol):
    """A compiled plan, not yet on the device; `offloaded` is the state that `offload_state` has put on the host."""

    @property
    def prepared(self) -> Traced: ...
    @property
    def plan(self) -> Plan: ...
    @property
    def demand(self) -> MemoryProfile: ...
    @property
    def offloaded(self) -> frozenset[TensorId]: ...

    def offload_state(self, tensors: frozenset[TensorId]) -> "Program":
        """The same segments with these state tensors on the host between their uses."""
        ...

    def may_be_offloaded(self) -> tuple[tuple[TensorId, int], ...]:
        """State tensors that `offload_state` could put on the host and that are not there yet, and their bytes."""
        ...


class Actor(Protocol):
    """What the runtime asks of a job's actor.

    `trace`, `prepare` and what they return may take long: the planner calls them. From `admit` on, the dispatcher's thread calls.
    """

    # -- before the job is admitted ---------------------------------------------------------------------------------------------

    @property
    def state_bytes(self) -> int:
        """The size of the state, as far as it is known."""
        ...

    @property
    def program(self) -> Program:
        """The program in use. There must be one."""
        ...

    def own(self) -> None:
        """Take the state over, to the host; what of it lay on the device is freed, as a donated argument is."""
        ...

    def trace(self, batch: Any, options: Options, compiler: Compiler) -> Traced:
        """The job's step, traced on its state and on shapes like those of `batch`.

        Raises:
            TraceError: it is given mutable references, or does not return (state, metrics) with the state as it was given.
        """
        ...

    def prepare(self, prepared: Any, budget_bytes: int) -> Program:
        """The plan under a budget of what `trace` has returned, compiled.

        Raises:
            BudgetTooSmall: there is none.
        """
        ...

    def use(self, program: Any) -> None:
        """Have `program`, one of this actor's, in use: from `admit` on; or, if the job was admitted, from `adopt` on."""
        ...

    # -- what the dispatcher asks -----------------------------------------------------------------------------------------------

    def admit(self) -> None:
        """The job is admitted: from now on its plan may be carried out."""
        ...

    def begin(self, batch: Any, *, watch: bool) -> None:
        """Move 0: begin an iteration on the state and on `batch`. With `watch` live bytes are read at its launches."""
        ...

    def issue(self, move: int) -> Wait | None:
        """Carry out any other move."""
        ...

    def take_metrics(self) -> Wait:
        """The metrics of the iteration that has ended, once, as NumPy arrays."""
        ...

    def park(self) -> Wait:
        """Copy the state to the host."""
        ...

    def unpark(self) -> Wait:
        """Bring the state where the plan expects it."""
        ...

    def adopt(self) -> None:
        """Put the renewed plan to use; the state is on the host."""
        ...

    def live_bytes(self) -> Wait:
        """The bytes of the job's arrays on the device at the time of the call; None where that cannot be seen."""
        ...

    def watched_bytes(self) -> Wait:
        """Live bytes and workspace at the latest launch; None if the iteration is not watched."""
        ...

    def state(self) -> StateSnapshot:
        """The state, on the host; only while it is parked."""
        ...

    def counts(self) -> tuple[int, int]:
        """(passive swap-ins, times that the device was out of memory) so far."""
        ...

    def free_device_arrays(self) -> None:
        """The last iteration is over: free what is left on the device. A state that was asked for stays."""
        ...

    def save_before_dropping(self) -> tuple[StateSnapshot, Wait] | None:
        """The job is about to be dropped: its state between iterations, on its way to the host; None where it is not whole."""
        ...

    def drop(self) -> None:
        """Free everything that is on the device, whatever is under way."""
        ...

    # -- after the end ----------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """The job has ended, and nothing more will be asked. Must return at once."""
        ...

    def join(self) -> None:
        """Wait, after `close`, until nothing of it is left."""
        ...
