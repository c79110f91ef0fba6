"""Estimates the workspace of each segment, and corrects the estimates by what XLA has reported for segments compiled so far.

The workspace is the memory that a segment needs beside its inputs and outputs. For the segment of the operators at places [a, b):

    estimate(a, b)  = least(a, b) * (1 + growth * number of heavy operators in [a, b))
    workspace(a, b) = measured                                                              if this segment was compiled
                    = estimate + error of the measured segment most similar to it + margin  otherwise

    similarity of [a, b) and [c, d) = heavy operators in both / heavy operators from the first begin to the last end
    error                           = (measured - estimate) of that segment * the part of its heavy operators that is in [a, b)

`least` is what XLA would need with the best schedule (`segmentation.py`). `growth` is `workspace_growth` of the device profile.
`margin` (of `Measured`) begins at zero, and grows each time compiling shows that a plan does not fit.

Segments that overlap hold the same large tensors and recompute the same ones. If an estimate was wrong for one of them, it is
wrong in the same way for the other, even in another candidate (`candidates.py`: a choice of what to drop and what to swap).
Without this correction, the planner would choose one underestimated segmentation after another. Sizes in bytes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from tensile_jax.plan.search.candidates import Candidates


@dataclass(frozen=True, slots=True, eq=False)
class Measured:
    """What compiling has shown, in bytes.

    `workspaces` is by (candidate, begin, end). `whole` is the peak of the step as one executable. `margin` is added to the
    workspace of each segment that was not compiled yet. It grows with each plan that compiling refutes, because a planner tends
    to choose what was underestimated.
    """

    workspaces: Mapping[tuple[int, int, int], int] = field(default_factory=lambda: {})
    whole: int | None = None
    margin: int = 0


def workspaces(candidates: Candidates, candidate: int, measured: Measured) -> np.ndarray:
    """Workspaces of all possible segments of a candidate, as above: a square array that is valid above its diagonal."""
    estimates = candidates[candidate].table.estimates(candidates.profile.workspace_growth)
    if not measured.workspaces:
        return estimates
    found = np.maximum(np.ceil(estimates + _errors(candidates, candidate, measured)), 0.0) + measured.margin
    return _with_known(found, candidates, candidate, measured)


def workspace_lower_estimates(candidates: Candidates, candidate: int, measured: Measured) -> np.ndarray:
    """Like `workspaces`, but an estimate stays uncorrected unless the segment itself was measured.

    This is for floors, which must not be too high.
    """
    return _with_known(
        candidates[candidate].table.estimates(candidates.profile.workspace_growth), candidates, candidate, measured
    )


def _errors(candidates: Candidates, candidate: int, measured: Measured) -> np.ndarray:
    table = candidates[candidate].table
    operators = candidates.graph.operators
    heavy = np.cumsum([0, *(op.kind == "heavy" for op in operators)]) + 1e-3 * np.arange(len(operators) + 1)
    ends = heavy[list(table.boundaries)]
    begin, end = ends[:, None], ends[None, :]
    closest = np.zeros((len(ends), len(ends)))
    error = np.zeros_like(closest)
    growth = candidates.profile.workspace_growth
    tables = {of: candidates[of].table for of, _, _ in measured.workspaces}
    estimates = {of: table.estimates(growth) for of, table in tables.items()}
    for (of, a, b), nbytes in measured.workspaces.items():
        common = np.minimum(end, heavy[b]) - np.maximum(begin, heavy[a])
        similarity = common / (np.maximum(end, heavy[b]) - np.minimum(begin, heavy[a]))
        closer = similarity > closest + (1e-9 if of != candidate else -1e-9)  # its own candidate's first
        closest = np.where(closer, similarity, closest)
        part = np.clip(common / (heavy[b] - heavy[a]), 0.0, 1.0)
        estimate = estimates[of][tables[of].boundaries.index(a), tables[of].boundaries.index(b)]
        error = np.where(closer, (nbytes - estimate) * part, error)
    return error


def _with_known(found: np.ndarray, candidates: Candidates, candidate: int, measured: Measured) -> np.ndarray:
    """`found`, with measured workspaces in the place of estimates.

    A measured segment of another candidate counts too if it is the same segment, or if its estimates are the same.
    """
    table = candidates[candidate].table
    place = {b: i for i, b in enumerate(table.boundaries)}
    for (of, a, b), nbytes in sorted(measured.workspaces.items(), key=lambda shown: shown[0][0] == candidate):  # its own last
        if a in place and b in place:
            other = candidates[of].table
            there = other.boundaries.index(a), other.boundaries.index(b)
            here = place[a], place[b]
            same = candidates[candidate].retention is candidates[of].retention  # swaps are not part of an executable
            if same or (table.workspace[here] == other.workspace[there] and table.held[here] == other.held[there]):
                found[here] = nbytes
    return found
