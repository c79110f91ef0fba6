"""Changes when a tensor is on the device. Each move makes a new schedule, or gives None if that schedule could not run.

A *schedule* is a plan while it is searched (`schedule.py`), and a *segment* is a stretch of operators that is compiled as one
executable. A segment *needs* a tensor if its operators read it. A *gap* of a tensor is a time in which no segment needs the
tensor. The gap begins at the start of the iteration, or after a segment that makes or needs the tensor. The gap ends at the
next segment that needs the tensor, or at the end of the iteration.

    drop          a tensor is not kept through a gap, but computed again by the segment after the gap
    keep          the opposite: a tensor is kept on the device for a segment that would compute it again
    swap          a tensor is on the host during a gap
    stay          the opposite: a tensor that was on the host during a gap is kept on the device instead
    shift         a swap begins or ends at other segments, so that its copies get more or less time
    send_across   a tensor of the state is on the host from its last need in an iteration to its first need in the next one
    keep_across   the opposite: it stays on the device from iteration to iteration

These moves leave the boundaries between segments as they are. `boundary_moves.py` changes the boundaries.

Sizes in bytes, times in microseconds.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from tensile_jax.plan.result.layout import BEGINS, COPIED, MADE, Residency, may_have
from tensile_jax.plan.search.condensed.condensed_step import members
from tensile_jax.plan.search.schedule import Schedule, Several


class Gap(NamedTuple):
    """Tensor `t` is on the device and not needed between the segments `after` and `before`, within its residency number `stay`.

    `after` is the last segment that needs or makes the tensor; if there is none, it is `first - 1` of the residency. `before` is
    the next segment that needs the tensor; for a gap up to the end of the iteration, it is the number of segments.
    """

    t: int
    stay: int
    after: int
    before: int


def gaps_at(schedule: Schedule, j: int) -> Iterator[Gap]:
    """The gaps that contain segment j, or that begin right after it."""
    idle = schedule.after[j]
    last_uses = _found(idle, range(j, -1, -1), schedule)
    first_uses = _found(idle, range(j + 1, schedule.count), schedule)
    for t in members(idle):
        for number, (first, last, _, _) in enumerate(schedule.residencies[t]):
            if not first - 1 <= j <= last:
                continue
            after = max(last_uses.get(t, -1), first - 1)
            before = min(first_uses.get(t, last + 1), last + 1)
            if before > last and last < schedule.count:
                continue  # it is on its way to the host
            if before - after > 1 or (after == j and before > j):
                yield Gap(t, number, after, min(before, schedule.count))


def _found(those: int, segments: Iterable[int], schedule: Schedule) -> dict[int, int]:
    """For each of the tensors `those`, the first of the segments, in this order, that needs it; nothing if none does."""
    found: dict[int, int] = {}
    for j in segments:
        needed = those & schedule.accounts[j].used
        if needed:
            found.update(dict.fromkeys(members(needed), j))
            those ^= needed
            if not those:
                break
    return found


def _replaced(schedule: Schedule, t: int, residencies: Several, also: Iterable[tuple[int, Several]] = ()) -> Schedule | None:
    if not may_have(residencies):
        return None
    new = schedule.copy()
    touched = new.set_residencies(t, residencies)
    idle = {t}
    for u, those in also:
        if not may_have(those):
            return None
        touched |= new.set_residencies(u, those)
        idle.add(u)
    return new if new.settle(touched, idle) else None


def drop(schedule: Schedule, gap: Gap, keep_sources: bool) -> Schedule | None:
    """Compute the tensor again in segment `gap.before`.

    With `keep_sources`, what it is computed from is kept until then; otherwise that is computed again too.
    """
    t, number, after, before = gap
    step = schedule.evaluator.condensed
    recipe = step.recipes[t]
    if recipe is None or before >= schedule.count:
        return None
    residencies = schedule.residencies[t]
    first, last, arrival, leaves = residencies[number]
    pieces: list[Residency] = []
    if after >= first:
        pieces.append(Residency(first, after, arrival, False))
    elif arrival == BEGINS:
        return None
    if last > before or (leaves and last >= before):
        pieces.append(Residency(before + 1, last, MADE, leaves))
    changed = (*residencies[:number], *pieces, *residencies[number + 1 :])
    also: list[tuple[int, Several]] = []
    if keep_sources:
        for u in members(recipe.reads & ~schedule.at[before]):
            if schedule.evaluator.made(schedule.cuts[before], schedule.cuts[before + 1]) >> u & 1:
                continue
            longer = kept(schedule, u, before)
            if longer is not None:
                also.append((u, longer))
        if not also:
            return None
    return _replaced(schedule, t, changed, also)


def kept(schedule: Schedule, t: int, m: int) -> Several | None:
    """The residencies of tensor t if it is kept until segment m from the last segment that has it; None if there is none."""
    bit = 1 << t
    if schedule.at[m] & bit:
        return None
    residencies = schedule.residencies[t]
    before = [s for s in residencies if s.last < m and s.first <= m]
    i = m - 1
    while i >= 0 and not schedule.have(i) & bit:
        i -= 1
    if i < 0:
        return None
    behind = residencies[len(before) :]
    stay = None
    if before and before[-1].last >= i:
        first, _, arrival, leaves = before.pop()
        if leaves:
            return None
        stay = Residency(first, m, arrival, False)
    else:
        stay = Residency(i + 1, m, MADE, False)
    if behind and behind[0].arrival == MADE and behind[0].first == m + 1:
        stay = Residency(stay.first, behind[0].last, stay.arrival, behind[0].leaves)
        behind = behind[1:]
    return (*before, stay, *behind)


def keep(schedule: Schedule, t: int, m: int) -> Schedule | None:
    """Keep tensor t, which segment m computes again."""
    residencies = kept(schedule, t, m)
    return None if residencies is None else _replaced(schedule, t, residencies)


def swap(schedule: Schedule, gap: Gap, gone: int, back: int) -> Schedule | None:
    """The tensor is on the host during the segments `gone` .. `back - 1`."""
    t, number, _, _ = gap
    residencies = schedule.residencies[t]
    first, last, arrival, leaves = residencies[number]
    if not first <= gone < back <= last:
        return None
    pieces = (Residency(first, gone - 1, arrival, True), Residency(back, last, COPIED, leaves))
    return _replaced(schedule, t, (*residencies[:number], *pieces, *residencies[number + 1 :]))


def stay(schedule: Schedule, t: int, number: int) -> Schedule | None:
    """Keep tensor t on the device between its residencies `number` and `number + 1`."""
    residencies = schedule.residencies[t]
    one, two = residencies[number], residencies[number + 1]
    if not one.leaves or two.arrival != COPIED:
        return None
    rest = residencies[number + 2 :]
    joined = Residency(one.first, two.last, one.arrival, two.leaves)
    return _replaced(schedule, t, (*residencies[:number], joined, *rest))


def shift(schedule: Schedule, t: int, number: int, gone: int, back: int) -> Schedule | None:
    """The swap between the residencies `number` and `number + 1` is an absence during `gone` .. `back - 1`."""
    residencies = schedule.residencies[t]
    one, two = residencies[number], residencies[number + 1]
    if gone >= back:
        return None
    pieces = (Residency(one.first, gone - 1, one.arrival, True), Residency(back, two.last, COPIED, two.leaves))
    return _replaced(schedule, t, (*residencies[:number], *pieces, *residencies[number + 2 :]))


def send_across(schedule: Schedule, old: int, back: int, gone: int) -> Schedule | None:
    """State is on the host across the iteration boundary: the old value until segment `back`, its update from segment `gone`
    on."""
    new = schedule.evaluator.new_of[old]
    before, after = schedule.residencies[old], schedule.residencies[new]
    if not before or not after or before[0].arrival != BEGINS or after[-1].last != schedule.count:
        return None
    first, rest = before[0], before[1:]
    if schedule.first_use(old, 0, first.last) > first.last and rest and first.leaves:
        returning = rest
    elif back <= schedule.first_use(old, 0, first.last) <= schedule.count:
        returning = (Residency(back, first.last, COPIED, first.leaves), *rest)
    else:
        return None
    last = after[-1]
    if gone <= max(schedule.last_use(new, last.first, schedule.count), last.first - 1):
        return None
    leaving = (*after[:-1], Residency(last.first, gone - 1, last.arrival, True))
    return _replaced(schedule, old, returning, [(new, leaving)])


def keep_across(schedule: Schedule, old: int) -> Schedule | None:
    """The opposite of `send_across`."""
    new = schedule.evaluator.new_of[old]
    before, after = schedule.residencies[old], schedule.residencies[new]
    if not before or before[0].arrival != COPIED or not after:
        return None
    first, last = before[0], after[-1]
    staying = (Residency(0, first.last, BEGINS, first.leaves), *before[1:])
    returned = (*after[:-1], last._replace(last=schedule.count, leaves=False))
    if schedule.evaluator.condensed.in_one_program:
        staying, returned = _never_away(staying), _never_away(returned)
    return _replaced(schedule, old, staying, [(new, returned)])


def _never_away(residencies: Several) -> Several:
    """The residencies without the swaps between them."""
    first, *others = residencies
    found = [first]
    for one in others:
        away = found[-1].leaves and one.arrival == COPIED
        found[-1:] = [found[-1]._replace(last=one.last, leaves=one.leaves)] if away else [found[-1], one]
    return tuple(found)
