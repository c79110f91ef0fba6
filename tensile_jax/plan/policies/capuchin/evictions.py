"""Evicts tensors between two of their accesses, by a swap or by a recomputation, and computes what that costs.

After an *eviction*, a tensor is not on the device from one access (the *evicted access*) to the next one (the *back access*).
`policy.py` chooses which tensors are evicted, and how. This file keeps track of the memory and the link time that remain.
Capuchin (Peng et al., ASPLOS 2020, sections 4.3 and 4.4) uses:

    FT       = (back access - swap-in time) - (evicted access + swap-out time)      free time: >= 0 if both copies can be hidden
    rp(t)    = latency of the operators that compute t again
    ext(t)   = rp(t) * (number of tensors computed again so far for which t is a source)
    MSPS(t)  = nbytes(t) / (rp(t) + ext(t))                memory saving per second (here: per microsecond)

A *kernel* is one heavy operator with the light ones that XLA fuses with it (`passive_mode.py`). The *target* is the memory that
no kernel should exceed.

A swap has two copies, one in each direction, and the link has one lane for each direction. The copy to the host starts as soon as
its lane is free. The copy to the device starts as late as the back access and its lane allow; Capuchin calls this start the
*in-trigger*. If the tensor is then still on the device during a kernel that exceeds the target, the swap is widened: the tensor
leaves before the first such kernel, and comes back after the last one. Computation may have to wait for its copies. The
*overhead* of the swap is the part of its copies that does not fit before and after these kernels.

A recomputation of t starts from the *sources* of t, tensors that are on the device whenever t is needed again. An input of t that
is no longer stored is computed again first. rp(t) is the time of this whole chain of operators. If t is itself a source of a
tensor u that is computed again, then computing u takes longer once t is not stored: u then needs the chain of t as well. ext(t)
is this extra time, summed over all such u. If the chain needs a tensor that was swapped out, t is not recomputed. (TENSILE,
section IV-D, has the same rule: only "those tensor accesses which have never been released".)

Difference from Capuchin: Capuchin keeps a recomputed tensor after the back access. Here every *segment* (a stretch of operators
that is compiled as one executable) that needs the tensor later computes it again (`retention.py`). MSPS counts only one of
these recomputations, as in Capuchin.

Times in microseconds since the step began.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from tensile_jax.ir import TensorId
from tensile_jax.plan.analysis.absence import Absence
from tensile_jax.plan.analysis.copy_time import copy_in_us, copy_out_us
from tensile_jax.plan.policies.capuchin.passive_mode import Kernel
from tensile_jax.plan.search.step_model import StepModel
from tensile_jax.plan.search.swaps import Gap, Link, may_leave


@dataclass(frozen=True, slots=True)
class Eviction:
    """A tensor that may be away between an access by kernel `first` and one by kernel `last`; other kernels run in between."""

    gap: Gap
    first: int
    last: int
    nbytes: int
    free_us: float


@dataclass(frozen=True, slots=True)
class _Swap:
    """An absence, the windows of its copies, their exposed time, and the kernels `[begin, end)` during which it is away."""

    absence: Absence
    out: tuple[float, float]
    into: tuple[float, float]
    exposed_us: float
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Recomputation:
    """The tensors to drop, each with the last place at which it is stored; what the chain starts from; rp(t) and ext(t)."""

    dropped: dict[TensorId, int]
    sources: frozenset[TensorId]
    latency_us: float
    extra_us: float

    @property
    def overhead_us(self) -> float:
        """What Capuchin compares with the overhead of a swap."""
        return self.latency_us + self.extra_us


class Evictions:
    """The evictions made so far: what is dropped, what is away, the windows on the link, and what each kernel then needs.

    `dropped` gives the retention (`retain`). `dropped` and `absences` together give the candidates.
    """

    def __init__(self, model: StepModel, kernels: Sequence[Kernel], target: float) -> None:
        retention = model.base
        self.dropped = dict(retention.dropped)
        self.absences: dict[TensorId, list[Absence]] = {}
        self._step = model
        self._retention = retention
        self._end = list(retention.end)
        self._needs = [set(places) for places in retention.needs]
        self._sources: dict[TensorId, frozenset[TensorId]] = {}  # of every tensor that is computed again
        self._kernels = kernels
        self._target = target
        self._link = Link()
        self._needed = np.array([kernel.nbytes for kernel in kernels], dtype=float)
        self._begins = [kernel.begin for kernel in kernels]
        self._ends_us = model.elapsed_us.tolist()  # of each place, from index 1

    def enough(self) -> bool:
        """Whether every kernel is within the target."""
        return float(self._needed.max()) <= self._target

    def candidates(self) -> list[Eviction]:
        """Every eviction during which a kernel exceeds the target, by falling free time."""
        retention, profile = self._retention, self._step.profile
        found: list[Eviction] = []
        for tensor in retention.liveness.graph.tensors:
            t = tensor.id
            if not may_leave(retention, t) or t in self.dropped:
                continue
            made = retention.liveness.begin[t]
            places = sorted({*self._needs[t], *((made,) if made >= 0 else ())})
            for after, before in pairwise(places):
                if any(away.leave < before and after < away.back for away in self.absences.get(t, ())):
                    continue
                first, last = self._kernel_at(after), self._kernel_at(before)
                if last - first > 1 and self._over_target(first + 1, last):
                    out_us = copy_out_us(tensor.nbytes, profile)
                    in_us = copy_in_us(tensor.nbytes, profile)
                    free = self._kernels[last].begin_us - self._kernels[first].end_us - out_us - in_us
                    found.append(Eviction(Gap(t, after, before), first, last, tensor.nbytes, free))
        return sorted(found, key=lambda e: (-e.free_us, -e.nbytes, e.gap.tensor, e.first))

    def swap_hidden(self, eviction: Eviction) -> bool:
        """Swap the tensor if both copies can be hidden and the swap lowers the memory of a kernel above the target; return
        whether it did so.
        """
        swap = self._swap(eviction, hidden=True) if self.helps(eviction) else None
        if swap is not None:
            self._take(swap)
        return swap is not None

    def helps(self, eviction: Eviction) -> bool:
        """Whether the eviction lowers the memory of a kernel above the target, and no earlier eviction has taken the
        tensor away.
        """
        t, after, before = eviction.gap.tensor, eviction.gap.after, eviction.gap.before
        away = any(a.leave < before and after < a.back for a in self.absences.get(t, ()))
        return not away and t not in self.dropped and self._over_target(eviction.first + 1, eviction.last)

    def swap_overhead_us(self, eviction: Eviction) -> float:
        """The exposed time of the copies; infinite if the tensor cannot be swapped between these accesses."""
        swap = self._swap(eviction, hidden=False)
        return float("inf") if swap is None else swap.exposed_us

    def swap(self, eviction: Eviction) -> None:
        """Swap the tensor, with exposed copies; `swap_overhead_us` must be finite."""
        swap = self._swap(eviction, hidden=False)
        assert swap is not None  # its overhead says so
        self._take(swap)

    # -- swaps ------------------------------------------------------------------------------------------------------------

    def _swap(self, eviction: Eviction, *, hidden: bool) -> _Swap | None:
        """The swap with both copies in free windows of the link; None if it does not help.

        Unless `hidden`, the tensor is absent during all kernels in the gap that exceed the target, even if copies are then
        exposed.
        """
        t, after, before = eviction.gap.tensor, eviction.gap.after, eviction.gap.before
        if not self._step.may_swap or any(after < p < before for p in self._needs[t]):
            return None  # in the second case, a recomputation reads it meanwhile
        profile = self._step.profile
        copied = any(away.leave < after for away in self.absences.get(t, ()))
        out_us = 0.0 if copied else copy_out_us(eviction.nbytes, profile)
        in_us = copy_in_us(eviction.nbytes, profile)
        start, stop = self._kernels[eviction.first].end_us, self._kernels[eviction.last].begin_us
        out = self._link.out.earliest(start, out_us)
        into = self._link.into.latest(stop, in_us)
        if hidden and out + out_us > into:
            return None
        leave, back = max(self._place(out + out_us), after), min(self._place(into), before - 1)
        exposed_us = 0.0
        if not hidden:
            short = [k for k in range(eviction.first + 1, eviction.last) if self._needed[k] > self._target]
            leave = max(min(leave, self._kernels[short[0]].begin - 1), after)
            back = min(max(back, self._kernels[short[-1]].end), before - 1)
            exposed_us += max(out + out_us - self._kernels[short[0]].begin_us, 0.0)
            exposed_us += max(self._kernels[short[-1]].end_us - into, 0.0)
            exposed_us = min(exposed_us, out_us + in_us)
        begin, end = bisect_right(self._begins, leave), bisect_right(self._begins, back) - 1
        if leave >= back or not self._over_target(begin, end):
            return None
        absence = Absence(t, leave, back, out_us + in_us - exposed_us)
        return _Swap(absence, (out, out + out_us), (into, into + in_us), exposed_us, begin, end)

    def _take(self, swap: _Swap) -> None:
        self.absences.setdefault(swap.absence.tensor, []).append(swap.absence)
        self._link.out.take(*swap.out)
        self._link.into.take(*swap.into)
        self._needed[swap.begin : swap.end] -= self._step.graph.tensors[swap.absence.tensor].nbytes

    # -- recomputations ---------------------------------------------------------------------------------------------------

    def recomputation(self, eviction: Eviction) -> Recomputation | None:
        """How to compute the tensor again after its evicted access; None if a tensor that the computation starts from is gone by
        then.
        """
        liveness, t = self._step.liveness, eviction.gap.tensor
        operators = liveness.graph.operators
        if t in self.absences or self._end[t] >= len(operators) or liveness.begin[t] < 0:
            return None
        far = [p for p in self._needs[t] if p > eviction.gap.after]
        last = max(far)
        dropped = {t: eviction.gap.after}
        sources: set[TensorId] = set()
        again: set[int] = set()
        wanted = [liveness.begin[t]]
        while wanted:
            place = wanted.pop()
            if place in again:
                continue
            if operators[place].effectful:
                return None
            again.add(place)
            for u in operators[place].inputs:
                if u in dropped:
                    continue
                if self._end[u] >= last:
                    if any(a.leave < p <= a.back for a in self.absences.get(u, ()) for p in far):
                        return None
                    sources.add(u)
                elif liveness.begin[u] < 0 or u in self.absences:
                    return None
                else:
                    dropped[u] = self._end[u]
                    wanted.append(liveness.begin[u])
        latency_us = sum(self._step.rerun_us[p] for p in sorted(again))
        starting = sum(t in others for others in self._sources.values())
        return Recomputation(dropped, frozenset(sources), latency_us, latency_us * starting)

    def recompute(self, eviction: Eviction, recomputation: Recomputation) -> None:
        """Drop the tensor after its evicted access, and drop the tensors that its chain makes on the way."""
        t = eviction.gap.tensor
        readers = {self._kernel_at(p) for p in self._needs[t]}
        without = [k for k in range(eviction.first + 1, self._kernel_at(self._end[t])) if k not in readers]
        self._needed[without] -= eviction.nbytes
        for u, until in recomputation.dropped.items():
            self.dropped[u] = self._end[u] = until
        for other, sources in self._sources.items():
            if t in sources:
                self._sources[other] = sources - {t} | recomputation.sources
        self._sources[t] = recomputation.sources
        self._propagate_need(t, {p for p in self._needs[t] if p > eviction.gap.after})

    def _propagate_need(self, tensor: TensorId, far: set[int]) -> None:
        """Add the places `far` to the needs of all tensors from which this one is computed, as `retain` would."""
        liveness = self._step.liveness
        wanted = [(tensor, far)]
        while wanted:
            t, places = wanted.pop()
            for u in liveness.graph.operators[liveness.begin[t]].inputs:
                new = places - self._needs[u]
                self._needs[u] |= new
                beyond = {p for p in new if p > self.dropped[u]} if u in self.dropped else set[int]()
                if beyond:
                    wanted.append((u, beyond))

    # -- places and times -------------------------------------------------------------------------------------------------

    def _over_target(self, begin: int, end: int) -> bool:
        """Whether one of the kernels needs more than the target."""
        return begin < end and float(self._needed[begin:end].max()) > self._target

    def _kernel_at(self, place: int) -> int:
        return bisect_right(self._begins, place) - 1

    def _place(self, time: float) -> int:
        return min(max(bisect_right(self._ends_us, time) - 1, 0), len(self._ends_us) - 2)
