"""Policies: from a ladder and a budget to a layout. One signature, so that others can stand beside these.

    policy(ladder, limit, measured) -> Choice | None

`limit` is in bytes; None means that the policy has no plan under it. `measured` holds what compiling has shown so far, and a policy
must use it in the place of its estimates.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from tensile_jax.plan.assemble import Layout
from tensile_jax.plan.cut import Board, cheapest_cut, least_peak
from tensile_jax.plan.ladder import Ladder

WHOLE = -1
"""The rung of the choice to run the step as one executable."""

_FLOOR_RUNGS = 3  # the last rungs, of which the least peak is the floor


@dataclass(frozen=True, slots=True)
class Measured:
    """What compiling has shown, in bytes.

    `workspaces` by (rung, begin, end). `whole` is the peak of the step as one executable. `inflation` multiplies the
    workspaces that are still estimates.
    """

    workspaces: Mapping[tuple[int, int, int], int] = field(default_factory=lambda: {})
    whole: int | None = None
    inflation: float = 1.0

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
        bounds = cheapest_cut(inflated(rung.board, measured), limit, known=measured.of_rung(index))
        if bounds is not None and len(bounds) > 2:
            return Choice(index, bounds)
    return None


def none(ladder: Ladder, limit: float, measured: Measured) -> Choice | None:
    """No events but releases: the step in the segments that hold its memory near the least that it can be without any."""
    del limit
    rung = ladder.rung(0)
    board = inflated(rung.board, measured)
    bounds = cheapest_cut(board, 1.02 * least_peak(board, known=measured.of_rung(0)), known=measured.of_rung(0))
    assert bounds is not None  # the least peak is attained by construction
    return Choice(0, bounds)


POLICIES: Mapping[str, Policy] = {"auto": auto, "none": none}


def floor(ladder: Ladder, measured: Measured) -> tuple[int, Choice]:
    """The least peak of the lowest rungs, and the choice that attains it."""
    best: tuple[int, int] | None = None
    for index in range(len(ladder) - _FLOOR_RUNGS, len(ladder)):
        nbytes = least_peak(inflated(ladder.rung(index).board, measured), known=measured.of_rung(index))
        if best is None or nbytes < best[0]:
            best = (nbytes, index)
    assert best is not None
    nbytes, index = best
    board = inflated(ladder.rung(index).board, measured)
    bounds = cheapest_cut(board, nbytes, known=measured.of_rung(index))
    assert bounds is not None
    return nbytes, Choice(index, bounds)


def inflated(board: Board, measured: Measured) -> Board:
    """The board with its estimated workspaces multiplied."""
    if measured.inflation == 1.0:
        return board
    extra = board.workspace * (measured.inflation - 1.0)
    return Board(board.boundaries, board.stored, board.cost, board.peak + extra, board.workspace + extra)


def whole_peak(ladder: Ladder, measured: Measured) -> int:
    """Peak of the step as one executable: measured, or what the uncut step stores at its highest."""
    if measured.whole is not None:
        return measured.whole
    return max(ladder.rung(0).highest, int(ladder.rung(0).board.peak[0, -1]))


def layout(ladder: Ladder, choice: Choice, measured: Measured) -> Layout:
    """The layout of a choice, with the workspaces of its segments."""
    rung = ladder.rung(choice.rung)
    board = inflated(rung.board, measured)
    known = measured.of_rung(choice.rung)
    index = {b: i for i, b in enumerate(board.boundaries)}
    workspaces = tuple(
        known.get((a, b), int(np.ceil(board.workspace[index[a], index[b]])))
        for a, b in zip(choice.boundaries, choice.boundaries[1:], strict=False)
    )
    return Layout(rung.retention, rung.absences, choice.boundaries, workspaces)
