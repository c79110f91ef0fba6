"""Policy `tensile`: plans a step with the algorithms of the paper TENSILE (Zhang et al.).

*Possible boundaries* are the places at which the step may be cut (`search/condensed/possible_boundaries.py`). The algorithms here
treat all operators between two neighbouring possible boundaries as one operator. The files are:

    analysis/access.py         the tensor access sequence (section IV-A)
    footprint.py               Algorithm 1, GPU memory peak analysis, kept up to date while events are added
    swap_scheduling.py         Algorithm 2, swap scheduling
    recompute_scheduling.py    section IV-D, recomputation scheduling by MSPS, the memory saved per unit of time
    complete_scheduling.py     Algorithm 3, the outer loop
    schedule_to_absences.py    translates the schedule of Algorithm 3: which tensors are *dropped* (released, and computed again
                               where they are needed), and in which intervals each swapped tensor is not on the device

If the whole step fits the limit, it runs as one executable. Otherwise the policy runs Algorithm 3 with the limit as its budget,
the memory in which the tensors should fit. The algorithm swaps as long as it finds a swap, even if the tensors fit already. It
recomputes only while the tensors need as much as the budget or more.

The plan may need more memory than this schedule says. A *segment* is a stretch of operators that is compiled as one executable,
and its *workspace* is the memory that it needs beside its inputs and results. The paper leaves workspaces out. If no cut into
segments keeps the limit with its workspaces, the policy runs Algorithm 3 again with a budget of zero, so that it saves as much
memory as it can.

Differences from the paper:

    - Latencies come from a device profile; the paper predicts them with an MLP.
    - In the paper, an operator is one of a deep learning framework. Here it is all operators between two neighbouring possible
      boundaries.
    - The paper runs its operators one by one. Here segments begin and end where the schedule's copies are issued and awaited
      (`event_boundaries.py`). Other boundaries are added only where the limit requires them.
    - Algorithm 2 says when a copy to the host begins. Here it begins right after the last access, or when the copy that was
      issued before it has ended (`copy_order.py`).
    - The paper always schedules across iterations. Here it does so with `state_memory="any"` only, because with "device" the
      caller wants the state on the device between two calls.
    - The paper's host memory has no limit. Here swaps that the host cannot hold are left out (`policies/host_limit.py`).
"""

from tensile_jax.plan.analysis.access import AccessSequence, access_sequence
from tensile_jax.plan.analysis.retention import retain
from tensile_jax.plan.policies.copy_order import in_order_of_issue
from tensile_jax.plan.policies.event_boundaries import event_boundaries
from tensile_jax.plan.policies.host_limit import that_fit, within_host_limit
from tensile_jax.plan.policies.segments import Decision, first_that_fits
from tensile_jax.plan.policies.tensile.schedule_to_absences import schedule_events
from tensile_jax.plan.policies.tensile.swap_scheduling import SwappedOut
from tensile_jax.plan.search.choice import LEAST, Choice
from tensile_jax.plan.search.cost.workspace import CompiledSizes
from tensile_jax.plan.search.step_model import StepModel
from tensile_jax.plan.search.swaps import SMALLEST

_TARGETS = (1.0, 0.0)  # of the limit: Free_GPU_Memory of Algorithm 3; more targets plan longer (`make bench-constants`)


def tensile(
    model: StepModel, limit: float, measured: CompiledSizes, agreed: tuple[SwappedOut, ...] | None = None
) -> Choice | None:
    """The cheapest segments under the limit, for the first schedule that has any.

    Args:
        agreed: the swaps that were chosen for several jobs together; by default, Algorithm 2 chooses them for this job alone.
    """
    return within_host_limit(model, limit, measured, lambda model: _cut(model, limit, measured, agreed))


def _cut(model: StepModel, limit: float, measured: CompiledSizes, agreed: tuple[SwappedOut, ...] | None) -> Choice | None:
    if not model.may_swap:
        agreed = ()
    targets = (LEAST,) if limit == LEAST else tuple(part * limit for part in _TARGETS)
    options = ((("tensile", target, agreed), lambda target=target: _scheduled(model, target, agreed)) for target in targets)
    return first_that_fits(model, options, limit, measured)


def access_sequence_of(model: StepModel) -> AccessSequence:
    """The tensor access sequence that this policy schedules."""
    return access_sequence(model.base, model.boundaries, model.latencies, smallest_bytes=SMALLEST)


def _scheduled(model: StepModel, free_bytes: float, agreed: tuple[SwappedOut, ...] | None) -> Decision:
    placed = schedule_events(
        model.base,
        model.latencies,
        model.profile,
        boundaries=model.boundaries,
        budget_bytes=free_bytes,
        state_may_stay_out=model.state_may_stay_out,
        agreed=agreed,
    )
    retention = retain(model.liveness, placed.dropped)
    absences = in_order_of_issue(retention, that_fit(model, retention, placed.absences), model.costs)
    return Decision(retention, absences, event_boundaries(retention, absences, model.costs))
