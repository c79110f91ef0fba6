"""Makes the candidates from which a policy chooses: ways to keep less in device memory, at a cost in time.

A candidate says which tensors are dropped and computed again (`analysis/rematerialization.py`) and which tensors are swapped
(`swaps.py`). What it drops follows from a *price*: the bytes that one is willing to keep in order to move one byte less. A
candidate does not depend on the budget. The budget matters only when a candidate is cut into segments (`segmentation.py`). There
are seven families of candidates. Within each family, memory falls and time grows from the first candidate to the last:

    none     nothing is swapped; the price falls
    hidden   every swap whose copies the link can hide at this price
    fine     like hidden, and no segment is long, so that copies can start and end near the times planned for them
    some     swaps, the largest first and with exposed copies, until what is stored falls to a given part of what it was
    more     like some, but light tensors count as stored too; XLA fuses these away unless a segment outputs them
    all      everything is swapped that can leave; copies are exposed where the link cannot hide them
    late     everything is swapped that can leave, and comes back no sooner than needed: the least memory, every copy exposed

`candidates[0]` is the base candidate: the first of the family `none`, where the least is recomputed and nothing is swapped.

A swap is priced by its copies. An exposed copy counts in full. A small part of a hidden copy counts too: swaps are planned on the
clock of single operators, and segments are coarser, so some of the copy is not hidden in the end. What the copy takes from
computation (`copy_share` of the device profile) also counts.

Sizes in bytes, times in microseconds.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np

from tensile_jax.ir import Graph, TensorId
from tensile_jax.plan.analysis.copy_time import copy_in_us, copy_out_us
from tensile_jax.plan.analysis.device_profile import DeviceProfile
from tensile_jax.plan.analysis.fusion import Fusion, find_fusion
from tensile_jax.plan.analysis.latency import StepCosts, fused_latencies, rerun_latencies
from tensile_jax.plan.analysis.liveness import Liveness, find_liveness
from tensile_jax.plan.analysis.rematerialization import drop_tensors
from tensile_jax.plan.analysis.residency import Absence, Absences, away_bytes, find_residencies, stored_unless_swapped
from tensile_jax.plan.analysis.retention import Retention, retain
from tensile_jax.plan.search.segmentation import BoundaryTable, boundary_table, pressure
from tensile_jax.plan.search.swaps import Link, find_gaps, keep_state_out, plan_swaps

Swapping = Literal["none", "hidden", "fine", "some", "more", "all", "late"]
FAMILIES: tuple[Swapping, ...] = ("none", "hidden", "fine", "some", "more", "all", "late")

_PRICES = (4.0, 0.6, 0.42, 0.36, 0.26, 0.24, 0.2, 0.165, 0.15, 0.1, 0.05, 0.01)
_HIDDEN_PRICES = (0.36, 0.26, 0.165, 0.05)
_FINE_PRICES = (0.6, 0.36, 0.26, 0.165)
_FINE = 1 / 24  # of the step's time: the longest segment of a candidate of the family `fine`
_LAUNCHES = 80  # but in a candidate of `fine`, a segment may always be as long as so many launches take
_UNCOVERED = 0.15  # part of the copies of a hidden swap that segments leave exposed
_UNCOVERED_WHEN_FINE = 0.03  # the same in the family `fine`
_EXPOSED_PRICES = (4.0, 0.36, 0.26, 0.165, 0.02)
_SOME_PRICES = (0.26, 0.05)
_SOME_PARTS = (0.95, 0.9, 0.84, 0.78, 0.7, 0.62, 0.54, 0.46)  # of the most that is stored when nothing is swapped
_MORE_PRICE = 0.05
_MORE_PARTS = (0.9, 0.84, 0.78, 0.7, 0.62)
_LATE_PRICES = (4.0, 0.26, 0.165, 0.02)
_SWAP_ROUNDS = {"none": 0, "hidden": 2, "fine": 6, "some": 6, "more": 6, "all": 8, "late": 8}
_TURNS = 4  # boundaries at which tensors are dropped, one after another; the one at which most is stored first
_ENOUGH = 0.99  # the search for such boundaries goes on if the last one lowered the highest footprint below this part of it


_SWAPPING: tuple[tuple[float, Swapping, float], ...] = (
    *((p, "hidden", 0.0) for p in _HIDDEN_PRICES),
    *((p, "fine", 0.0) for p in _FINE_PRICES),
    *((p, "some", part) for p in _SOME_PRICES for part in _SOME_PARTS),
    *((_MORE_PRICE, "more", part) for part in _MORE_PARTS),
    *((p, "all", 0.0) for p in _EXPOSED_PRICES),
    *((p, "late", 0.0) for p in _LATE_PRICES),
)


@dataclass(frozen=True, eq=False)
class Candidate:
    """What is kept on the device (`retention`) and what is swapped when (`absences`).

    `highest` is the most that is in memory at any boundary, wherever the candidate is cut. `swap_us` is the price of the swaps,
    and `again_us` is the latency of all that may run again, each operator once. If segments must be short, `longest` is the time
    that a segment may take, and when the operator at each place begins, both in microseconds. Every cut has the boundaries `own`.
    """

    retention: Retention
    absences: Absences
    highest: int
    swap_us: float
    again_us: float
    fusion: Fusion
    profile: DeviceProfile
    longest: tuple[float, np.ndarray] | None
    own: tuple[int, ...] = ()

    @property
    def least_us(self) -> float:
        """A lower bound on the price of the candidate, however it is cut."""
        return self.swap_us + self.again_us

    @cached_property
    def table(self) -> BoundaryTable:
        """The table of all possible segments. It is computed only if `highest` does not rule the candidate out."""
        residencies = find_residencies(self.retention, self.absences)
        table = boundary_table(self.retention, self.fusion, self.profile, residencies=residencies, own=self.own)
        if self.longest is None:
            return table
        longest_us, elapsed = self.longest
        times = elapsed[list(table.boundaries)]
        long = times[None, :] - times[:, None] > longest_us
        long[np.arange(len(times) - 1), np.arange(1, len(times))] = False
        return replace(table, cost=np.where(long, np.inf, table.cost))


class Candidates:
    """The candidates for one graph. Each is made when it is first used."""

    def __init__(self, graph: Graph, profile: DeviceProfile, *, state_may_stay_out: bool, may_swap: bool = True) -> None:
        self.graph = graph
        self.profile = profile
        self.state_may_stay_out = state_may_stay_out
        self.may_swap = may_swap
        self.recipes: tuple[tuple[float, Swapping, float], ...] = (  # price, family, part to bring what is stored down to
            *((p, "none", 1.0) for p in _PRICES),
        )
        if may_swap:
            self.recipes += _SWAPPING
        self._made: dict[int, Candidate] = {}
        self._added: dict[Hashable, int] = {}
        self._dropped: dict[float, tuple[Retention, int]] = {}
        self._again: dict[float, float] = {}

    def families(self) -> tuple[range, ...]:
        """The candidates of each family, by index; those that keep most in memory come first."""
        kinds = [swapping for _, swapping, _ in self.recipes]
        return tuple(range(kinds.index(k), kinds.index(k) + kinds.count(k)) for k in FAMILIES if k in kinds)

    @cached_property
    def unplanned_bytes(self) -> int:
        """The most that is stored at any boundary when nothing is dropped or swapped."""
        counted = self.fusion.written if self.profile.fused_reductions else None
        return int(stored_unless_swapped(self.undropped, counted).max())

    @cached_property
    def liveness(self) -> Liveness:
        """Activity analysis of the graph."""
        return find_liveness(self.graph)

    @cached_property
    def fusion(self) -> Fusion:
        """Which tensors lie in memory (are materialised) and which ones XLA fuses away."""
        return find_fusion(self.liveness, fused_reductions=self.profile.fused_reductions)

    @cached_property
    def undropped(self) -> Retention:
        """What is kept when only virtual tensors are dropped, which XLA never stores (`analysis/fusion.py`)."""
        begin = self.liveness.begin
        return retain(self.liveness, {t.id: begin[t.id] for t in self.graph.tensors if self.fusion.virtual[t.id]})

    @cached_property
    def latencies(self) -> tuple[float, ...]:
        """Microseconds of each operator where it runs first, by place."""
        return fused_latencies(self.liveness, self.fusion, self.profile)

    @cached_property
    def costs(self) -> StepCosts:
        """The profile and the latencies, for building plans."""
        return StepCosts(self.profile, self.latencies, self.rerun_us)

    @cached_property
    def elapsed_us(self) -> np.ndarray:
        """When each operator begins and the last one ends if they run one after another, by place; shape (places + 1,)."""
        return np.concatenate([[0.0], np.cumsum(self.latencies)])

    @cached_property
    def whole_us(self) -> float:
        """Microseconds of the step as one executable."""
        return sum(self.latencies) + self.profile.launch_us

    @cached_property
    def rerun_us(self) -> tuple[float, ...]:
        """Microseconds that it adds to a segment to run each operator again, by place."""
        return tuple(rerun_latencies(self.liveness, self.fusion, self.profile).tolist())

    def __len__(self) -> int:
        return len(self.recipes)

    def __getitem__(self, index: int) -> Candidate:
        """The candidate at `index`; always the same one."""
        if index not in self._made:
            price, swapping, part = self.recipes[index]
            retention, turn = self._retention(price)
            same = self._made.get(index - 1)
            family = index > 0 and self.recipes[index - 1][1] == swapping not in ("some", "more")
            if same is not None and family and same.retention.dropped == retention.dropped:
                self._made[index] = same  # the lower price has changed nothing
            else:
                absences = self._absences(retention, turn, swapping, part)
                self._made[index] = self._candidate_of(retention, absences, fine=swapping == "fine")
        return self._made[index]

    def add(self, key: Hashable, make: Callable[[], tuple[Retention, Absences, tuple[int, ...]]]) -> int:
        """The index of a candidate that a policy makes itself, once for each key. It belongs to none of `families`.

        Args:
            make: gives what is kept, what is absent when, and the boundaries that every cut of the candidate has, ascending.
        """
        if key not in self._added:
            self._added[key] = index = len(self.recipes) + len(self._added)
            retention, absences, own = make()
            self._made[index] = replace(self._candidate_of(retention, absences, fine=False), own=own)
        return self._added[key]

    def least_us(self, index: int) -> float:
        """A lower bound on the price of the candidate at `index`; for one of `recipes`, the bound does not contain its copies."""
        if index >= len(self.recipes):
            return self._made[index].least_us
        return self._again_us(self.recipes[index][0])

    def _again_us(self, price: float) -> float:
        if price not in self._again:
            self._again[price] = self._rerun_us(self._retention(price)[0])
        return self._again[price]

    def _candidate_of(self, retention: Retention, absences: Absences, *, fine: bool) -> Candidate:
        aliases = set(retention.aliases.values())  # they share the residency of the state that they update
        away = away_bytes(retention, {t: several for t, several in absences.items() if self._in_memory[t] or t in aliases})
        return Candidate(
            retention=retention,
            absences=absences,
            highest=int((stored_unless_swapped(retention, self._in_memory) - away).max()),
            swap_us=self._swap_us(absences, _UNCOVERED_WHEN_FINE if fine else _UNCOVERED),
            again_us=self._rerun_us(retention),
            fusion=self.fusion,
            profile=self.profile,
            longest=(self._longest_us, self.elapsed_us) if fine else None,
        )

    @cached_property
    def _longest_us(self) -> float:
        return max(_FINE * float(sum(self.latencies)), _LAUNCHES * self.profile.launch_us)

    @cached_property
    def _in_memory(self) -> np.ndarray:
        """For each tensor, whether it exists in memory wherever it is stored, even inside a segment."""
        return (self.liveness.begins < 0) | self.fusion.written

    def _rerun_us(self, retention: Retention) -> float:
        return sum(self.rerun_us[place] for place, runs in enumerate(retention.reruns) if runs)

    def _swap_us(self, absences: Absences, uncovered: float) -> float:
        total = 0.0
        for t, several in absences.items():
            nbytes = self.graph.tensors[t].nbytes
            copies = copy_out_us(nbytes, self.profile) if several[0].leave >= 0 else 0.0  # the first time only
            for away in several:
                if away.back < len(self.graph.operators):
                    copies += copy_in_us(nbytes, self.profile)
                hidden_us = (1 - uncovered) * (1 - self.profile.copy_share) * min(away.hidden_us, copies)
                total += copies - hidden_us
                copies = 0.0
        return total

    def _absences(self, retention: Retention, turn: int, swapping: Swapping, part: float) -> dict[TensorId, tuple[Absence, ...]]:
        """Swaps across boundary `turn`, then across the boundary with most in memory, while there is something to swap."""
        absences: dict[TensorId, tuple[Absence, ...]] = {}
        link = Link()
        if swapping != "none" and self.state_may_stay_out:
            absences |= keep_state_out(retention, link, latencies=self.latencies, profile=self.profile, late=swapping == "late")
        if swapping == "none":
            return absences
        counted = self._in_memory if swapping == "some" else None
        unswapped = stored_unless_swapped(retention, counted)[:-1] + pressure(retention, self.fusion, self.profile)
        target = part * float(unswapped.max())
        beside = unswapped - away_bytes(retention, absences)[:-1]
        for _ in range(_SWAP_ROUNDS[swapping]):
            more = plan_swaps(
                retention,
                find_gaps(retention, turn=turn, state_may_stay_out=self.state_may_stay_out),
                link,
                taken=absences,
                latencies=self.latencies,
                profile=self.profile,
                exposed=swapping in ("some", "more", "all"),
                late=swapping == "late",
                enough=float(beside[min(turn, len(beside) - 1)]) - target,
            )
            for away in more:
                absences[away.tensor] = tuple(sorted((*absences.get(away.tensor, ()), away), key=lambda a: a.leave))
            beside = unswapped - away_bytes(retention, absences)[:-1]
            highest = int(beside.argmax())
            if beside[highest] <= target or (not more and highest == turn):
                break
            turn = highest
        return absences

    def _retention(self, price: float) -> tuple[Retention, int]:
        """What is kept at this price, and the boundary at which most is stored then.

        Tensors are dropped across the boundary at which most is stored, again and again, while that lowers the highest footprint.
        """
        if price in self._dropped:
            return self._dropped[price]
        retention = self.undropped
        dropped = dict(retention.dropped)
        stored = stored_unless_swapped(retention)
        turn = int(stored.argmax())
        for _ in range(_TURNS):
            highest = int(stored.max())
            again = drop_tensors(
                self.liveness, self.fusion, retention, turn=int(stored.argmax()), price=price, profile=self.profile
            )
            if not again:
                break
            sooner = {t: min(last, dropped.get(t, last)) for t, last in again.items()}
            fewer = retain(self.liveness, {**dropped, **sooner})
            stored_then = stored_unless_swapped(fewer)
            if int(stored_then.max()) >= highest:
                break
            dropped.update(sooner)
            retention, stored = fewer, stored_then
            turn = int(stored.argmax())
            if int(stored.max()) > _ENOUGH * highest:
                break
        self._dropped[price] = (retention, turn)
        return self._dropped[price]
