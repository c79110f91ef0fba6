"""The ladder: ways to keep less, from which a policy chooses.

A rung is a choice of what to drop, at one price for moving bytes (`recompute.py`), and of what to swap (`swap.py`). It does
not depend on the budget: that comes in where a rung is cut into segments (`cut.py`). Five families, each from dear memory
to dear time:

    none     nothing is swapped; the price falls
    hidden   every swap that the link can hide at this price
    some     as many swaps, the largest first and copies exposed, as bring what is stored down to a part of what it was
    all      everything swapped that can leave, copies exposed where the link cannot hide them
    late     everything swapped that can leave, and back no sooner than needed: the least memory, every copy exposed

Swaps are priced by their copies: in full where they are exposed; where they are hidden, by the part that segments, which are
coarser than the operators on whose clock the windows were found, leave uncovered.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from tensile_jax.ir import Graph, TensorId
from tensile_jax.plan.activity import Activity, find_activity
from tensile_jax.plan.cut import Board, lay_board, pressure, rerun_latency
from tensile_jax.plan.latency import DeviceProfile, operator_latency
from tensile_jax.plan.recompute import drop_tensors
from tensile_jax.plan.retention import Retention, retain
from tensile_jax.plan.stays import Absence, Stay, away_bytes, find_stays, stored_bytes, stored_unless_swapped
from tensile_jax.plan.swap import Link, find_gaps, keep_state_out, plan_swaps
from tensile_jax.plan.traffic import Traffic, find_traffic

Swapping = Literal["none", "hidden", "some", "all", "late"]
FAMILIES: tuple[Swapping, ...] = ("none", "hidden", "some", "all", "late")

_PRICES = (4.0, 0.6, 0.42, 0.36, 0.26, 0.24, 0.2, 0.165, 0.15, 0.1, 0.05, 0.01)
_HIDDEN_PRICES = (0.36, 0.165, 0.05)
_UNCOVERED = 0.15  # of the copies of a hidden swap
_EXPOSED_PRICES = (0.36, 0.165, 0.02)
_SOME_PRICE = 0.05
_SOME_PARTS = (0.9, 0.78, 0.7, 0.62)  # of the most that is stored when nothing is swapped
_LATE_PRICES = (0.165, 0.02)
_SWAP_ROUNDS = {"none": 0, "hidden": 2, "some": 6, "all": 8, "late": 8}
_TURNS = 4  # boundaries cut one after another, highest first
_ENOUGH = 0.99  # a further turn must lower the highest footprint below this part of it


@dataclass(frozen=True, eq=False)
class Rung:
    """One choice: what is kept and what is away.

    `highest` is the most that is in memory at any boundary, wherever the rung is cut; `swap_us` the price of the
    swaps, `again_us` the latency of all that may run again, each operator once.
    """

    price: float
    swapping: Swapping
    retention: Retention
    absences: Mapping[TensorId, Absence]
    stays: tuple[Stay, ...]
    highest: int
    swap_us: float
    again_us: float
    traffic: Traffic
    profile: DeviceProfile

    @property
    def least_us(self) -> float:
        """What no segmentation of the rung is cheaper than."""
        return self.swap_us + self.again_us

    @cached_property
    def board(self) -> Board:
        """The board on which to cut it; laid when a rung is not ruled out by `highest`."""
        return lay_board(self.retention, self.traffic, self.profile, stays=self.stays)


class Ladder:
    """The rungs for one graph, made when they are asked for."""

    def __init__(self, graph: Graph, profile: DeviceProfile, *, state_may_stay_out: bool) -> None:
        self.graph = graph
        self.profile = profile
        self.state_may_stay_out = state_may_stay_out
        self.steps: tuple[tuple[float, Swapping, float], ...] = (  # price, family, part to bring what is stored down to
            *((p, "none", 1.0) for p in _PRICES),
            *((p, "hidden", 0.0) for p in _HIDDEN_PRICES),
            *((_SOME_PRICE, "some", part) for part in _SOME_PARTS),
            *((p, "all", 0.0) for p in _EXPOSED_PRICES),
            *((p, "late", 0.0) for p in _LATE_PRICES),
        )
        self._rungs: dict[int, Rung] = {}
        self._dropped: dict[float, tuple[Retention, int]] = {}
        self._again: dict[float, float] = {}

    def families(self) -> tuple[range, ...]:
        """The rungs of each family, dear memory first."""
        kinds = [swapping for _, swapping, _ in self.steps]
        return tuple(range(kinds.index(k), kinds.index(k) + kinds.count(k)) for k in FAMILIES)

    @cached_property
    def unplanned_bytes(self) -> int:
        """The most that is stored at any boundary when nothing is dropped or swapped."""
        begin = self.activity.begin
        virtual = {t.id: begin[t.id] for t in self.graph.tensors if self.traffic.virtual[t.id]}
        stays = find_stays(retain(self.activity, virtual), {})
        materialised = [s for s in stays if self.traffic.materialised[s.tensor] or not self.profile.fused_reductions]
        return int(stored_bytes(materialised, len(self.graph.operators)).max())

    @cached_property
    def activity(self) -> Activity:
        """Activity analysis of the graph."""
        return find_activity(self.graph)

    @cached_property
    def traffic(self) -> Traffic:
        """What is materialised."""
        return find_traffic(self.activity, fused_reductions=self.profile.fused_reductions)

    @cached_property
    def latencies(self) -> tuple[float, ...]:
        """Microseconds per place, fused: light operators cost what they write for heavy ones to read."""
        graph, profile = self.graph, self.profile
        found: list[float] = []
        for op in graph.operators:
            if op.kind == "light":
                written = sum(2 * graph.tensors[t].nbytes for t in op.outputs if self.traffic.materialised[t])
                found.append(min(written, op.nbytes) / profile.bytes_per_us)
            else:
                found.append(operator_latency(op, profile))
        return tuple(found)

    def __len__(self) -> int:
        return len(self.steps)

    def rung(self, index: int) -> Rung:
        """The rung at `index`; always the same one."""
        if index not in self._rungs:
            price, swapping, part = self.steps[index]
            retention, turn = self._retention(price)
            same = self._rungs.get(index - 1)
            if same is not None and same.swapping == swapping != "some" and same.retention.dropped == retention.dropped:
                self._rungs[index] = same  # the lower price has changed nothing
            else:
                self._rungs[index] = self._make(price, swapping, part, retention, turn)
        return self._rungs[index]

    def least_us(self, index: int) -> float:
        """What no segmentation of the rung at `index` is cheaper than; the rung need not have been made."""
        made = self._rungs.get(index)
        return made.least_us if made is not None else self._again_us(self.steps[index][0])

    def _again_us(self, price: float) -> float:
        if price not in self._again:
            retention, _ = self._retention(price)
            places = (place for place, runs in enumerate(retention.reruns) if runs)
            self._again[price] = sum(rerun_latency(p, retention, self.traffic, self.profile) for p in places)
        return self._again[price]

    def _make(self, price: float, swapping: Swapping, part: float, retention: Retention, turn: int) -> Rung:
        count = len(self.graph.operators)
        absences = self._absences(retention, turn, swapping, part)
        stays = find_stays(retention, absences)
        there = [s for s in stays if s.begin < 0 or self.traffic.materialised[s.tensor]]
        highest = int(stored_bytes(there, count).max())
        again_us = self._again_us(price)
        swap_us = self._swap_us(absences)
        return Rung(
            price, swapping, retention, absences, stays, highest, swap_us, again_us, self.traffic, self.profile
        )  # fmt: skip

    def _swap_us(self, absences: Mapping[TensorId, Absence]) -> float:
        total = 0.0
        for t, away in absences.items():
            nbytes = self.graph.tensors[t].nbytes
            copies = nbytes / self.profile.device_to_host_bytes_per_us if away.leave >= 0 else 0.0
            if away.back < len(self.graph.operators):
                copies += nbytes / self.profile.host_to_device_bytes_per_us
            total += copies - (1 - _UNCOVERED) * away.hidden_us
        return total

    def _absences(self, retention: Retention, turn: int, swapping: Swapping, part: float) -> dict[TensorId, Absence]:
        """Swaps at the turn, then at whatever place is the highest, as long as there is something to swap there."""
        absences: dict[TensorId, Absence] = {}
        link = Link()
        if swapping != "none" and self.state_may_stay_out:
            absences |= keep_state_out(retention, link, latencies=self.latencies, profile=self.profile, late=swapping == "late")
        if swapping == "none":
            return absences
        unswapped = stored_unless_swapped(retention)[:-1] + pressure(retention, self.traffic, self.profile)
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
                exposed=swapping in ("some", "all"),
                late=swapping == "late",
                enough=float(beside[min(turn, len(beside) - 1)]) - target,
            )
            absences |= more
            beside = unswapped - away_bytes(retention, absences)[:-1]
            highest = int(beside.argmax())
            if beside[highest] <= target or (not more and highest == turn):
                break
            turn = highest
        return absences

    def _retention(self, price: float) -> tuple[Retention, int]:
        """What is kept at this price: the highest boundaries are cut one after another while that lowers the highest."""
        if price in self._dropped:
            return self._dropped[price]
        begin = self.activity.begin
        dropped = {t.id: begin[t.id] for t in self.graph.tensors if self.traffic.virtual[t.id]}
        retention = retain(self.activity, dropped)
        stored = stored_unless_swapped(retention)
        turn = int(stored.argmax())
        for _ in range(_TURNS):
            highest = int(stored.max())
            again = drop_tensors(
                self.activity, self.traffic, retention, turn=int(stored.argmax()), price=price, profile=self.profile
            )
            if not again:
                break
            sooner = {t: min(last, dropped.get(t, last)) for t, last in again.items()}
            candidate = retain(self.activity, {**dropped, **sooner})
            stored_then = stored_unless_swapped(candidate)
            if int(stored_then.max()) >= highest:
                break
            dropped.update(sooner)
            retention, stored = candidate, stored_then
            turn = int(stored.argmax())
            if int(stored.max()) > _ENOUGH * highest:
                break
        self._dropped[price] = (retention, turn)
        return self._dropped[price]
