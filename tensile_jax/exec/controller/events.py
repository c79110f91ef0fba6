"""What the controller hears: a job is prepared, something of it has ended, a batch is loaded, the user wishes, ...

Times in microseconds.
"""

from typing import NamedTuple

from tensile_jax.exec.controller.state import JobId, Seat, Wish
from tensile_jax.plan.multi_job.memory_profile import MemoryProfile


class Prepared(NamedTuple):
    """A job has a plan; its state is on the host. Its number was never used before, and never will be again."""

    seat: Seat


class Ended(NamedTuple):
    """The job's oldest launch in flight is over; it took `us`."""

    job: JobId
    us: float


class Waited(NamedTuple):
    """What the job's WAIT waited for is over."""

    job: JobId


class Moved(NamedTuple):
    """The job's state has arrived where it was sent, on the host or on the device."""

    job: JobId


class BatchReady(NamedTuple):
    """One more batch is loaded."""

    job: JobId


class Wished(NamedTuple):
    """The user wants the job to run, to pause, or to stop; or its batches have ended, and it must stop."""

    job: JobId
    wish: Wish


class Died(NamedTuple):
    """The job failed in the middle of something: what it held is gone, its launches in flight too, and so is the job."""

    job: JobId


class Renewed(NamedTuple):
    """The job has another plan, for the time after its state has been away: answered by `Adopt` or `Decline`, the last one.

    Of a job in the queue it holds at once, and nothing is said.
    """

    job: JobId
    demand: MemoryProfile


class Budgeted(NamedTuple):
    """The budget is to be another: answered by `Apply`, the last one."""

    nbytes: int


JobEvent = Ended | Waited | Moved | BatchReady | Wished | Died | Renewed
Event = JobEvent | Prepared | Budgeted
