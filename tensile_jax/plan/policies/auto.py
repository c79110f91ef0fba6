"""Policy `auto`, the default: the fastest plan under the limit, of all candidates.

Recomputation, swaps and segments compete by the microseconds that they add to the step. `candidates.py` says what there is to
choose from, `segmentation.py` how segments are priced, and `local_search.py` removes copies that the limit does not ask for. If
the step as one executable is under the limit, that is the plan.
"""

import math
from collections.abc import Iterator
from functools import lru_cache

from tensile_jax.plan.search.candidates import Candidates
from tensile_jax.plan.search.choice import LEAST, Choice, cheapest, least, step_us, whole, whole_peak
from tensile_jax.plan.search.local_search import improve
from tensile_jax.plan.search.workspace import Measured, workspace_lower_estimates, workspaces

_SCALE = 0.985  # from one limit to the next
_LIMITS = 20
_SMALL = 300  # operators of a step for which so many limits are looked at
_FLOOR_CANDIDATES = 4  # the last candidates, of which the least peak is the floor


def auto(candidates: Candidates, limit: float, measured: Measured) -> Choice | None:
    """The fastest of what the candidates offers under the limit; one executable, if that fits.

    What a cut costs leaves out how its copies come to lie, so a lower limit may have the faster plan (by some per cent in large
    steps, by more in small ones). For small steps, some lower limits are therefore looked at as well. Limits are looked at on a
    fixed scale, in parts of the whole step's peak, downwards from the first at or below the limit, so many of them whatever the
    limit. That keeps a lower limit from needing more: let i be where the scale begins for it, and C[j] the plan of a higher one.
    If C[j] fits, j >= i: either it is looked at again, or what is faster is C[k] for a k > j, which has no higher peak.
    """
    if limit > LEAST and whole_peak(candidates, measured) <= limit:
        return whole(candidates)
    lowest, choice = floor_lower_estimate(candidates, measured)
    if limit == LEAST:
        return choice
    if limit < lowest:
        return None
    if len(candidates.graph.operators) > _SMALL:
        return _under(candidates, limit, measured)
    found = (_under(candidates, lower, measured) for lower in _scale(candidates, limit, lowest, measured))
    different = {(c.candidate, c.boundaries, tuple(c.absences.values())): c for c in found if c is not None}
    if not different:
        return _under(candidates, limit, measured)
    choices = list(different.values())
    return choices[0] if len(choices) == 1 else min(choices, key=lambda c: step_us(candidates, c, measured))


def _scale(candidates: Candidates, limit: float, lowest: float, measured: Measured) -> Iterator[float]:
    highest = whole_peak(candidates, measured)
    first = max(0, math.ceil(math.log(limit / highest, _SCALE) - 1e-9))
    while highest * _SCALE**first > limit:
        first += 1
    for k in range(first, first + _LIMITS):
        yield max(highest * _SCALE**k, lowest)
        if highest * _SCALE**k <= lowest:
            return


@lru_cache(maxsize=32)
def _under(candidates: Candidates, limit: float, measured: Measured) -> Choice | None:
    """The cheapest of the cheapest cuts of all candidates, made faster in place."""
    found = cheapest(candidates, candidates.families(), limit, measured)
    return None if found is None else improve(candidates, found, limit, measured)


@lru_cache(maxsize=16)
def floor_lower_estimate(candidates: Candidates, measured: Measured) -> tuple[int, Choice]:
    """The least peak of the last candidates, and the choice that has it, before compiling says more."""
    return least(candidates, range(len(candidates) - _FLOOR_CANDIDATES, len(candidates)), measured, workspace_lower_estimates)


def floors_after_compiling(candidates: Candidates, measured: Measured) -> Iterator[tuple[int, Choice]]:
    """The same when compiling has refuted that floor, the likeliest first. Looks at every candidate.

    The first takes all errors of estimates into account, which may be too cautious for small segments; the second takes measured
    sizes alone.
    """
    for needed in (workspaces, workspace_lower_estimates):
        yield least(candidates, range(len(candidates)), measured, needed)
