"""Finds the fastest schedule of a step under a memory limit, and the schedule with the least peak.

A *schedule* is a plan while it is searched: where the step is cut into *segments*, each compiled as one executable, and when each
tensor is on the device (`schedule.py`). The fastest schedule is found in five steps:

    start     A minimum cut decides which tensors are kept, at each of several prices: the bytes that may be kept to save one byte
              of memory traffic (`analysis/minimum_cut.py`). Dynamic programming then cuts the step into segments
              (`starts/segment_boundaries.py`).
    repair    Moves lower the peak of each schedule until the peak is under the limit (`moves/local_search.py`).
    descend   If no repair succeeds, or the result is slow, the search finds a schedule under a higher limit, and repairs this
              schedule under lower and lower limits.
    improve   Local search makes the fastest schedules faster.
    perturb   The fastest schedule is repaired under a lower limit and improved again, as long as that makes it faster (iterated
              local search: Lourenço, Martin and Stützle, 2003).

If the limit is below a lower bound on the memory of every schedule (`bounds/memory_bound.py`), the search ends at once.

The search for the least peak begins with a schedule whose segments are as short as possible, and in which every tensor is on the
host while no segment needs it. Neighbouring segments are joined where that lowers the peak, and repairs lower the peak further.
If host memory is limited, this schedule swaps fewer tensors. The search then also begins with a second schedule, without swaps,
which keeps only what the minimum cut at the lowest price keeps. The schedule with the lower peak is the result.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator
from functools import cache, partial
from math import sqrt
from typing import NamedTuple

import numpy as np

from tensile_jax.plan.result.layout import BEGINS, COPIED, MADE, Residency
from tensile_jax.plan.search.bounds.memory_bound import necessary_bytes
from tensile_jax.plan.search.condensed.condensed_step import members
from tensile_jax.plan.search.cost.segment_evaluator import Evaluator
from tensile_jax.plan.search.cost.workspace import CompiledSizes
from tensile_jax.plan.search.moves.boundary_moves import merged
from tensile_jax.plan.search.moves.local_search import improve, repair
from tensile_jax.plan.search.schedule import Schedule, Several
from tensile_jax.plan.search.starts.segment_boundaries import cheapest_cuts
from tensile_jax.plan.search.starts.start_schedules import assemble, held_at, last_held, nodes_of, start
from tensile_jax.plan.search.step_model import PRICES, StepModel


class Start(NamedTuple):
    """What a schedule keeps in the beginning: what a minimum cut keeps.

    Attributes:
        price: of the cut.
        higher: the price of another cut, if there is one; of the tensors that are made by the node `since` or a later one, that
            cut says which are kept.
        since: a node.
        spread: whether many segments may exceed the limit by little each, instead of few by much
            (`starts/segment_boundaries.py`).
    """

    price: float
    higher: float | None = None
    since: int = 0
    spread: bool = False


class Found(NamedTuple):
    """A schedule, and the limit under which it was found."""

    schedule: Schedule
    limit: float


# Each trades the time of the plan for the time of planning (`make bench-constants`, `make bench-planning`).
_STARTS = (Start(0.05), Start(0.165), Start(0.36), Start(1.2), Start(0.36, spread=True), Start(0.6, spread=True))
"""Price 1.2 keeps nearly everything, and leaves the rest to repairs. Those with `spread` are for small steps."""
_LOWEST_PRICE, _APART = 0.004, 1.05  # the lowest price of a start; the ratio at which a search between two prices ends
_KEPT = (1.0, 0.65)  # of the limit: what starts at lower prices keep; a segment needs its workspace beside it
_PARTS = tuple(part / 100 for part in range(30, 95, 5))  # of the limit: the largest part that needs no repair is one more start
_REPAIRS = 400  # moves of a repair
_LEAST_REPAIRS = 30  # moves of a repair of the schedule with the least peak
_PROMISING = 1.05  # of the fastest repaired schedule's time: slower ones are not repaired any further
_OTHERS, _MOST_OTHERS = 30_000, 12_000  # evaluations per repair once one succeeded: times its slowdown, but at most the second
_TIRED = 3_000  # evaluations without a successful repair after which a higher limit is tried
_GOOD = 1.0  # of the whole step's time: a plan that is no slower is taken although state may be on the host
_ACCEPTABLE = 1.1  # of the whole step's time: slower schedules without state on the host are given up early at first
_LIKELY = 1.2  # of the time without state on the host: slower schedules of the second search are not repaired any further
_EVALUATIONS, _FEWEST, _MOST = 20_000, 1200, 4000  # to improve one schedule: times its slowdown, within these bounds
_LOWER = (0.97, 0.93, 0.87)  # of the limit: what the fastest schedule is repaired under, to be improved again under the limit
_STILL_FASTER = 0.9999  # of its time: what that must reach to be repeated
_NOT_PERTURBED = 1.05  # of the whole step's time: a faster schedule is not improved again
_MORE_EVALUATIONS = 3  # for all of these repetitions: times those to improve one schedule
_BEHIND = 1.04  # of the fastest repaired schedule's time: slower ones are not improved, except of small steps
_SMALL = 64  # nodes of a small step
_ALL_EVALUATIONS = 3600  # after which no start with `spread` is tried, and then no further schedule is improved
_LIMITS = (1.3, 1.15, 1.07, 1.0)  # of the limit: higher limits for a schedule that is then repaired under lower ones
_SLOW = 1.25  # of the whole step's time: only for slower schedules, other limits are tried
_IMPROVED = 1.5  # of the wanted time: schedules that are no slower may become that fast when they are improved
_SOON = 1.6  # of the whole step's time: what a schedule may take that is to be found soon (`make bench-workloads`)
_UNSWAPPED = 16  # swaps compared as candidates to give up, where the host cannot hold all; not tuned
_SHRINK = 0.97  # of the least peak found so far: the next limit that is tried
_LEAST_KEPT = Start(PRICES[-1])  # the start for the least peak without swaps
_DESCENT, _LEAST_EVALUATIONS = 4_500, 900  # evaluations to lower the peak of each start, and to repair one schedule


def fastest(model: StepModel, limit: float, measured: CompiledSizes) -> Schedule | None:
    """The fastest schedule of two segments or more that the search finds under the limit; None if there is none.

    If state may be on the host between iterations, the search first runs without that permission, so that the permission hardly
    ever makes a plan slower.
    """
    evaluator = model.search_evaluator.with_measured(measured)
    best = _either(model, evaluator, limit) if evaluator.new_of else _improved_once(model, evaluator, limit, float("inf"))
    if best is None or best.cost < _NOT_PERTURBED * model.whole_us:
        return best
    return perturbed(model, Found(best, limit)).schedule


def fast(model: StepModel, limit: float, measured: CompiledSizes, upper: float = float("inf")) -> Schedule | None:
    """A schedule under the limit that is found quickly: the fastest of those that the search begins with, improved once.

    None if there is none, or if nothing faster than `upper` seems to exist.
    """
    return _improved_once(model, model.search_evaluator.with_measured(measured), limit, _IMPROVED * upper)


def soon(model: StepModel, limit: float, measured: CompiledSizes) -> Schedule | None:
    """A schedule under the limit that is found sooner than that of `fast`, and is hardly ever faster; None if there is none.

    It is the first that is fast enough of those that the search begins with, as repairs leave it.
    """
    evaluator = model.search_evaluator.with_measured(measured)
    return _from_cuts(model, evaluator, limit, float("inf"), may_rise=True, enough=_SOON * model.whole_us)


def _either(model: StepModel, evaluator: Evaluator, limit: float) -> Schedule | None:
    """The faster of two schedules: one keeps state on the device between iterations, and the other need not.

    The first one is sought again, without an upper limit on its time, only if both are slow.
    """
    inside, likely = evaluator.without_state_out(), _ACCEPTABLE * model.whole_us
    staying = _improved_once(model, inside, limit, likely, may_rise=False)
    if _cost(staying) <= _GOOD * model.whole_us:
        return staying
    found = [staying, _improved_once(model, evaluator, limit, _LIKELY * _cost(staying))]
    if min(map(_cost, found)) > likely:
        found.append(_improved_once(model, inside, limit, _cost(found[1]), may_rise=found[1] is None))
    return min(found, key=_cost)


def _cost(schedule: Schedule | None) -> float:
    return float("inf") if schedule is None else schedule.cost


def _improved_once(
    model: StepModel, evaluator: Evaluator, limit: float, upper: float, *, may_rise: bool = True
) -> Schedule | None:
    """The schedule with which the search goes on. It is remembered, since variants of a step are ranked by it first.

    Schedules that are much slower than `upper` are given up early.
    """
    found = partial(_from_cuts, model, evaluator, limit, upper, may_rise=may_rise)
    return evaluator.found("cuts", (limit, upper, may_rise), found)


def _improved(model: StepModel, schedule: Schedule, limit: float, wanted: float = float("inf")) -> Schedule:
    """The schedule, improved with effort in proportion to how much slower it is than the whole step."""
    return improve(schedule, limit, int(_evaluations(model, schedule)), wanted)


def _evaluations(model: StepModel, schedule: Schedule) -> float:
    return min(max(_FEWEST, _EVALUATIONS * (schedule.cost / model.whole_us - 1)), _MOST)


def _from_higher_limits(model: StepModel, evaluator: Evaluator, limit: float, upper: float) -> Schedule | None:
    """The fastest schedule under a higher limit, repaired and improved under lower and lower ones.

    None if a repair fails, or if a schedule is slower than `upper` already.
    """
    highest, *lower = _LIMITS
    schedule = _from_cuts(model, evaluator, highest * limit, upper, may_rise=False, with_others=False)
    for part in lower:
        schedule = None if schedule is None else repair(schedule, part * limit, _REPAIRS, upper)
        if schedule is None or part == lower[-1]:  # the last one is improved beside the others
            return schedule
        schedule = _improved(model, schedule, part * limit)
    return schedule


def perturbed(model: StepModel, best: Found, keep: Callable[[Found], Found | None] = lambda found: found) -> Found:
    """A faster schedule, found by iterated local search: repaired under a lower limit, and improved under its limit again.

    It ends after `_MORE_EVALUATIONS`, or once that has not led to a faster schedule.

    Args:
        keep: makes of a faster schedule one whose plan can be used; None if it makes none.
    """
    evaluator = best.schedule.evaluator
    end = evaluator.evaluated + _MORE_EVALUATIONS * _evaluations(model, best.schedule)
    lower = iter(_LOWER)
    part = next(lower)
    while evaluator.evaluated < end:
        repaired = repair(best.schedule, part * best.limit, _REPAIRS)
        improved = None if repaired is None else _improved(model, repaired, best.limit)
        faster = _STILL_FASTER * best.schedule.cost
        kept = None if improved is None or improved.cost >= faster else keep(Found(improved, best.limit))
        if kept is None or kept.schedule.cost >= faster:
            part = next(lower, None) if best.schedule.cost > _SLOW * model.whole_us else None
            if part is None:
                break
        else:
            best = kept
    return best


def _from_cuts(
    model: StepModel,
    evaluator: Evaluator,
    limit: float,
    upper: float,
    *,
    may_rise: bool,
    with_others: bool = True,
    enough: float = 0.0,
) -> Schedule | None:
    """The fastest of the schedules that begin with minimum cuts, repaired and improved.

    The schedule with the least peak is one more of them if none of the others can be repaired, or if the step is small.

    Args:
        may_rise: whether to descend from higher limits if repairs have failed, or if the result is slow.
            Schedules that are slower than the result are then given up early.
        with_others: whether to improve other schedules than the fastest of a step that is not small.
        enough: the first schedule that is no slower is the result, once it is repaired.
    """
    if limit < necessary_bytes(evaluator):
        return None
    is_small = len(evaluator.condensed.reads) <= _SMALL
    found: list[Schedule] = []
    begun: set[tuple[object, ...]] = set()
    schedule_of = cache(partial(starting, model, evaluator, limit=limit))
    end, tired = evaluator.evaluated + _ALL_EVALUATIONS, evaluator.evaluated + _TIRED

    def add(schedule: Schedule | None) -> None:
        nonlocal upper
        if schedule is not None:
            found.append(schedule)
            upper = min(upper, schedule.cost)

    for first in _starts(model, evaluator, limit, schedule_of):
        kept = (first.spread, *_kept(model, evaluator, first)[1])
        if kept in begun or (first.spread and found and evaluator.evaluated >= end):
            continue
        begun.add(kept)
        schedule = schedule_of(first)
        if schedule is None:
            continue
        evaluations = min(_OTHERS * (upper / model.whole_us - 1), _MOST_OTHERS) if found else float("inf")
        add(repair(schedule, limit, _REPAIRS, _PROMISING * upper, evaluations))
        if upper <= enough:
            return found[-1]
        if may_rise and not found and evaluator.evaluated >= tired:
            may_rise = False
            add(_from_higher_limits(model, evaluator, limit, upper))
    if may_rise and not found:
        may_rise = False
        add(_from_higher_limits(model, evaluator, limit, upper))
    if is_small or not found:
        lowest = _least(model, evaluator)
        if lowest.peak <= limit and (is_small or lowest.cost <= _IMPROVED * upper):
            found.append(lowest)
    if not found:
        return None
    end = evaluator.evaluated + _ALL_EVALUATIONS
    found.sort(key=lambda schedule: schedule.cost)
    best = _improved(model, found[0], limit)
    for schedule in found[1:]:
        if evaluator.evaluated >= end or not (is_small or (with_others and schedule.cost <= _BEHIND * found[0].cost)):
            break
        improved = _improved(model, schedule, limit, wanted=best.cost)
        best = min(best, improved, key=_cost)
    if may_rise and best.cost >= _SLOW * model.whole_us:
        descended = _from_higher_limits(model, evaluator, limit, min(upper, best.cost))
        best = best if descended is None else min(best, _improved(model, descended, limit), key=_cost)
    return best


def _starts(
    model: StepModel, evaluator: Evaluator, limit: float, schedule_of: Callable[[Start], Schedule | None]
) -> Iterator[Start]:
    """What schedules to begin with.

    If all of `_STARTS` keep more than the limit, cuts at lower prices follow. For each part of the limit, these are the highest
    price that keeps less than the part, and a price just above it. A network with many equal layers keeps much less from one
    price to the next, so starts that combine the two prices come last: one that keeps just the last part, and the largest one
    that leaves enough room for the segments to need no repair.
    """
    yield from _STARTS

    def keeps_more(start: Start, most: float) -> bool:
        return max(map(evaluator.condensed.bytes_of, _kept(model, evaluator, start)[1])) + evaluator.condensed.base_bytes > most

    def combined(most: float) -> Start:
        more, less = _around(most, keeps_more)
        nodes = range(len(evaluator.condensed.reads) + 1)
        return Start(less, more, bisect_left(nodes, True, key=lambda node: not keeps_more(Start(less, more, node), most)))

    def exceeds(part: float) -> bool:
        begun = schedule_of(combined(part * limit))
        return begun is None or begun.peak > limit

    if not keeps_more(_STARTS[0], limit):
        return
    for part in _KEPT:
        more, less = _around(part * limit, keeps_more)
        yield Start(more)
        yield Start(less)
    yield combined(_KEPT[-1] * limit)
    fitting = bisect_left(_PARTS, True, key=exceeds)
    if fitting:
        yield combined(_PARTS[fitting - 1] * limit)


def _around(most: float, keeps_more: Callable[[Start, float], bool]) -> tuple[float, float]:
    """Two prices close together: at the higher one, more than `most` bytes are kept, and at the lower one fewer (or it is
    `_LOWEST_PRICE`).
    """
    more, less = _STARTS[0].price, _LOWEST_PRICE
    while more > _APART * less and not keeps_more(Start(less), most):
        between = sqrt(more * less)
        more, less = (between, less) if keeps_more(Start(between), most) else (more, between)
    return more, less


def starting(model: StepModel, evaluator: Evaluator, begun: Start, limit: float) -> Schedule | None:
    """The schedule that a start describes, with its cheapest segments, which may exceed the limit."""
    end, stored = _kept(model, evaluator, begun)
    return start(evaluator, cheapest_cuts(evaluator, stored, limit, spread=begun.spread), end)


def _kept(model: StepModel, evaluator: Evaluator, begun: Start) -> tuple[list[int], list[int]]:
    """By tensor, the last node before which it is held; and by possible boundary, the set of tensors held there."""
    if begun.higher is not None:
        low, high = (_kept(model, evaluator, Start(price))[0] for price in (begun.price, begun.higher))
        mixed = [low[t] if made < begun.since else high[t] for t, made in enumerate(evaluator.condensed.made)]
        return mixed, held_at(evaluator.condensed, mixed)
    if begun.price not in evaluator.kept_at:
        end = last_held(evaluator.condensed, nodes_of(evaluator, model.dropped_at(begun.price).dropped))
        evaluator.kept_at[begun.price] = end, held_at(evaluator.condensed, end)
    return evaluator.kept_at[begun.price]


def least(model: StepModel, measured: CompiledSizes) -> Schedule:
    """The schedule with the least peak that the search knows."""
    return _least(model, model.search_evaluator.with_measured(measured))


def _least(model: StepModel, evaluator: Evaluator) -> Schedule:
    found = evaluator.found("least", (), lambda: _sought_least(model, evaluator))
    assert found is not None  # that in which every tensor is absent is one
    return found


def _sought_least(model: StepModel, evaluator: Evaluator) -> Schedule:
    free, may_swap_all = model.with_host_limit(float("inf")), evaluator.host_limit == float("inf")
    if may_swap_all or not model.may_swap:
        lowest = _joined(_all_absent(evaluator))
    else:
        everything = _least(free, free.search_evaluator.with_measured(evaluator.measured))
        lowest = _within_host_limit(evaluator, improve(everything, everything.peak, _MOST))
    if not may_swap_all:
        begun = starting(model, evaluator, _LEAST_KEPT, 0.0)
        both = [lowest, *([] if begun is None else [_joined(begun)])]
        lowest = min(map(_descended, both), key=lambda schedule: schedule.peak)
    return _lowered(lowest, lambda schedule, limit: _lower(model, evaluator, schedule, limit, repairs_only=may_swap_all))


def _descended(schedule: Schedule) -> Schedule:
    """The schedule after repairs under lower and lower limits, until `_DESCENT` segments have been evaluated."""
    evaluator, end = schedule.evaluator, schedule.evaluator.evaluated + _DESCENT

    def repaired(schedule: Schedule, limit: float) -> Schedule | None:
        left = end - evaluator.evaluated
        return repair(schedule, limit, _LEAST_REPAIRS, evaluations=left) if left > 0 else None

    return _lowered(schedule, repaired)


def _lowered(schedule: Schedule, under: Callable[[Schedule, float], Schedule | None]) -> Schedule:
    """What `under` makes of the schedule under lower and lower limits, as long as it finds something."""
    while True:
        lower = under(schedule, _SHRINK * schedule.peak)
        if lower is None or lower.peak >= schedule.peak:
            return schedule
        schedule = lower


def _lower(model: StepModel, evaluator: Evaluator, schedule: Schedule, limit: float, *, repairs_only: bool) -> Schedule | None:
    """A schedule under a limit that is below the peak of this one; None if repairs find none.

    With `repairs_only`, no other starts are tried. They hardly ever get lower where everything may be swapped, and take long.
    """
    repaired = repair(schedule, limit, _LEAST_REPAIRS)
    if not repairs_only:
        for price in reversed(PRICES):
            if repaired is not None:
                break
            begun = starting(model, evaluator, Start(price), limit)
            repaired = None if begun is None else repair(begun, limit, _REPAIRS, evaluations=_LEAST_EVALUATIONS)
    return repaired


def _joined(schedule: Schedule) -> Schedule:
    """The schedule in which the segment with the highest peak is joined to its neighbours as long as that lowers the peak.

    A boundary makes a segment hold what it reads until its end, and its results from its beginning; inside a segment, XLA uses
    their memory for other tensors.
    """
    while True:
        j = schedule.peaks.index(schedule.peak)
        joined = [new for i in (j, j + 1) if 0 < i < schedule.count and (new := merged(schedule, i)) is not None]
        joined = [new for new in joined if new.keeps_host_limit]
        lower = min(joined, key=lambda new: new.peak, default=schedule)
        if lower.peak >= schedule.peak:
            return schedule
        schedule = lower


def _within_host_limit(evaluator: Evaluator, free: Schedule) -> Schedule:
    """The schedule with fewer swaps, so that the host can hold the rest. First go the swaps that raise the peak least.

    The other tensors stay on the device, a tensor of the state together with its update. Ties go to the earlier tensor.
    """
    schedule = assemble(evaluator, list(free.cuts), list(free.residencies), as_they_are=True)
    assert schedule is not None  # it runs in the other model
    while not schedule.keeps_host_limit:
        fewer = [new for t in _most_on_host(schedule) if (new := _without_swap(schedule, t)) is not None]
        schedule = min(fewer, key=lambda new: new.excess(free.peak))
    return schedule


def _most_on_host(schedule: Schedule) -> list[int]:
    """The largest tensors that are on the host when most is there."""
    spans = {t: schedule.host_span(t) for t in sorted(schedule.swapped)}
    nbytes = schedule.evaluator.condensed.nbytes
    host = [sum(nbytes[t] for t, (begin, end) in spans.items() if begin <= j <= end) for j in range(schedule.count + 1)]
    most = host.index(max(host))
    there = [t for t, (begin, end) in spans.items() if begin <= most <= end]
    return sorted(there, key=lambda t: (-nbytes[t], t))[:_UNSWAPPED]


def _without_swap(schedule: Schedule, t: int) -> Schedule | None:
    """The schedule in which tensor t is not swapped, nor the state that it updates or that updates it."""
    evaluator, new = schedule.evaluator, schedule.copy()
    both = [u for u in (t, evaluator.new_of.get(t, evaluator.old_of.get(t))) if u is not None and u in schedule.swapped]
    touched = set[int]().union(*(new.set_residencies(u, _staying(schedule.residencies[u], schedule.count)) for u in both))
    return new if new.settle(touched, both) else None


def _staying(several: Several, count: int) -> Several:
    """The residency of a swapped tensor if it stays on the device, also across the iteration boundary."""
    first, last = several[0], several[-1]
    begins = first.arrival == COPIED
    return (
        Residency(0 if begins else first.first, count if last.leaves else last.last, BEGINS if begins else first.arrival, False),
    )


def _all_absent(evaluator: Evaluator) -> Schedule:
    """The schedule that is cut at every possible boundary, and in which everything that may be swapped is on the host whenever no
    segment needs it.
    """
    condensed = evaluator.condensed
    k = len(evaluator.places) - 1
    segment = np.searchsorted(np.array(condensed.boundaries), np.arange(len(condensed.reads) + 1), side="right") - 1
    uses: list[list[int]] = [[] for _ in condensed.tensors]
    for node, read in enumerate(condensed.reads):
        for t in members(read):
            j = int(segment[node])
            if not uses[t] or uses[t][-1] != j:
                uses[t].append(j)
    old_of = {new: old for old, new in condensed.pairs}
    new_of = dict(condensed.pairs)
    across = sum(1 << t for pair in condensed.pairs for t in set(pair))
    movable = condensed.movable & ~(condensed.held & ~across)
    residencies: list[Several] = []
    for t, made in enumerate(condensed.made):
        j = int(segment[made]) if made >= 0 else -1
        needs = [u for u in uses[t] if u > j]
        if condensed.at_end >> t & 1:
            needs.append(k)
        if t in old_of and condensed.at_end >> t & 1:
            needs.pop()
        residencies.append(_apart(needs, j, stays_out=t in old_of, starts_out=t in new_of, movable=bool(movable >> t & 1)))
    made = assemble(evaluator, list(range(k + 1)), residencies)
    assert made is not None
    return made


def _apart(needs: list[int], made: int, *, stays_out: bool, starts_out: bool, movable: bool) -> Several:
    """Residencies at the segments in `needs` only, if the tensor is movable; it is made by segment `made`, or -1 for an input."""
    if not movable:
        if made < 0:
            return (Residency(0, max(needs, default=0), BEGINS, False),)
        return (Residency(made + 1, needs[-1], MADE, False),) if needs else ()
    found: list[Residency] = []
    if starts_out and made < 0 and needs:
        found.append(Residency(needs[0], needs[0], COPIED, False))
    elif made < 0:
        found.append(Residency(0, -1 if needs else 0, BEGINS, False))
    elif needs or stays_out:
        found.append(Residency(made + 1, made, MADE, False))
    for need in needs:
        before = found[-1]
        if need <= before.last + 1:
            found[-1] = before._replace(last=max(need, before.last))
        else:
            found[-1] = before._replace(leaves=True)
            found.append(Residency(need, need, COPIED, False))
    if stays_out:
        found[-1] = found[-1]._replace(leaves=True)
    if found and found[0].arrival == MADE and found[0].last < found[0].first and not found[0].leaves:
        found = found[1:]
    return tuple(found)
