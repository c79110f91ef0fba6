"""Lists the moves after which one segment of a schedule may hold less, with a first estimate of what each is worth.

A *schedule* is a plan that the search is working on (`schedule.py`), and a *segment* is a stretch of operators that is compiled
as one executable. A segment that exceeds the memory limit holds less, for example, after a tensor that it does not need was
dropped or swapped (`residency_moves.py`), or after it was split (`boundary_moves.py`). A move is worth the more, the less time
it adds for each byte of the excess that it removes. `best_moves.py` chooses among the moves that this module lists.
"""

from collections.abc import Callable, Iterator
from itertools import pairwise
from math import sqrt

from tensile_jax.plan.result.layout import BEGINS, COPIED
from tensile_jax.plan.search.moves import residency_moves
from tensile_jax.plan.search.moves.addressed_moves import LEAST_GAIN, Move
from tensile_jax.plan.search.moves.boundary_moves import halves, merged_under, split
from tensile_jax.plan.search.moves.residency_moves import Gap
from tensile_jax.plan.search.schedule import Schedule

# Each trades the time of the plan for the time of planning (`make bench-constants`).
_TRIED = 8  # tensors whose moves are listed, the likeliest first
_LATER = 2  # results of the step that a move tries to make later
_SENT = 3  # pairs of state that one move tries
_SWAP_RISK = 0.05  # of a copy's time: counted although other work may hide the copy
_ROUGH = 5.0  # how many times lower than estimated the rate of a drop or a swap may be
_CLOSE = 1.5  # the same of a split


def lowering(schedule: Schedule, j: int, limit: float, most_us: float) -> Iterator[tuple[float, Move]]:
    """Moves after which segment j may hold less, except those that are expected to add `most_us` or more.

    Each comes after its least rate: time that it adds for each byte of the excess that it removes, as estimated without making
    the move. Hardly any move turns out to have a lower rate.
    """
    evaluator = schedule.evaluator
    step = evaluator.condensed
    cuts, bounds = schedule.cuts, step.boundaries
    above = [(i, p - limit, sqrt(bounds[cuts[i + 1]] - bounds[cuts[i]])) for i, p in enumerate(schedule.peaks) if p > limit]

    def rate(us: float, nbytes: float, first: int, end: int) -> float:
        """Time for each byte of the excess if the segments `first` .. `end - 1` hold so many bytes less."""
        less = sum(min(nbytes, more) * weight for i, more, weight in above if first <= i < end)
        return us / less / _ROUGH if less else float("inf")

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
            yield _least_rate_of_split(schedule, limit, *move.arguments), move
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


def _least_rate_of_split(schedule: Schedule, limit: float, j: int, cut: int) -> float:
    """About the lowest rate of a split: other segments may hold less after it, too."""
    parts = halves(schedule, j, cut)
    if parts is None:
        return 0.0
    bounds, (a, b) = schedule.evaluator.condensed.boundaries, schedule.cuts[j : j + 2]
    less = (schedule.peaks[j] - limit) * sqrt(bounds[b] - bounds[a])
    for peak, begin, end in zip(parts.peaks, (a, cut), (cut, b), strict=True):
        less -= max(peak - limit, 0.0) * sqrt(bounds[end] - bounds[begin])
    us = max(parts.us - schedule.us_of(j, j + 1), 0.0) + LEAST_GAIN
    return us / less / _CLOSE if less > 0 else float("inf")


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


def tensor_of(move: Move) -> int | None:
    """The tensor whose residencies a move changes; None if it changes boundaries."""
    if move.function in (split, merged_under):
        return None
    first: Gap | int = move.arguments[0]
    return first.t if isinstance(first, Gap) else first
