"""Cuts a step into segments: the cheapest boundaries with which every segment stays under a limit, by dynamic programming.

What is on the device at each possible boundary is given. Cost and peak of a segment then depend on its two ends only, so the
cheapest cut is a shortest path. A segment is extended until it exceeds the limit several times in a row.

Sizes in bytes, times in microseconds.
"""

from collections.abc import Collection, Sequence

from tensile_jax.plan.search.account import Segment
from tensile_jax.plan.search.schedule import _CROSSING, Model

_MISSES = 4  # possible ends at which a segment exceeds the limit, one after another, before it is not extended any further


def cheapest_cuts(
    model: Model, stored: Sequence[int], limit: float, overflow_us_per_byte: float, possible: Sequence[int],
    required: Collection[int] = (),
) -> list[int]:
    """Indices of `Condensed.boundaries`, from the first to the last; a segment that exceeds the limit is charged for it.

    Args:
        stored: by possible boundary, the set of tensors on the device.
        possible: the possible boundaries to choose from, ascending; the first and the last are taken.
        required: possible boundaries that are always taken.
        overflow_us_per_byte: what a segment is charged for each byte by which it exceeds the limit.
    """
    step, profile = model.step, model.profile
    k = len(possible)
    bounds = [step.boundaries[p] for p in possible]
    stored = [stored[p] for p in possible]
    held = [step.base_bytes + step.bytes_of(those) for those in stored]
    total = [float("inf")] * k
    total[0] = 0.0
    back = [0] * k
    for a in range(k - 1):
        if total[a] == float("inf"):
            continue
        there = stored[a]
        segment = Segment(step, there, 0)
        us = misses = 0.0
        for b in range(a + 1, k):
            for node in range(bounds[b - 1], bounds[b]):
                if not segment.run(node):
                    misses = _MISSES
                    break
                us += step.us[node]
            if misses >= _MISSES:
                break
            wanted = stored[b] & ~there
            aliased = model.aliased(there, stored[b], wanted)
            contents = segment.contents(0.0, wanted, aliased)
            workspace, _ = model.workspace(possible[a], possible[b], contents, wanted)
            peak = held[a] + int(step.small_bytes[possible[a], possible[b]]) + step.bytes_of(wanted & ~aliased) + workspace
            crossing = step.bytes_of(wanted & step.written) * _CROSSING + step.bytes_of(wanted & ~step.written)
            cost = profile.launch_us + us + segment.again_us + crossing / profile.bytes_per_us
            if peak > limit:
                cost += (peak - limit) * overflow_us_per_byte
                misses += 1
            else:
                misses = 0
            if total[a] + cost < total[b]:
                total[b], back[b] = total[a] + cost, a
            if misses >= _MISSES or possible[b] in required:
                break
    path = [k - 1]
    while path[-1]:
        path.append(back[path[-1]])
    return [possible[p] for p in path[::-1]]
