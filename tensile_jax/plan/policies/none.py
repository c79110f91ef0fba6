"""Policy `none`: swaps nothing, and recomputes only what XLA fuses anyway. This is "vanilla" in the paper: no schedule at all.

The step is nevertheless cut into segments. They may use 95 % of the peak of the step as one executable, or 4 % more than the
least peak of any cut, whichever is more, but never more than the limit. The other policies start from the tensors that this
policy keeps.
"""

from tensile_jax.plan.search.candidates import Candidates
from tensile_jax.plan.search.choice import LEAST, Choice, whole, whole_peak
from tensile_jax.plan.search.segmentation import cheapest_cut, least_peak
from tensile_jax.plan.search.workspace import Measured, workspaces

_NEAR_LEAST = 1.04  # of the least peak: the policy may use so much memory if the limit allows it
_NEAR_WHOLE = 0.95  # of the whole step's peak: the policy may use so much instead if that is more


def none(candidates: Candidates, limit: float, measured: Measured) -> Choice | None:
    """The cheapest segments of the first candidate under the limit and near the least that they need."""
    if not candidates.graph.operators:
        return whole(candidates)
    work = workspaces(candidates, 0, measured)
    table = candidates[0].table
    lowest = least_peak(table, work)
    near = max(_NEAR_LEAST * lowest, _NEAR_WHOLE * whole_peak(candidates, measured))
    cut = cheapest_cut(table, work, lowest if limit == LEAST else min(near, limit))
    return None if cut is None else Choice(0, cut.boundaries, {})
