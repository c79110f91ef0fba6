"""The ladder: ways to keep less, each dearer than the one before it.

A rung is a choice of what to drop, at one price for moving bytes (`recompute.py`), and of what to swap (`swap.py`). It does
not depend on the budget. For a budget the first rung on which there is a segmentation under it (`cut.py`) is taken, with the
cheapest such segmentation. Because the order of the rungs is fixed and each segmentation is the optimum,

    a lower budget never gives a higher peak:

if the plan for a budget keeps a lower one too, it is the plan for that as well; otherwise the lower budget's plan is below it.

    first    prices at which what is computed again costs next to nothing
    then     from there on, the lower prices, with every swap that the link hides
    last     a few prices with everything swapped that can leave, copies exposed
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
from tensile_jax.plan.stays import Absence, find_stays, stored_bytes
from tensile_jax.plan.swap import Link, find_gaps, keep_state_out, plan_swaps
from tensile_jax.plan.traffic import Traffic, find_traffic

Swapping = Literal["none", "hidden", "all"]

_PRICES = (4.0, 1.0, 0.6, 0.45, 0.35, 0.3, 0.25, 0.21, 0.17, 0.1, 0.05, 0.02, 0.01)
_EXPOSED_PRICES = (0.45, 0.17, 0.02)
_SWAP_ROUNDS = {"none": 0, "hidden": 2, "all": 8}
_TURNS = 4  # boundaries cut one after another, highest first
_ENOUGH = 0.99  # a further turn must lower the highest footprint below this part of it


@dataclass(frozen=True, slots=True, eq=False)
class Rung:
    """One choice: `retention`, `absences`, and the board on which to cut it. `floor` is the least peak on this rung."""

    price: float
    swapping: Swapping
    retention: Retention
    absences: Mapping[TensorId, Absence]
    highest: int
    board: Board


class Ladder:
    """The rungs for one graph, made when they are asked for."""

    def __init__(self, graph: Graph, profile: DeviceProfile, *, state_may_stay_out: bool) -> None:
        self.graph = graph
        self.profile = profile
        self.state_may_stay_out = state_may_stay_out
        self._rungs: dict[int, Rung] = {}
        self._dropped: dict[float, tuple[Retention, int]] = {}

    @cached_property
    def steps(self) -> tuple[tuple[float, Swapping], ...]:
        """The price and the swapping of each rung."""
        free = sum(self.latencies) * self.profile.recompute_before_swap
        cheap = [_PRICES[0]]
        for price in _PRICES[1:]:
            if self._again_us(price) > free:
                break
            cheap.append(price)
        return (
            *((p, "none") for p in cheap),
            *((p, "hidden") for p in _PRICES[len(cheap) - 1 :]),
            *((p, "all") for p in _EXPOSED_PRICES),
        )

    def _again_us(self, price: float) -> float:
        """Microseconds of everything that may run again at this price, each operator once."""
        retention, _ = self._retention(price)
        return sum(
            rerun_latency(place, retention, self.traffic, self.profile) for place, runs in enumerate(retention.reruns) if runs
        )

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
            self._rungs[index] = self._make(*self.steps[index])
        return self._rungs[index]

    def _make(self, price: float, swapping: Swapping) -> Rung:
        retention, turn = self._retention(price)
        count = len(self.graph.operators)
        absences = self._absences(retention, turn, swapping)
        stays = find_stays(retention, absences)
        board = lay_board(retention, self.traffic, self.profile, stays=stays)
        return Rung(price, swapping, retention, absences, int(stored_bytes(stays, count).max()), board)

    def _absences(self, retention: Retention, turn: int, swapping: Swapping) -> dict[TensorId, Absence]:
        """Swaps at the turn, then at whatever place is the highest, as long as there is something to swap there."""
        absences: dict[TensorId, Absence] = {}
        link = Link()
        if swapping != "none" and self.state_may_stay_out:
            absences |= keep_state_out(retention, link, latencies=self.latencies, profile=self.profile)
        alone = pressure(retention, self.traffic, self.profile) if swapping != "none" else None
        for _ in range(_SWAP_ROUNDS[swapping]):
            more = plan_swaps(
                retention,
                find_gaps(retention, turn=turn, state_may_stay_out=self.state_may_stay_out),
                link,
                taken=absences,
                latencies=self.latencies,
                profile=self.profile,
                exposed=swapping == "all",
            )
            absences |= more
            stored = stored_bytes(find_stays(retention, absences), len(self.graph.operators))
            highest = int((stored[:-1] + alone).argmax())
            if not more and highest == turn:
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
        count = len(self.graph.operators)
        stored = stored_bytes(find_stays(retention, {}), count)
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
            stored_then = stored_bytes(find_stays(candidate, {}), count)
            if int(stored_then.max()) >= highest:
                break
            dropped.update(sooner)
            retention, stored = candidate, stored_then
            turn = int(stored.argmax())
            if int(stored.max()) > _ENOUGH * highest:
                break
        self._dropped[price] = (retention, turn)
        return self._dropped[price]
