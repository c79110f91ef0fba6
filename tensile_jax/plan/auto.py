"""Policy `auto`, the default: the least time under the limit, of everything that the ladder has to offer.

Recomputation, swaps and segments compete by the microseconds that they add to the step; see `ladder.py` for what there is to
choose from, `cut.py` for how segments are priced, `improve.py` for copies that the limit does not ask for. If the step as one
executable is under the limit, that is the plan.
"""

from collections.abc import Iterator
from functools import lru_cache

from tensile_jax.plan.choice import LEAST, Choice, cheapest, least, whole, whole_peak
from tensile_jax.plan.improve import improve
from tensile_jax.plan.ladder import Ladder
from tensile_jax.plan.workspace import Measured, hopeful_workspaces, workspaces

_FLOOR_RUNGS = 3  # the last rungs, of which the least peak is the floor


def auto(ladder: Ladder, limit: float, measured: Measured) -> Choice | None:
    """The cheapest of the cheapest cuts of all rungs; one executable, if that fits."""
    if limit > LEAST and whole_peak(ladder, measured) <= limit:
        return whole(ladder)
    lowest, choice = hopeful_floor(ladder, measured)
    if limit == LEAST:
        return choice
    found = None if limit < lowest else cheapest(ladder, ladder.families(), limit, measured)
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
