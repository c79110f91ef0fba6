"""Policy `none`: no swaps, and nothing computed again but what XLA fuses. The vanilla of the paper: our runtime, no schedule.

The step is cut into segments that fit where the whole step would. The other policies start from what this one keeps.
"""

from tensile_jax.plan.search.candidates import Ladder
from tensile_jax.plan.search.choice import LEAST, Choice, whole, whole_peak
from tensile_jax.plan.search.segmentation import cheapest_cut, least_peak
from tensile_jax.plan.search.workspace import Measured, workspaces

_NEAR_LEAST = 1.04  # of the least peak: what it may always use, as far as the limit allows
_NEAR_WHOLE = 0.95  # of the whole step's peak: what it may use if that is more


def none(ladder: Ladder, limit: float, measured: Measured) -> Choice | None:
    """The cheapest segments of the first rung under the limit and near the least that they need."""
    if not ladder.graph.operators:
        return whole(ladder)
    work = workspaces(ladder, 0, measured)
    board = ladder.rung(0).board
    lowest = least_peak(board, work)
    near = max(_NEAR_LEAST * lowest, _NEAR_WHOLE * whole_peak(ladder, measured))
    cut = cheapest_cut(board, work, lowest if limit == LEAST else min(near, limit))
    return None if cut is None else Choice(0, cut.boundaries, {})
