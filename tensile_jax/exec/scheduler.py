"""The Memory Scheduler (TENSILE section III-D): plans and compiles for all jobs, one at a time, in a thread of its own.

What concerns jobs that run already goes before the preparation of new ones, which takes long.

Jobs share what is compiled: two with the same step compile it once. A job's segments are chosen when it is prepared, under what
is left beside the others at rest. What of its state is out while others run is chosen again whenever a job comes or goes
(`plan/sharing.py`).
"""

import itertools
import queue
import sys
import threading
from collections.abc import Callable, Sequence

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
        self._asked: queue.PriorityQueue[tuple[int, int, Callable[[], None] | None]] = queue.PriorityQueue()
        self._numbers = itertools.count()
        self._thread = threading.Thread(target=self._run, name="tensile-scheduler", daemon=True)
        self._thread.start()

    def call(self, what: Callable[[], None], *, soon: bool = False) -> None:
        """Run `what` in the scheduler's thread, after all that was asked for before; `soon`, before all that is not."""
        self._asked.put((0 if soon else 1, next(self._numbers), what))

    def close(self) -> None:
        """End, once everything asked for is done."""
        self._asked.put((2, next(self._numbers), None))
        self._thread.join()

    def _run(self) -> None:
        while (what := self._asked.get()[2]) is not None:
            try:
                what()
            except Exception:  # a mistake of ours: it is said as Python says it, and all jobs go on as they are
                threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), self._thread)))
            del what  # and what it names, before the next one comes

    def prepare(
        self,
        actor: JobActor,
        prepared: Traced,
        limit_bytes: int,
        *,
        ceiling: int,
        most_swapped: float = float("inf"),
        most_on_host: float = float("inf"),
    ) -> Program:
        """A plan under the limit, which leaves the others where they are at rest; if there is none, under the ceiling.

        It swaps at most so many bytes an iteration, and needs at most so many on the host, unless only swaps keep the budget.

        Raises:
            BudgetTooSmall: not even under the ceiling is there a plan.
        """
        program = self._prepared(actor, prepared, limit_bytes, ceiling)
        few = program.plan.swapped_out_bytes + program.plan.swapped_in_bytes <= most_swapped
        if few and program.demand.host_bytes <= most_on_host:
            return program
        try:
            without = self._prepared(actor, prepared.without_swaps(), limit_bytes, ceiling)
        except BudgetTooSmall:
            return program
        return program if few and without.demand.host_bytes > most_on_host else without

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
