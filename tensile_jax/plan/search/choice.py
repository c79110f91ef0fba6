"""Defines what a policy decides, and decides between candidates: the cheapest cut under a limit, or the cut with the least peak.

A *cut* of a candidate is a set of boundaries that divide the step into segments. A policy is a function

    policy(candidates, limit, measured) -> Choice | None

`limit` is in bytes; None means that the policy has no plan under it. A limit of `LEAST` asks for as little memory as the policy
can manage with; for this limit, every policy has a choice. `measured` holds what compiling has shown so far, in the place of
estimates.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from tensile_jax.plan.analysis.residency import Absences
from tensile_jax.plan.result.build import Layout, build_plan, empty_plan
from tensile_jax.plan.search.candidates import Candidates
from tensile_jax.plan.search.segmentation import Cut, cheapest_cut, least_peak
from tensile_jax.plan.search.workspace import Measured, workspaces

WHOLE = -1
"""The candidate of the choice to run the step as one executable."""

# With it, predictions for the CPU are 0.83 to 1.15 of what XLA reports (README's chain of dense layers, cnn, gpt, mlp: `peak` of
# `tensile plan` without a budget beside `jit_peak_bytes`); without it, 1.9 for the chain.
_MOST_ABOVE = 1.15

LEAST = 0.0
"""The limit that asks for as little memory as a policy can do with."""


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """A candidate's index (or `WHOLE`), the boundaries of its segments, and its absences or some of them (`local_search.py`)."""

    candidate: int
    boundaries: tuple[int, ...]
    absences: Absences

    @property
    def runs_whole(self) -> bool:
        """Whether the step runs as one executable."""
        return self.candidate == WHOLE


Policy = Callable[[Candidates, float, Measured], Choice | None]
Needed = Callable[[Candidates, int, Measured], np.ndarray]
"""Workspaces of every segment of a candidate: what is expected of them."""


def cheapest(candidates: Candidates, families: Iterable[Sequence[int]], limit: float, measured: Measured) -> Choice | None:
    """The cheapest cut of all candidates under the limit.

    In each family, candidates must be ordered by `least_us`. Ties go to the earlier candidate. A lower limit never gives a higher
    peak, because the price of a cut does not depend on the limit. If the choice for a limit also keeps a lower limit, it is the
    cheapest one under that limit as well. Otherwise its peak is above the lower limit, and the lower limit's choice is below.
    """
    best: Cut | None = None
    where = WHOLE
    for indices in families:
        for index in indices:
            if best is not None and candidates.least_us(index) >= best.cost:
                break  # the next candidates of the family cost more still
            candidate = candidates[index]
            if candidate.highest > limit or (best is not None and candidate.least_us >= best.cost):
                continue
            cut = cheapest_cut(candidate.table, workspaces(candidates, index, measured), limit)
            if cut is not None and (best is None or cut.cost + candidate.swap_us < best.cost):
                best, where = Cut(cut.cost + candidate.swap_us, cut.boundaries), index
    return None if best is None else Choice(where, best.boundaries, candidates[where].absences)


def least(candidates: Candidates, indices: Iterable[int], measured: Measured, needed: Needed = workspaces) -> tuple[int, Choice]:
    """The least peak of any cut of these candidates or of the whole step, and the cheapest choice with this peak."""
    all_of_it = whole(candidates)
    whole_bytes = whole_peak(candidates, measured)
    if not candidates.graph.operators:
        return whole_bytes, all_of_it
    nbytes, index = min((least_peak(candidates[i].table, needed(candidates, i, measured)), i) for i in indices)
    if whole_bytes <= nbytes:
        return whole_bytes, all_of_it
    cut = cheapest_cut(candidates[index].table, needed(candidates, index, measured), nbytes)
    assert cut is not None  # the least peak is attained by construction
    return nbytes, Choice(index, cut.boundaries, candidates[index].absences)


def first_that_fits(candidates: Candidates, indices: Iterable[int], limit: float, measured: Measured) -> Choice | None:
    """The cheapest cut under the limit of the first candidate that has one; the step as one executable if that fits.

    This is for policies whose candidates differ only in how much memory they save.
    """
    if limit > LEAST and whole_peak(candidates, measured) <= limit:
        return whole(candidates)
    if limit == LEAST:
        return least(candidates, indices, measured)[1]
    return next((c for i in indices if (c := cheapest(candidates, [[i]], limit, measured)) is not None), None)


def whole(candidates: Candidates) -> Choice:
    """The choice to run the step as one executable."""
    return Choice(WHOLE, (0, len(candidates.graph.operators)), {})


def whole_peak(candidates: Candidates, measured: Measured) -> int:
    """Peak of the step as one executable, in bytes.

    If it is not measured, it is the larger of two: the most that is stored at any boundary, and the estimate for one segment. But
    it is not much above the latter, since what is stored at a boundary counts tensors that XLA computes again for itself.
    """
    if measured.whole is not None:
        return measured.whole
    if not candidates.graph.operators:
        return sum(t.nbytes for t in candidates.graph.tensors)
    table = candidates[0].table
    one_segment = int(table.held[0, -1] + table.workspace[0, -1])
    return min(max(candidates.unplanned_bytes, one_segment), int(_MOST_ABOVE * one_segment))


def peak_of(candidates: Candidates, choice: Choice, measured: Measured) -> int:
    """The peak of a choice, in bytes, from measurements and estimates."""
    if choice.runs_whole:
        return whole_peak(candidates, measured)
    return int(segment_peaks(candidates, choice, measured).max())


def segment_peaks(candidates: Candidates, choice: Choice, measured: Measured) -> np.ndarray:
    """The peak of each segment of a choice, in bytes."""
    candidate = candidates[choice.candidate]
    needed = candidate.table.held + workspaces(candidates, choice.candidate, measured)
    index = {b: i for i, b in enumerate(candidate.table.boundaries)}
    peaks = np.ceil([needed[index[a], index[b]] for a, b in pairwise(choice.boundaries)])
    return (
        peaks + _away(candidates, choice.boundaries, candidate.absences) - _away(candidates, choice.boundaries, choice.absences)
    )


def _away(candidates: Candidates, boundaries: tuple[int, ...], absences: Absences) -> np.ndarray:
    """For each segment, the bytes that are absent while it runs. A tensor that is copied in at its begin is not absent."""
    found = np.zeros(len(boundaries) - 1)
    for away in (away for several in absences.values() for away in several):
        first, back = bisect_right(boundaries, away.leave), bisect_right(boundaries, away.back) - 1
        found[first : max(back, first)] += candidates.graph.tensors[away.tensor].nbytes
    return found


def layout(candidates: Candidates, choice: Choice, measured: Measured) -> Layout:
    """The layout of a choice, with the workspaces of its segments."""
    candidate = candidates[choice.candidate]
    work = workspaces(candidates, choice.candidate, measured)
    index = {b: i for i, b in enumerate(candidate.table.boundaries)}
    pairs = list(pairwise(choice.boundaries))
    of_segments = tuple(int(work[index[a], index[b]]) for a, b in pairs)
    peaks = segment_peaks(candidates, choice, measured).astype(int).tolist()
    known = tuple((choice.candidate, a, b) in measured.workspaces for a, b in pairs)
    return Layout(candidate.retention, choice.absences, choice.boundaries, of_segments, tuple(peaks), known)


def step_us(candidates: Candidates, choice: Choice, measured: Measured) -> float:
    """The predicted microseconds of a step under the choice."""
    if choice.runs_whole:
        return candidates.whole_us
    chosen = layout(candidates, choice, measured)
    return build_plan(chosen, candidates.costs, empty_plan(candidates.graph)).step_us
