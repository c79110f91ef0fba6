"""A state or a batch that is not there. None would not do, since None is a state or a batch that a user may give."""

from enum import Enum


class Missing(Enum):
    """What is not there, where None would be a value that a user may give."""

    STATE = "no state"
    BATCH = "no batch"


NO_STATE, NO_BATCH = Missing.STATE, Missing.BATCH
