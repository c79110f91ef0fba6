"""Defines `StepModel`: what the planner knows about one step on one device. All policies start from it.

The facts are:

    - the operators' latencies
    - which tensors XLA writes to memory
    - which tensors are cheaper to drop and compute again than to keep, for each of several prices. A price says how much memory
      may be spent to save time. *Minimum cuts* of a flow network find these tensors (`analysis/minimum_cut.py`)
    - where *segments*, stretches of operators that are each compiled as one executable, may begin
    - the *condensed step*, the step reduced to its large tensors, on which the search works (`condensed/condensed_step.py`)

Each fact is computed when it is first needed, and only once.

Sizes in bytes, times in microseconds.
"""

from collections.abc import Callable, Hashable, Mapping
from copy import copy
from dataclasses import replace
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from tensile_jax.ir import Graph, TensorId
from tensile_jax.plan.analysis.absence import stored_unless_swapped
from tensile_jax.plan.analysis.corrections import Corrections, no_corrections
from tensile_jax.plan.analysis.device_profile import DeviceProfile
from tensile_jax.plan.analysis.fusion import Fusion, find_fusion
from tensile_jax.plan.analysis.latency import StepCosts, fused_latencies, rerun_latencies, rewriting_us
from tensile_jax.plan.analysis.liveness import Liveness, find_liveness
from tensile_jax.plan.analysis.minimum_cut import drop_tensors
from tensile_jax.plan.analysis.retention import Retention, retain
from tensile_jax.plan.search.condensed.bundles import MOST_TENSORS, bundled
from tensile_jax.plan.search.condensed.condensed_step import Condensed, classify, condense
from tensile_jax.plan.search.condensed.possible_boundaries import possible_boundaries
from tensile_jax.plan.search.cost.segment_evaluator import Evaluator
from tensile_jax.plan.search.swaps import SMALLEST
from tensile_jax.plan_format import Memory

PRICES = (4.0, 0.6, 0.36, 0.165, 0.05, 0.01)
"""Of moving a byte, in bytes kept: prices of the minimum cuts. More prices plan longer (`make bench-constants`)."""

Made = TypeVar("Made")

_TURNS = 4  # boundaries at which tensors are dropped, the highest first (`make bench-constants`)
_ENOUGH = 0.99  # of the highest footprint: a turn that lowers it by less is the last (`make bench-constants`)
_NO_LAUNCH_US = 0.01  # the launch of a part of an executable, above zero as that of every device profile
_LAUNCHES = 10  # of a typical plan, which share the time that the host is ahead of the device; not tuned


class StepModel:
    """A step's graph, a device profile, and what follows from them.

    Args:
        graph: its operators in the order in which plans run them.
        state_may_stay_out: whether state may be on the host when an iteration begins and ends.
        host_limit: the most bytes that a plan may have in host memory; zero for plans without swaps.
        whole_graph: the graph of the step as one executable, if it has loops that are opened in `graph`.
        corrections: what was measured of the step's operators and of the link, in relation to what `profile` predicts.
        in_one_program: whether plans become one executable, with their copies inside (`as_one_program`).

    Attributes:
        given_profile: the device profile as it was given.
        host_limit: as above; infinite also where all tensors of the step together need no more.
    """

    def __init__(
        self,
        graph: Graph,
        profile: DeviceProfile,
        *,
        state_may_stay_out: bool,
        host_limit: float = float("inf"),
        whole_graph: Graph | None = None,
        corrections: Corrections | None = None,
        in_one_program: bool = False,
    ) -> None:
        self.graph = graph
        self.corrections = corrections or no_corrections(len(graph.operators))
        self.given_profile = profile
        self.state_may_stay_out = state_may_stay_out
        self.host_limit = host_limit if sum(t.nbytes for t in graph.tensors) > host_limit else float("inf")
        self.in_one_program = in_one_program
        self.whole_graph = whole_graph
        self._dropped: dict[float, Retention] = {}
        self._evaluators: dict[tuple[int, ...], Evaluator] = {}
        self._decided: dict[Hashable, Any] = {}

    def corrected(self, corrections: Corrections) -> "StepModel":
        """The same step with other corrections. What does not depend on latencies is shared, and so are the classes of tensors:
        a measured workspace names its segment by them (`cost/workspace.py`)."""
        made = StepModel(
            self.graph, self.given_profile, state_may_stay_out=self.state_may_stay_out, host_limit=self.host_limit,
            whole_graph=self.whole_graph, corrections=corrections, in_one_program=self.in_one_program,
        )  # fmt: skip
        shared = {name: getattr(self, name) for name in ("liveness", "fusion", "undropped", "classes", "boundaries")}
        made.__dict__.update(shared)
        made._dropped.update(self._dropped)
        return made

    def with_host_limit(self, host_limit: float) -> "StepModel":
        """The same step with another limit of host memory, made once for each."""

        def make() -> StepModel:
            made = copy(self)
            made.host_limit, made._evaluators, made._decided = host_limit, {}, {}
            for name in ("evaluator", "plain_evaluator", "search_evaluator"):
                made.__dict__.pop(name, None)
            return made

        if sum(t.nbytes for t in self.graph.tensors) <= host_limit:
            host_limit = float("inf")
        return self if host_limit == self.host_limit else self.decided(("host limit", host_limit), make)

    def as_one_program(self) -> "StepModel":
        """The same step for plans that become one executable, with their copies inside (`result/joined.py`), made once.

        Such an executable holds its arguments, so state is on the host across the boundary of the iteration, or on the device for
        the whole step. The executable asks the device's allocator once for all that its segments need, so the allocator hands out
        nothing between them unasked. A further segment costs no launch.
        """

        def make() -> StepModel:
            made = copy(self)
            made.in_one_program, made._evaluators, made._decided = True, {}, {}
            for name in ("profile", "costs", "evaluator", "plain_evaluator", "search_evaluator"):
                made.__dict__.pop(name, None)
            return made

        return self if self.in_one_program else self.decided("one program", make)

    @property
    def budgets(self) -> Mapping[Memory, int | None]:
        """The most bytes that may wait in each memory off the device; None for no limit."""
        return {"host": None if self.host_limit == float("inf") else int(self.host_limit)}

    @property
    def may_swap(self) -> bool:
        """Whether plans may swap at all."""
        return self.host_limit >= SMALLEST

    def decided(self, key: Hashable, make: Callable[[], Made]) -> Made:
        """What `make` returns; it is called once for each key."""
        if key not in self._decided:
            self._decided[key] = make()
        return self._decided[key]

    @cached_property
    def profile(self) -> DeviceProfile:
        """The device profile with the rates of the link corrected, and with what a launch takes in this step.

        A host that is ahead of the device issues the next executable while the device still runs the previous one. The host gets
        ahead by the time that the step's kernels run longer than the host needs to issue them; `_LAUNCHES` launches share it.
        """
        profile = self.corrections.of_link(self.given_profile)
        if self.in_one_program:
            return replace(profile, allocator="exact", launch_us=_NO_LAUNCH_US)
        if not profile.host_launch_us:
            return profile
        device = fused_latencies(self.liveness, self.fusion, replace(profile, host_kernel_us=0.0))
        ahead_us = sum(device) - profile.host_kernel_us * sum(us > 0 for us in device)
        return replace(profile, launch_us=profile.launch_us + max(0.0, profile.host_launch_us - max(0.0, ahead_us) / _LAUNCHES))

    @property
    def has_iterations(self) -> bool:
        """Whether loops of the step are opened."""
        return self.most_iterations > 0

    @cached_property
    def most_iterations(self) -> int:
        """The most iterations of an opened loop; 0 if none is opened."""
        return max((1 + index for op in self.graph.operators for index in op.iterations), default=0)

    @cached_property
    def liveness(self) -> Liveness:
        """Activity analysis of the graph."""
        return find_liveness(self.graph, transposed_updates=self.given_profile.fused_reductions)  # both are so on GPUs

    @cached_property
    def fusion(self) -> Fusion:
        """Which tensors lie in memory (are materialised) and which ones XLA fuses away."""
        return find_fusion(self.liveness, fused_reductions=self.given_profile.fused_reductions)

    @cached_property
    def undropped(self) -> Retention:
        """What is kept when only virtual tensors are dropped, which XLA never stores (`analysis/fusion.py`)."""
        begin = self.liveness.begin
        return retain(self.liveness, {t.id: begin[t.id] for t in self.graph.tensors if self.fusion.virtual[t.id]})

    @cached_property
    def base(self) -> Retention:
        """What policy `none` keeps, from which the policies of the papers start: the least is computed again.

        Derived tensors (`condensed/condensed_step.py`) are dropped, since no schedule keeps them.
        """
        begin = self.liveness.begin
        derived: list[int] = np.flatnonzero(self.classes[1]).tolist()
        return retain(self.liveness, {**self.dropped_at(PRICES[0]).dropped, **{TensorId(t): begin[t] for t in derived}})

    @cached_property
    def elapsed_us(self) -> np.ndarray:
        """When each operator begins and the last one ends if they run one after another, by place; shape (places + 1,)."""
        return np.concatenate([[0.0], np.cumsum(self.latencies)])

    @cached_property
    def unplanned_bytes(self) -> int:
        """The most bytes that are stored at any boundary when nothing is dropped or swapped."""
        counted = self.fusion.written if self.profile.fused_reductions else None
        return int(stored_unless_swapped(self.undropped, counted).max())

    @cached_property
    def latencies(self) -> tuple[float, ...]:
        """Microseconds of each operator where it runs first, by place."""
        predicted = fused_latencies(self.liveness, self.fusion, self.profile)
        return tuple(us * factor for us, factor in zip(predicted, self.corrections.first, strict=True))

    @cached_property
    def rerun_us(self) -> tuple[float, ...]:
        """Microseconds that it adds to a segment to run each operator again, by place."""
        predicted = rerun_latencies(self.liveness, self.fusion, self.profile)
        return tuple((predicted * np.array(self.corrections.again)).tolist())

    @cached_property
    def unpredicted(self) -> tuple[int, int]:
        """How many heavy operators the device's latency model does not know, so that their latency is a roofline's; and how many
        heavy operators there are.

        The first number is 0 for a device without such a model.
        """
        networks = self.profile.latency_model
        heavy = [op for op in self.graph.operators if op.kind == "heavy" and not op.alone]
        return (0, len(heavy)) if networks is None else (int(np.isnan(networks.predict(heavy)).sum()), len(heavy))

    @cached_property
    def costs(self) -> StepCosts:
        """The profile and the latencies, for building plans."""
        return StepCosts(self.profile, self.latencies, self.rerun_us)

    @cached_property
    def whole(self) -> "StepModel":
        """The step as plain jit runs it, with every loop as one operator."""
        if self.whole_graph is None:
            return self
        return StepModel(self.whole_graph, self.given_profile, state_may_stay_out=False, host_limit=0)

    @cached_property
    def whole_latency_us(self) -> float:
        """Microseconds of the step as one executable, without its launch. Loops are taken to run as fast as their iterations one
        by one."""
        return sum(self.latencies) + rewriting_us(self.liveness, self.profile)

    @property
    def whole_us(self) -> float:
        """The same with its launch."""
        return self.whole_latency_us + self.profile.launch_us

    def dropped_at(self, price: float) -> Retention:
        """What is kept if tensors are dropped at this price of moving a byte (`analysis/minimum_cut.py`).

        Tensors are dropped across the boundary at which most is stored, again and again, while that lowers the highest footprint.
        """
        if price not in self._dropped:
            self._dropped[price] = self._drop(price)
        return self._dropped[price]

    def _drop(self, price: float) -> Retention:
        retention = self.undropped
        dropped = dict(retention.dropped)
        stored = stored_unless_swapped(retention)
        for _ in range(_TURNS):
            highest = int(stored.max())
            turn = int(stored.argmax())
            again = drop_tensors(self.liveness, self.fusion, retention, turn=turn, price=price, profile=self.profile)
            if not again:
                break
            sooner = {t: min(last, dropped.get(t, last)) for t, last in again.items()}
            fewer = retain(self.liveness, {**dropped, **sooner})
            stored_then = stored_unless_swapped(fewer)
            if int(stored_then.max()) >= highest:
                break
            dropped.update(sooner)
            retention, stored = fewer, stored_then
            if int(stored.max()) > _ENOUGH * highest:
                break
        return retention

    @cached_property
    def pairs(self) -> tuple[tuple[TensorId, TensorId], ...]:
        """The pairs (old, new) of donated state that could be on the host from its last use to its first use in the next
        iteration.

        The step itself must compute the new tensor. If it returns an argument as the update of another argument, the returned
        argument may belong to the caller, or be the old tensor of another pair.
        """
        tensors = self.graph.tensors
        return tuple(
            (pair.input, pair.output) for pair in self.graph.carried
            if pair.input in self.graph.donated and tensors[pair.output].producer is not None
            and tensors[pair.input].nbytes >= SMALLEST and self.liveness.uses[pair.input]
            and not tensors[pair.input].dtype.startswith("key<")
        )  # fmt: skip

    @cached_property
    def boundaries(self) -> tuple[int, ...]:
        """The places before which the search may begin a segment, with 0 and the number of operators."""
        retention = self.dropped_at(PRICES[0])
        return possible_boundaries(retention, stored_unless_swapped(retention))

    @cached_property
    def evaluator(self) -> Evaluator:
        """The condensed step with the possible boundaries of the search."""
        return self.evaluator_for(())

    @cached_property
    def plain_evaluator(self) -> Evaluator:
        """The evaluator for plain `jax.jit`: every update ends in the memory of the donated state, if necessary by a copy."""
        step, bit = self.evaluator.condensed, self.evaluator.bit
        aliases = {bit[t]: bit[h] for t, h in self.liveness.possible_aliases if t in bit and h in bit}
        return (
            self.evaluator
            if aliases == step.aliases
            else Evaluator(replace(step, aliases=aliases), self.profile, self.host_limit)
        )

    @cached_property
    def small_rewritten_bytes(self) -> int:
        """The bytes of small updates that `plain_evaluator` counts beside the state whose memory they take over."""
        nbytes, significant = self.liveness.nbytes, self.classes[0]
        return sum(int(nbytes[t]) for t in self.liveness.rewritten if not significant[t])

    @cached_property
    def search_evaluator(self) -> Evaluator:
        """The evaluator that the search uses. Its step has bundles if there are many significant tensors
        (`condensed/bundles.py`).
        """
        step = self.evaluator.condensed
        if len(step.tensors) <= MOST_TENSORS:
            return self.evaluator
        dropped = [self.dropped_at(price).dropped for price in PRICES]
        dropped_by = [sum((t in those) << i for i, those in enumerate(dropped)) for (t,) in step.tensors]
        return Evaluator(bundled(step, dropped_by), self.profile, self.host_limit)

    def evaluator_for(self, boundaries: tuple[int, ...]) -> Evaluator:
        """The evaluator of the condensed step in which segments may also begin at these places."""
        if boundaries not in self._evaluators:
            self._evaluators[boundaries] = Evaluator(self._condense(boundaries), self.profile, self.host_limit)
        return self._evaluators[boundaries]

    @cached_property
    def classes(self) -> tuple[np.ndarray, np.ndarray]:
        """Which tensors are significant, and which are derived (`condensed/condensed_step.py`)."""
        count = len(self.graph.operators)
        begins = self.liveness.begins
        kept = np.zeros(len(self.graph.tensors), dtype=bool)
        for price in PRICES:
            retention = self.dropped_at(price)
            turn = int(stored_unless_swapped(retention).argmax())
            crosses = (begins < turn) & (retention.ends >= turn) & (retention.ends <= count)
            crosses[list(retention.dropped)] = False
            kept |= crosses
        live_bytes = int(stored_unless_swapped(self.undropped, self.fusion.written).max(initial=0))
        return classify(self.liveness, self.fusion, np.array(self.rerun_us), kept_by_cuts=kept, live_bytes=live_bytes)

    def _condense(self, boundaries: tuple[int, ...]) -> Condensed:
        significant, derived = self.classes
        last_needed = np.max([self.dropped_at(price).ends for price in (PRICES[0], PRICES[-1])] + [self.undropped.ends], axis=0)
        return condense(
            self.liveness, self.fusion, self.costs, significant=significant, derived=derived,
            boundaries=sorted({*self.boundaries, *boundaries}), last_needed=last_needed,
            smallest_swap=SMALLEST if self.may_swap else None, relayout=self.profile.canonical_layouts,
            pairs=self.pairs if self.state_may_stay_out and self.may_swap else (),
            in_one_program=self.in_one_program,
        )  # fmt: skip
