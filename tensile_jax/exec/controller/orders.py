"""What the controller says: what is to be done now, in that order."""

from typing import NamedTuple

from tensile_jax.exec.controller.state import JobId


class Do(NamedTuple):
    """Carry out move `move` of the job's iteration. A LAUNCH must be answered by `Ended`, a WAIT by `Waited`."""

    job: JobId
    move: int


class Park(NamedTuple):
    """Copy the job's state to the host and give its device memory back; answered by `Moved`."""

    job: JobId


class Unpark(NamedTuple):
    """Bring the job's state where its plan expects it; answered by `Moved`."""

    job: JobId


class Admit(NamedTuple):
    """The job has left the queue."""

    job: JobId


class Adopt(NamedTuple):
    """The job's renewed plan holds from now on."""

    job: JobId


class Decline(NamedTuple):
    """The job's renewed plan does not fit beside the others; the one it has goes on."""

    job: JobId


class Rest(NamedTuple):
    """The job is paused, admitted or queued, its state on the host."""

    job: JobId


class Dismiss(NamedTuple):
    """The job has ended, its state is on the host, and its seat is free."""

    job: JobId


class Apply(NamedTuple):
    """This budget holds from now on: the new one, or the old one where jobs at rest alone hold more than the new one."""

    nbytes: int


Order = Do | Park | Unpark | Admit | Adopt | Decline | Rest | Dismiss | Apply
