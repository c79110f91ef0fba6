"""Policies: from a ladder and a budget to a layout. One signature, so that others can stand beside these.

    policy(ladder, limit, measured) -> Choice | None

`limit` is in bytes; None means that the policy has no plan under it. `measured` holds what compiling has shown so far, and a
policy must use it in the place of its estimates.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from tensile_jax.plan.assemble import Layout
from tensile_jax.plan.cut import Cut, cheapest_cut, least_peak
from tensile_jax.plan.ladder import Ladder
from tensile_jax.plan.workspace import Measured, hopeful_workspaces, workspaces

WHOLE = -1
"""The rung of the choice to run the step as one executable."""

_NEAR_LEAST = 1.04  # of the least peak of the first rung: what "none" may always use
_NEAR_WHOLE = 0.95  # of the whole step's peak: what it may use if that is more
_FLOOR_RUNGS = 3  # the last rungs, of which the least peak is the floor


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """A rung (or `WHOLE`) and where to cut it."""

    rung: int
    boundaries: tuple[int, ...]


Policy = Callable[[Ladder, float, Measured], Choice | None]


def auto(ladder: Ladder, limit: float, measured: Measured) -> Choice | None:
    """The cheapest of the cheapest cuts of all rungs; one executable, if that fits.

    What a cut costs does not depend on the limit, so a lower one never gives a higher peak: if the plan for a limit keeps a lower
    one too, it is the cheapest under that as well; otherwise the lower limit's plan is below it. Ties go to the lower rung.
    """
    if whole_peak(ladder, measured) <= limit:
        return Choice(WHOLE, (0, len(ladder.graph.operators)))
    if limit < floor(ladder, measured)[0]:
        return None
    best: Cut | None = None
    where = WHOLE
    for rungs in ladder.families():
        for index in rungs:
            if best is not None and ladder.least_us(index) >= best.cost:
                break  # the next rungs of the family are dearer still
            rung = ladder.rung(index)
            if rung.highest > limit or (best is not None and rung.least_us >= best.cost):
                continue
            cut = cheapest_cut(rung.board, workspaces(ladder, index, measured), limit)
            if cut is not None and (best is None or cut.cost + rung.swap_us < best.cost):
                best, where = Cut(cut.cost + rung.swap_us, cut.boundaries), index
    return None if best is None else Choice(where, best.boundaries)


def none(ladder: Ladder, limit: float, measured: Measured) -> Choice | None:
    """No swaps, and nothing computed again but what XLA fuses: the step in segments that fit where the whole step would."""
    del limit
    if not ladder.graph.operators:
        return Choice(WHOLE, (0, 0))
    work = workspaces(ladder, 0, measured)
    board = ladder.rung(0).board
    cut = cheapest_cut(board, work, max(_NEAR_LEAST * least_peak(board, work), _NEAR_WHOLE * whole_peak(ladder, measured)))
    assert cut is not None  # the least peak is attained by construction
    return Choice(0, cut.boundaries)


POLICIES: Mapping[str, Policy] = {"auto": auto, "none": none}


@lru_cache(maxsize=16)
def floor(ladder: Ladder, measured: Measured) -> tuple[int, Choice]:
    """The smallest limit that is planned for, and the choice that keeps it: the least peak of the last rungs, or of the whole."""
    return _least(ladder, measured, range(len(ladder) - _FLOOR_RUNGS, len(ladder)), hopeful_workspaces)


def floors(ladder: Ladder, measured: Measured) -> Iterator[tuple[int, Choice]]:
    """Choices for the least peak when compiling has refuted the floor, the likeliest first. Looks at every rung.

    The first heeds all that was learnt, which may be too much to fear for small segments; the second what was measured only.
    """
    rungs = range(len(ladder))
    yield _least(ladder, measured, rungs, workspaces)
    yield _least(ladder, measured, rungs, hopeful_workspaces)


def _least(
    ladder: Ladder, measured: Measured, rungs: Iterable[int], needed: Callable[[Ladder, int, Measured], np.ndarray]
) -> tuple[int, Choice]:
    whole = whole_peak(ladder, measured), Choice(WHOLE, (0, len(ladder.graph.operators)))
    if not ladder.graph.operators:
        return whole
    nbytes, index = min((least_peak(ladder.rung(i).board, needed(ladder, i, measured)), i) for i in rungs)
    if whole[0] <= nbytes:
        return whole
    cut = cheapest_cut(ladder.rung(index).board, needed(ladder, index, measured), nbytes)
    assert cut is not None  # the least peak is attained by construction
    return nbytes, Choice(index, cut.boundaries)


def whole_peak(ladder: Ladder, measured: Measured) -> int:
    """Peak of the step as one executable: measured, or the more of what it stores and what it is estimated to need."""
    if measured.whole is not None or not ladder.graph.operators:
        return measured.whole or sum(t.nbytes for t in ladder.graph.tensors)
    board = ladder.rung(0).board
    return max(ladder.unplanned_bytes, int(board.held[0, -1] + board.workspace[0, -1]))


def layout(ladder: Ladder, choice: Choice, measured: Measured) -> Layout:
    """The layout of a choice, with the workspaces of its segments."""
    rung = ladder.rung(choice.rung)
    work = workspaces(ladder, choice.rung, measured)
    index = {b: i for i, b in enumerate(rung.board.boundaries)}
    pairs = zip(choice.boundaries, choice.boundaries[1:], strict=False)
    of_segments = tuple(int(work[index[a], index[b]]) for a, b in pairs)
    return Layout(rung.retention, rung.absences, choice.boundaries, of_segments)
