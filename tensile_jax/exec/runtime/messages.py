"""What a job's lifecycle hears and says: news, which tell what has happened to the job, and effects, which say what to do next.

Each effect that takes time is answered by news. States, metrics and errors are passed on as they are; there is no JAX here.
"""

from typing import Any, NamedTuple

from tensile_jax.exec.actor.feed_news import FeedNews
from tensile_jax.exec.controller.messages import BatchLoaded, Wished
from tensile_jax.exec.controller.state import JobRecord, Wish
from tensile_jax.plan.multi_job.memory_profile import MemoryProfile
from tensile_jax.runtime_records import EventName

# -- news ---------------------------------------------------------------------------------------------------------------------


class Submitted(NamedTuple):
    """The job is one of the runtime's; `note` says from where it was resumed."""

    note: str


class UserWished(NamedTuple):
    """The user wants the job to run, to pause or to stop."""

    wish: Wish


class PreparationFailed(NamedTuple):
    """The job's step could not be traced, planned or compiled."""

    error: BaseException


class Planned(NamedTuple):
    """The job has its first plan, which asks `demand` of memory."""

    demand: MemoryProfile
    note: str
    values: dict[str, float]


class ProcessDied(NamedTuple):
    """The job's own process has ended on its own."""

    error: BaseException


class Admitted(NamedTuple):
    """The controller has admitted the job."""


class Pending(NamedTuple):
    """The job is pending in the controller, which cannot admit it yet; `note` says what the job needs."""

    note: str
    values: dict[str, float]


class CannotRunNow(NamedTuple):
    """The job cannot run under the budget that holds now; `note` says what it needs."""

    note: str
    values: dict[str, float]


class BudgetSuffices(NamedTuple):
    """A new budget holds, under which the job's plan can run."""


class PlanAdopted(NamedTuple):
    """The job's new plan holds, after so many steps."""

    steps: int


class PlanDeclined(NamedTuple):
    """The job's new plan, which asks `demand`, does not fit beside the other jobs."""

    demand: MemoryProfile


class Stepped(NamedTuple):
    """One more iteration has ended; `values` are the metrics that are single numbers."""

    metrics: Any
    values: dict[str, float]


class Parked(NamedTuple):
    """The job's state has gone to the host."""


class Paused(NamedTuple):
    """The controller has paused the job after so many steps; `kept` is its state."""

    kept: Any
    steps: int


class Released(NamedTuple):
    """The controller knows the job no more: it has stopped or done all steps; `kept` is its state after so many."""

    kept: Any
    steps: int


class Lost(NamedTuple):
    """The job failed in the middle of something; `kept` is its state after so many steps, None where that is lost as well."""

    error: BaseException
    kept: Any
    steps: int


class CheckpointMade(NamedTuple):
    """The first of the `saves` has written its checkpoint, or could not."""

    steps: int
    note: str
    error: Exception | None


class StateFetched(NamedTuple):
    """The first of the `saves`, a `SaveEnd`, is done; `error` says why there is no state."""

    state: Any
    error: Exception | None


News = (
    Submitted | UserWished | FeedNews | PreparationFailed | Planned | ProcessDied | Admitted | Pending | CannotRunNow |
    BudgetSuffices | PlanAdopted | PlanDeclined | Stepped | Parked | Paused | Released | Lost | CheckpointMade | StateFetched
)  # fmt: skip

# -- effects ------------------------------------------------------------------------------------------------------------------


class Report(NamedTuple):
    """Tell the user of an event, after so many steps."""

    kind: EventName
    steps: int
    note: str = ""
    values: dict[str, float] | None = None


class StartPreparing(NamedTuple):
    """Trace the job's step on its first batch, then plan and compile it; `Planned` or `PreparationFailed` answers."""


class JoinController(NamedTuple):
    """Tell the controller that the job is prepared, with what it needs to know of it."""

    record: JobRecord


class TellController(NamedTuple):
    """Tell the controller of an event."""

    event: BatchLoaded | Wished


class LoseJob(NamedTuple):
    """Give back what the job holds on the device; `Lost` answers."""

    error: BaseException


class ExplainWait(NamedTuple):
    """If the job is pending in the controller, find out for what; `Pending` answers."""


class UsePlan(NamedTuple):
    """The job's new plan came into use after so many steps."""

    steps: int


class DropPlan(NamedTuple):
    """The job's new plan, which asks `demand`, is not used; if the old one cannot run either, `CannotRunNow` answers."""

    demand: MemoryProfile


class ShareState(NamedTuple):
    """Choose again what of all jobs' states is kept out of the device while other jobs run."""


class Deliver(NamedTuple):
    """Have the user's callback called with the metrics of a step."""

    steps: int
    metrics: Any


class StartSaving(NamedTuple):
    """Carry out the `saves` one after another, until none is left; each is answered."""


class StopFeed(NamedTuple):
    """Draw no more batches; `CallbacksMade` answers once the last callback has returned."""


class Close(NamedTuple):
    """The job has ended: stop its feed and close its actor."""


class ReleaseFolder(NamedTuple):
    """Let other runs have the folder of the job's checkpoints."""


Effect = (
    Report | StartPreparing | JoinController | TellController | LoseJob | ExplainWait | UsePlan | DropPlan | ShareState | Deliver
    | StartSaving | StopFeed | Close | ReleaseFolder
)  # fmt: skip
