"""Policy `auto`, the default: the least time under the limit, of everything that the ladder has to offer.

Recomputation, swaps and segments compete by the microseconds that they add to the step; see `candidates.py` for what there is to
choose from, `segmentation.py` for how segments are priced, `local_search.py` for copies that the limit does not ask for. If the
step as one executable is under the limit, that is the plan.
"""

import math
from collections.abc import Iterator
from functools import lru_cache

from tensile_jax.plan.search.candidates import Ladder
from tensile_jax.plan.search.choice import LEAST, Choice, cheapest, least, step_us, whole, whole_peak
from tensile_jax.plan.search.local_search import improve
from tensile_jax.plan.search.workspace import Measured, hopeful_workspaces, workspaces

_SCALE = 0.985  # from one limit to the next
_LIMITS = 20
_SMALL = 300  # operators of a step for which so many limits are looked at
_FLOOR_RUNGS = 4  # the last rungs, of which the least peak is the floor


def auto(ladder: Ladder, limit: float, measured: Measured) -> Choice | None:
    """The fastest of what the ladder offers under the limit; one executable, if that fits.

    What a cut costs leaves out how its copies come to lie, so a lower limit may have the faster plan (by some per cent in large
    steps, by more in small ones). For small steps, some lower limits are therefore looked at as well. Limits are looked at on a
    fixed scale, in parts of the whole step's peak, downwards from the first at or below the limit, so many of them whatever the
    limit. That keeps a lower limit from needing more: let i be where the scale begins for it, and C[j] the plan of a higher one.
    If C[j] fits, j >= i: either it is looked at again, or what is faster is C[k] for a k > j, which has no higher peak.
    """
    if limit > LEAST and whole_peak(ladder, measured) <= limit:
        return whole(ladder)
    lowest, choice = hopeful_floor(ladder, measured)
    if limit == LEAST:
        return choice
    if limit < lowest:
        return None
    if len(ladder.graph.operators) > _SMALL:
        return _under(ladder, limit, measured)
    found = (_under(ladder, lower, measured) for lower in _scale(ladder, limit, lowest, measured))
    different = {(c.rung, c.boundaries, tuple(c.absences.values())): c for c in found if c is not None}
    if not different:
        return _under(ladder, limit, measured)
    choices = list(different.values())
    return choices[0] if len(choices) == 1 else min(choices, key=lambda c: step_us(ladder, c, measured))


def _scale(ladder: Ladder, limit: float, lowest: float, measured: Measured) -> Iterator[float]:
    highest = whole_peak(ladder, measured)
    first = max(0, math.ceil(math.log(limit / highest, _SCALE) - 1e-9))
    while highest * _SCALE**first > limit:
        first += 1
    for k in range(first, first + _LIMITS):
        yield max(highest * _SCALE**k, lowest)
        if highest * _SCALE**k <= lowest:
            return


@lru_cache(maxsize=32)
def _under(ladder: Ladder, limit: float, measured: Measured) -> Choice | None:
    """The cheapest of the cheapest cuts of all rungs, made faster in place."""
    found = cheapest(ladder, ladder.families(), limit, measured)
    return None if found is None else improve(ladder, found, limit, measured)


@lru_cache(maxsize=16)
def hopeful_floor(ladder: Ladder, measured: Measured) -> tuple[int, Choice]:
    """The least peak of the last rungs, and the choice that has it, before compiling says more."""
    return least(ladder, range(len(ladder) - _FLOOR_RUNGS, len(ladder)), measured, hopeful_workspaces)


def refuted_floors(ladder: Ladder, measured: Measured) -> Iterator[tuple[int, Choice]]:
    """The same when compiling has refuted that floor, the likeliest first. Looks at every rung.

    The first heeds all that was learnt, which may be too much to fear for small segments; the second what was measured only.
    """
    for needed in (workspaces, hopeful_workspaces):
        yield least(ladder, range(len(ladder)), measured, needed)
