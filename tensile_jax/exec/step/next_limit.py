"""Chooses for which limit of memory the next plan is made, from the peaks that compiling has shown of the plans before.

A plan of a step on several devices is made for a limit, and compiled as one program. XLA collects operands and adds gradients up
in buffers which no prediction knows, so the program's peak is another one than the plan's. Where the peak is

    above the budget    the next limit is lower by as much as the peak is too high, and by a margin
    far below it        this plan gives away memory, and so time. The next limit is higher: by as much as the peak is too low, if
                        this was the first plan. Otherwise, a straight line through the peaks of two plans meets the budget there,
                        less a margin
    otherwise           no further plan is made

A plan that was made for more memory is taken if its peak keeps the budget, too. All sizes are bytes on each device.
"""

from collections.abc import Sequence
from typing import NamedTuple

_MARGIN = 0.01
"""Of the budget; half of it where the limit rises. `python -m benchmarks.mesh`: plans whose limits differ by 1 % have peaks that
differ by up to 2 %, so a smaller margin is often missed, and a larger one gives away what was to be won."""
_FAR = 0.02
"""Of the budget: what a peak must be below it for one more compilation, if an earlier one was above. `python -m benchmarks.mesh`:
2 % of plain jit's peak are worth up to 1 % of its traffic, and compiling once more takes as long as plain jit's compilation."""
_FIRST_FAR = 0.05
"""The same if no peak was above. `python -m benchmarks.mesh_largest --how ours --batch 215`: XLA needs 99.7 GB of a budget of 141
for the first plan."""
_LEAST_RISE, _MOST_RISE = 0.5, 2.0  # of the limit, for each byte of the peak; not tuned: two peaks say little if they are close


class Tried(NamedTuple):
    """For which limit a plan was made, and the peak of the program that was compiled for it."""

    limit: float
    peak_bytes: int


def next_limit(tried: Sequence[Tried], budget: float) -> float | None:
    """The limit for the next plan, after these; None if none is to be made.

    Args:
        tried: in the order in which they were compiled, at least one.
    """
    below = [one for one in tried if one.peak_bytes <= budget]
    if not below:
        latest = tried[-1]
        return latest.limit - (latest.peak_bytes - budget) - _MARGIN * budget
    nearest = max(below, key=lambda one: one.peak_bytes)
    others = [one for one in tried if one is not nearest]
    far = _FIRST_FAR if len(below) == len(tried) else _FAR
    if nearest.peak_bytes >= (1 - far) * budget:
        return None
    missing = (1 - _MARGIN / 2) * budget - nearest.peak_bytes
    return nearest.limit + missing * (_rise(nearest, others[-1]) if others else 1.0)


def _rise(one: Tried, other: Tried) -> float:
    """By how much the limit rises from one to the other for each byte by which the peak does."""
    peaks = other.peak_bytes - one.peak_bytes
    rise = (other.limit - one.limit) / peaks if peaks else 1.0
    return min(max(rise, _LEAST_RISE), _MOST_RISE)
