"""Makes a schedule fit under a limit, and then faster, one move at a time (`residency_moves.py`, `boundary_moves.py`).

A *schedule* is a plan that the search is working on: where the step is cut into *segments*, each compiled as one executable,
and when each tensor is on the device.

    repair    While segments exceed the memory limit, makes the move that adds the least time for each byte by which it lowers the
              excess. A repair first works under a higher limit, and lowers this limit step by step. So the highest peaks are
              lowered first.
    improve   Makes every change that saves time and stays under the limit: keeps tensors, merges segments, shifts copies. Then
              tries changes that exceed the limit, those that save most time for each byte first, and repairs the schedule after
              each. It keeps a change if the repaired schedule is faster than before. A round ends after several failures in a
              row. Further rounds follow while they save enough time.

No move exceeds the limit of host memory. The search is bounded by a number of moves, not by time, so the result is always the
same.
"""

from collections.abc import Callable, Iterator
from itertools import pairwise
from math import sqrt
from typing import NamedTuple, TypeGuard

from tensile_jax.plan.result.layout import BEGINS, COPIED
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
from tensile_jax.plan.search.moves.boundary_moves import merged_under, split
from tensile_jax.plan.search.moves.residency_moves import Gap
from tensile_jax.plan.search.schedule import Schedule

# Each trades the time of the plan for the time of planning (`make bench-constants`; `_TRUSTED`: also `make bench-scale`).
_TRUSTED = 40  # moves after which a repair that lowers the excess too slowly is given up
_RATED, _LATER_US = 20, 0.25  # moves after which their time per byte is trusted, and the part of it that later moves take
_STAGE = 0.93  # of a limit: the next limit of a repair, so that the highest peaks are lowered first
_TRIED = 8  # moves of which a repair evaluates each, the likeliest first
_LATER = 2  # results of the step that a move tries to make later
_HOPEFUL = 5.0  # of the best rate: moves that are expected to have more are not rated
_SENT = 3  # pairs of state that one move tries
_SWAP_RISK = 0.05  # of a copy's time: counted although other work may hide the copy
_REPAIRS = 16  # moves that repair what a change has brought above the limit
_FAILED = 6  # consecutive repairs that save no time before the others are skipped
_WORTH = 0.01  # of the time: what a round of changes must save to be followed by another
_BEHIND = 1.08  # of the wanted time: schedules that are slower are not repaired
_WORTH_KEEPING_US = 0.05  # a tensor that takes less time to compute again is not kept
_STAYING, _SHIFTED = 0.5, 0.2  # of the time of copies: what changes of swaps are expected to save; orders the changes
_SHIFTS = ((1, 0), (0, -1), (1, -1), (-1, 0), (0, 1), (3, 0), (0, -3))  # of the two ends of an absence, in segments
_SHIFTS_ACROSS = ((-1, 0), (0, 1), (-1, 1), (1, 0), (0, -1), (-3, 0), (0, 3))
_MOVES = (-1, 1, -2, 2, -4, 4)  # of a boundary, in possible boundaries


Elsewhere = Callable[[Schedule, Move, Schedule], Schedule | None]
"""Given a schedule, a move, and the schedule after the move: makes the move elsewhere, too (`in_all_iterations.py`)."""


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
        lower = _best_move(schedule, stage, upper, elsewhere)
        if lower is None:
            return None
        schedule = lower
    return schedule if schedule.peak <= limit else None


def _best_move(schedule: Schedule, limit: float, upper: float, elsewhere: Elsewhere | None) -> Schedule | None:
    """The schedule after the move that adds the least time for each byte of the excess that it removes, if it is faster than
    `upper`; None if there is none."""
    excess, cost = schedule.excess(limit), schedule.cost

    def rated(new: Schedule | None, best: float) -> float:
        """Time for each byte, or a lower bound of it that is above `best`; infinite if the move must not be made."""
        less = 0.0 if new is None else excess - new.excess(limit)
        if new is None or less <= 0 or (least := new.least_cost) >= upper:
            return float("inf")
        bound = (max(least - cost, 0.0) + LEAST_GAIN) / less
        if bound > best:
            return bound
        return (max(new.cost - cost, 0.0) + LEAST_GAIN) / less if new.cost < upper and new.keeps_host_limit else float("inf")

    for j in worst(schedule, limit):
        best: Schedule | None = None
        best_rate = float("inf")
        for expected, move in lowering(schedule, j, limit, upper - cost):
            if expected > _HOPEFUL * best_rate:
                continue
            new = move(schedule)
            rate = rated(new, best_rate)
            if new is not None and elsewhere is not None and rate < _HOPEFUL * best_rate:
                new = elsewhere(schedule, move, new)
                rate = rated(new, best_rate)
            if rate < best_rate:
                best, best_rate = new, rate
        if best is not None:
            return best
    return None


def worst(schedule: Schedule, limit: float) -> list[int]:
    over = [j for j, p in enumerate(schedule.peaks) if p > limit]
    return sorted(over, key=lambda j: -schedule.peaks[j])[:3]


def lowering(schedule: Schedule, j: int, limit: float, most_us: float) -> Iterator[tuple[float, Move]]:
    """Moves after which segment j may hold less, except those that are expected to add `most_us` or more.

    Each has an estimate of the time that it adds for each byte of the excess that it removes. The estimate is mostly too low.
    """
    evaluator = schedule.evaluator
    step = evaluator.condensed
    cuts, bounds = schedule.cuts, step.boundaries
    above = [(i, p - limit, sqrt(bounds[cuts[i + 1]] - bounds[cuts[i]])) for i, p in enumerate(schedule.peaks) if p > limit]

    def rate(us: float, nbytes: float, first: int, end: int) -> float:
        """Time for each byte of the excess if the segments `first` .. `end - 1` hold so many bytes less."""
        less = sum(min(nbytes, more) * weight for i, more, weight in above if first <= i < end)
        return us / less if less else float("inf")

    ranked: list[tuple[float, Gap]] = []
    results: list[tuple[float, Gap]] = []
    for gap in residency_moves.gaps_at(schedule, j):
        recipe = step.recipes[gap.t]
        us = recipe.us if recipe is not None and gap.before < schedule.count else float("inf")
        if schedule.may_be_swapped(gap.t):
            us = min(us, _swap_us(schedule, gap, _SWAP_RISK))
        if us < most_us:
            span = sum(1 for p in schedule.peaks[gap.after + 1 : gap.before] if p > limit) + (gap.after == j)
            ranked.append(((us + 1.0) / (step.nbytes[gap.t] * max(span, 1)), gap))
        if recipe is not None and recipe.us < most_us and gap.before >= schedule.count:
            results.append(((recipe.us + 1.0) / step.nbytes[gap.t], gap))
    ranked.sort()
    for _, gap in ranked[:_TRIED]:
        yield from released(schedule, gap, j, limit, rate)
    for _, gap in sorted(results)[:_LATER]:
        recipe = step.recipes[gap.t]
        us = 0.0 if recipe is None else recipe.us
        for move in made_later(schedule, gap):
            yield rate(us, step.nbytes[gap.t], gap.after, gap.before), move
    launch_us = evaluator.profile.launch_us
    for move in sent_across(schedule, j):
        yield 0.0, move
    if launch_us < most_us:
        for move in splits(schedule, j):
            yield rate(launch_us, float("inf"), j, j + 1), move
    for move in merges(schedule, j, limit):
        yield 0.0, move
    for move in absences_with(schedule, j):
        yield 0.0, move


def _swap_us(schedule: Schedule, gap: Gap, risk: float) -> float:
    """An estimate of the time that a swap in the gap adds: the part that other work cannot hide, and the work that it slows."""
    evaluator = schedule.evaluator
    copies = evaluator.out_us[gap.t] + evaluator.in_us[gap.t]
    timing = schedule.timing
    room = timing.begins[gap.before] - timing.out_free[min(gap.after + 1, schedule.count)]
    return max(0.0, copies - room) + (evaluator.profile.copy_share + risk) * copies


def released(
    schedule: Schedule, gap: Gap, j: int, limit: float, rate: Callable[[float, float, int, int], float]
) -> Iterator[tuple[float, Move]]:
    step = schedule.evaluator.condensed
    nbytes, recipe = step.nbytes[gap.t], step.recipes[gap.t]
    if gap.before < schedule.count and recipe is not None:
        expected = rate(recipe.us, nbytes, gap.after, gap.before)
        for move in dropped(gap):
            yield expected, move
    if schedule.may_be_swapped(gap.t) and gap.before > gap.after + 1:
        seen: set[tuple[int, int]] = set()
        us = _swap_us(schedule, gap, 0.0)
        for gone, back in windows(schedule, gap, j, limit):
            if gone < back and (gone, back) not in seen:
                seen.add((gone, back))
                move = Move(residency_moves.swap, (gap, gone, back))
                yield rate(us, nbytes, gone, back), move


def made_later(schedule: Schedule, gap: Gap) -> Iterator[Move]:
    """Makes a result of the step later: in the last segment, or in the one with the least peak, and does not keep it
    until then.
    """
    behind = range(gap.after + 1, schedule.count)
    for before in sorted({min(behind, key=schedule.peaks.__getitem__), behind[-1]}) if behind else ():
        yield from dropped(gap._replace(before=before))


def dropped(gap: Gap) -> Iterator[Move]:
    """Drops the tensor in the gap, so that it is computed again: with its sources kept, and without."""
    for keep_sources in (False, True):
        yield Move(residency_moves.drop, (gap, keep_sources))


def windows(schedule: Schedule, gap: Gap, j: int, limit: float) -> Iterator[tuple[int, int]]:
    """Windows (gone, back) of a swap in the gap that contain segment j: with time for the copies, and as long as possible."""
    low, high = gap.after + 1, min(gap.before, schedule.count)
    out_us, in_us = schedule.evaluator.out_us[gap.t], schedule.evaluator.in_us[gap.t]
    if not low <= j < high:
        j = min(max(j, low), high - 1)
    first = j
    while first - 1 >= low and schedule.peaks[first - 1] > limit:
        first -= 1
    last = j
    while last + 1 < high and schedule.peaks[last + 1] > limit:
        last += 1
    _, begins, out_free, in_free = schedule.timing
    out_ends = out_free[low] + out_us
    gone = low
    while gone < first and begins[gone] < out_ends:
        gone += 1
    back = high
    while back > last + 1 and max(in_free[back], begins[back]) + in_us > begins[high]:
        back -= 1
    yield gone, back
    yield first, last + 1
    yield low, high


def sent_across(schedule: Schedule, j: int) -> Iterator[Move]:
    """State that is idle in segment j, before its first use or after its update, is on the host across the iteration boundary."""
    evaluator = schedule.evaluator
    ranked: list[tuple[float, int]] = []
    for old, new in evaluator.new_of.items():
        before, after = schedule.residencies[old], schedule.residencies[new]
        if not before or before[0].arrival != BEGINS or not after or after[-1].last != schedule.count:
            continue
        use = schedule.first_use(old, 0, before[0].last)
        last = schedule.last_use(new, after[-1].first, schedule.count)
        if j < use or j > last and schedule.at[j] >> new & 1:
            room = sum(schedule.us[:use]) + sum(schedule.us[last + 1 :])
            ranked.append((-room, old))
    ranked.sort()
    for _, old in ranked[:_SENT]:
        before, after = schedule.residencies[old], schedule.residencies[evaluator.new_of[old]]
        use = min(schedule.first_use(old, 0, before[0].last), schedule.count)
        last = max(schedule.last_use(evaluator.new_of[old], after[-1].first, schedule.count), after[-1].first - 1)
        _, begins, out_free, in_free = schedule.timing
        back, gone = use, last + 1
        while back > 0 and max(in_free[back], begins[back]) + evaluator.in_us[old] > begins[use] and not back - 1 <= j < use:
            back -= 1
        out_ends = out_free[gone] + evaluator.out_us[old]
        while gone < schedule.count and begins[gone] < out_ends and not last < j <= gone:
            gone += 1
        yield Move(residency_moves.send_across, (old, back, gone))


def splits(schedule: Schedule, j: int) -> Iterator[Move]:
    a, b = schedule.cuts[j], schedule.cuts[j + 1]
    inner = range(a + 1, b)
    chosen = sorted({inner[len(inner) * i // 4] for i in range(4)}) if len(inner) > 4 else inner
    for cut in chosen:
        yield Move(split, (j, cut))


def merges(schedule: Schedule, j: int, limit: float) -> Iterator[Move]:
    """Segment j and a neighbour are one segment under the limit: XLA reuses the memory of what it need not leave behind."""
    for i in (j, j + 1):
        if 0 < i < schedule.count and schedule.count > 2:
            yield Move(merged_under, (i, limit))


def absences_with(schedule: Schedule, j: int) -> Iterator[Move]:
    """Extends absences to segment j for tensors that are only on their way there: they leave sooner, or come back later."""
    for t in sorted(schedule.swapped):
        residencies = schedule.residencies[t]
        for number, (one, two) in enumerate(pairwise(residencies)):
            if not one.leaves or two.arrival != COPIED:
                continue
            gone, back = one.last + 1, two.first
            if one.first <= j <= one.last and schedule.last_use(t, one.first, one.last) < j:
                ends = j, back
            elif back <= j < schedule.first_use(t, back, two.last):
                ends = gone, j + 1
            else:
                continue
            move = Move(residency_moves.shift, (t, number, *ends))
            yield move


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
