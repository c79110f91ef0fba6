"""What policies decide, and how they decide between rungs: the cheapest cut under a limit, or the cut with the least peak.

A policy is a function

    policy(ladder, limit, measured) -> Choice | None

`limit` is in bytes; None means that the policy has no plan under it. A limit of `LEAST` asks for as little memory as the policy
can do with, and always has an answer. `measured` holds what compiling has shown so far, which takes the place of estimates.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from tensile_jax.plan.analysis.residency import Absences
from tensile_jax.plan.result.build import Layout, assemble, empty_plan
from tensile_jax.plan.search.candidates import Ladder
from tensile_jax.plan.search.segmentation import Cut, cheapest_cut, least_peak
from tensile_jax.plan.search.workspace import Measured, workspaces

WHOLE = -1
"""The rung of the choice to run the step as one executable."""

LEAST = 0.0
"""The limit that asks for as little memory as a policy can do with."""


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """A rung (or `WHOLE`), where to cut it, and what is away: all that the rung swaps, or some of it (`local_search.py`)."""

    rung: int
    boundaries: tuple[int, ...]
    absences: Absences


Policy = Callable[[Ladder, float, Measured], Choice | None]
Needed = Callable[[Ladder, int, Measured], np.ndarray]
"""Workspaces of every segment of a rung: what is expected of them."""


def cheapest(ladder: Ladder, families: Iterable[Sequence[int]], limit: float, measured: Measured) -> Choice | None:
    """The cheapest cut of all rungs under the limit; in each family, rungs ascend in what they cost at least.

    What a cut costs does not depend on the limit, so a lower one never gives a higher peak: if the plan for a limit keeps a lower
    one too, it is the cheapest under that as well; otherwise the lower limit's plan is below it. Ties go to the earlier rung.
    """
    best: Cut | None = None
    where = WHOLE
    for rungs in families:
        for index in rungs:
            if best is not None and ladder.least_us(index) >= best.cost:
                break  # the next rungs of the family are dearer still
            rung = ladder.rung(index)
            if rung.highest > limit or (best is not None and rung.least_us >= best.cost):
                continue
            cut = cheapest_cut(rung.board, workspaces(ladder, index, measured), limit)
            if cut is not None and (best is None or cut.cost + rung.swap_us < best.cost):
                best, where = Cut(cut.cost + rung.swap_us, cut.boundaries), index
    return None if best is None else Choice(where, best.boundaries, ladder.rung(where).absences)


def least(ladder: Ladder, rungs: Iterable[int], measured: Measured, needed: Needed = workspaces) -> tuple[int, Choice]:
    """The least peak of any cut of the rungs, or of the whole step if that is no more; and the cheapest choice that has it."""
    all_of_it = whole(ladder)
    whole_bytes = whole_peak(ladder, measured)
    if not ladder.graph.operators:
        return whole_bytes, all_of_it
    nbytes, index = min((least_peak(ladder.rung(i).board, needed(ladder, i, measured)), i) for i in rungs)
    if whole_bytes <= nbytes:
        return whole_bytes, all_of_it
    cut = cheapest_cut(ladder.rung(index).board, needed(ladder, index, measured), nbytes)
    assert cut is not None  # the least peak is attained by construction
    return nbytes, Choice(index, cut.boundaries, ladder.rung(index).absences)


def first_that_fits(ladder: Ladder, rungs: Iterable[int], limit: float, measured: Measured) -> Choice | None:
    """For a policy that has no more to choose from than how far to go: the cheapest cut of the first rung that has one.

    The step runs whole where that fits.
    """
    if limit > LEAST and whole_peak(ladder, measured) <= limit:
        return whole(ladder)
    if limit == LEAST:
        return least(ladder, rungs, measured)[1]
    return next((c for i in rungs if (c := cheapest(ladder, [[i]], limit, measured)) is not None), None)


def whole(ladder: Ladder) -> Choice:
    """The choice to run the step as one executable."""
    return Choice(WHOLE, (0, len(ladder.graph.operators)), {})


def whole_peak(ladder: Ladder, measured: Measured) -> int:
    """Peak of the step as one executable: measured, or the more of what it stores and what it is estimated to need."""
    if measured.whole is not None:
        return measured.whole
    if not ladder.graph.operators:
        return sum(t.nbytes for t in ladder.graph.tensors)
    board = ladder.rung(0).board
    return max(ladder.unplanned_bytes, int(board.held[0, -1] + board.workspace[0, -1]))


def peak_of(ladder: Ladder, choice: Choice, measured: Measured) -> int:
    """The peak of a choice, in bytes, as far as it is known."""
    if choice.rung == WHOLE:
        return whole_peak(ladder, measured)
    return int(segment_peaks(ladder, choice, measured).max())


def segment_peaks(ladder: Ladder, choice: Choice, measured: Measured) -> np.ndarray:
    """The peak of each segment of a choice, in bytes."""
    rung = ladder.rung(choice.rung)
    needed = rung.board.held + workspaces(ladder, choice.rung, measured)
    index = {b: i for i, b in enumerate(rung.board.boundaries)}
    peaks = np.ceil([needed[index[a], index[b]] for a, b in pairwise(choice.boundaries)])
    return peaks + _away(ladder, choice.boundaries, rung.absences) - _away(ladder, choice.boundaries, choice.absences)


def _away(ladder: Ladder, boundaries: tuple[int, ...], absences: Absences) -> np.ndarray:
    """Bytes that are away from each segment. What comes in at its begin is there."""
    found = np.zeros(len(boundaries) - 1)
    for away in (away for several in absences.values() for away in several):
        first, back = bisect_right(boundaries, away.leave), bisect_right(boundaries, away.back) - 1
        found[first : max(back, first)] += ladder.graph.tensors[away.tensor].nbytes
    return found


def layout(ladder: Ladder, choice: Choice, measured: Measured) -> Layout:
    """The layout of a choice, with the workspaces of its segments."""
    rung = ladder.rung(choice.rung)
    work = workspaces(ladder, choice.rung, measured)
    index = {b: i for i, b in enumerate(rung.board.boundaries)}
    pairs = list(pairwise(choice.boundaries))
    of_segments = tuple(int(work[index[a], index[b]]) for a, b in pairs)
    peaks = segment_peaks(ladder, choice, measured).astype(int).tolist()
    known = tuple((choice.rung, a, b) in measured.workspaces for a, b in pairs)
    return Layout(rung.retention, choice.absences, choice.boundaries, of_segments, tuple(peaks), known)


def step_us(ladder: Ladder, choice: Choice, measured: Measured) -> float:
    """The predicted microseconds of a step under the choice."""
    if choice.rung == WHOLE:
        return ladder.whole_us
    chosen = layout(ladder, choice, measured)
    return assemble(chosen, ladder.traffic, ladder.profile, ladder.latencies, empty_plan(ladder.graph)).step_us
