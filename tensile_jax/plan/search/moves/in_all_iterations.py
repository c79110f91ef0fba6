"""Makes a move that was made in one iteration of an opened loop in all of the others, so that they stay alike.

A *schedule* is a plan while it is searched (`schedule.py`), and a *segment* is a stretch of operators that is compiled as one
executable. Segments of two iterations share an executable if they consist of the same operators and keep the same tensors. A
move (`addressed_moves.py`) names tensors, segments and boundaries of one iteration. `iterations.py` says what corresponds to them
in another iteration:

    tensor      the output of the counterpart of its operator
    boundary    the boundary before the counterpart of the operator that follows it
    gap         the gap of the corresponding tensor after as many of the segments that need it
    segment     as far from the end of a gap, or from a copy, as in the first iteration
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator
from functools import cache

from tensile_jax.plan.result.layout import Residency
from tensile_jax.plan.search.cost.segment_evaluator import Evaluator
from tensile_jax.plan.search.iterations import Iterations
from tensile_jax.plan.search.moves import residency_moves
from tensile_jax.plan.search.moves.addressed_moves import (
    Move,
    keep_at,
    merge_at,
    move_boundary,
    shift_by,
    stay_between,
)
from tensile_jax.plan.search.moves.boundary_moves import merged, merged_under, split
from tensile_jax.plan.search.moves.residency_moves import Gap
from tensile_jax.plan.search.schedule import Schedule

_Found = Callable[[Schedule], Move | None]
"""Finds in a schedule the move that corresponds to one in another iteration; None if there is none."""


class InAllIterations:
    """Makes moves of schedules with this evaluator in all iterations of a loop."""

    def __init__(self, iterations: Iterations, evaluator: Evaluator) -> None:
        self._iterations = iterations
        self._evaluator = evaluator
        self._cut_at = {place: cut for cut, place in enumerate(evaluator.places)}
        self._tensors_like = cache(self._others)

    def __call__(self, before: Schedule, move: Move, after: Schedule) -> Schedule | None:
        """The schedule after the move in the other iterations; where it cannot be made, nothing changes.

        None if a boundary would have to lie where none is possible, or if all iterations would become one segment, which takes
        the longer to compile the more iterations there are.

        Args:
            before: the schedule for which the move was found.
            after: the schedule after the move.
        """
        for find in self._elsewhere(before, move):
            if find is None:
                return None
            there = find(after)
            after = (None if there is None else there(after)) or after
        return after

    def _elsewhere(self, before: Schedule, move: Move) -> Iterator[_Found | None]:
        """What finds the move in each of the other iterations; None where it must not be made."""
        function, arguments = move.function, move.arguments
        if function in (residency_moves.drop, residency_moves.swap):
            gap: Gap = arguments[0]
            found = _dropped if function is residency_moves.drop else _swapped
            yield from (found(before, gap, t, *arguments[1:]) for t in self._tensors_like(gap.t))
        elif function is residency_moves.shift:
            t, number, *window = arguments
            by = _shift_of(before, t, number, *window)
            yield from (_always(shift_by, other, number, *by) for other in self._tensors_like(t))
        elif function in (shift_by, stay_between):
            yield from (_always(function, other, *arguments[1:]) for other in self._tensors_like(arguments[0]))
        elif function is keep_at:
            yield from map(_kept, self._tensors_like(arguments[0]))
        elif function is split:
            yield from (None if cut is None else _split(cut) for cut in self._cuts_like(arguments[1]))
        elif function in (merged_under, merge_at):
            removed = int(arguments[0]) if function is merge_at else before.cuts[int(arguments[0])]
            joins = self._joins_iterations(before, removed)
            for cut in self._cuts_like(removed):
                if cut is None or joins:
                    yield None
                else:
                    yield _merged(cut) if function is merged_under else _always(merge_at, cut)
        elif function is move_boundary:
            one_cut, by_cuts = arguments
            for cut, to in self._pairs_like(one_cut, one_cut + by_cuts):
                yield None if cut is None or to is None else _always(move_boundary, cut, to - cut)

    def _joins_iterations(self, schedule: Schedule, cut: int) -> bool:
        """Whether this is the only boundary in its iteration. Without it, a segment would contain all iterations."""
        place = self._evaluator.places[cut]
        others = {self._evaluator.places[other] for other in schedule.cuts} - {place}
        return others.isdisjoint(self._iterations.of_iteration(place))

    def _others(self, t: int) -> tuple[int, ...]:
        """The tensors of the condensed step that correspond to tensor t in the other iterations."""
        ids, bit = self._evaluator.condensed.tensors[t], self._evaluator.bit
        return tuple(bit[u] for u in self._iterations.tensors_like(ids[0]) if u in bit and bit[u] != t)

    def _cuts_like(self, cut: int) -> Iterator[int | None]:
        """The possible boundaries that correspond to this one in the other iterations; None where no boundary is possible."""
        for place in self._iterations.places_like(self._evaluator.places[cut]).values():
            there = self._cut_at.get(place)
            if there != cut:
                yield there

    def _pairs_like(self, one: int, two: int) -> Iterator[tuple[int | None, int | None]]:
        """The same for two possible boundaries of one iteration; a pair of None if they are not in the same one."""
        places = self._evaluator.places
        of_one, of_two = (self._iterations.places_like(places[cut]) for cut in (one, two))
        for iteration, place in of_one.items():
            if place != places[one]:
                yield self._cut_at.get(place), self._cut_at.get(of_two.get(iteration, -1))
            elif of_two.get(iteration) != places[two]:
                yield None, None


def _dropped(before: Schedule, gap: Gap, t: int, keep_sources: bool) -> _Found:
    def find(schedule: Schedule) -> Move | None:
        there = _gap_like(before, gap, schedule, t)
        return None if there is None else Move(residency_moves.drop, (there, keep_sources))

    return find


def _swapped(before: Schedule, gap: Gap, t: int, gone: int, back: int) -> _Found:
    def find(schedule: Schedule) -> Move | None:
        there = _gap_like(before, gap, schedule, t)
        if there is None:
            return None
        return Move(residency_moves.swap, (there, there.after + gone - gap.after, there.before - (gap.before - back)))

    return find


def _always(function: Callable[..., Schedule | None], *arguments: object) -> _Found:
    return lambda _: Move(function, arguments)


def _shift_of(schedule: Schedule, t: int, number: int, gone: int, back: int) -> tuple[int, int]:
    """By how many segments a shift moves the two ends of a swap."""
    one, two = schedule.residencies[t][number : number + 2]
    return gone - one.last - 1, back - two.first


def _kept(t: int) -> _Found:
    """Keeps tensor t for the first segment that computes it again."""

    def find(schedule: Schedule) -> Move | None:
        m = next((j for j, account in enumerate(schedule.accounts) if account.again >> t & 1), None)
        return None if m is None else Move(residency_moves.keep, (t, m))

    return find


def _split(cut: int) -> _Found:
    def find(schedule: Schedule) -> Move | None:
        j = bisect_right(schedule.cuts, cut) - 1
        return None if schedule.cuts[j] == cut else Move(split, (j, cut))

    return find


def _merged(cut: int) -> _Found:
    def find(schedule: Schedule) -> Move | None:
        return Move(merged, (schedule.cuts.index(cut),)) if cut in schedule.cuts[1:-1] else None

    return find


def _gap_like(before: Schedule, gap: Gap, schedule: Schedule, t: int) -> Gap | None:
    """The gap of tensor t in a schedule that corresponds to the gap of another tensor in the schedule before; None if there is
    none.
    """
    several, needs_before = schedule.residencies[t], _needs(before, gap.t, before.residencies[gap.t][gap.stay])
    is_open = gap.before >= before.count
    if len(several) <= gap.stay or not (is_open or gap.before in needs_before):
        return None
    count = bisect_right(needs_before, gap.after)
    there = several[gap.stay]
    needs = _needs(schedule, t, there)
    if len(needs) < count or is_open != (len(needs) == count and there.last >= schedule.count):
        return None
    if len(needs) == count and not is_open:
        return None  # it is on its way to the host
    after = needs[count - 1] if count else there.first - 1
    return Gap(t, gap.stay, after, schedule.count if is_open else needs[count])


def _needs(schedule: Schedule, t: int, residency: Residency) -> list[int]:
    """The segments that need the tensor during a residency."""
    during = range(max(residency.first, 0), min(residency.last, schedule.count - 1) + 1)
    return [j for j in during if schedule.accounts[j].used >> t & 1]
