"""Until when each tensor is stored when some are dropped, and what each segment must compute again then.

A *dropped* tensor is stored only up to a given place; a segment that begins later and needs it computes it again, from its
operator's inputs, which are stored or computed again in turn. Whatever such a chain starts from must be kept as long as
the chain may be needed:

    far(d)   = places after end(d) that read d, themselves or through operators that run again
    needs(t) = uses(t) and far(d) for every dropped d that t's readers make
    end(t)   = the given place          t dropped
             = number of operators      t is a result or the caller's
             = last of needs(t)         otherwise
    stored at b  <=>  begin < b <= end  and t is on the device (`swaps.py` takes it away in between)

The results of effectful operators are never dropped, since such an operator runs once only.

A chain that begins after boundary b is emitted inside the segment that needs it, once, whatever the number of its consumers
there; what the segment makes itself is never made twice.
"""

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from tensile_jax.ir import TensorId
from tensile_jax.plan.analysis.liveness import Liveness


@dataclass(frozen=True, eq=False)
class Retention:
    """By tensor id: `end` and `needs` (ascending). By place: `reruns`, the places for whose sake the operator may run again."""

    liveness: Liveness
    dropped: Mapping[TensorId, int]
    end: tuple[int, ...]
    needs: tuple[tuple[int, ...], ...]
    reruns: tuple[tuple[int, ...], ...]

    @cached_property
    def ends(self) -> np.ndarray:
        """`end` as an array."""
        return np.array(self.end, dtype=np.int64)

    @cached_property
    def aliases(self) -> dict[TensorId, TensorId]:
        """For each donated state tensor, the update that takes over its memory, where nothing reads the old value later."""
        begin = self.liveness.begin
        return {t: h for t, h in self.liveness.aliases if self.end[t] <= begin[h]}

    def stored(self, tensor: TensorId, boundary: int) -> bool:
        """Whether the tensor is stored at the boundary."""
        return self.liveness.begin[tensor] < boundary <= self.end[tensor]

    def last_need(self, tensor: TensorId, place: int) -> int:
        """The last place up to this one that needs the tensor, or where it is made; -1 for an input that nothing needed yet."""
        needs = self.needs[tensor]
        before = bisect_right(needs, place)
        return max(self.liveness.begin[tensor], needs[before - 1] if before else -1)

    def next_need(self, tensor: TensorId, place: int) -> int:
        """The first place after this one that needs the tensor; the number of operators if there is none."""
        needs = self.needs[tensor]
        after = bisect_right(needs, place)
        return needs[after] if after < len(needs) else len(self.liveness.graph.operators)


def retain(liveness: Liveness, dropped: Mapping[TensorId, int]) -> Retention:
    """The retention that follows when `dropped` tensors are stored up to the given places only.

    What an effectful operator makes is kept all the same. Only what is dropped, and what its operators read, is looked at: the
    rest is as in `liveness`.
    """
    graph = liveness.graph
    if liveness.made_once:
        dropped = {t: last for t, last in dropped.items() if t not in liveness.made_once}
    count = len(graph.operators)
    needs = list(liveness.uses)
    end = list(liveness.end)
    reruns: list[tuple[int, ...]] = [()] * count
    more: dict[TensorId, set[int]] = {}  # needs beyond uses
    for place in sorted({liveness.begin[t] for t in dropped} - {-1}, reverse=True):
        operator = graph.operators[place]
        far: set[int] = set()
        for t in operator.outputs:
            last = dropped.get(t)
            if last is not None:
                far.update(liveness.uses[t][bisect_right(liveness.uses[t], last) :])
                far.update(p for p in more.get(t, ()) if p > last)
        if far:
            reruns[place] = tuple(sorted(far))
            for u in operator.inputs:
                more.setdefault(u, set()).update(far)
    for t, far in more.items():
        needs[t] = tuple(sorted(far.union(needs[t])))
        if end[t] < count:
            end[t] = max(needs[t][-1], end[t])
    for t, last in dropped.items():
        end[t] = last
    return Retention(liveness, dropped, tuple(end), tuple(needs), tuple(reruns))


@dataclass(frozen=True, slots=True)
class SegmentContents:
    """What the segment `[begin, end)` consists of, as places and tensor ids; `again` are places before `begin`."""

    begin: int
    end: int
    again: tuple[int, ...]
    inputs: tuple[TensorId, ...]
    outputs: tuple[TensorId, ...]


def segment_contents(retention: Retention, begin: int, end: int) -> SegmentContents:
    """The segment of the operators at `[begin, end)`, with the chains that it must compute again."""
    liveness = retention.liveness
    operators = liveness.graph.operators
    inputs: dict[TensorId, None] = {}
    again: set[int] = set()
    wanted = [t for place in range(begin, end) for t in operators[place].inputs]
    while wanted:
        t = wanted.pop()
        made = liveness.begin[t]
        if made >= begin or t in inputs:
            continue
        if retention.stored(t, begin):
            inputs[t] = None
        elif made not in again:
            again.add(made)
            wanted += operators[made].inputs
    outputs = tuple(t for place in range(begin, end) for t in operators[place].outputs if retention.stored(t, end))
    return SegmentContents(begin, end, tuple(sorted(again)), tuple(sorted(inputs)), outputs)
