"""What the controller hears and says: events, which tell it what has happened, and orders, which say what to do next.

Each order that takes time is answered by an event. Times are microseconds.
"""

from typing import NamedTuple

from tensile_jax.exec.controller.state import JobId, JobRecord, Wish
from tensile_jax.plan.multi_job.memory_profile import MemoryProfile

# -- events -------------------------------------------------------------------------------------------------------------------


class Prepared(NamedTuple):
    """A job has a plan and its state is on the host: it is pending from now on. A job's number is never used again."""

    record: JobRecord


class LaunchEnded(NamedTuple):
    """The job's oldest launch in flight has ended; it took `us`."""

    job: JobId
    us: float


class WaitEnded(NamedTuple):
    """The copies for which the job's WAIT move waited have ended."""

    job: JobId


class StateMoved(NamedTuple):
    """The job's state has arrived where `Park` or `Unpark` sent it."""

    job: JobId


class BatchLoaded(NamedTuple):
    """One more batch of the job is loaded."""

    job: JobId


class Wished(NamedTuple):
    """The job is to run, to pause or to stop: the user wants it so, or the job must stop because it has no more batches."""

    job: JobId
    wish: Wish


class JobLost(NamedTuple):
    """The job failed in the middle of something. What it held is free, and its launches in flight have ended."""

    job: JobId


class PlanRenewed(NamedTuple):
    """The job has a new plan. An admitted job changes to it once its state is on the host: `AdoptPlan` or `DeclinePlan` answers.

    A pending job takes the plan over at once, and no order answers.
    """

    job: JobId
    demand: MemoryProfile


class BudgetRequested(NamedTuple):
    """The budget is to be `nbytes`. `ApplyBudget` answers; if several budgets are requested, only the last one is answered."""

    nbytes: int


JobEvent = LaunchEnded | WaitEnded | StateMoved | BatchLoaded | Wished | JobLost | PlanRenewed
Event = JobEvent | Prepared | BudgetRequested

# -- orders -------------------------------------------------------------------------------------------------------------------


class Issue(NamedTuple):
    """Carry out move `move` of the job's iteration. `LaunchEnded` answers a LAUNCH, `WaitEnded` answers a WAIT."""

    job: JobId
    move: int


class Park(NamedTuple):
    """Copy the job's state to the host and free it on the device; `StateMoved` answers."""

    job: JobId


class Unpark(NamedTuple):
    """Bring the job's state where its plan expects it; `StateMoved` answers."""

    job: JobId


class Admit(NamedTuple):
    """The job is pending no more: it is admitted."""

    job: JobId


class AdoptPlan(NamedTuple):
    """The job's new plan holds from now on."""

    job: JobId


class DeclinePlan(NamedTuple):
    """The job's new plan does not fit beside the other jobs; the job keeps the plan that it has."""

    job: JobId


class ReportPaused(NamedTuple):
    """The job, admitted or pending, is paused, and its state is on the host."""

    job: JobId


class Release(NamedTuple):
    """The job has stopped or done all its steps, its state is on the host, and the controller knows it no more."""

    job: JobId


class ApplyBudget(NamedTuple):
    """This budget holds from now on: the requested one, or the old one where parked jobs alone hold more than the requested."""

    nbytes: int


Order = Issue | Park | Unpark | Admit | AdoptPlan | DeclinePlan | ReportPaused | Release | ApplyBudget
