"""Defines the controller's messages: events tell the controller what has happened, and instructions say what is to be done next.

When an instruction that takes time is done, an event reports it. Times are in microseconds.
"""

from typing import NamedTuple

from tensile_jax.exec.actor.plans import PlanSummary
from tensile_jax.exec.controller.state import JobId, JobRecord, Wish

# -- events -------------------------------------------------------------------------------------------------------------------


class Prepared(NamedTuple):
    """A job has a plan, and its state is on the host. The job is pending from now on. Its number must never be used again."""

    record: JobRecord


class RunEnded(NamedTuple):
    """The job's oldest run in flight has ended: all its moves are over. Its launches took `us` microseconds."""

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
    """The job is to run, to pause or to stop.

    The user asked for it; or the job's checkpoint is being written, so that it may run again; or it must stop, since its batches
    ended or its code failed.
    """

    job: JobId
    wish: Wish


class JobLost(NamedTuple):
    """The job failed and is gone. The device memory that it held is free, and its runs in flight have ended."""

    job: JobId


class PlanRenewed(NamedTuple):
    """The job has a new plan.

    An admitted job changes its plan once its state is on the host; `AdoptPlan` or `DeclinePlan` says whether it did. A pending
    job has the new plan at once, and no instruction says so.
    """

    job: JobId
    plan: PlanSummary


class BudgetRequested(NamedTuple):
    """The budget is to be `nbytes`. `ApplyBudget` answers. If several budgets are requested, it answers only the last."""

    nbytes: int


JobEvent = RunEnded | WaitEnded | StateMoved | BatchLoaded | Wished | JobLost | PlanRenewed
Event = JobEvent | Prepared | BudgetRequested

# -- instructions -------------------------------------------------------------------------------------------------------------


class Issue(NamedTuple):
    """Carry out the moves `[begin, end)` of the job's iteration, a run.

    `RunEnded` reports the end of a run with a LAUNCH, which on a CPU may have WAIT moves, too. `WaitEnded` reports the end of a
    WAIT that is issued alone. A run of INSTANT moves is over at once.
    """

    job: JobId
    begin: int
    end: int


class Park(NamedTuple):
    """Copy the job's state to the host and free it on the device; `StateMoved` reports that this is done."""

    job: JobId


class Unpark(NamedTuple):
    """Copy to the device the part of the job's state that its plan expects there; `StateMoved` reports that this is done."""

    job: JobId


class Admit(NamedTuple):
    """The job is admitted: it is no longer pending, and uses the plan of its record from now on."""

    job: JobId


class AdoptPlan(NamedTuple):
    """The job uses its new plan from now on."""

    job: JobId
    plan: PlanSummary


class DeclinePlan(NamedTuple):
    """The job's new plan does not fit beside the other jobs; the job keeps the plan that it has."""

    job: JobId
    plan: PlanSummary


class ReportPaused(NamedTuple):
    """The job, admitted or pending, is paused, and its state is on the host.

    The user asked for it, or a checkpoint is due. `Wished` with "run" lets the job run again.
    """

    job: JobId


class Release(NamedTuple):
    """The job has stopped or done all its steps, and its state is on the host. The controller has forgotten the job."""

    job: JobId


class ApplyBudget(NamedTuple):
    """The budget is `nbytes` from now on: the requested one, or the old one if the jobs hold more than requested even when
    parked.
    """

    nbytes: int


Instruction = Issue | Park | Unpark | Admit | AdoptPlan | DeclinePlan | ReportPaused | Release | ApplyBudget
