"""Defines the values `NO_STATE` and `NO_BATCH`, which stand for "there is no state" and "there is no batch" of a job.

`None` cannot stand for these, since it is a pytree: a user may give `None` as a state or a batch.
"""

from enum import Enum


class Missing(Enum):
    """The type of `NO_STATE` and `NO_BATCH`."""

    STATE = "no state"
    BATCH = "no batch"


NO_STATE, NO_BATCH = Missing.STATE, Missing.BATCH
