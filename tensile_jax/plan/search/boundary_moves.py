"""Changes the boundaries of a schedule: joins two segments, or splits one, and evaluates the segments that change.

Tensors stay on the device for the same time as before (`residency_moves.py` changes that time); only segments are renumbered.
"""

from tensile_jax.plan.result.layout import MADE, Residency, may_have
from tensile_jax.plan.search.condensed_step import members
from tensile_jax.plan.search.schedule import Schedule


def merged(schedule: Schedule, j: int) -> Schedule | None:
    """The schedule without boundary j: segments j - 1 and j are one."""
    used = schedule.accounts[j].used
    new = schedule.copy(schedule.cuts[:j] + schedule.cuts[j + 1 :])
    residencies = new.residencies
    for t, several in enumerate(residencies):
        if not several:
            continue
        if len(several) == 1:  # as most tensors have
            ((first, last, arrival, leaves),) = several
            if last < j and not leaves:
                continue
            if first > j:
                residencies[t] = (Residency(first - 1, last - 1, arrival, leaves),)
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
                    found.append(Residency(first, last, arrival, leaves))
        residencies[t] = tuple(found)
    come, left = schedule.at[j] & ~schedule.after[j - 1], schedule.after[j - 1] & ~schedule.at[j]  # at the boundary
    new.at[j - 1] |= come & used
    new.held[j - 1] += schedule.evaluator.condensed.bytes_of(come & used)
    new.after[j - 1 : j + 1] = [schedule.after[j] & ~(come & ~used) | left]
    for those in (new.at, new.held, new.accounts, new.peaks, new.us, new.written_us):
        del those[j]
    new.recount_copies(schedule.swapped)
    both = schedule.accounts[j - 1].used | used | schedule.after[j - 1]
    return new if new.settle((j - 1,), members(both & ~new.after[j - 1])) else None


def split(schedule: Schedule, j: int, cut: int) -> Schedule | None:
    """The schedule with one more boundary, at the possible boundary `cut`, inside segment j."""
    evaluator = schedule.evaluator
    a, b = schedule.cuts[j], schedule.cuts[j + 1]
    there, after = schedule.at[j], schedule.after[j]
    made = evaluator.made(a, cut)
    first_part = evaluator.evaluate(a, cut, there, 0, 0)
    if first_part is None:
        return None
    before = first_part.account
    have = there | made | before.again
    second_part = evaluator.evaluate(cut, b, have, after & ~have, 0)
    if second_part is None:
        return None
    behind = second_part.account
    crossing = behind.used & ~there
    new = schedule.copy(schedule.cuts[: j + 1] + [cut] + schedule.cuts[j + 1 :])
    residencies = new.residencies
    for t, several in enumerate(residencies):
        if not several:
            continue
        if len(several) == 1:
            ((first, last, arrival, leaves),) = several
            if last < j and not leaves:
                continue
            if first > j + 1:
                residencies[t] = (Residency(first + 1, last + 1, arrival, leaves),)
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
                found.append(Residency(first, last, arrival, leaves))
        residencies[t] = tuple(found)
    held = there | after & have
    for t in members(crossing & ~held):
        several = residencies[t]
        stay = Residency(j + 1, j + 1, MADE, False)
        after_it = [s for s in several if s.first > j + 1]
        if after_it and after_it[0].first == j + 2 and after_it[0].arrival == MADE:
            stay = Residency(j + 1, after_it[0].last, MADE, after_it[0].leaves)
            after_it = after_it[1:]
        residencies[t] = (*(s for s in several if s.last < j + 1 and s.first <= j + 1), stay, *after_it)
        if not may_have(residencies[t]):
            return None
    held |= crossing
    new.at.insert(j + 1, held)
    new.after.insert(j, held)
    new.held.insert(j + 1, schedule.held[j] + evaluator.condensed.bytes_of(held & ~there))
    new.peaks.insert(j + 1, new.peaks[j])
    for times in (new.us, new.written_us):
        times.insert(j + 1, times[j])
    new.accounts[j : j + 1] = [before, behind]
    new.recount_copies(schedule.swapped)
    idle = schedule.accounts[j].used | crossing | new.at[j + 1] & ~new.at[j + 2]
    return new if new.settle(range(j, j + 2), members(idle)) else None
