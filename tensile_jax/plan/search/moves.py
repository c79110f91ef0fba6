"""The moves of the search: each makes a new schedule from another one, or None if that cannot run.

    drop      a tensor is not kept through a gap between two needs, but computed again by the segment after the gap
    keep      the opposite: a tensor that a segment computes again is kept from where it was before
    swap      a tensor is on the host during a gap
    stay      the opposite: a tensor is kept where it was on the host
    shift     the copies of a swap get more or less time
    merge     two segments become one
    split     a segment becomes two
    move      a boundary lies elsewhere

Sizes in bytes, times in microseconds.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from tensile_jax.plan.search.condensed import members
from tensile_jax.plan.search.schedule import BEGINS, COPIED, MADE, Schedule, Stay, Stays


class Gap(NamedTuple):
    """Tensor `t` is on the device and not needed between the segments `after` and `before`, within stay number `stay`.

    `after` is the segment that needs it last or makes it, `first - 1` of the stay if none does; `before` is the next segment that
    needs it, the number of segments if that is the end of the iteration.
    """

    t: int
    stay: int
    after: int
    before: int


def gaps_at(schedule: Schedule, j: int) -> Iterator[Gap]:
    """The gaps that contain segment j, or that begin right after it."""
    idle = (schedule.at[j] | schedule.after[j]) & schedule.after[j]
    for t in members(idle):
        for number, (first, last, _, leaves) in enumerate(schedule.stays[t]):
            if not first - 1 <= j <= last:
                continue
            after = schedule.last_use(t, first, j)
            before = schedule.first_use(t, j + 1, last)
            if before > last and last < schedule.count:
                continue  # it is on its way to the host
            if before - after > 1 or (after == j and before > j):
                yield Gap(t, number, after, min(before, schedule.count))


def _replaced(schedule: Schedule, t: int, stays: Stays, also: Iterable[tuple[int, Stays]] = ()) -> Schedule | None:
    new = schedule.copy()
    touched = new.set_stays(t, stays)
    idle = {t}
    for u, those in also:
        touched |= new.set_stays(u, those)
        idle.add(u)
    if not new.settle(touched, idle):
        return None
    new.time()
    return new


def drop(schedule: Schedule, gap: Gap, *, keep_sources: bool) -> Schedule | None:
    """Compute the tensor again in segment `gap.before`.

    With `keep_sources`, what it is computed from is kept until then; otherwise that is computed again too.
    """
    t, number, after, before = gap
    step = schedule.model.step
    recipe = step.recipes[t]
    if recipe is None or before >= schedule.count:
        return None
    stays = schedule.stays[t]
    first, last, how, leaves = stays[number]
    pieces: list[Stay] = []
    if after >= first:
        pieces.append(Stay(first, after, how, False))
    elif how == BEGINS:
        return None
    if last > before or (leaves and last >= before):
        pieces.append(Stay(before + 1, last, MADE, leaves))
    changed = (*stays[:number], *pieces, *stays[number + 1 :])
    also: list[tuple[int, Stays]] = []
    if keep_sources:
        for u in members(recipe.reads & ~schedule.at[before]):
            if schedule.model.made(schedule.cuts[before], schedule.cuts[before + 1]) >> u & 1:
                continue
            longer = kept(schedule, u, before)
            if longer is not None:
                also.append((u, longer))
        if not also:
            return None
    return _replaced(schedule, t, changed, also)


def kept(schedule: Schedule, t: int, m: int) -> Stays | None:
    """The stays of tensor t if it is kept until segment m from the last segment that has it; None if there is none."""
    bit = 1 << t
    if schedule.at[m] & bit:
        return None
    stays = schedule.stays[t]
    before = [s for s in stays if s.last < m and s.first <= m]
    i = m - 1
    while i >= 0 and not schedule.have(i) & bit:
        i -= 1
    if i < 0:
        return None
    behind = stays[len(before) :]
    stay = None
    if before and before[-1].last >= i:
        first, _, how, leaves = before.pop()
        if leaves:
            return None
        stay = Stay(first, m, how, False)
    else:
        stay = Stay(i + 1, m, MADE, False)
    if behind and behind[0].how == MADE and behind[0].first == m + 1:
        stay = Stay(stay.first, behind[0].last, stay.how, behind[0].leaves)
        behind = behind[1:]
    return (*before, stay, *behind)


def keep(schedule: Schedule, t: int, m: int) -> Schedule | None:
    """Keep tensor t, which segment m computes again."""
    stays = kept(schedule, t, m)
    return None if stays is None else _replaced(schedule, t, stays)


def swap(schedule: Schedule, gap: Gap, gone: int, back: int) -> Schedule | None:
    """The tensor is on the host during the segments `gone` .. `back - 1`."""
    t, number, _, _ = gap
    stays = schedule.stays[t]
    first, last, how, leaves = stays[number]
    if not first <= gone < back <= last or how == COPIED and False:
        return None
    pieces = (Stay(first, gone - 1, how, True), Stay(back, last, COPIED, leaves))
    return _replaced(schedule, t, (*stays[:number], *pieces, *stays[number + 1 :]))


def stay(schedule: Schedule, t: int, number: int) -> Schedule | None:
    """Keep tensor t on the device between its stays `number` and `number + 1`."""
    stays = schedule.stays[t]
    one, two = stays[number], stays[number + 1]
    if not one.leaves or two.how != COPIED:
        return None
    rest = stays[number + 2 :]
    joined = Stay(one.first, two.last, one.how, two.leaves)
    return _replaced(schedule, t, (*stays[:number], joined, *rest))


def shift(schedule: Schedule, t: int, number: int, gone: int, back: int) -> Schedule | None:
    """The swap between the stays `number` and `number + 1` is an absence during `gone` .. `back - 1`."""
    stays = schedule.stays[t]
    one, two = stays[number], stays[number + 1]
    if gone >= back:
        return None
    pieces = (Stay(one.first, gone - 1, one.how, True), Stay(back, two.last, COPIED, two.leaves))
    return _replaced(schedule, t, (*stays[:number], *pieces, *stays[number + 2 :]))
