"""Makes schedules to start the search from: what a minimum cut keeps, cut into segments where least is stored.

A tensor is on the device from where it is made to where it is needed last, or, if it is dropped, to where it is needed before
that."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence

from tensile_jax.plan.result.layout import BEGINS, COPIED, MADE, Residency, may_have
from tensile_jax.plan.search.condensed import Condensed, members
from tensile_jax.plan.search.schedule import Model, Schedule, Several


def last_held(step: Condensed, dropped: Mapping[int, int]) -> list[int]:
    """By tensor, the last node before which a boundary holds it, if the `dropped` ones are held up to these nodes only.

    What a dropped tensor is computed from is held as long as a node may need the dropped tensor.
    """
    needs = [0] * len(step.tensors)  # sets of nodes
    for node, read in enumerate(step.reads):
        for t in members(read):
            needs[t] |= 1 << node
    count = len(step.reads)
    end = [0] * len(needs)
    for t in range(len(needs) - 1, -1, -1):  # a recipe reads what was made before
        recipe, last = step.recipes[t], dropped.get(t)
        if step.at_end >> t & 1:
            end[t] = count
        elif last is None or recipe is None:
            end[t] = needs[t].bit_length() - 1 if needs[t] else step.made[t]
        else:
            end[t] = last
            far = needs[t] >> last + 1 << last + 1
            for u in members(recipe.reads):
                needs[u] |= far
    return end


def held_at(step: Condensed, end: Sequence[int]) -> list[int]:
    """By possible boundary, the set of tensors on the device."""
    found: list[int] = []
    for b in step.boundaries:
        there = step.at_begin if b == 0 else 0
        if b:
            for t, last in enumerate(end):
                if step.made[t] < b <= last:
                    there |= 1 << t
        found.append(there)
    return found


def start(model: Model, cuts: Sequence[int], end: Sequence[int]) -> Schedule | None:
    """The schedule of these cuts in which every tensor is held from where it is made to `end` (`last_held`)."""
    step = model.step
    edges = [step.boundaries[c] for c in cuts]
    residencies: list[Several] = []
    for t, made in enumerate(step.made):
        last = bisect_right(edges, end[t]) - 1
        if made < 0:
            residencies.append((Residency(0, max(last, 0), BEGINS, False),))
        else:
            first = bisect_right(edges, made)
            residencies.append((Residency(first, last, MADE, False),) if first <= last else ())
    return assemble(model, list(cuts), residencies)


def assemble(model: Model, cuts: list[int], residencies: list[Several], *, as_they_are: bool = False) -> Schedule | None:
    """The schedule of these cuts and residencies; None if a segment cannot run.

    Tensors that nothing needs are released earlier, unless the residencies are to be left as they are.
    """
    k = len(cuts) - 1
    none = model.nothing
    made = Schedule(
        model,
        cuts,
        [()] * len(residencies),
        [0] * (k + 1),
        [0] * k,
        set(),
        [none] * k,
        [0] * (k + 1),
        [0] * k,
        [0.0] * k,
        [0.0] * k,
    )
    for t, those in enumerate(residencies):
        if those:
            made.set_residencies(t, those)
    if as_they_are:
        if not all(map(made.refresh, range(k))):
            return None
    elif not made.settle(range(k), range(len(residencies))):
        return None
    made.time()
    return made


def merged(schedule: Schedule, j: int) -> Schedule | None:
    """The schedule without boundary j: segments j - 1 and j are one."""
    cuts = schedule.cuts[:j] + schedule.cuts[j + 1 :]
    new = _reindexed(schedule, cuts)
    used = schedule.contents[j].used
    for t, several in enumerate(schedule.residencies):
        if not several:
            continue
        if len(several) == 1 and several[0].last < j and not (several[0].leaves):
            new.residencies[t] = several
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
        new.residencies[t] = tuple(found)
    removed = slice(j, j + 1)
    for those in (new.at, new.held):
        del those[removed]
    for those in (new.contents, new.peaks, new.us, new.written_us):
        del those[removed]
    _masks(new)
    both = schedule.contents[j - 1].used | schedule.contents[j].used | schedule.after[j - 1]
    return new if new.settle((j - 1,), members(both & ~new.after[j - 1])) else None


def split(schedule: Schedule, j: int, cut: int) -> Schedule | None:
    """The schedule with one more boundary, at the possible boundary `cut`, inside segment j."""
    model = schedule.model
    a, b = schedule.cuts[j], schedule.cuts[j + 1]
    there, after = schedule.at[j], schedule.after[j]
    made = model.made(a, cut)
    first_part = model.contents(a, cut, there, 0, 0)
    if first_part is None:
        return None
    before = first_part.contents
    have = there | made | before.again
    second_part = model.contents(cut, b, have, after & ~have, 0)
    if second_part is None:
        return None
    behind = second_part.contents
    crossing = behind.used & ~there
    new = _reindexed(schedule, schedule.cuts[: j + 1] + [cut] + schedule.cuts[j + 1 :])
    for t, several in enumerate(schedule.residencies):
        if len(several) == 1 and several[0].last < j and not several[0].leaves:
            new.residencies[t] = several
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
        new.residencies[t] = tuple(found)
    for t in members(crossing):
        several = new.residencies[t]
        if any(s.first <= j + 1 <= s.last for s in several):
            continue
        stay = Residency(j + 1, j + 1, MADE, False)
        after_it = [s for s in several if s.first > j + 1]
        if after_it and after_it[0].first == j + 2 and after_it[0].arrival == MADE:
            stay = Residency(j + 1, after_it[0].last, MADE, after_it[0].leaves)
            after_it = after_it[1:]
        new.residencies[t] = (*(s for s in several if s.last < j + 1 and s.first <= j + 1), stay, *after_it)
        if not may_have(new.residencies[t]):
            return None
    for those in (new.at, new.held):
        those.insert(j + 1, 0)
    new.peaks.insert(j + 1, new.peaks[j])
    for times in (new.us, new.written_us):
        times.insert(j + 1, times[j])
    new.contents[j : j + 1] = [before, behind]
    _masks(new)
    idle = schedule.contents[j].used | crossing | new.at[j + 1] & ~new.at[j + 2]
    return new if new.settle(range(j, j + 2), members(idle)) else None


def _reindexed(schedule: Schedule, cuts: list[int]) -> Schedule:
    new = schedule.copy()
    new.cuts = cuts
    return new


def _masks(new: Schedule) -> None:
    """Find the sets again from the residencies."""
    k = len(new.cuts) - 1
    at, after = [0] * (k + 2), [0] * (k + 1)
    change_at, change_after = [0] * (k + 3), [0] * (k + 3)
    for t, several in enumerate(new.residencies):
        bit = 1 << t
        for first, last, arrival, leaves in several:
            if first <= last:
                change_at[first] ^= bit
                change_at[last + 1] ^= bit
            begin = first - 1 if arrival == MADE else first
            end = last if leaves and last < k else last - 1
            if begin <= end:
                change_after[begin] ^= bit
                change_after[end + 1] ^= bit
    now = then = 0
    for j in range(k + 1):
        now ^= change_at[j]
        then ^= change_after[j]
        at[j], after[j] = now, then
    new.at, new.after = at[: k + 1], after[:k]
    bytes_of = new.model.step.bytes_of
    held = [0] * (k + 1)
    total = 0
    before = 0
    for j in range(k + 1):
        total += bytes_of(new.at[j] & ~before) - bytes_of(before & ~new.at[j])
        held[j] = total
        before = new.at[j]
    new.held = held
    new.swapped = {t for t in new.swapped if any(s.leaves or s.arrival == COPIED for s in new.residencies[t])}
