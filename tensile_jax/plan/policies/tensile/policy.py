"""Policy `tensile`: the paper's own algorithms, between the segments that `none` starts from.

    access.py                  tensor access sequence (section IV-A)
    footprint.py               Algorithm 1, GPU memory peak analysis, kept up to date under events
    swap_scheduling.py         Algorithm 2, swap scheduling
    recompute_scheduling.py    section IV-D, recomputation scheduling by MSPS
    complete_scheduling.py     Algorithm 3, the outer loop
    schedule_to_absences.py                 from its schedule to places of the graph

Swapping does not stop at the budget: it goes on as long as the peak falls. Only recomputation does, while what lies between
segments is not below the budget. Workspaces are not part of the paper's footprint, so the schedule may need more than it says;
then it is asked for less, until the cut of the step into segments is under the limit.

Departures: latencies come from a device profile in the place of an MLP; the operators that access tensors are stretches between
heavy operators of the jaxpr, not the layers of a framework; segments are cut afterwards, as for every policy.
"""

from tensile_jax.plan.analysis.residency import Absences
from tensile_jax.plan.analysis.retention import Retention, retain
from tensile_jax.plan.policies.tensile.schedule_to_absences import schedule_events
from tensile_jax.plan.search.candidates import Candidates
from tensile_jax.plan.search.choice import LEAST, Choice, first_that_fits
from tensile_jax.plan.search.workspace import Measured

_TARGETS = (1.0, 0.9, 0.75, 0.5, 0.0)  # of the limit, one after another: the memory that Algorithm 3 is told to be free


def tensile(candidates: Candidates, limit: float, measured: Measured) -> Choice | None:
    """The first schedule whose cheapest segments are under the limit."""
    targets = (LEAST,) if limit == LEAST else tuple(part * limit for part in _TARGETS)
    indices = (candidates.add(("tensile", target), lambda target=target: _scheduled(candidates, target)) for target in targets)
    return first_that_fits(candidates, indices, limit, measured)


def _scheduled(candidates: Candidates, free_bytes: float) -> tuple[Retention, Absences]:
    base = candidates[0]
    placed = schedule_events(
        base.retention,
        candidates.latencies,
        candidates.profile,
        boundaries=base.table.boundaries,
        budget_bytes=free_bytes,
        state_may_stay_out=candidates.state_may_stay_out,
    )
    return retain(candidates.liveness, placed.dropped), placed.absences
