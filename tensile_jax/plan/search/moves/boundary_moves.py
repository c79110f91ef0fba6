"""Changes the boundaries of a schedule: joins two segments, or splits one, and evaluates the segments that change.

A *schedule* is a plan while it is searched (`schedule.py`), and a *segment* is a stretch of operators that is compiled as one
executable. For each tensor, a schedule has the numbers of the boundaries at which the tensor is on the device. When segments
are joined or split, all later boundaries get new numbers. Apart from that, only what happens at the removed or added boundary
changes. For example, a tensor that was copied back at a removed boundary must now be back before the joined segment.
`residency_moves.py` makes all other changes of when a tensor is on the device.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from tensile_jax.plan.result.layout import MADE, Arrival, Residency, may_have
from tensile_jax.plan.search.condensed.condensed_step import members
from tensile_jax.plan.search.cost.segment_account import SegmentAccount
from tensile_jax.plan.search.cost.segment_evaluator import Evaluated, Evaluator
from tensile_jax.plan.search.schedule import UNSEEN, Schedule

_residency: Callable[[tuple[int, int, Arrival, bool]], Residency] = partial(
    tuple.__new__,  # pyright: ignore[reportUnknownMemberType]: typeshed does not say what the tuple has
    Residency,
)
"""Makes a residency several times as fast as the class does."""


def merged(schedule: Schedule, j: int, *, limit: float = float("inf"), upper: float = float("inf")) -> Schedule | None:
    """The schedule without boundary j: segments j - 1 and j are one.

    None if the segment cannot run, or if it is evident that it would exceed `limit`, or that the schedule would cost `upper` or
    more.
    """
    evaluator = schedule.evaluator
    used = schedule.accounts[j].used
    come, left = schedule.at[j] & ~schedule.after[j - 1], schedule.after[j - 1] & ~schedule.at[j]  # at the boundary
    there, after = schedule.at[j - 1] | come & used, schedule.after[j] & ~(come & ~used) | left
    a, b, wanted = schedule.cuts[j - 1], schedule.cuts[j + 1], after & ~there
    joined = evaluator.evaluate(a, b, there, wanted, evaluator.aliased(there, after, wanted))
    if (
        joined is None
        or (upper < float("inf") and schedule.least_cost_with(j - 1, j + 1, _least_us(evaluator, joined)) >= upper)
        or (limit < float("inf") and _needed(evaluator, a, b, joined, there, wanted) > limit)
    ):
        evaluator.count_schedule()
        return None
    new = schedule.copy(schedule.cuts[:j] + schedule.cuts[j + 1 :])
    residencies = new.residencies
    for t, several in enumerate(residencies):
        if not several or several[-1].last < j - 1:
            continue
        if len(several) == 1:  # as most tensors have
            ((first, last, arrival, leaves),) = several
            if last < j and not leaves:
                continue
            if first > j:
                residencies[t] = (_residency((first - 1, last - 1, arrival, leaves)),)
                continue
            if first < j:
                if last >= j:
                    residencies[t] = (_residency((first, last - 1, arrival, leaves)),)
                continue
        found: list[Residency] = []
        for first, last, arrival, leaves in several:
            if first >= j:
                first = (j - 1 if arrival != MADE and used >> t & 1 else j) if first == j else first - 1
            if last >= j:
                last -= 1
            if first <= last or leaves:
                if found and found[-1].last >= first:
                    found[-1] = Residency(found[-1].first, max(last, found[-1].last), found[-1].arrival, leaves)
                else:
                    found.append(_residency((first, last, arrival, leaves)))
        residencies[t] = tuple(found)
    new.at[j - 1] = there
    new.held[j - 1] += evaluator.condensed.bytes_of(come & used)
    new.after[j - 1 : j + 1] = [after]
    for those in (new.at, new.held, new.accounts, new.peaks, new.us, new.written_us, new.seen):
        del those[j]
    new.seen[j - 1] = UNSEEN
    new.recount_copies(schedule.swapped)
    both = schedule.accounts[j - 1].used | used | schedule.after[j - 1]
    return new if new.settle((j - 1,), members(both & ~new.after[j - 1])) else None


def merged_under(schedule: Schedule, j: int, limit: float) -> Schedule | None:
    """The segments j - 1 and j are one, if that one keeps the limit."""
    new = merged(schedule, j, limit=limit)
    return new if new is not None and new.peaks[j - 1] <= limit else None


def _needed(evaluator: Evaluator, a: int, b: int, segment: Evaluated, there: int, wanted: int) -> int:
    """The peak, in bytes, of a segment between two boundaries."""
    step = evaluator.condensed
    workspace, _ = evaluator.workspace(a, b, segment.account, wanted)
    return step.base_bytes + step.bytes_of(there) + int(step.small_bytes[a, b]) + segment.result_bytes + workspace


def _least_us(evaluator: Evaluator, segment: Evaluated) -> float:
    """The cost of a segment without copies, and without what it writes."""
    return evaluator.profile.launch_us + segment.account.us + evaluator.compiling_us


class Parts(NamedTuple):
    """Two segments in place of one or two others, as long as no other segment changes.

    Attributes:
        us: their cost, without copies.
        peaks: of each, in bytes.
    """

    us: float
    peaks: tuple[int, int]


def halves(schedule: Schedule, j: int, cut: int) -> Parts | None:
    """What `split` would make of segment j, found in much less time; None if that is not evident."""
    sides = _sides(schedule, j, cut)
    if sides is None:
        return None
    after = schedule.after[j]
    first, second = (schedule.at[j], sides.held), (sides.held & (sides.behind.used | after), after)
    return _parts(schedule.evaluator, schedule.cuts[j], cut, schedule.cuts[j + 1], first, second)


def around(schedule: Schedule, j: int, cut: int) -> Parts | None:
    """What becomes of the segments j - 1 and j if boundary j is at `cut` instead; None if that is not evident."""
    a, old, b = schedule.cuts[j - 1 : j + 2]
    sides = _sides(schedule, j if cut > old else j - 1, cut)
    if sides is None:
        return None
    there, after = schedule.at[j - 1], schedule.after[j]
    needed = sides.behind.used | after
    if cut > old:
        there |= schedule.at[j] & ~schedule.after[j - 1] & schedule.accounts[j].used
    else:
        needed |= schedule.accounts[j].used
    return _parts(schedule.evaluator, a, cut, b, (there, sides.held & needed), (sides.held & needed, after))


def _parts(evaluator: Evaluator, a: int, cut: int, b: int, first: tuple[int, int], second: tuple[int, int]) -> Parts | None:
    """Two segments, each with the tensors on the device before it and after it; None if one cannot run."""
    us, peaks = 0.0, list[int]()
    for begin, end, (there, after) in ((a, cut, first), (cut, b, second)):
        wanted = after & ~there
        one = evaluator.evaluate(begin, end, there, wanted, evaluator.aliased(there, after, wanted))
        if one is None:
            return None
        us += _least_us(evaluator, one) + one.written_us
        peaks.append(_needed(evaluator, begin, end, one, there, wanted))
    return Parts(us, (peaks[0], peaks[1]))


class _Sides(NamedTuple):
    """The two segments of a split, what exists where the second one begins, and what of it is kept; sets of tensors (bits)."""

    before: SegmentAccount
    behind: SegmentAccount
    have: int
    held: int


def _sides(schedule: Schedule, j: int, cut: int) -> _Sides | None:
    """The two sides of a possible boundary inside segment j; None if one of the two segments cannot run."""
    evaluator = schedule.evaluator
    a, b = schedule.cuts[j], schedule.cuts[j + 1]
    there, after = schedule.at[j], schedule.after[j]
    before = evaluator.evaluate(a, cut, there, 0, 0)
    if before is None:
        return None
    have = there | evaluator.made(a, cut) | before.account.again
    behind = evaluator.evaluate(cut, b, have, after & ~have, 0)
    if behind is None:
        return None
    held = there | after & have | behind.account.used & ~there
    return _Sides(before.account, behind.account, have, held)


def split(schedule: Schedule, j: int, cut: int) -> Schedule | None:
    """The schedule with one more boundary, at the possible boundary `cut`, inside segment j."""
    sides = _sides(schedule, j, cut)
    if sides is None:
        return None
    there, after = schedule.at[j], schedule.after[j]
    before, behind, have, held = sides
    new = schedule.copy(schedule.cuts[: j + 1] + [cut] + schedule.cuts[j + 1 :])
    residencies = new.residencies
    for t, several in enumerate(residencies):
        if not several or several[-1].last < j - 1:
            continue
        if len(several) == 1:
            ((first, last, arrival, leaves),) = several
            if last < j and not leaves:
                continue
            if first > j + 1:
                residencies[t] = (_residency((first + 1, last + 1, arrival, leaves)),)
                continue
            if first <= j:
                if last >= j:
                    residencies[t] = (_residency((first, last + 1, arrival, leaves)),)
                continue
        found: list[Residency] = []
        for first, last, arrival, leaves in several:
            if first > j:
                first = j + 1 if first == j + 1 and arrival == MADE and have >> t & 1 else first + 1
            if last >= j:
                last += 1
            if found and found[-1].last >= first:
                found[-1] = found[-1]._replace(last=last, leaves=leaves)
            else:
                found.append(_residency((first, last, arrival, leaves)))
        residencies[t] = tuple(found)
    crossing = behind.used & ~there
    for t in members(crossing & ~(after & have)):
        several = residencies[t]
        stay = Residency(j + 1, j + 1, MADE, False)
        after_it = [s for s in several if s.first > j + 1]
        if after_it and after_it[0].first == j + 2 and after_it[0].arrival == MADE:
            stay = Residency(j + 1, after_it[0].last, MADE, after_it[0].leaves)
            after_it = after_it[1:]
        residencies[t] = (*(s for s in several if s.last < j + 1 and s.first <= j + 1), stay, *after_it)
        if not may_have(residencies[t]):
            return None
    new.at.insert(j + 1, held)
    new.after.insert(j, held)
    new.held.insert(j + 1, schedule.held[j] + schedule.evaluator.condensed.bytes_of(held & ~there))
    new.peaks.insert(j + 1, new.peaks[j])
    for times in (new.us, new.written_us):
        times.insert(j + 1, times[j])
    new.accounts[j : j + 1] = [before, behind]
    new.seen[j : j + 1] = [UNSEEN, UNSEEN]
    new.recount_copies(schedule.swapped)
    idle = schedule.accounts[j].used | crossing | new.at[j + 1] & ~new.at[j + 2]
    return new if new.settle(range(j, j + 2), members(idle)) else None
