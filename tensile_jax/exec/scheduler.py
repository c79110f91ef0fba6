"""The Memory Scheduler (TENSILE section III-D): plans and compiles for all jobs, one at a time, in a thread of its own.

Jobs share what is compiled: two with the same step compile it once. A job's segments are chosen when it is prepared, under what
is left beside the others at rest. What of its state is out while others run is chosen again whenever a job comes or goes
(`plan/sharing.py`).
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from tensile_jax.errors import BudgetTooSmall
from tensile_jax.exec.actor import JobActor, Program, Traced
from tensile_jax.exec.compile import Compiler
from tensile_jax.exec.transfer import Device
from tensile_jax.ir import TensorId
from tensile_jax.plan.latency import DeviceProfile
from tensile_jax.plan.sharing import Sharer, share


class Scheduler:
    """The thread, and what has been compiled."""

    def __init__(self, device: Device, profile: DeviceProfile) -> None:
        self.compiler = Compiler(device)
        self._profile = profile
        self._thread = ThreadPoolExecutor(1, "tensile-scheduler")

    def call(self, what: Callable[[], None]) -> None:
        """Run `what` in the scheduler's thread, after all that was asked for before."""
        with suppress(RuntimeError):  # it has ended, and so have all jobs
            self._thread.submit(what)

    def close(self) -> None:
        """End, once everything asked for is done."""
        self._thread.shutdown()

    def prepare(
        self, actor: JobActor, prepared: Traced, limit_bytes: int, *, ceiling: int, most_swapped: float = float("inf")
    ) -> Program:
        """A plan under the limit, which leaves the others where they are at rest; if there is none, under the ceiling.

        It swaps at most so many bytes an iteration, unless only swaps keep the budget.

        Raises:
            BudgetTooSmall: not even under the ceiling is there a plan.
        """
        program = self._prepared(actor, prepared, limit_bytes, ceiling)
        if program.plan.swapped_out_bytes + program.plan.swapped_in_bytes <= most_swapped:
            return program
        try:
            return self._prepared(actor, prepared.without_swaps(), limit_bytes, ceiling)
        except BudgetTooSmall:
            return program

    def _prepared(self, actor: JobActor, prepared: Traced, limit_bytes: int, ceiling: int) -> Program:
        if limit_bytes > 0:
            try:
                return actor.prepare(prepared, limit_bytes)
            except BudgetTooSmall as error:
                if error.floor_bytes > ceiling:
                    raise
        return actor.prepare(prepared, ceiling)

    def share(
        self, programs: Sequence[Program], max_swap_rates: Sequence[float], budget_bytes: int
    ) -> tuple[frozenset[TensorId], ...]:
        """What of each job's state is to be out while the others run; `programs` without anything kept out."""
        jobs = [
            Sharer(
                program.demand.peak_bytes,
                program.demand.idle_bytes,
                program.plan.step_us,
                program.plan.swapped_out_bytes,
                rate,
                program.may_stay_out(),
            )
            for program, rate in zip(programs, max_swap_rates, strict=True)
        ]
        return share(jobs, budget_bytes, self._profile)
