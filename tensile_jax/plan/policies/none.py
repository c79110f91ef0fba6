"""Policy `none`: swaps nothing, and recomputes only the cheap operators that XLA repeats in its fusions anyway.

This policy is the baseline that the TENSILE paper calls "vanilla", a system without any schedule. Still, the step is cut into
*segments*, stretches of operators that are each compiled as one executable. The peak of this cut is at most

    min(limit, max(0.95 * peak of the step as one executable, 1.04 * least peak of any cut))

The policies `tensile`, `capuchin`, `vdnn` and `checkpoint`, which come from papers, begin with the tensors that this policy
keeps between segments. They then drop or swap some of these tensors.
"""

from tensile_jax.plan.policies.segments import Decision, cut_of, least_cut
from tensile_jax.plan.search.choice import LEAST, WHOLE, Choice, peak_of, whole_peak
from tensile_jax.plan.search.cost.workspace import CompiledSizes
from tensile_jax.plan.search.step_model import StepModel

_NEAR_LEAST = 1.04  # of the least peak: memory used although less would do, for fewer segments (`make bench-constants`)
_NEAR_WHOLE = 0.95  # of the whole step's peak: the same; the larger of the two counts (`make bench-constants`)


def none(model: StepModel, limit: float, measured: CompiledSizes) -> Choice | None:
    """The cheapest segments under the limit and near the least that they need."""
    if not model.graph.operators:
        return WHOLE
    kept = Decision(model.base, {}, ())
    lowest = least_cut(model, kept, measured)
    if limit == LEAST:
        return lowest
    least_bytes = peak_of(model, lowest, measured)
    near = max(_NEAR_LEAST * least_bytes, _NEAR_WHOLE * whole_peak(model, measured))
    choice = cut_of(model, kept, min(near, limit), measured)
    return lowest if choice is None and least_bytes <= limit else choice
