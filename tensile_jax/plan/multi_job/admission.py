"""Decides whether a job is admitted beside others under one budget, and under which limits a new job is planned.

The jobs share a device, and each runs its step again and again. A job is *parked* when its whole state is in host memory. Even
then it holds some bytes on the device: the constants of its plan, and metrics that nobody has read yet. For a job k,

    parked_k    what the job holds on the device while it is parked
    peak_k      the most that the job needs on the device at any time
    host_k      the most that the job needs in host memory, in an iteration or while it is parked

A job can run if its peak fits while all other jobs are parked:

    spare       = budget - sum over all jobs k of parked_k
    can_run(j)  <=>  peak_j - parked_j <= spare

A job is admitted if three things hold. It can run. Every other job that can run now can still run while the new job is parked.
And host memory can hold the sum of host_k over all jobs. So a set of jobs needs at least these budgets:

    device      sum over k of parked_k + max over k of (peak_k - parked_k)
    host        sum over k of host_k

A new job is first planned under the memory that the other jobs leave free between their iterations. With such a plan, no state
has to move when another job's iteration begins. If there is no such plan, the job is planned under the whole budget, and jobs are
parked while others run. A job's *maximal swapping rate* (TENSILE section IV-D) is the largest share that its plan may have of all
bytes that jobs swap.

Two callers use this module: the runtime's controller, which decides what runs next, and the command `tensile plan JOBS.toml`.
Sizes in bytes.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, Self, TypeVar

from tensile_jax.errors import BudgetTooSmall
from tensile_jax.ir import TensorId
from tensile_jax.plan.multi_job.memory_profile import MemoryProfile
from tensile_jax.plan_format import Plan


class SmallestBudgets(NamedTuple):
    """The least device memory and host memory with which some jobs can all run."""

    device_bytes: int
    host_bytes: int


def smallest_budgets(jobs: Iterable[MemoryProfile]) -> SmallestBudgets:
    """The smallest budgets under which all of these jobs can be admitted together."""
    jobs = list(jobs)
    device_bytes = sum(job.parked_bytes for job in jobs) + max((job.rise_bytes for job in jobs), default=0)
    return SmallestBudgets(device_bytes, sum(job.host_bytes for job in jobs))


def admits(
    job: MemoryProfile,
    others: Sequence[MemoryProfile],
    *,
    budget_bytes: float,
    host_budget_bytes: float,
    replaces: MemoryProfile | None = None,
) -> bool:
    """Whether the job may run beside the others, as above.

    Args:
        replaces: the present profile of a job that is admitted already and gets another one. If the job cannot run with the
            present profile, it need not be able to run with the new one.
    """
    if job.host_bytes + sum([other.host_bytes for other in others]) > host_budget_bytes:
        return False
    without = budget_bytes - sum([other.parked_bytes for other in others])
    before = without if replaces is None else without - replaces.parked_bytes
    after = without - job.parked_bytes
    if job.rise_bytes > after and (replaces is None or replaces.rise_bytes <= before):
        return False
    return all([other.rise_bytes <= after for other in others if other.rise_bytes <= before])


class JobProgram(Protocol):
    """A job's plan, which may be compiled, and its memory profile."""

    @property
    def plan(self) -> Plan: ...
    @property
    def memory(self) -> MemoryProfile: ...

    def offload_state(self, tensors: frozenset[TensorId]) -> Self:
        """The same segments with these state tensors on the host between their uses."""
        ...

    def may_be_offloaded(self) -> tuple[tuple[TensorId, int], ...]:
        """The state tensors that `offload_state` could still put on the host, and their bytes."""
        ...


Program = TypeVar("Program", bound=JobProgram)


@dataclass(frozen=True, slots=True)
class JobLimits:
    """The limits under which a job is planned.

    Attributes:
        beside_bytes: what its plan may need while the other jobs hold what they hold between iterations.
        alone_bytes: what its plan may need while the other jobs are parked.
        most_swapped_bytes: what its plan may swap in an iteration, out and in added up.
        most_host_bytes: what its plan may need in host memory.
    """

    beside_bytes: int
    alone_bytes: int
    most_swapped_bytes: float = float("inf")
    most_host_bytes: float = float("inf")


def plan_job(prepare: Callable[[Any, int], Program], traced: Any, limits: JobLimits) -> Program:
    """The plan under `beside_bytes`, for which no other job is parked; if there is none, the plan under `alone_bytes`.

    The plan also keeps the limits of swapping and of host memory if such a plan fits the device budget.

    Args:
        prepare: gives a traced step's program under a budget in bytes, or raises BudgetTooSmall.
        traced: what `prepare` takes; its method `with_host_limit` gives the same step with a limit of host memory for its plans,
            in bytes. A limit of zero means no swaps.

    Raises:
        BudgetTooSmall: there is no plan under `alone_bytes`.
    """
    program = _plan_beside_or_alone(prepare, traced, limits)
    swaps_little = swapped_bytes(program.plan) <= limits.most_swapped_bytes
    if swaps_little and program.memory.host_bytes <= limits.most_host_bytes:
        return program
    host_limit = max(limits.most_host_bytes, 0) if swaps_little else 0
    try:
        limited = _plan_beside_or_alone(prepare, traced.with_host_limit(host_limit), limits)
    except BudgetTooSmall:
        return program
    return program if swaps_little and limited.memory.host_bytes > limits.most_host_bytes else limited


def _plan_beside_or_alone(prepare: Callable[[Any, int], Program], traced: Any, limits: JobLimits) -> Program:
    if limits.beside_bytes > 0:
        try:
            return prepare(traced, limits.beside_bytes)
        except BudgetTooSmall as error:
            if error.floor_bytes > limits.alone_bytes:
                raise
    return prepare(traced, limits.alone_bytes)


def most_swapped_bytes(max_swap_rate: float, others: Iterable[Plan]) -> float:
    """The bytes that a job may swap in an iteration, by its maximal swapping rate and what the plans of the others swap.

    The rate is the job's part of all that is swapped: rate = own / (own + others). A rate of 1 is no limit.
    """
    if max_swap_rate >= 1:
        return float("inf")
    return max_swap_rate / (1 - max_swap_rate) * sum(swapped_bytes(plan) for plan in others)


def swapped_bytes(plan: Plan) -> int:
    """What a plan copies over the link in an iteration, out and in added up."""
    return plan.swapped_out_bytes + plan.swapped_in_bytes
