"""Makes a schedule fit under a limit, and then faster, one move at a time (`residency_moves.py`, `boundary_moves.py`).

A *schedule* is a plan that the search is working on: where the step is cut into *segments*, each compiled as one executable,
and when each tensor is on the device.

    repair    While segments exceed the memory limit, makes the move that adds the least time for each byte by which it lowers the
              excess (`best_moves.py`). A repair first works under a higher limit, and lowers this limit step by step. So the
              highest peaks are lowered first.
    improve   Makes every change that saves time and stays under the limit: keeps tensors, merges segments, shifts copies. Then
              tries changes that exceed the limit, those that save most time for each byte first, and repairs the schedule after
              each. It keeps a change if the repaired schedule is faster than before. A round ends after several failures in a
              row. Further rounds follow while they save enough time.

No move exceeds the limit of host memory. The search is bounded by a number of moves, not by time, so the result is always the
same.
"""

from typing import NamedTuple, TypeGuard

from tensile_jax.plan.result.layout import COPIED
from tensile_jax.plan.search.condensed.condensed_step import members
from tensile_jax.plan.search.moves import residency_moves
from tensile_jax.plan.search.moves.addressed_moves import (
    LEAST_GAIN,
    Move,
    keep_at,
    merge_at,
    move_boundary,
    shift_across_by,
    shift_by,
    stay_between,
)
from tensile_jax.plan.search.moves.best_moves import BestMoves, Elsewhere
from tensile_jax.plan.search.schedule import Schedule

# Each trades the time of the plan for the time of planning (`make bench-constants`; `_TRUSTED`: also `make bench-scale`).
_TRUSTED = 40  # moves after which a repair that lowers the excess too slowly is given up
_RATED, _LATER_US = 20, 0.25  # moves after which their time per byte is trusted, and the part of it that later moves take
_STAGE = 0.93  # of a limit: the next limit of a repair, so that the highest peaks are lowered first
_REPAIRS = 16  # moves that repair what a change has brought above the limit
_FAILED = 6  # consecutive repairs that save no time before the others are skipped
_WORTH = 0.01  # of the time: what a round of changes must save to be followed by another
_BEHIND = 1.08  # of the wanted time: schedules that are slower are not repaired
_WORTH_KEEPING_US = 0.05  # a tensor that takes less time to compute again is not kept
_STAYING, _SHIFTED = 0.5, 0.2  # of the time of copies: what changes of swaps are expected to save; orders the changes
_SHIFTS = ((1, 0), (0, -1), (1, -1), (-1, 0), (0, 1), (3, 0), (0, -3))  # of the two ends of an absence, in segments
_SHIFTS_ACROSS = ((-1, 0), (0, 1), (-1, 1), (1, 0), (0, -1), (-3, 0), (0, 3))
_MOVES = (-1, 1, -2, 2, -4, 4)  # of a boundary, in possible boundaries


def repair(
    schedule: Schedule,
    limit: float,
    most: int,
    upper: float = float("inf"),
    evaluations: float = float("inf"),
    elsewhere: Elsewhere | None = None,
) -> Schedule | None:
    """A schedule under the limit that is faster than `upper`, after at most `most` moves; None if none was found.

    The first limits are higher, from `_STAGE` times the peak down, so that the highest peaks are lowered first.

    Args:
        evaluations: the most segments that are evaluated.
        elsewhere: makes each move elsewhere, too.

    A repair gives up early in two cases: `most` moves would not suffice at the rate so far, or the result would be slower than
    `upper` even if each further byte took only a quarter of the time so far.
    """
    begun, begun_us, end = schedule.excess(limit), schedule.cost, schedule.evaluator.evaluated + evaluations
    stage = max(limit, _STAGE * schedule.peak)
    moves = BestMoves(upper, elsewhere)
    for made in range(most):
        if schedule.peak <= limit:
            return schedule
        while schedule.peak <= stage and stage > 0:  # a step may hold nothing, and no limit below zero can be kept
            stage = max(limit, _STAGE * stage)
        if schedule.cost >= upper or schedule.evaluator.evaluated >= end:
            return None
        excess = schedule.excess(limit)
        if made >= _TRUSTED and excess * made > (begun - excess) * (most - made):
            return None
        if made >= _RATED and _LATER_US * (schedule.cost - begun_us) * excess >= (upper - schedule.cost) * (begun - excess) > 0:
            return None
        lower = moves.make_one(schedule, stage)
        if lower is None:
            return None
        schedule = lower
    return schedule if schedule.peak <= limit else None


def improve(
    schedule: Schedule, limit: float, budget: int, wanted: float = float("inf"), elsewhere: Elsewhere | None = None
) -> Schedule:
    """A faster schedule under the limit, after evaluating about `budget` segments.

    A schedule more than `_BEHIND` times as slow as `wanted`, the cost of another schedule, is not repaired. `elsewhere` makes
    each change elsewhere, too.
    """
    evaluator = schedule.evaluator
    end = evaluator.evaluated + budget

    def saves(new: Schedule | None) -> TypeGuard[Schedule]:
        if new is None or new.least_cost >= schedule.cost - LEAST_GAIN:
            return False
        return new.cost < schedule.cost - LEAST_GAIN and new.keeps_host_limit

    def changed(change: Change) -> Schedule | None:
        new = change.move(schedule)
        return new if elsewhere is None or not saves(new) else elsewhere(schedule, change.move, new)

    while evaluator.evaluated < end:
        before = schedule.cost
        above: list[tuple[float, Change]] = []
        for change in changes(schedule):
            if evaluator.evaluated >= end:
                break
            new = changed(change)
            if not saves(new):
                continue
            excess = new.excess(limit)
            if excess:
                above.append((excess / (schedule.cost - new.cost), change))
            else:
                schedule = new
        if schedule.cost > _BEHIND * wanted:
            break
        failed = 0
        for _, change in sorted(above, key=lambda one: one[0]):
            if evaluator.evaluated >= end or failed == _FAILED:
                break
            new = changed(change)
            if saves(new) and new.excess(limit):
                new = repair(new, limit, _REPAIRS, schedule.cost - LEAST_GAIN, elsewhere=elsewhere)
            if saves(new):
                schedule, failed = new, 0
            else:
                failed += 1
        if schedule.cost >= before * (1 - _WORTH):
            break
    return schedule


class Change(NamedTuple):
    """A move that may save `gain` microseconds."""

    gain: float
    kind: int
    move: Move


def changes(schedule: Schedule) -> list[Change]:
    """Changes that may save time, the most promising first. Each is found again in the schedule to which it is made."""
    evaluator = schedule.evaluator
    step = evaluator.condensed
    found: list[Change] = []
    for m, account in enumerate(schedule.accounts):
        node = step.boundaries[schedule.cuts[m]]
        for t in members(account.again):
            recipe = step.recipes[t]
            if recipe is not None and recipe.us > _WORTH_KEEPING_US:
                found.append(Change(recipe.us, 0, Move(keep_at, (t, node))))
    for old in evaluator.new_of:
        several = schedule.residencies[old]
        if several and several[0].arrival == COPIED:
            copies_us = evaluator.out_us[old] + evaluator.in_us[old]
            found.append(Change(copies_us, 5, Move(residency_moves.keep_across, (old,))))
            found += [Change(_SHIFTED * copies_us, 6, Move(shift_across_by, (old, *by))) for by in _SHIFTS_ACROSS]
    for t in sorted(schedule.swapped):
        copies_us = evaluator.out_us[t] + evaluator.in_us[t]
        for number in range(len(schedule.residencies[t]) - 1):
            found.append(Change(_STAYING * copies_us, 1, Move(stay_between, (t, number))))
            found += [Change(_SHIFTED * copies_us, 2, Move(shift_by, (t, number, *by))) for by in _SHIFTS]
    launch_us = evaluator.profile.launch_us
    for j in range(1, schedule.count):
        cut = schedule.cuts[j]
        found.append(Change(launch_us + schedule.written_us[j - 1], 3, Move(merge_at, (cut,))))
        found += [Change(launch_us, 4, Move(move_boundary, (cut, by))) for by in _MOVES]
    found.sort(key=lambda change: (-change.gain, change.kind, change.move.arguments))
    return found
