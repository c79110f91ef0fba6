"""`NO_STATE` and `NO_BATCH`: values that mean that there is no state, or no batch.

`None` cannot mean this, since a user may give `None` as a state or a batch.
"""

from enum import Enum


class Missing(Enum):
    """The type of `NO_STATE` and `NO_BATCH`."""

    STATE = "no state"
    BATCH = "no batch"


NO_STATE, NO_BATCH = Missing.STATE, Missing.BATCH
