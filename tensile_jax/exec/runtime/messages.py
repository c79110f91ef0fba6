"""Defines the messages of a job's lifecycle: events report what has happened to the job, and instructions say what is to be done.

The state machine of a job (`lifecycle.py`) takes the events and answers each with instructions, which the `Runtime` carries out.
When an instruction that takes time is done, an event reports it. The state machine only passes on the states, metrics and errors
that the messages hold. This module does not use JAX.
"""

from typing import Any, NamedTuple

from tensile_jax.exec.actor.feed_events import FeedEvent
from tensile_jax.exec.actor.plans import PlanSummary
from tensile_jax.exec.controller.messages import BatchLoaded, Wished
from tensile_jax.exec.controller.state import JobRecord, Wish
from tensile_jax.plan.drift import Tracked
from tensile_jax.runtime_records import EventName

# -- events -------------------------------------------------------------------------------------------------------------------


class Submitted(NamedTuple):
    """The job was submitted; `note` says from which step it was resumed, if it was."""

    note: str


class UserWished(NamedTuple):
    """The user wants the job to run, to pause or to stop."""

    wish: Wish


class Preparing(NamedTuple):
    """The job is prepared: `done` of the `of` parts of the phase `what` are done (`progress/phases.py`)."""

    what: str
    done: int
    of: int


class PreparationFailed(NamedTuple):
    """The job's step could not be traced, planned or compiled."""

    error: BaseException


class Planned(NamedTuple):
    """The job has its first plan."""

    plan: PlanSummary
    note: str
    values: dict[str, float]


class ProcessDied(NamedTuple):
    """The job's own process has ended without being asked to."""

    error: BaseException


class Admitted(NamedTuple):
    """The controller has admitted the job."""


class Pending(NamedTuple):
    """The job is pending: the controller cannot admit it yet. `note` says what budget it needs."""

    note: str
    values: dict[str, float]


class CannotRunNow(NamedTuple):
    """The job cannot run under the present budget; `note` says what it needs."""

    note: str
    values: dict[str, float]


class BudgetSuffices(NamedTuple):
    """The budget was changed, and the job's plan can run under it."""


class PlanAdopted(NamedTuple):
    """The job uses its new plan after `steps` steps."""

    plan: PlanSummary
    steps: int


class PlanDeclined(NamedTuple):
    """The job's new plan does not fit beside the other jobs."""

    plan: PlanSummary


class Stepped(NamedTuple):
    """One more iteration has ended; `values` are the metrics that are single numbers."""

    metrics: Any
    values: dict[str, float]


class Drifted(NamedTuple):
    """The latencies of the plan in use have drifted, and a new plan is due. `reason` says so in a sentence."""

    tracked: Tracked
    reason: str


class Parked(NamedTuple):
    """The job's state is in host memory: the job is parked."""


class Paused(NamedTuple):
    """The controller has paused the job after `steps` steps; `kept` is a snapshot of its state, if that is to be saved."""

    kept: Any
    steps: int


class Released(NamedTuple):
    """The job has stopped or done all steps, and the controller has forgotten it; `kept` is its state after `steps` steps."""

    kept: Any
    steps: int


class Lost(NamedTuple):
    """The job failed, and the controller has forgotten it; `kept` is its state after `steps` steps, or None if that is lost."""

    error: BaseException
    kept: Any
    steps: int


class CheckpointMade(NamedTuple):
    """The first of the `saves` has written its checkpoint; or it could not, and `error` says why."""

    steps: int
    note: str
    error: Exception | None


class StateFetched(NamedTuple):
    """The first of the `saves`, a `SaveEnd`, is done; if there is no state, `error` says why."""

    state: Any
    error: Exception | None


Event = (
    Submitted | UserWished | FeedEvent | Preparing | PreparationFailed | Planned | ProcessDied | Admitted | Pending |
    CannotRunNow | BudgetSuffices | PlanAdopted | PlanDeclined | Stepped | Drifted | Parked | Paused | Released | Lost |
    CheckpointMade | StateFetched
)  # fmt: skip

# -- instructions -------------------------------------------------------------------------------------------------------------


class Report(NamedTuple):
    """Add an event to the log that the user follows; the job has done `steps` steps."""

    kind: EventName
    steps: int
    note: str = ""
    values: dict[str, float] | None = None


class StartPreparing(NamedTuple):
    """Trace the job's step on its first batch, then plan and compile it; `Planned` or `PreparationFailed` reports the end."""


class JoinController(NamedTuple):
    """Tell the controller that the job is prepared, and give it the job's record."""

    record: JobRecord


class TellController(NamedTuple):
    """Tell the controller of an event."""

    event: BatchLoaded | Wished


class LoseJob(NamedTuple):
    """Free what the job holds on the device; `Lost` reports that this is done."""

    error: BaseException


class ExplainWait(NamedTuple):
    """If the job is pending, compute the budget that it needs; `Pending` reports the result."""


class UsePlan(NamedTuple):
    """Record that the job uses its new plan after `steps` steps."""

    plan: PlanSummary
    steps: int


class PlanAgain(NamedTuple):
    """Make a new plan from the latencies that were measured of the plan in use."""

    tracked: Tracked
    reason: str


class DropPlan(NamedTuple):
    """The job keeps its old plan, since it cannot use the new one. If the old one cannot run, `CannotRunNow` reports that."""

    plan: PlanSummary


class ShareState(NamedTuple):
    """Choose again which parts of all jobs' states are in host memory while other jobs run."""


class Deliver(NamedTuple):
    """Queue a call of the user's callback with the metrics of a step."""

    steps: int
    metrics: Any


class StartSaving(NamedTuple):
    """Make the `saves` one after another until none is left; `CheckpointMade` and `StateFetched` report the end of each."""


class StopFeed(NamedTuple):
    """Draw no more batches; `CallbacksMade` reports that the last callback has returned."""


class Close(NamedTuple):
    """The job has ended: stop its feed and close its actor."""


class ReleaseFolder(NamedTuple):
    """Release the lock of the folder of the job's checkpoints, so that other runs may use it."""


Instruction = (
    Report | StartPreparing | JoinController | TellController | LoseJob | ExplainWait | UsePlan | PlanAgain | DropPlan
    | ShareState | Deliver | StartSaving | StopFeed | Close | ReleaseFolder
)  # fmt: skip
