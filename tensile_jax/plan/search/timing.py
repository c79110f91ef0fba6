"""Simulates the time of a schedule's step: its segments, and the copies of the tensors that are swapped.

The simulation is that of `result/simulate.py`. Boundaries are 0 .. k; boundary j is where segment j begins.

Times in microseconds.
"""

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple


class Copies(NamedTuple):
    """The copies of one tensor in an iteration.

    Attributes:
        out: of the copy to the host, the boundary at which it is issued and that at which it must have ended; None without one.
        into: the same of each copy back.
    """

    out: tuple[int, int] | None
    into: tuple[tuple[int, int], ...]


class Timing(NamedTuple):
    """When what happens in a step.

    Attributes:
        step_us: the time of the step.
        begins: by boundary, when it is reached.
        out_free, in_free: by boundary, when a copy to the host, or from it, that is issued there can begin.
    """

    step_us: float
    begins: list[float]
    out_free: list[float]
    in_free: list[float]


def timed(
    us: Sequence[float],
    copies: Iterable[tuple[int, Copies]],
    out_us: Sequence[float],
    in_us: Sequence[float],
    copy_share: float,
) -> Timing:
    """The timing of segments that take so long each.

    Args:
        copies: tensors, and their copies.
        out_us, in_us: by tensor, the time of a copy to the host and of one from it.
        copy_share: the part of a copy's time by which it delays the next segment.
    """
    k = len(us)
    out: dict[int, list[tuple[int, int]]] = {}
    into: dict[int, list[tuple[int, int]]] = {}
    for t, (leaves, comes) in copies:
        if leaves is not None:
            out.setdefault(leaves[0], []).append((leaves[1], t))
        for issued, until in comes:
            into.setdefault(issued, []).append((until, t))
    if not out and not into:
        begins = [0.0, *accumulate(us)]
        return Timing(begins[-1], begins, begins, begins)
    clock = lane_out = lane_in = delay_us = 0.0
    left, come = [0.0] * (k + 2), [0.0] * (k + 2)
    begins, out_free, in_free = [0.0] * (k + 1), [0.0] * (k + 1), [0.0] * (k + 1)

    def copied(
        those: list[tuple[int, int]], each_us: Sequence[float], ended: list[float], lane: float, delay_us: float
    ) -> tuple[float, float]:
        """Issue copies now; when their lane is free again, and by how much the next segment is delayed."""
        those.sort()
        for until, t in those:
            lane = ended[until] = (lane if lane > clock else clock) + each_us[t]
            delay_us += copy_share * each_us[t]
        return lane, delay_us

    for index in range(k + 1):
        if index in out:
            lane_out, delay_us = copied(out[index], out_us, left, lane_out, delay_us)
        out_free[index] = lane_out if lane_out > clock else clock
        if left[index] > clock:
            clock = left[index]
        if index in into:
            lane_in, delay_us = copied(into[index], in_us, come, lane_in, delay_us)
        begins[index], in_free[index] = clock, (lane_in if lane_in > clock else clock)
        if index < k:
            if come[index] > clock:
                clock = come[index]
            clock += us[index] + delay_us
            delay_us = 0.0
    return Timing(max(clock, lane_out, lane_in), begins, out_free, in_free)
