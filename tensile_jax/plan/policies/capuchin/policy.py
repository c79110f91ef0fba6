"""Policy `capuchin`: makes one plan of swaps and recomputations from the tensor accesses of the first iteration.

Peng et al., "Capuchin: Tensor-based GPU Memory Management for Deep Learning" (ASPLOS 2020), sections 4.3 to 4.5, the second
baseline of TENSILE (section V). The first iteration runs in passive mode (`passive_mode.py`). It shows when tensors are accessed,
and which kernels need more memory than there is. From these, evictions are chosen once, by their free time FT and by MSPS, the
memory that they save per unit of time (`evictions.py`):

    1. candidates   evictions that lower the memory of a kernel which needs more than the target, by falling FT
    2. hidden       those with FT >= 0 are swapped, as long as both copies find a window on the link, one lane for each direction
    3. exposed      the eviction that saves the most bytes per microsecond: nbytes / exposed time of a swap, or the MSPS of a
                    recomputation; every choice changes what the others cost, so the others are computed again after it
    until no kernel needs more than the target.

The target is the limit. Nothing is scheduled across iterations: state is on the device when the iteration begins and ends, even
with `state_memory="any"`. If the whole step fits the limit, it runs as one executable. Ties: the larger tensor, then the lower
id, then the earlier access; a swap before a recomputation.

Differences from the paper:

    - Accesses are those of kernels, not of single operators, and times come from the device profile.
    - Copies are placed once, by a prediction. Capuchin moves in-triggers from iteration to iteration.
    - Segments need more than kernels do (`segmentation.py`). If no cut of the plan is under the limit, lower targets are tried.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from heapq import heapify, heappop, heapreplace

from tensile_jax.plan.analysis.residency import Absences
from tensile_jax.plan.analysis.retention import Retention, retain
from tensile_jax.plan.policies.capuchin.evictions import Eviction, Evictions
from tensile_jax.plan.policies.capuchin.passive_mode import Kernel, observe
from tensile_jax.plan.policies.event_boundaries import event_boundaries
from tensile_jax.plan.search.candidates import Candidates
from tensile_jax.plan.search.choice import LEAST, Choice, first_that_fits, whole
from tensile_jax.plan.search.workspace import Measured

_PARTS = (1.0, 0.92, 0.84, 0.72, 0.6)  # of the limit: targets, tried one after another until a cut is under the limit
_LEAST_PARTS = (0.8, 0.65, 0.5, 0.35, 0.2, 0.0)  # of what the kernel that needs most needs: targets for the least memory


def capuchin(candidates: Candidates, limit: float, measured: Measured) -> Choice | None:
    """The cheapest cut of the first target's plan that has a cut under the limit."""
    if not candidates.graph.operators:
        return whole(candidates)
    return first_that_fits(candidates, _candidates_for(candidates, limit), limit, measured)


def _candidates_for(candidates: Candidates, limit: float) -> Iterator[int]:
    """The plans for the limit and for less, down to the least; the first candidate where nothing needs to be evicted."""
    kernels = observe(candidates)
    most = max(kernel.nbytes for kernel in kernels)
    if limit == LEAST or limit >= most:
        yield 0
    targets = [part * limit for part in _PARTS if LEAST < part * limit < most] + [part * most for part in _LEAST_PARTS]
    for target in targets:
        yield candidates.add(("capuchin", target), partial(_candidate_for, candidates, kernels, target))


def _candidate_for(
    candidates: Candidates, kernels: Sequence[Kernel], target: float
) -> tuple[Retention, Absences, tuple[int, ...]]:
    retention, absences = plan_evictions(candidates, kernels, target)
    own = event_boundaries(retention, absences, candidates.costs)
    return retention, absences, own


def plan_evictions(candidates: Candidates, kernels: Sequence[Kernel], target: float) -> tuple[Retention, Absences]:
    """What is dropped and what is away so that no kernel needs more than the target, or as near to it as evictions come."""
    evictions = Evictions(candidates, kernels, target)
    left: list[Eviction] = []
    for eviction in evictions.candidates():
        if evictions.enough():
            break
        if eviction.free_us < 0 or not evictions.swap_hidden(eviction):
            left.append(eviction)
    left.sort(key=lambda e: (-e.nbytes, e.gap.tensor, e.first))
    queue = [(-evictions.rate(eviction), rank) for rank, eviction in enumerate(left)]  # the best first
    heapify(queue)
    while queue and not evictions.enough():
        before, rank = queue[0]
        now = -evictions.rate(left[rank])
        if now == 0.0:  # nothing to gain any more
            heappop(queue)
        elif now > before:
            heapreplace(queue, (now, rank))
        else:
            evictions.evict(left[rank])
            heappop(queue)
    absences = {t: tuple(sorted(several, key=lambda a: a.leave)) for t, several in evictions.absences.items()}
    return retain(candidates.liveness, evictions.dropped), absences
