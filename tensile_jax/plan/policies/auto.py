"""Policy `auto`, the default: chooses the fastest plan that the planner finds under a memory limit.

If the step as one executable is under the limit, that is the plan. Otherwise the policy compares candidates
(`search/candidates.py`), which differ in what they recompute and what they swap. It cuts them into segments and takes the one
that adds the fewest microseconds to the step (`search/segmentation.py` says how segments are priced). Then
`search/local_search.py` removes copies, or gives them more time, where the limit leaves room for their tensors.
"""

import math
from collections.abc import Iterator
from functools import lru_cache

from tensile_jax.plan.search.candidates import Candidates
from tensile_jax.plan.search.choice import LEAST, Choice, cheapest, least, step_us, whole, whole_peak
from tensile_jax.plan.search.local_search import improve
from tensile_jax.plan.search.workspace import Measured, workspace_lower_estimates, workspaces

_SCALE = 0.985  # each further limit that is tried is this part of the one before
_LIMITS = 20  # that are tried at most
_SMALL = 300  # operators: further limits are tried for steps that have no more
_FLOOR_CANDIDATES = 4  # the last candidates, of which the least peak is the floor


def auto(candidates: Candidates, limit: float, measured: Measured) -> Choice | None:
    """The fastest plan that the candidates offer under the limit; one executable, if that fits.

    The price of a cut does not count on which boundaries its copies start and end. A cut that was made for a lower limit may
    therefore be faster when it is simulated (by a few per cent for large steps, by more for small ones). For small steps, the
    policy plans for up to `_LIMITS` limits and takes the fastest result. These limits lie on a fixed scale:

        limit[k] = (peak of the whole step) * _SCALE ** k      for `_LIMITS` numbers k, from the first with limit[k] <= `limit`

    Because the scale is fixed, a lower limit never gives a higher peak. Let C[k] be the choice for limit[k]; no later C[k] has a
    higher peak. Let a higher limit choose C[j], and let a lower limit try the numbers from i on. If j < i, all that the lower
    limit tries comes after j. If j >= i, the lower limit tries C[j] too; only a C[k] that the higher limit did not try can be
    faster than C[j], and that k is above j.
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
    """The cheapest cut of any candidate, after local search has improved its copies."""
    found = cheapest(candidates, candidates.families(), limit, measured)
    return None if found is None else improve(candidates, found, limit, measured)


@lru_cache(maxsize=16)
def floor_lower_estimate(candidates: Candidates, measured: Measured) -> tuple[int, Choice]:
    """The least peak of the last candidates, which keep the least in memory, and the choice that has this peak.

    Where no measurement replaces it, a workspace is its plain estimate, so that the floor is not too high.
    """
    return least(candidates, range(len(candidates) - _FLOOR_CANDIDATES, len(candidates)), measured, workspace_lower_estimates)


def floors_after_compiling(candidates: Candidates, measured: Measured) -> Iterator[tuple[int, Choice]]:
    """Two floors of all candidates, for when compiling has shown that `floor_lower_estimate` is too low; the likelier one first.

    The first floor corrects every estimate by the errors measured so far, which may be too cautious for small segments. The
    second floor replaces only those estimates whose own segments were measured.
    """
    for needed in (workspaces, workspace_lower_estimates):
        yield least(candidates, range(len(candidates)), measured, needed)
