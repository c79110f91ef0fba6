"""Makes schedules to start the search from: what a minimum cut keeps, cut into segments where least is stored.

A tensor is on the device from where it is made to where it is needed last, or, if it is dropped, to where it is needed before
that."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence

from tensile_jax.plan.result.layout import BEGINS, MADE, Residency, may_have
from tensile_jax.plan.search.condensed import Condensed, members
from tensile_jax.plan.search.schedule import Model, Schedule, Several
from tensile_jax.plan.search.timing import CopiesOfAll


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
        CopiesOfAll(model.copies_us),
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
    return made


def merged(schedule: Schedule, j: int) -> Schedule | None:
    """The schedule without boundary j: segments j - 1 and j are one."""
    used = schedule.contents[j].used
    new = schedule.copy(schedule.cuts[:j] + schedule.cuts[j + 1 :])
    residencies = new.residencies
    for t, several in enumerate(residencies):
        if not several or (several[-1].last < j and len(several) == 1 and not several[0].leaves):
            continue
        if several[0].first > j and len(several) == 1:
            first, last, arrival, leaves = several[0]
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
    new.held[j - 1] += schedule.model.step.bytes_of(come & used)
    new.after[j - 1 : j + 1] = [schedule.after[j] & ~(come & ~used) | left]
    for those in (new.at, new.held, new.contents, new.peaks, new.us, new.written_us):
        del those[j]
    new.recount_copies(schedule.swapped)
    both = schedule.contents[j - 1].used | used | schedule.after[j - 1]
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
    new = schedule.copy(schedule.cuts[: j + 1] + [cut] + schedule.cuts[j + 1 :])
    residencies = new.residencies
    for t, several in enumerate(residencies):
        if not several or (several[-1].last < j and len(several) == 1 and not several[0].leaves):
            continue
        if several[0].first > j + 1 and len(several) == 1:
            first, last, arrival, leaves = several[0]
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
    new.held.insert(j + 1, schedule.held[j] + model.step.bytes_of(held & ~there))
    new.peaks.insert(j + 1, new.peaks[j])
    for times in (new.us, new.written_us):
        times.insert(j + 1, times[j])
    new.contents[j : j + 1] = [before, behind]
    new.recount_copies(schedule.swapped)
    idle = schedule.contents[j].used | crossing | new.at[j + 1] & ~new.at[j + 2]
    return new if new.settle(range(j, j + 2), members(idle)) else None
