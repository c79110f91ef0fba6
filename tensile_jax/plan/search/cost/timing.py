"""Simulates the time of a schedule's step: its segments, and the copies of the tensors that are swapped.

A *schedule* is a plan while it is searched, and its *segments* are executables, 0 .. k - 1. Boundary j is where segment j begins,
and boundary k is the end of the iteration. The rules are those of `result/simulate.py`, which simulates finished plans. Here,
copies that are issued at the same boundary and must end by the same boundary are simulated as one copy. That changes no time,
since nothing depends on when each of them ends.

Times in microseconds. The times of copies are multiples of `GRID_US`, so that sums of them are exact in any order.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

GRID_US = 2.0**-10
"""A sum of multiples of a power of two is exact, up to 2 ** 53 of them."""

Span = tuple[int, int]
"""The boundary at which a copy is issued, and that at which it must have ended."""


class Copies(NamedTuple):
    """The copies of one tensor in an iteration: `out` to the host (None if there is none), and each copy back."""

    out: Span | None
    into: tuple[Span, ...]


class CopiesOfAll:
    """The copies of all tensors that are swapped.

    Args:
        each_us: by tensor, the time of a copy to the host and of one from it.
        swapped: the tensors that are swapped; their copies are to be found.

    Attributes:
        of: by tensor, its copies; None where they must be found again.
        out_us, into_us: the time of the known copies to the host, and of those from it, by span.
    """

    __slots__ = ("_each_us", "into_us", "of", "out_us")

    def __init__(self, each_us: Sequence[tuple[float, float]], swapped: Iterable[int] = ()) -> None:
        self._each_us = each_us
        self.of: dict[int, Copies | None] = dict.fromkeys(swapped)
        self.out_us: dict[Span, float] = {}
        self.into_us: dict[Span, float] = {}

    def copy(self) -> "CopiesOfAll":
        """Others that are equal, and may be changed."""
        new = CopiesOfAll(self._each_us)
        new.of, new.out_us, new.into_us = self.of.copy(), self.out_us.copy(), self.into_us.copy()
        return new

    def forget(self, t: int) -> None:
        """Tensor t is swapped, and its copies must be found again."""
        self.drop(t)
        self.of[t] = None

    def drop(self, t: int) -> None:
        """Tensor t is not swapped."""
        known = self.of.pop(t, None)
        if known is not None:
            self._count(t, known, -1)

    def find(self, t: int, copies: Copies) -> None:
        """Tensor t, whose copies were not known, has these."""
        self.of[t] = copies
        self._count(t, copies, 1)

    def _count(self, t: int, copies: Copies, times: int) -> None:
        out_us, into_us = self._each_us[t]
        if copies.out is not None:
            _add(self.out_us, copies.out, times * out_us)
        for span in copies.into:
            _add(self.into_us, span, times * into_us)


def _add(sums: dict[Span, float], span: Span, us: float) -> None:
    total = sums.get(span, 0.0) + us
    if total:
        sums[span] = total
    else:  # sums are exact, and every copy takes some time
        del sums[span]


class Timing(NamedTuple):
    """When the boundaries of a schedule are reached, and when copies can begin.

    Attributes:
        step_us: the time of the step.
        begins: by boundary, when it is reached.
        out_free, in_free: by boundary, when a copy to the host, or from it, that is issued there can begin.
    """

    step_us: float
    begins: list[float]
    out_free: list[float]
    in_free: list[float]


def timed(us: Sequence[float], out_us: Mapping[Span, float], into_us: Mapping[Span, float], copy_share: float) -> Timing:
    """The timing of a schedule whose segments take these times.

    Args:
        out_us, into_us: by span, the time of the copies to the host, and of those from it.
        copy_share: the part of a copy's time by which it delays the next segment.
    """
    if not out_us and not into_us:
        begins = [0.0, *accumulate(us)]
        return Timing(begins[-1], begins, begins, begins)
    k = len(us)
    never = ((k + 1, 0), 0.0)
    out, into = sorted([*out_us.items(), never], reverse=True), sorted([*into_us.items(), never], reverse=True)
    next_out, next_into = out[-1][0][0], into[-1][0][0]
    clock = lane_out = lane_in = delay_us = 0.0
    left, come = [0.0] * (k + 2), [0.0] * (k + 2)
    begins, out_free, in_free = [0.0] * (k + 1), [0.0] * (k + 1), [0.0] * (k + 1)
    for index in range(k + 1):
        while next_out == index:
            (_, until), copies_us = out.pop()
            lane_out = left[until] = (lane_out if lane_out > clock else clock) + copies_us
            delay_us += copy_share * copies_us
            next_out = out[-1][0][0]
        out_free[index] = lane_out if lane_out > clock else clock
        if left[index] > clock:
            clock = left[index]
        while next_into == index:
            (_, until), copies_us = into.pop()
            lane_in = come[until] = (lane_in if lane_in > clock else clock) + copies_us
            delay_us += copy_share * copies_us
            next_into = into[-1][0][0]
        begins[index], in_free[index] = clock, (lane_in if lane_in > clock else clock)
        if index < k:
            if come[index] > clock:
                clock = come[index]
            clock += us[index] + delay_us
            delay_us = 0.0
    return Timing(max(clock, lane_out, lane_in), begins, out_free, in_free)
