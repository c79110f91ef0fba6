"""Policy `capuchin`: makes one plan of swaps and recomputations from the tensor accesses of the first iteration.

Peng et al., "Capuchin: Tensor-based GPU Memory Management for Deep Learning" (ASPLOS 2020), sections 4.3 to 4.5, the second
baseline of TENSILE (section V). The first iteration runs in *passive mode*: it copies tensors to the host when an allocation
fails (`passive_mode.py`). This shows when tensors are accessed, and which kernels need more memory than there is. A *kernel* is
one heavy operator (one that XLA does not fuse into others) with the light ones that XLA fuses with it. An *eviction* removes a
tensor from the device between two of its accesses. The *target* is the memory that no kernel should exceed. The policy then
chooses all evictions (`evictions.py` has the formulas):

    1. The candidates are the evictions that lower the memory of a kernel above the target. Their *free time* (FT) is the time
       between the two accesses, minus the time of both copies. The policy looks at the candidates in the order of their free
       time, the longest first.
    2. If both copies of the tensor can be hidden behind computation, the tensor is swapped.
    3. Otherwise the policy finds the candidate whose recomputation saves the most memory per unit of time (MSPS). This may be a
       candidate with another tensor. If its recomputation costs less than the swap, the policy recomputes the tensor of *that*
       candidate. If not, the policy swaps the tensor of point 2, and computation waits for its copies.
    4. The policy stops when no kernel needs more than the target. If one pass over all candidates is not enough, the policy
       collects the candidates that are left and makes another pass. It also stops when a pass evicts nothing.
    5. Copies to the device start earlier if a segment still waits for them (`feedback.py`).

At first, the target is the limit. A plan cuts the step into *segments*, stretches of operators that are each compiled as one
executable. A segment may need more memory than each of its kernels. If no cut keeps the limit, lower targets are tried. A tensor
leaves the device when its copy to the host ends, and nothing waits for that. If no cut keeps the limit in this way, each tensor
leaves before the first kernel that exceeds the target, which then waits for the copy, as in Capuchin when an allocation fails.

If the whole step fits the limit, it runs as one executable. State is on the device when the iteration begins and ends, even if
the user allows it to be in host memory then (`state_memory="any"`). Ties go to the larger tensor, then to the lower id, then to
the earlier access. If a swap and a recomputation cost the same, the policy swaps.

Differences from the paper:

    - Accesses are those of kernels, not of single operators, and times come from the device profile.
    - Kernels run in segments that begin and end at the copies (`event_boundaries.py`).
    - A chain of operators that computes a tensor again also makes other evicted tensors. Capuchin keeps these as long as memory
      allows (collective recomputation). Here a segment runs the chain once for all tensors that it needs, and hands none of them
      on. The next segment that needs the chain runs it again. The cheapest cut therefore joins segments as far as the limit
      allows.
    - Swaps that the host cannot hold are left out (`policies/host_limit.py`).
    - `evictions.py`, `passive_mode.py` and `feedback.py` list further differences.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from heapq import heappop, heapreplace

from tensile_jax.plan.analysis.absence import Absences
from tensile_jax.plan.analysis.retention import Retention, retain
from tensile_jax.plan.policies.capuchin.evictions import Eviction, Evictions, Recomputation
from tensile_jax.plan.policies.capuchin.feedback import move_in_triggers
from tensile_jax.plan.policies.capuchin.passive_mode import Kernel, observe
from tensile_jax.plan.policies.copy_order import in_order_of_issue
from tensile_jax.plan.policies.event_boundaries import event_boundaries
from tensile_jax.plan.policies.host_limit import that_fit, within_host_limit
from tensile_jax.plan.policies.segments import Decision, Option, first_that_fits
from tensile_jax.plan.search.choice import LEAST, WHOLE, Choice
from tensile_jax.plan.search.cost.workspace import CompiledSizes
from tensile_jax.plan.search.step_model import StepModel

_PARTS = (1.0, 0.92, 0.84, 0.72, 0.6)  # of the limit: targets until a cut fits (`make bench-constants`)
_LEAST_PARTS = (0.8, 0.65, 0.5, 0.35, 0.2, 0.0)  # of the largest kernel's need: targets for least memory (`make bench-constants`)


def capuchin(model: StepModel, limit: float, measured: CompiledSizes) -> Choice | None:
    """The cheapest cut of the first target's plan that has a cut under the limit."""
    return within_host_limit(model, limit, measured, lambda model: _cut(model, limit, measured))


def _cut(model: StepModel, limit: float, measured: CompiledSizes) -> Choice | None:
    if not model.graph.operators:
        return WHOLE
    choice = first_that_fits(model, _options(model, limit), limit, measured)
    return None if choice is None else move_in_triggers(model, choice, limit, measured)


def _options(model: StepModel, limit: float) -> Iterator[Option]:
    """The plans for the limit and for lower targets; the plan that evicts nothing comes last, or first if nothing needs to be
    evicted.

    There are two for each target: in one, nothing waits for copies to the host; in the other, kernels do. The plan that evicts
    nothing may fit as well, because XLA reuses memory within a segment, so a segment may need less than its kernels.
    """
    kernels = observe(model)
    most = max(kernel.nbytes for kernel in kernels)
    nothing_evicted: Option = "nothing evicted", lambda: Decision(model.base, {}, ())
    if limit >= most:
        yield nothing_evicted
    targets = [part * limit for part in _PARTS if LEAST < part * limit < most] + [part * most for part in _LEAST_PARTS]
    for target in targets:
        evicted = cache(partial(plan_evictions, model, kernels, target))
        for waits in (False, True):
            yield ("capuchin", target, waits), partial(_decision, model, evicted, waits=waits)
    if limit < most:
        yield nothing_evicted


def _decision(model: StepModel, evicted: Callable[[], tuple[Retention, Absences]], *, waits: bool) -> Decision:
    retention, absences = evicted()
    absences = that_fit(model, retention, absences)
    if not waits:
        absences = in_order_of_issue(retention, absences, model.costs)
    return Decision(retention, absences, event_boundaries(retention, absences, model.costs))


def plan_evictions(model: StepModel, kernels: Sequence[Kernel], target: float) -> tuple[Retention, Absences]:
    """What is dropped and what is away, so that no kernel needs more than the target, or as little more as evictions allow."""
    evictions = Evictions(model, kernels, target)
    while not evictions.enough() and _walk(evictions, evictions.candidates()):
        pass
    absences = {t: tuple(sorted(several, key=lambda a: a.leave)) for t, several in evictions.absences.items()}
    return retain(model.liveness, evictions.dropped), absences


def _walk(evictions: Evictions, waiting: Sequence[Eviction]) -> bool:
    """Go through the evictions once, in their order; return whether a tensor was evicted."""
    recomputations = _Recomputations(evictions, waiting)
    evicted = False
    for eviction in waiting:
        if evictions.enough():
            break
        if evictions.swap_hidden(eviction):
            evicted = True
        elif evictions.helps(eviction):
            swap_us, best = evictions.swap_overhead_us(eviction), recomputations.best()
            if best is not None and best[1].overhead_us < swap_us:
                evictions.recompute(*best)
                evicted = True
            elif swap_us < float("inf"):
                evictions.swap(eviction)
                evicted = True
    return evicted


class _Recomputations:
    """The recomputations of some evictions, of which it finds the one with the largest MSPS.

    Every tensor that is dropped makes the recomputation of others longer, never shorter. So an eviction is looked at again only
    when its last known MSPS is the largest.
    """

    def __init__(self, evictions: Evictions, waiting: Sequence[Eviction]) -> None:
        self._evictions = evictions
        self._ranked = sorted(waiting, key=lambda e: (-e.nbytes, e.gap.tensor, e.first))
        self._queue = [(float("-inf"), rank) for rank in range(len(self._ranked))]  # -MSPS

    def best(self) -> tuple[Eviction, Recomputation] | None:
        """The eviction with the largest MSPS of those that still help, and its recomputation; None if there is none."""
        while self._queue:
            before, rank = self._queue[0]
            eviction = self._ranked[rank]
            found = self._evictions.recomputation(eviction) if self._evictions.helps(eviction) else None
            if found is None:
                heappop(self._queue)
                continue
            now = -eviction.nbytes / found.overhead_us if found.overhead_us > 0 else float("-inf")
            if now <= before:
                return eviction, found
            heapreplace(self._queue, (now, rank))
        return None
