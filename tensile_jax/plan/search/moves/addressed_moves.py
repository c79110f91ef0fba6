"""Defines `Move`, a change of a schedule that has not been made yet, and moves with addresses that outlive other changes.

A *schedule* is a plan while it is searched (`schedule.py`), and a *segment* is a stretch of operators that is compiled as one
executable. Segments have numbers, and these change when segments are joined or split. The moves in this module say what they
change by other means, so that one of them can be made after others:

    keep_at          segment, by the node with which it begins
    stay_between     residencies of a tensor, by their number
    shift_by         the same, and by how many segments a copy begins earlier or later
    shift_across_by  the same for state that is on the host across the iteration boundary
    merge_at         boundary between two segments, by its position among the possible boundaries
    move_boundary    the same

Each makes a new schedule, or gives None if what it names is no longer there, or if the new schedule could not run.
`residency_moves.py` and `boundary_moves.py` make the changes.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from tensile_jax.plan.result.layout import COPIED
from tensile_jax.plan.search.moves import residency_moves
from tensile_jax.plan.search.moves.boundary_moves import around, merged, split
from tensile_jax.plan.search.schedule import Schedule

LEAST_GAIN = 1e-3
"""Microseconds; less is no gain."""


class Move(NamedTuple):
    """A change: `function(schedule, *arguments)` returns the changed schedule, or None."""

    function: Callable[..., Schedule | None]
    arguments: tuple[Any, ...]

    def __call__(self, schedule: Schedule) -> Schedule | None:
        return self.function(schedule, *self.arguments)


def keep_at(schedule: Schedule, t: int, node: int) -> Schedule | None:
    """Keep tensor t, which the segment that begins with this node computes again."""
    bounds = schedule.evaluator.condensed.boundaries
    m = next((j for j in range(schedule.count) if bounds[schedule.cuts[j]] == node), None)
    if m is None or not schedule.accounts[m].again >> t & 1:
        return None
    return residency_moves.keep(schedule, t, m)


def stay_between(schedule: Schedule, t: int, number: int) -> Schedule | None:
    """Keep tensor t on the device between its residencies `number` and `number + 1`."""
    return residency_moves.stay(schedule, t, number) if number + 1 < len(schedule.residencies[t]) else None


def shift_by(schedule: Schedule, t: int, number: int, d: int, e: int) -> Schedule | None:
    """The swap between the residencies `number` and `number + 1` begins d segments later, and ends e segments later."""
    residencies = schedule.residencies[t]
    if number + 1 >= len(residencies) or not residencies[number].leaves or residencies[number + 1].arrival != COPIED:
        return None
    one, two = residencies[number], residencies[number + 1]
    gone, back = one.last + 1 + d, two.first + e
    need = schedule.last_use(t, one.first, one.last)
    use = schedule.first_use(t, two.first, two.last)
    if gone <= max(need, one.first - 1) or back > min(use, schedule.count) or gone >= back:
        return None
    return residency_moves.shift(schedule, t, number, gone, back)


def shift_across_by(schedule: Schedule, old: int, d: int, e: int) -> Schedule | None:
    """State that is on the host across the iteration boundary comes back d segments later, and leaves e segments later."""
    kept = residency_moves.keep_across(schedule, old)
    if kept is None:
        return None
    back = schedule.residencies[old][0].first + d
    gone = schedule.residencies[schedule.evaluator.new_of[old]][-1].last + 1 + e
    if back < 0 or gone > schedule.count:
        return None
    return residency_moves.send_across(kept, old, back, gone)


def merge_at(schedule: Schedule, cut: int) -> Schedule | None:
    """Without the boundary `cut`, if that saves time."""
    if cut not in schedule.cuts[1:-1]:
        return None
    return merged(schedule, schedule.cuts.index(cut), upper=schedule.cost - LEAST_GAIN)


def move_boundary(schedule: Schedule, cut: int, d: int) -> Schedule | None:
    """The boundary `cut` is d possible boundaries later, if that saves time."""
    if cut not in schedule.cuts[1:-1]:
        return None
    j = schedule.cuts.index(cut)
    to = cut + d
    if not schedule.cuts[j - 1] < to < schedule.cuts[j + 1]:
        return None
    parts, upper = around(schedule, j, to), schedule.cost - LEAST_GAIN
    if parts is not None and schedule.least_cost_with(j - 1, j + 1, parts.us) >= upper:
        schedule.evaluator.count_schedule()
        return None
    new = split(schedule, j if d > 0 else j - 1, to)
    return None if new is None else merged(new, j if d > 0 else j + 1, upper=upper)
