"""What a segment needs beyond its inputs and outputs: estimated, measured, and what measuring teaches about the others.

    estimate(a, b) = what XLA would need if it scheduled as well as can be (`segmentation.py`), and its own growth for each kernel
    workspace(a, b) = measured                                                     where compiling has shown it
                    = estimate + surprise of the measured segment most like it     otherwise

    likeness of [a, b) and [c, d) = common / all of their heavy operators
    surprise = (measured - estimate) of that segment * the part of its heavy operators that is in [a, b)

Segments that overlap hold the same chains and large tensors, so an estimate that was wrong for one is wrong for the other
in the same way, on whatever rung. Without this, the planner would go from one segmentation that is underestimated to the next.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from tensile_jax.plan.search.candidates import Ladder


@dataclass(frozen=True, slots=True, eq=False)
class Measured:
    """What compiling has shown, in bytes.

    `workspaces` by (rung, begin, end). `whole` is the peak of the step as one executable. `caution` is what a segment that was
    not compiled yet must leave free: a planner picks what was underestimated, so it grows with each plan that was refuted.
    """

    workspaces: Mapping[tuple[int, int, int], int] = field(default_factory=lambda: {})
    whole: int | None = None
    caution: int = 0


def workspaces(ladder: Ladder, rung: int, measured: Measured) -> np.ndarray:
    """Workspaces of every segment of a rung, with all that is known. Square, with meaning above the diagonal."""
    estimates = ladder.rung(rung).board.estimates(ladder.profile.workspace_growth)
    if not measured.workspaces:
        return estimates
    found = np.maximum(np.ceil(estimates + _surprises(ladder, rung, measured)), 0.0) + measured.caution
    return _with_known(found, ladder, rung, measured)


def hopeful_workspaces(ladder: Ladder, rung: int, measured: Measured) -> np.ndarray:
    """The same, with estimates wherever nothing was measured, whatever was learnt: for a floor, which must not be too high."""
    return _with_known(ladder.rung(rung).board.estimates(ladder.profile.workspace_growth), ladder, rung, measured)


def _surprises(ladder: Ladder, rung: int, measured: Measured) -> np.ndarray:
    board = ladder.rung(rung).board
    operators = ladder.graph.operators
    heavy = np.cumsum([0, *(op.kind == "heavy" for op in operators)]) + 1e-3 * np.arange(len(operators) + 1)
    ends = heavy[list(board.boundaries)]
    begin, end = ends[:, None], ends[None, :]
    likest = np.zeros((len(ends), len(ends)))
    surprise = np.zeros_like(likest)
    growth = ladder.profile.workspace_growth
    boards = {of: ladder.rung(of).board for of, _, _ in measured.workspaces}
    estimates = {of: board.estimates(growth) for of, board in boards.items()}
    for (of, a, b), nbytes in measured.workspaces.items():
        common = np.minimum(end, heavy[b]) - np.maximum(begin, heavy[a])
        likeness = common / (np.maximum(end, heavy[b]) - np.minimum(begin, heavy[a]))
        closer = likeness > likest + (1e-9 if of != rung else -1e-9)  # its own rung's first
        likest = np.where(closer, likeness, likest)
        part = np.clip(common / (heavy[b] - heavy[a]), 0.0, 1.0)
        estimate = estimates[of][boards[of].boundaries.index(a), boards[of].boundaries.index(b)]
        surprise = np.where(closer, (nbytes - estimate) * part, surprise)
    return surprise


def _with_known(found: np.ndarray, ladder: Ladder, rung: int, measured: Measured) -> np.ndarray:
    """What was measured in its place; a segment of another rung counts if it is the same, or holds and is estimated the same."""
    board = ladder.rung(rung).board
    place = {b: i for i, b in enumerate(board.boundaries)}
    for (of, a, b), nbytes in sorted(measured.workspaces.items(), key=lambda shown: shown[0][0] == rung):  # its own last
        if a in place and b in place:
            other = ladder.rung(of).board
            there = other.boundaries.index(a), other.boundaries.index(b)
            here = place[a], place[b]
            same = ladder.rung(rung).retention is ladder.rung(of).retention  # swaps are not part of an executable
            if same or (board.workspace[here] == other.workspace[there] and board.held[here] == other.held[there]):
                found[here] = nbytes
    return found
