"""Stand-ins for a state or a batch that does not exist. None cannot be one, since users may give None as a state or a batch."""

from enum import Enum


class Missing(Enum):
    """What does not exist."""

    STATE = "no state"
    BATCH = "no batch"


NO_STATE, NO_BATCH = Missing.STATE, Missing.BATCH
