"""Plans all iterations of an opened loop alike, so that they share their executables.

A loop is *opened* if the step contains the operators of every iteration, one iteration after another (`trace/reading/scans.py`).
A *segment* is a stretch of operators that is compiled as one executable. If a plan cuts every iteration at the same places and
keeps the same tensors in each, the segments of all iterations are equal. Each distinct segment is compiled once, however many
layers a network has. The plans of the search (`search.py`) are faster under tight limits, but almost all of their segments
differ.

Two choices determine such a schedule: which tensors are *dropped* (not kept, but computed again where they are needed), and the
cuts into segments:

    dropped   A minimum cut of a flow network chooses which tensors are dropped (`analysis/minimum_cut.py`). A parameter of the
              network, the *price*, says how many bytes may be kept to save one byte of memory traffic. A tensor is dropped in
              all iterations if the minimum cut drops it in most of them.
    cuts      At first, every iteration is cut once, where least is stored. If no such plan stays under the limit, or if the
              best one takes over 5 % longer than the step as one executable, the module finds the cheapest cuts of the whole
              step under the limit (`starts/segment_boundaries.py`). It keeps the cuts outside of loops. In each loop, it leaves
              the first and the last iteration aside, picks the iteration with the most cuts among the others, and cuts every
              iteration at the places of these cuts.

Two prices may be combined: the first k iterations use the lower price, at which more is dropped, and the others the higher one. k
is the smallest number found with which the plan stays under the limit. In nested loops, k counts iterations of the innermost
loop.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import product

import numpy as np

from tensile_jax.ir import TensorId
from tensile_jax.plan.analysis.absence import stored_unless_swapped
from tensile_jax.plan.search.cost.segment_evaluator import Evaluator
from tensile_jax.plan.search.cost.workspace import CompiledSizes
from tensile_jax.plan.search.schedule import Schedule
from tensile_jax.plan.search.starts.segment_boundaries import cheapest_cuts
from tensile_jax.plan.search.starts.start_schedules import held_at, last_held, start
from tensile_jax.plan.search.step_model import PRICES, StepModel

_LOWER = (None, 1.0, 0.85, 0.7)
"""Of the limit: limits for cuts, since cuts that are taken over may need more. None cuts each iteration once, which plans faster
(`make bench-loops`)."""
_ONE_CUT_SUFFICES = 1.05  # of the whole step's time: slower schedules make a search for cuts worth its time (`make bench-loops`)

Iteration = tuple[int, ...]


class Iterations:
    """The iterations of a step's opened loops: where each operator of a body stands in every iteration."""

    def __init__(self, model: StepModel) -> None:
        self._step = model
        operators = model.graph.operators
        self._place = {(op.position, op.iterations): place for place, op in enumerate(operators) if op.iterations}
        self._of_loop: dict[tuple[int, ...], list[Iteration]] = {}
        self._places: dict[tuple[tuple[int, ...], Iteration], list[int]] = defaultdict(list)
        for place, op in enumerate(operators):
            if op.iterations:
                loop = op.position[:-1]
                if (loop, op.iterations) not in self._places:
                    self._of_loop.setdefault(loop, []).append(op.iterations)
                self._places[loop, op.iterations].append(place)
        self._made: dict[tuple[tuple[int, ...], int], list[TensorId]] = defaultdict(list)  # one operator's output, by iteration
        for op in operators:
            if op.iterations:
                for i, t in enumerate(op.outputs):
                    self._made[op.position, i].append(t)
        self.index = {t: op.iterations[-1] for op in operators if op.iterations for t in op.outputs}
        self.most = max((1 + index for index in self.index.values()), default=0)

    def dropped_at(self, price: float) -> dict[TensorId, int]:
        """The tensors that are dropped at this price in most iterations, each with the last place up to which it is kept."""
        found = dict(self._step.dropped_at(price).dropped)
        for made in self._made.values():
            count = sum(t in found for t in made)
            if 0 < 2 * count <= len(made):
                for t in made:
                    found.pop(t, None)
            elif 0 < count < len(made):
                until = self._until(next(t for t in made if t in found), found)
                for t in made:
                    if t not in found and (last := until(t)) is not None:
                        found[t] = last
        return found

    def _until(self, dropped: TensorId, found: Mapping[TensorId, int]):  # noqa: ANN202
        """Returns a function that gives the place up to which another iteration's tensor is kept, if it is dropped as this one
        is.
        """
        operators, made_at = self._step.graph.operators, self._step.liveness.begin
        last, made = operators[found[dropped]], operators[made_at[dropped]]
        same_iteration = last.iterations == made.iterations

        def until(t: TensorId) -> int | None:
            return self._place.get((last.position, operators[made_at[t]].iterations)) if same_iteration else None

        return until

    def everywhere(self, places: Sequence[int], stored: np.ndarray) -> list[int]:
        """The cuts at `places` outside of loops; in each loop, the cuts of the iteration that has most, in every iteration."""
        operators = self._step.graph.operators
        ends = (0, len(operators))
        found = {p for p in places if p in ends or not operators[p].iterations}
        for loop, iterations in self._of_loop.items():
            middle = iterations[len(iterations) // 2]
            inner = [middle, *iterations[1:-1]]
            most = max(inner, key=lambda iteration: len(set(places) & set(self._places[loop, iteration])))
            own = self._places[loop, most]
            cuts = sorted(set(places) & set(own)) or [min(own, key=lambda p: (int(stored[p]), p))]
            for cut, other in product(cuts, iterations):
                same = (self._place.get((operators[p].position, other)) for p in own if p >= cut)
                found.update([next((p for p in same if p is not None), ends[0])])
        return sorted(found)


def alike(model: StepModel, limit: float, measured: CompiledSizes) -> Schedule | None:
    """The fastest schedule of this kind under the limit; None if none is found, or if no loop of the step is opened.

    It is remembered, since variants of a step are ranked by it first.
    """
    iterations = model.decided("iterations", lambda: Iterations(model))
    if not iterations.most:
        return None
    return model.evaluator.with_measured(measured).found("alike", limit, lambda: _alike(model, iterations, limit, measured))


def _alike(model: StepModel, iterations: Iterations, limit: float, measured: CompiledSizes) -> Schedule | None:
    best: Schedule | None = None
    for lower in _LOWER:
        found = _highest(model, iterations, limit, measured, lower)
        if found is not None and (best is None or found.cost < best.cost):
            best = found
        if best is not None and (lower is not None or best.step_us <= _ONE_CUT_SUFFICES * model.whole_us):
            break
    return best


def _highest(
    model: StepModel, iterations: Iterations, limit: float, measured: CompiledSizes, lower: float | None
) -> Schedule | None:
    """The schedule of the highest price at which one fits, combined with the two prices above it, if that is faster.

    Cuts are sought under `lower` times the limit; if that is None, every iteration is cut once.
    """
    base = model.evaluator.with_measured(measured)
    drops = [model.decided(("alike", price), lambda price=price: iterations.dropped_at(price)) for price in PRICES]
    for i, price in enumerate(PRICES):
        if i and drops[i] == drops[i - 1]:
            continue  # the price before it has led to nothing
        held = held_at(base.condensed, last_held(base.condensed, _nodes(base, drops[i])))
        if base.condensed.base_bytes + max(map(base.condensed.bytes_of, held)) > limit:
            continue
        found = (0, len(base.places) - 1) if lower is None else cheapest_cuts(base, held, lower * limit)
        cuts = iterations.everywhere(
            [base.places[c] for c in {*found, *base.required}], stored_unless_swapped(model.dropped_at(price))
        )
        schedule = _schedule(model, measured, cuts, drops[i])
        if schedule is not None and schedule.peak <= limit:
            mixed = (_mixed(model, iterations, measured, limit, cuts, drops[i], drop) for drop in drops[max(0, i - 2) : i])
            return min((schedule, *(s for s in mixed if s is not None)), key=lambda s: s.cost)
    return None


def _mixed(
    model: StepModel,
    iterations: Iterations,
    measured: CompiledSizes,
    limit: float,
    cuts: list[int],
    lower: Mapping[TensorId, int],
    higher: Mapping[TensorId, int],
) -> Schedule | None:
    """The schedule that drops `lower` in the first iterations, and `higher` in as many of the last ones as the limit allows."""
    best: Schedule | None = None
    fits, exceeds = iterations.most, 0
    while fits - exceeds > 1:
        k = (fits + exceeds) // 2
        index = iterations.index
        dropped = {t: last for t, last in lower.items() if t not in index or index[t] < k}
        dropped |= {t: last for t, last in higher.items() if t in index and index[t] >= k}
        schedule = _schedule(model, measured, cuts, dropped)
        if schedule is not None and schedule.peak <= limit:
            best, fits = schedule, k
        else:
            exceeds = k
    return best


def _schedule(model: StepModel, measured: CompiledSizes, cuts: Sequence[int], dropped: Mapping[TensorId, int]) -> Schedule | None:
    """The schedule with these cuts (places) and dropped tensors."""
    evaluator = model.evaluator_for(tuple(p for p in cuts if p not in set(model.boundaries))).with_measured(measured)
    at = {place: c for c, place in enumerate(evaluator.places)}
    return start(evaluator, [at[p] for p in cuts], last_held(evaluator.condensed, _nodes(evaluator, dropped)))


def _nodes(evaluator: Evaluator, dropped: Mapping[TensorId, int]) -> dict[int, int]:
    """By tensor of the condensed step, the last node up to which it is kept."""
    nodes = np.searchsorted(np.array(evaluator.condensed.starts), np.arange(evaluator.condensed.starts[-1] + 1), side="right") - 1
    found: dict[int, int] = {}
    for t, last in dropped.items():
        if t in evaluator.bit:
            found[evaluator.bit[t]] = max(int(nodes[last]), found.get(evaluator.bit[t], 0))
    return found
