"""Cuts a step into segments: the cheapest boundaries with which every segment stays under a limit, by dynamic programming.

What is on the device at each possible boundary is given. Cost and peak of a segment then depend on its two ends only, so the
cheapest cut is a shortest path. A segment is extended until it exceeds the limit several times in a row. What a segment exceeds
the limit by costs so much that no segment does if there is a way without.

Long segments take long to evaluate. So the boundaries are first chosen among a few, where least is stored. If segments exceed the
limit then, all possible boundaries are considered: segments under a tight limit are short.

Sizes in bytes, times in microseconds.
"""

from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

from tensile_jax.plan.search.account import Segment
from tensile_jax.plan.search.schedule import CROSSING, Model

_FEW = 48  # possible boundaries of the first try
_MISSES = 4  # possible ends at which a segment exceeds the limit, one after another, before it is not extended any further
_OVERFLOW_US_PER_BYTE = 1.0


class _Cut(NamedTuple):
    boundaries: list[int]
    overflow_bytes: float


def cheapest_cuts(model: Model, stored: Sequence[int], limit: float, required: Collection[int] = ()) -> list[int]:
    """Indices of `Condensed.boundaries`, from the first to the last: the cheapest two segments or more.

    Args:
        stored: by possible boundary, the set of tensors on the device.
        required: indices of boundaries that are always taken.
    """
    everything = range(len(model.places))
    few = _narrow(model, stored, required)
    cut = _shortest_path(model, stored, limit, few, required)
    if cut.overflow_bytes and len(few) < len(everything):
        cut = min(cut, _shortest_path(model, stored, limit, everything, required), key=lambda c: c.overflow_bytes)
    return cut.boundaries


def _narrow(model: Model, stored: Sequence[int], required: Collection[int]) -> list[int]:
    """Some of the possible boundaries: of each stretch, the one at which least is stored."""
    k = len(model.places)
    if k <= _FEW:
        return list(range(k))
    nbytes = [model.step.bytes_of(there) for there in stored]
    stretches = np.array_split(np.arange(1, k - 1), _FEW - 2)
    chosen = {min(stretch.tolist(), key=nbytes.__getitem__) for stretch in stretches}
    return sorted({0, k - 1, *required, *chosen})


def _shortest_path(
    model: Model, stored: Sequence[int], limit: float, possible: Sequence[int], required: Collection[int]
) -> _Cut:
    step, profile = model.step, model.profile
    k = len(possible)
    bounds = [step.boundaries[p] for p in possible]
    there_at = [stored[p] for p in possible]
    held = [step.base_bytes + step.bytes_of(those) for those in there_at]
    total, over, back = [float("inf")] * k, [0.0] * k, [0] * k
    total[0] = 0.0
    for a in range(k - 1):
        if total[a] == float("inf"):
            continue
        there = there_at[a]
        segment = Segment(step, there, 0)
        us, misses = 0.0, 0
        for b in range(a + 1, k):
            if not all(segment.run(node) for node in range(bounds[b - 1], bounds[b])):
                break
            us += sum(step.us[bounds[b - 1] : bounds[b]])
            wanted = there_at[b] & ~there
            aliased = model.aliased(there, there_at[b], wanted)
            contents = segment.contents(us, wanted, aliased)
            workspace, _ = model.workspace(possible[a], possible[b], contents, wanted)
            peak = held[a] + int(step.small_bytes[possible[a], possible[b]]) + step.bytes_of(wanted & ~aliased) + workspace
            crossing = step.bytes_of(wanted & step.written) * CROSSING + step.bytes_of(wanted & ~step.written)
            exceeds = max(0.0, peak - limit)
            misses = misses + 1 if exceeds else 0
            cost = profile.launch_us + contents.us + crossing / profile.bytes_per_us + exceeds * _OVERFLOW_US_PER_BYTE
            if total[a] + cost < total[b] and (a > 0 or b < k - 1 or k == 2):
                total[b], over[b], back[b] = total[a] + cost, over[a] + exceeds, a
            if (misses >= _MISSES and total[k - 1] < float("inf")) or misses >= 2 * _MISSES or possible[b] in required:
                break
    path = [k - 1]
    while path[-1]:
        path.append(back[path[-1]])
    return _Cut([possible[p] for p in path[::-1]], over[-1])
