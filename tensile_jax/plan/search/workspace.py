"""How much memory each segment needs beyond its inputs and outputs: estimated, or measured once XLA has compiled the segment.

    estimate(a, b) = what XLA would need if it scheduled as well as can be (`segmentation.py`), and its own growth for each kernel
    workspace(a, b) = measured                                                     where compiling has shown it
                    = estimate + error of the measured segment most like it        otherwise

    similarity of [a, b) and [c, d) = common / all of their heavy operators
    error = (measured - estimate) of that segment * the part of its heavy operators that is in [a, b)

Segments that overlap hold the same chains and large tensors, so an estimate that was wrong for one is wrong for the other in the
same way, whatever the candidate. Without this correction, the planner would go from one underestimated segmentation to the next.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from tensile_jax.plan.search.candidates import Candidates


@dataclass(frozen=True, slots=True, eq=False)
class Measured:
    """What compiling has shown, in bytes.

    `workspaces` by (candidate, begin, end). `whole` is the peak of the step as one executable. `margin` is what a segment that
    was not compiled yet must leave free: a planner picks what was underestimated, so it grows with each refuted plan.
    """

    workspaces: Mapping[tuple[int, int, int], int] = field(default_factory=lambda: {})
    whole: int | None = None
    margin: int = 0


def workspaces(candidates: Candidates, candidate: int, measured: Measured) -> np.ndarray:
    """Workspaces of every segment of a candidate, with all that is known. Square, with meaning above the diagonal."""
    estimates = candidates[candidate].table.estimates(candidates.profile.workspace_growth)
    if not measured.workspaces:
        return estimates
    found = np.maximum(np.ceil(estimates + _errors(candidates, candidate, measured)), 0.0) + measured.margin
    return _with_known(found, candidates, candidate, measured)


def workspace_lower_estimates(candidates: Candidates, candidate: int, measured: Measured) -> np.ndarray:
    """The same, with estimates wherever nothing was measured, whatever was learnt: for a floor, which must not be too high."""
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
    """The same with what was measured. A segment of another candidate counts if it is the same, or holds the same by estimate."""
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
