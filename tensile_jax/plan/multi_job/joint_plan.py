"""Plans several jobs that share one budget, as the runtime would plan them if the jobs came in the given order.

Each job is first planned for the memory that the other jobs leave free between their iterations. What an earlier job holds
between its iterations is known from its plan. A later job has no plan yet, so the size of its state is taken instead. If no
plan keeps within the free memory, the job is planned for the whole budget (`admission.py`).

A job is *parked* while its whole state is on the host. All jobs fit if each of them can run an iteration while all others are
parked, and host memory can hold what all jobs keep there. Once all jobs are planned, some of their state may be put on the host
between its uses (`state_offload.py`). Sizes in bytes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic

from tensile_jax.errors import BudgetTooSmall
from tensile_jax.plan.analysis.device_profile import DeviceProfile
from tensile_jax.plan.multi_job.admission import JobLimits, Program, most_swapped_bytes, plan_job, smallest_budgets
from tensile_jax.plan.multi_job.state_offload import SharingJob, choose_offloaded

_CLOSE_ENOUGH = 1.005  # ratio of its bounds at which the search for the smallest budget ends; not tuned
_MOST_TRIES = 40  # larger budgets tried until the jobs fit, each a sixteenth above the one before; not tuned


@dataclass(frozen=True, slots=True, eq=False)
class PlannableJob(Generic[Program]):
    """A traced job, the function that plans it under a budget, and what `plan_jobs` must know of it.

    `floor_bytes` is the least budget under which the job can be planned alone.
    """

    traced: Any
    prepare: Callable[[Any, int], Program]
    state_bytes: int
    floor_bytes: int
    max_swap_rate: float


@dataclass(frozen=True, slots=True, eq=False)
class JobPlan(Generic[Program]):
    """A job's program, and whether it fits while the other jobs hold what they hold between iterations."""

    program: Program
    beside_others: bool

    @property
    def host_bytes(self) -> int:
        """The most host memory that the job needs, including that for writing a checkpoint while the job runs."""
        return self.program.memory.host_bytes + self.program.memory.state_bytes


def plan_jobs(
    jobs: Sequence[PlannableJob[Program]], budget_bytes: int, host_budget_bytes: float
) -> list[JobPlan[Program]] | None:
    """The plan of every job; None if a job has no plan, or if the jobs cannot all run."""
    planned: list[JobPlan[Program]] = []
    for place, job in enumerate(jobs):
        at_rest = sum(one.program.memory.idle_bytes for one in planned) + sum(later.state_bytes for later in jobs[place + 1 :])
        limits = JobLimits(
            beside_bytes=budget_bytes - at_rest,
            alone_bytes=budget_bytes,
            most_swapped_bytes=most_swapped_bytes(job.max_swap_rate, [one.program.plan for one in planned]),
            most_host_bytes=host_budget_bytes - sum(one.host_bytes for one in planned) - job.state_bytes,
        )
        try:
            program = plan_job(job.prepare, job.traced, limits)
        except BudgetTooSmall:
            return None
        planned.append(JobPlan(program, program.memory.peak_bytes <= limits.beside_bytes))
    needed = smallest_budgets(replace(one.program.memory, host_bytes=one.host_bytes) for one in planned)
    return planned if needed.device_bytes <= budget_bytes and needed.host_bytes <= host_budget_bytes else None


def offload_states(
    planned: Sequence[JobPlan[Program]], jobs: Sequence[PlannableJob[Program]], budget_bytes: int, profile: DeviceProfile
) -> list[JobPlan[Program]]:
    """The same plans with some state on the host between its uses, where other jobs need the room to run."""
    sharing = [
        SharingJob.of(one.program.plan, one.program.memory, one.program.may_be_offloaded(), job.max_swap_rate)
        for one, job in zip(planned, jobs, strict=True)
    ]
    offloaded = choose_offloaded(sharing, budget_bytes, profile)
    return [replace(one, program=one.program.offload_state(tensors)) for one, tensors in zip(planned, offloaded, strict=True)]


def smallest_budget(jobs: Sequence[PlannableJob[Program]], budget_bytes: int, host_budget_bytes: float) -> int:
    """A budget above the given one under which all jobs fit. They do not fit under a budget that is half a per cent lower."""
    low, high = budget_bytes, max(budget_bytes + 1, *(job.floor_bytes for job in jobs))
    for _ in range(_MOST_TRIES):
        if plan_jobs(jobs, high, host_budget_bytes) is not None:
            break
        low, high = high, high + max(high // 16, 1)
    while high > low * _CLOSE_ENOUGH and high - low > 1:
        middle = (low + high) // 2
        if plan_jobs(jobs, middle, host_budget_bytes) is None:
            low = middle
        else:
            high = middle
    return high
