"""Chooses for which limit of memory the next plan is made, from the peaks that compiling has shown of the plans before.

A plan of a step on several devices is made for a limit, and compiled as one program. XLA collects operands and adds gradients up
in buffers which no prediction knows, so the program's peak is another one than the plan's. Where the peak is

    above the budget    the next limit is lower by as much as the peak is too high, and by a margin
    far below it        the plan before needed too much, and this one gives away memory, and so time. The next limit lies between
                        theirs: a straight line through the two peaks meets the budget there, less a margin
    otherwise           no further plan is made

A plan that was made for more memory is taken if its peak keeps the budget, too. All sizes are bytes on each device.
"""

from collections.abc import Sequence
from typing import NamedTuple

_MARGIN = 0.01
"""Of the budget; half of it where the limit rises. `python -m benchmarks.mesh`: plans whose limits differ by 1 % have peaks that
differ by up to 2 %, so a smaller margin is often missed, and a larger one gives away what was to be won."""
_FAR = 0.02
"""Of the budget: what a peak must be below it for one more compilation. `python -m benchmarks.mesh`: 2 % of plain jit's peak are
worth up to 1 % of its traffic, and compiling once more takes as long as plain jit's compilation."""


class Tried(NamedTuple):
    """For which limit a plan was made, and the peak of the program that was compiled for it."""

    limit: float
    peak_bytes: int


def next_limit(tried: Sequence[Tried], budget: float) -> float | None:
    """The limit for the next plan, after these; None if none is to be made.

    Args:
        tried: in the order in which they were compiled, at least one.
    """
    *before, latest = tried
    if any(one.peak_bytes <= budget for one in before):
        return None
    if latest.peak_bytes > budget:
        return latest.limit - (latest.peak_bytes - budget) - _MARGIN * budget
    if not before or latest.peak_bytes >= (1 - _FAR) * budget:
        return None
    above = before[-1]
    rise = (above.limit - latest.limit) / (above.peak_bytes - latest.peak_bytes)
    return latest.limit + rise * ((1 - _MARGIN / 2) * budget - latest.peak_bytes)
