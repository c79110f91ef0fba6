"""Decides which tensors the policies from papers may swap, and when the link between device and host has time for a copy.

A tensor can be swapped out during a *gap*: the time between two operators that need the tensor. The link has one lane for each
direction, and a lane carries one copy at a time. A *place* is the position of an operator in the order of execution.

Times in microseconds since the step began.
"""

from bisect import bisect_left
from dataclasses import dataclass
from itertools import islice

from tensile_jax.ir import TensorId
from tensile_jax.plan.analysis.retention import Retention

SMALLEST = 2**16  # bytes; a smaller copy costs more in calls than it frees (`make bench-constants`)
_TOUCHING = 1e-6  # microseconds; no copy is as short


@dataclass(frozen=True, slots=True)
class Gap:
    """`tensor` is not needed between the places `after` and `before`.

    -1 is the beginning of the iteration, and the number of operators is its end.
    """

    tensor: TensorId
    after: int
    before: int


class LinkDirection:
    """One direction of the link, as the windows in which it is busy: disjoint, ascending, merged where they touch."""

    def __init__(self) -> None:
        self._busy: list[tuple[float, float]] = []

    def earliest(self, start: float, length: float) -> float:
        """The earliest begin >= start of a free window of that length."""
        place = bisect_left(self._busy, (start, float("-inf")))
        if place and self._busy[place - 1][1] > start:
            start = self._busy[place - 1][1]
        for begin, end in islice(self._busy, place, None):
            if begin - start >= length:
                break
            start = max(start, end)
        return start

    def latest(self, end: float, length: float) -> float:
        """The latest begin of a free window of that length that ends by `end`."""
        for place in range(bisect_left(self._busy, (end, float("-inf"))) - 1, -1, -1):
            begin, until = self._busy[place]
            if until <= end - length:
                break
            if begin < end:
                end = begin
        return end - length

    def take(self, begin: float, end: float) -> None:
        first = last = bisect_left(self._busy, (begin, end))
        if first and self._busy[first - 1][1] >= begin - _TOUCHING:
            first -= 1
        if last < len(self._busy) and self._busy[last][0] <= end + _TOUCHING:
            last += 1
        one = [*self._busy[first:last], (begin, end)]
        self._busy[first:last] = [(min(b for b, _ in one), max(e for _, e in one))]


class Link:
    """The two lanes of the link between device and host."""

    def __init__(self) -> None:
        self.out = LinkDirection()
        self.into = LinkDirection()


def may_leave(retention: Retention, tensor: TensorId) -> bool:
    """Whether the tensor may be swapped: it is stored, does not belong to the caller, and is neither a PRNG key nor tiny."""
    liveness = retention.liveness
    found = liveness.graph.tensors[tensor]
    ours = tensor not in liveness.kept_by_caller and tensor not in retention.dropped
    return ours and found.nbytes >= SMALLEST and not found.dtype.startswith("key<")
