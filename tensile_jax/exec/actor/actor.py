"""Defines the protocol `Actor`: an object that holds one job's state and compiled plan, and carries out the job's iterations.

There are two kinds of actors. They do what the paper's Executor and Swap Executor do for a job (TENSILE section III-D):

    LocalActor     runs the job in this process (`local_actor.py`)
    IsolatedActor  starts a process for the job, in which a LocalActor runs it (`exec/child_process/isolated_actor.py`)

An iteration is a sequence of *moves*: its begin, launches, starts of copies, waits for copies, and its end (`plan_memory.py`).
The controller (`exec/controller/machine.py`) decides which job does what next, and groups consecutive moves into a *run*. For
each run, the dispatcher (`exec/runtime/dispatcher.py`) calls `issue`, which never waits for the device. If there is something to
wait for, `issue` returns a function that waits, and the dispatcher calls this function in another thread. On a CPU, a launch
itself blocks, so the returned function also carries out the launches.

The calls come in the order below; `(...)*` is repeated. `own` takes the state from the user and copies it to the host. `use`
selects the plan under which the next iterations run. `state` returns a snapshot of the job's state. A job is *parked* while its
state is in host memory. `plan` may be called again at any time, and `use` while the job is parked. Requests for plans and their
answers are plain data (`plans.py`), so they can be sent to another process.

    own -> trace -> plan -> use -> (unpark -> (begin -> issue ... -> take_metrics)* -> park -> state)* -> free_device_arrays ->
    close
"""

from collections.abc import Callable
from typing import Any, Protocol

from tensile_jax.exec.actor.plans import PlanId, PlanRequest, PlanSummary
from tensile_jax.exec.checkpoint.checkpoints import Checkpoints
from tensile_jax.exec.compiling.compiler import Compiler
from tensile_jax.exec.compiling.step import Options
from tensile_jax.plan.analysis.access import AccessSequence

Wait = Callable[[], Any]
"""Returns when what was issued is over, and raises what went wrong with it.

Of a copy it returns the lane and the bytes. Of a run whose moves it carries out it returns the microseconds for which copies
were waited for.
"""


class StateSnapshot(Protocol):
    """A job's state as it was at one moment between two iterations. Both calls may take a while, and may raise."""

    def save(self, checkpoints: Checkpoints, step: int) -> str:
        """Write this state as the checkpoint after `step` steps; returns what `Checkpoints.save` returns."""
        ...

    def fetch(self) -> Any:
        """The state itself, in host memory."""
        ...

    def release(self) -> None:
        """Free the snapshot, which is not used again."""
        ...


class Actor(Protocol):
    """The methods of a job's actor.

    `trace` and `plan` may take long; the planner's threads call them. `use` and the methods after it are called by the
    dispatcher.
    """

    # -- before the job is admitted ---------------------------------------------------------------------------------------------

    @property
    def state_bytes(self) -> int:
        """The size of the state, as far as it is known now."""
        ...

    @property
    def stays_on_host(self) -> frozenset[int]:
        """The flat positions of the state's arrays that the step itself keeps in host memory. May be read after `close`, too."""
        ...

    def own(self) -> None:
        """Take the user's state: copy it to the host and delete the user's arrays on the device, as with a donated argument."""
        ...

    def trace(self, batch: Any, options: Options, compiler: Compiler) -> AccessSequence | None:
        """Trace the job's step on its state and on shapes like those of `batch`.

        Returns the accesses from which swaps are chosen for several jobs together; None if the policy does not take part in that.

        Raises:
            TraceError: the step is given mutable references, or does not return (state, metrics) with the state as it was given.
        """
        ...

    def jit_peak_bytes(self) -> int:
        """The peak of the step under plain jit, after `trace`. The first call compiles plain jit's step."""
        ...

    def plan(self, request: PlanRequest) -> PlanSummary:
        """Make a plan, after `trace`. The actor keeps it at least until `use` is called with the id of a later one.

        A plan that was not made by `OffloadState` is also kept until the next such plan is made.

        Raises:
            BudgetTooSmall: there is no plan within the limits.
            TensileError: planning has failed.
        """
        ...

    # -- what the dispatcher asks -----------------------------------------------------------------------------------------------

    def use(self, plan: PlanId) -> None:
        """Put a plan to use; the state is on the host. The job has been admitted."""
        ...

    def begin(self, batch: Any, *, watch: bool) -> None:
        """Carry out move 0: begin an iteration on the state and `batch`. If `watch`, read live bytes at each launch."""
        ...

    def issue(self, begin: int, end: int) -> Wait | None:
        """Carry out the moves `[begin, end)`, a run that does not begin with move 0. Returns a function that waits, or None.

        If the run has launches, the function must be called once; it may carry out the run. No other run of this job may be
        issued before that function returns, unless the device allocates memory in the order of launches.
        """
        ...

    def take_metrics(self) -> Wait:
        """A function that returns the metrics of the last iteration as NumPy arrays. May be called once for each iteration."""
        ...

    def park(self) -> Wait:
        """Copy the state to the host."""
        ...

    def unpark(self) -> Wait:
        """Copy to the device the part of the state that the plan expects there."""
        ...

    def live_bytes(self) -> Wait:
        """A function that returns the bytes of the job's arrays on the device at the time of this call; None if not known."""
        ...

    def watched_bytes(self) -> Wait:
        """A function that returns live bytes plus workspace at the latest launch, and the most bytes of the iteration so far.

        It returns None if the iteration is not watched.
        """
        ...

    def state(self) -> StateSnapshot:
        """The state. May be called only while the job is parked."""
        ...

    def counts(self) -> tuple[int, int]:
        """(number of passive swap-ins, number of times that the device was out of memory) so far."""
        ...

    def free_device_arrays(self) -> None:
        """After the last iteration: free what is left on the device. A snapshot that `state` has returned stays valid."""
        ...

    def save_before_dropping(self) -> tuple[StateSnapshot, Wait] | None:
        """Start to copy the state of a failed job to the host: (snapshot, wait); None if the state is not complete.

        The state is complete between iterations only.
        """
        ...

    def drop(self) -> None:
        """Free everything that the job holds on the device, even in the middle of an iteration.

        If another thread is carrying out a run, that thread ends the run after the move under way, and frees everything then.
        """
        ...

    # -- after the end ----------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """The job has ended: no method but `join` is called afterwards. Must return at once."""
        ...

    def join(self) -> None:
        """After `close`: wait until its process, if it has one, has ended."""
        ...
