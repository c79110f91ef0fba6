"""A job's plan beside other jobs, and the state of all of them: what the Memory Scheduler decides (TENSILE section III-D).

A job's segments are chosen under what is left beside the others at rest; if there is no such plan, under the whole budget, and
then it runs in time slices. What of its state is out while others run is chosen for all jobs together
(`plan/multi_job/state_offload.py`).
Nothing here knows whether plans are compiled, or predicted only.
"""

from collections.abc import Callable, Sequence
from typing import Any

from tensile_jax.errors import BudgetTooSmall
from tensile_jax.exec.actor.actor import Program, Traced
from tensile_jax.ir import TensorId
from tensile_jax.plan.analysis.latency import DeviceProfile
from tensile_jax.plan.multi_job.state_offload import Sharer, share
from tensile_jax.plan_format import Plan

Prepare = Callable[[Any, int], Program]
"""A traced step's program under a budget in bytes; raises BudgetTooSmall where there is none."""


def prepare_beside(
    prepare: Prepare,
    traced: Traced,
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
    program = _prepared(prepare, traced, limit_bytes, ceiling)
    few = program.plan.swapped_out_bytes + program.plan.swapped_in_bytes <= most_swapped
    if few and program.demand.host_bytes <= most_on_host:
        return program
    try:
        without = _prepared(prepare, traced.without_swaps(), limit_bytes, ceiling)
    except BudgetTooSmall:
        return program
    return program if few and without.demand.host_bytes > most_on_host else without


def _prepared(prepare: Prepare, traced: Traced, limit_bytes: int, ceiling: int) -> Program:
    if limit_bytes > 0:
        try:
            return prepare(traced, limit_bytes)
        except BudgetTooSmall as error:
            if error.floor_bytes > ceiling:
                raise
    return prepare(traced, ceiling)


def most_swapped(max_swap_rate: float, others: Sequence[Plan]) -> float:
    """Bytes an iteration, by a job's maximal swapping rate and what the plans of the others swap (TENSILE section IV-D)."""
    if max_swap_rate >= 1:
        return float("inf")
    return max_swap_rate / (1 - max_swap_rate) * sum(plan.swapped_out_bytes + plan.swapped_in_bytes for plan in others)


def share_state(
    programs: Sequence[Program], max_swap_rates: Sequence[float], budget_bytes: int, profile: DeviceProfile
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
    return share(jobs, budget_bytes, profile)
