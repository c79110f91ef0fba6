"""Computes how long each tensor stays stored if some tensors are dropped, and what each segment must then compute again.

A *segment* is a stretch of operators that is compiled as one executable. Time is counted in places, the positions of operators in
their order of execution; boundary b lies before the operator at place b. A tensor is *stored* while it is kept in device memory.
A *dropped* tensor is stored only up to a given place. A later segment that needs the tensor computes it again, by running the
operator that makes the tensor once more. That operator's inputs must then be stored, or be computed again in turn. The operators
that run again for a tensor are its *chain*. Whatever a chain starts from must be stored as long as the chain may be needed:

    begin(t) = place of the operator that makes t; -1 if t is an input
    uses(t)  = places of the operators that read t
    needs(t) = union of uses(t) and of far(d) for every dropped tensor d that is made by an operator that reads t
    far(d)   = the places in needs(d) that come after end(d): for them, the operator that makes d runs again
    end(t)   = the given place          if t is dropped
             = number of operators      if t is a result of the step or belongs to the caller
             = last of needs(t)         otherwise
    t is stored at b  <=>  begin(t) < b <= end(t), and t is not swapped out (`search/swaps.py`)

An operator with effects (a print, a callback) runs only once, so its results are never dropped.

Within a segment, each operator of a chain runs once, however many operators need its result.
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
    """Until when each tensor is stored if some are dropped.

    By tensor id: `end`; `last_needs`, the last of `needs`, or -1; and `needs`, ascending. By place: `reruns`, the later places
    for which the operator may run again. In long chains, `needs` and `reruns` are far larger than the step, so they are computed
    only when a policy asks for them.
    """

    liveness: Liveness
    dropped: Mapping[TensorId, int]
    end: tuple[int, ...]
    last_needs: tuple[int, ...]

    @cached_property
    def ends(self) -> np.ndarray:
        """`end` as an array."""
        return np.array(self.end, dtype=np.int64)

    @property
    def needs(self) -> tuple[tuple[int, ...], ...]:
        """As above."""
        return self._needs_and_reruns[0]

    @property
    def reruns(self) -> tuple[tuple[int, ...], ...]:
        """As above."""
        return self._needs_and_reruns[1]

    @cached_property
    def _needs_and_reruns(self) -> tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]:
        operators, uses = self.liveness.graph.operators, self.liveness.uses
        needs = list(uses)
        reruns: list[tuple[int, ...]] = [()] * len(operators)
        more: dict[TensorId, set[int]] = {}  # needs beyond uses
        for place in sorted({self.liveness.begin[t] for t in self.dropped} - {-1}, reverse=True):
            operator = operators[place]
            far: set[int] = set()
            for t in operator.outputs:
                last = self.dropped.get(t)
                if last is not None:
                    far.update(uses[t][bisect_right(uses[t], last) :])
                    far.update(p for p in more.get(t, ()) if p > last)
            if far:
                reruns[place] = tuple(sorted(far))
                for u in operator.inputs:
                    more.setdefault(u, set()).update(far)
        for t, far in more.items():
            needs[t] = tuple(sorted(far.union(needs[t])))
        return tuple(needs), tuple(reruns)

    @cached_property
    def aliases(self) -> dict[TensorId, TensorId]:
        """By donated state tensor, the update that takes over its memory. A state tensor whose old value is still needed later is
        left out.
        """
        begin = self.liveness.begin
        return {t: h for t, h in self.liveness.aliases if self.end[t] <= begin[h]}

    def stored(self, tensor: TensorId, boundary: int) -> bool:
        """Whether the tensor is stored at the boundary."""
        return self.liveness.begin[tensor] < boundary <= self.end[tensor]

    def last_need(self, tensor: TensorId, place: int) -> int:
        """The last place up to this one that needs or makes the tensor; -1 for an input that nothing has needed yet."""
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

    Results of effectful operators are never dropped. Tensors that are neither dropped nor inputs of operators that run again stay
    as in `liveness`.
    """
    operators, begin = liveness.graph.operators, liveness.begin
    if liveness.made_once:
        dropped = {t: last for t, last in dropped.items() if t not in liveness.made_once}
    last_needs, end = list(liveness.last_uses), list(liveness.end)
    for place in sorted({begin[t] for t in dropped} - {-1}, reverse=True):
        operator = operators[place]
        farthest = max(last_needs[t] if last_needs[t] > dropped[t] else -1 for t in operator.outputs if t in dropped)
        if farthest >= 0:
            for u in operator.inputs:
                if last_needs[u] < farthest:
                    last_needs[u] = farthest
                if end[u] < farthest:  # neither a result nor the caller's, whose end is the number of operators
                    end[u] = farthest
    for t, last in dropped.items():
        end[t] = last
    return Retention(liveness, dropped, tuple(end), tuple(last_needs))


@dataclass(frozen=True, slots=True)
class SegmentContents:
    """The parts of segment `[begin, end)`, as places and tensor ids; `again` are the earlier places that it runs again."""

    begin: int
    end: int
    again: tuple[int, ...]
    inputs: tuple[TensorId, ...]
    outputs: tuple[TensorId, ...]


def segment_contents(retention: Retention, begin: int, end: int) -> SegmentContents:
    """The segment of the operators at `[begin, end)`, and what it must compute again."""
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
