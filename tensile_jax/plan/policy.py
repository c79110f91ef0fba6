"""Policies: from a ladder and a budget to a layout. One signature, so that others can stand beside these.

    policy(ladder, limit, measured) -> Choice | None

`limit` is in bytes; None means that the policy has no plan under it. `measured` holds what compiling has shown so far, and a
policy must use it in the place of its estimates.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from tensile_jax.plan.assemble import Layout
from tensile_jax.plan.cut import cheapest_cut, least_peak
from tensile_jax.plan.ladder import Ladder

WHOLE = -1
"""The rung of the choice to run the step as one executable."""

_NEAR_LEAST = 1.02
_FLOOR_RUNGS = 3  # the last rungs, of which the least peak is the floor


@dataclass(frozen=True, slots=True)
class Measured:
    """What compiling has shown, in bytes.

    `workspaces` by (rung, begin, end). `whole` is the peak of the step as one executable. `growth` is added to the
    profile's workspace growth.
    """

    workspaces: Mapping[tuple[int, int, int], int] = field(default_factory=lambda: {})
    whole: int | None = None
    growth: float = 0.0

    def of_rung(self, rung: int) -> dict[tuple[int, int], int]:
        """The workspaces of one rung's segments, by (begin, end)."""
        return {(b, e): nbytes for (r, b, e), nbytes in self.workspaces.items() if r == rung}


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """A rung (or `WHOLE`) and where to cut it."""

    rung: int
    boundaries: tuple[int, ...]


Policy = Callable[[Ladder, float, Measured], Choice | None]


def auto(ladder: Ladder, limit: float, measured: Measured) -> Choice | None:
    """The first rung of the ladder that has a segmentation under the limit; one executable, if that fits."""
    if whole_peak(ladder, measured) <= limit:
        return Choice(WHOLE, (0, len(ladder.graph.operators)))
    for index in range(len(ladder)):
        rung = ladder.rung(index)
        if rung.highest > limit:
            continue
        bounds = cheapest_cut(rung.board, workspaces(ladder, index, measured), limit)
        if bounds is not None and len(bounds) > 2:
            return Choice(index, bounds)
    return None


def none(ladder: Ladder, limit: float, measured: Measured) -> Choice | None:
    """No events but releases: the step in the segments that hold its memory near the least that it can be without any."""
    del limit
    work = workspaces(ladder, 0, measured)
    board = ladder.rung(0).board
    bounds = cheapest_cut(board, work, _NEAR_LEAST * least_peak(board, work))
    assert bounds is not None  # the least peak is attained by construction
    return Choice(0, bounds)


POLICIES: Mapping[str, Policy] = {"auto": auto, "none": none}


def floor(ladder: Ladder, measured: Measured) -> tuple[int, Choice]:
    """The least peak of the lowest rungs, and the choice that attains it."""
    last = range(len(ladder) - _FLOOR_RUNGS, len(ladder))
    nbytes, index = min((least_peak(ladder.rung(i).board, workspaces(ladder, i, measured)), i) for i in last)
    bounds = cheapest_cut(ladder.rung(index).board, workspaces(ladder, index, measured), nbytes)
    assert bounds is not None  # the least peak is attained by construction
    return nbytes, Choice(index, bounds)


def workspaces(ladder: Ladder, rung: int, measured: Measured) -> np.ndarray:
    """Workspaces of every segment of a rung, with all that is known."""
    growth = ladder.profile.workspace_growth + measured.growth
    return ladder.rung(rung).board.workspaces(growth, measured.of_rung(rung))


def whole_peak(ladder: Ladder, measured: Measured) -> int:
    """Peak of the step as one executable: measured, or the more of what it stores and what it is estimated to need."""
    if measured.whole is not None:
        return measured.whole
    board = ladder.rung(0).board
    return max(ladder.unplanned_bytes, int(board.held[0, -1] + board.workspace[0, -1]))


def layout(ladder: Ladder, choice: Choice, measured: Measured) -> Layout:
    """The layout of a choice, with the workspaces of its segments."""
    rung = ladder.rung(choice.rung)
    work = workspaces(ladder, choice.rung, measured)
    index = {b: i for i, b in enumerate(rung.board.boundaries)}
    pairs = zip(choice.boundaries, choice.boundaries[1:], strict=False)
    of_segments = tuple(int(np.ceil(work[index[a], index[b]])) for a, b in pairs)
    return Layout(rung.retention, rung.absences, choice.boundaries, of_segments)
