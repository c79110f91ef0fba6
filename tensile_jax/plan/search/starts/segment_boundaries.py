"""Cuts a step into segments: the cheapest boundaries with which every segment stays under a limit, by dynamic programming.

A *segment* is a stretch of operators that is compiled as one executable. The caller says which tensors are on the device at
each possible boundary. So the cost and the peak of a segment depend only on its two ends, and the cheapest cut of the step is a
shortest path. From each boundary, longer and longer segments are tried, until several in a row exceed the limit. Exceeding the
limit is penalised so heavily that it happens only when unavoidable. The option `spread` is for schedules that are repaired
afterwards (`moves/local_search.py`), since repairs can remove many small excesses. With `spread`, the penalty is small, and is
proportional to the length of the segment. If every segment exceeds the limit by the same number of bytes, the penalties then
add up to the same sum for many short segments as for a few long ones.

Evaluating a long segment takes long. So the module first considers only a few boundaries, where least is stored. If the
cheapest cut at these boundaries exceeds the limit, the module considers all boundaries. This is fast enough, because segments
under a tight limit are short.

Sizes in bytes, times in microseconds.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from tensile_jax.plan.search.cost.segment_evaluator import Evaluator

# Each trades the time of the plan for the time of planning (`make bench-planning`, `make bench-constants`).
_FEW = 24  # possible boundaries of the first try
_MISSES = 4  # consecutive ends at which a segment exceeds the limit before it is extended no further
_FAR_ABOVE = 1.25  # of the limit: if `thorough`, ends below it are no misses, since a longer segment may need less
_NEAR = 8  # possible boundaries: a segment ends at any of the next ones, and beyond these at one of the few
_EXCESS_US_PER_BYTE = 1.0  # so high that a segment exceeds the limit only when that is unavoidable
_SPREAD_US_PER_BYTE = 1e-6  # so low that many small excesses, which repairs can remove, are preferred to slow cuts


class _Cut(NamedTuple):
    boundaries: list[int]
    excess_us: float


def cheapest_cuts(
    evaluator: Evaluator,
    stored: Sequence[int],
    limit: float,
    required: Collection[int] = (),
    *,
    thorough: bool = False,
    spread: bool = False,
) -> list[int]:
    """Indices of `Condensed.boundaries`, from the first to the last: the cheapest two segments or more.

    Args:
        stored: by possible boundary, the set of tensors on the device.
        required: indices of boundaries that are always taken, beside those of operators that are alone.
        thorough: whether segments are extended farther, for cuts that are not repaired afterwards. It takes longer.
        spread: whether many small excesses are preferred to a few large ones. Segments may then exceed the limit even if a cut
            without excesses exists.
    """
    required = {*required, *evaluator.required}
    stop = _FAR_ABOVE * limit if thorough else limit
    everything = range(len(evaluator.places))
    few = _narrow(evaluator, stored, required)
    cut = _shortest_path(evaluator, stored, limit, few, required, stop, spread)
    if cut.excess_us and len(few) < len(everything):
        cut = min(
            cut, _shortest_path(evaluator, stored, limit, everything, required, stop, spread, set(few)), key=lambda c: c.excess_us
        )
    return cut.boundaries


def _narrow(evaluator: Evaluator, stored: Sequence[int], required: Collection[int]) -> list[int]:
    """Some of the possible boundaries: of each stretch, the one at which least is stored."""
    k = len(evaluator.places)
    if k <= _FEW:
        return list(range(k))
    nbytes = [evaluator.condensed.bytes_of(there) for there in stored]
    stretches = np.array_split(np.arange(1, k - 1), _FEW - 2)
    chosen = {min(stretch.tolist(), key=nbytes.__getitem__) for stretch in stretches}
    return sorted({0, k - 1, *required, *chosen})


def least_peak(evaluator: Evaluator, stored: Sequence[int], required: Collection[int] = ()) -> float:
    """The least peak, in bytes, of any cut into two segments or more: at the few boundaries where least is stored, or at all."""
    required = {*required, *evaluator.required}
    few = _narrow(evaluator, stored, required)
    k = len(few)
    most = [0.0] + [float("inf")] * (k - 1)
    for a, b, peak, _ in _segments(evaluator, stored, few, required, float("inf")):
        if a > 0 or b < k - 1 or k == 2:
            most[b] = min(most[b], max(most[a], peak))
    finest = max(peak for _, _, peak, _ in _segments(evaluator, stored, range(len(evaluator.places)), required, 0.0, farthest=1))
    return min(most[-1], finest)


def _shortest_path(
    evaluator: Evaluator,
    stored: Sequence[int],
    limit: float,
    possible: Sequence[int],
    required: Collection[int],
    stop: float,
    spread: bool,
    far: Collection[int] = (),
) -> _Cut:
    k, bounds = len(possible), evaluator.condensed.boundaries
    total, over, back = [float("inf")] * k, [0.0] * k, [0] * k
    total[0] = 0.0

    def is_useless(a: int, b: int, us: float) -> bool:
        return total[a] + us >= total[b]

    for a, b, peak, us in _segments(
        evaluator, stored, possible, required, stop, far=far, is_useless=None if spread else is_useless
    ):
        share = (bounds[possible[b]] - bounds[possible[a]]) / bounds[-1]
        excess_us = max(0.0, peak - limit) * (share * _SPREAD_US_PER_BYTE if spread else _EXCESS_US_PER_BYTE)
        cost = us + excess_us
        if total[a] + cost < total[b] and (a > 0 or b < k - 1 or k == 2):
            total[b], over[b], back[b] = total[a] + cost, over[a] + excess_us, a
    path = [k - 1]
    while path[-1]:
        path.append(back[path[-1]])
    reached = total[-1] < float("inf")  # not if a segment between all of them cannot compute again what is absent at its begin
    return _Cut([possible[p] for p in path[::-1]], over[-1] if reached else float("inf"))


def _segments(
    evaluator: Evaluator,
    stored: Sequence[int],
    possible: Sequence[int],
    required: Collection[int],
    stop: float,
    *,
    farthest: int | None = None,
    far: Collection[int] = (),
    is_useless: Callable[[int, int, float], bool] | None = None,
) -> Iterator[tuple[int, int, float, float]]:
    """Segments as (index of the first boundary in `possible`, index of the last one, peak, microseconds), by the first boundary.

    A segment has at most `farthest` possible boundaries. It is extended no further once several in a row give peaks above `stop`.
    Segments that `is_useless` rejects by their two ends and their time are skipped before their memory is computed.
    """
    step, profile = evaluator.condensed, evaluator.profile
    bounds = [step.boundaries[p] for p in possible]
    for a in range(len(possible) - 1):
        there = stored[possible[a]]
        held = step.base_bytes + step.bytes_of(there)
        begun = evaluator.begun_at(possible[a], there)
        us, misses, made = 0.0, 0, 0
        for b in range(a + 1, len(possible)):
            us += sum(step.us[bounds[b - 1] : bounds[b]])
            made |= evaluator.made(possible[b - 1], possible[b])
            if far and b - a > _NEAR and b < len(possible) - 1 and possible[b] not in far:
                continue
            again_us = begun.again_us(bounds[b])
            if again_us is None:
                break
            after = stored[possible[b]]
            wanted = after & ~there & made  # what else is there after the segment is copied there
            crossing_us = step.crossing_bytes(wanted) / profile.bytes_per_us
            cost_us = profile.launch_us + evaluator.compiling_us + us + again_us + crossing_us
            if is_useless is None or not is_useless(a, b, cost_us):
                aliased = evaluator.aliased(there, after, wanted)
                account = begun.account(bounds[b], us, wanted, aliased)
                workspace, _ = evaluator.workspace(possible[a], possible[b], account, wanted)
                peak = held + int(step.small_bytes[possible[a], possible[b]]) + step.sizes[wanted & ~aliased] + workspace
                yield a, b, peak, cost_us
                misses = misses + 1 if peak > stop else 0
            elif misses:
                misses += 1
            if misses >= _MISSES or possible[b] in required or (farthest is not None and b - a >= farthest):
                break
        begun.rest()
