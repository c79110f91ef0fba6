"""Finds in every iteration of an opened loop what corresponds to an operator or a tensor of one iteration.

A loop is *opened* if the step contains the operators of every iteration, one iteration after another (`trace/reading/scans.py`).
An operator of one iteration has a *counterpart* in each of the others, unless the trace has simplified it away there. The tensors
that counterparts make are counterparts, too. Plans that treat counterparts alike need few executables (`alike_iterations.py`).
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import product

import numpy as np

from tensile_jax.ir import TensorId
from tensile_jax.plan.search.step_model import StepModel

Iteration = tuple[int, ...]


class Iterations:
    """The iterations of a step's opened loops: where each operator of a body stands in every iteration."""

    def __init__(self, model: StepModel) -> None:
        self._step = model
        operators = model.graph.operators
        self._of_operator: dict[tuple[int, ...], dict[Iteration, int]] = defaultdict(dict)
        for place, op in enumerate(operators):
            if op.iterations:
                self._of_operator[op.position][op.iterations] = place
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

    def tensors_like(self, t: TensorId) -> Sequence[TensorId]:
        """The counterparts of a tensor in all iterations, itself among them; none if no loop makes it."""
        producer = self._step.graph.tensors[t].producer
        op = None if producer is None else self._step.graph.operators[self._step.liveness.begin[t]]
        return self._made[op.position, op.outputs.index(t)] if op is not None and op.iterations else ()

    def places_like(self, place: int) -> Mapping[Iteration, int]:
        """The places of the counterparts of the operator at a place, by iteration; none if it is in no loop."""
        operators = self._step.graph.operators
        position = operators[place].position if place < len(operators) and operators[place].iterations else None
        return {} if position is None else self._of_operator[position]

    def of_iteration(self, place: int) -> Sequence[int]:
        """The places of the operators in the same iteration as the operator at a place, itself among them."""
        op = self._step.graph.operators[place]
        return self._places[op.position[:-1], op.iterations]

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
            return self._of_operator[last.position].get(operators[made_at[t]].iterations) if same_iteration else None

        return until

    def are_alike(self, places: Sequence[int]) -> bool:
        """Whether cuts at these places cut all iterations of a loop, but for its first and last one, at the same operators."""
        operators, cut = self._step.graph.operators, set(places)

        def cuts_of(loop: tuple[int, ...], iteration: Iteration) -> list[tuple[int, ...]]:
            return [operators[p].position for p in self._places[loop, iteration] if p in cut]

        return all(
            len({tuple(cuts_of(loop, iteration)) for iteration in iterations[1:-1]}) <= 1
            for loop, iterations in self._of_loop.items()
        )

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
                same = (self._of_operator[operators[p].position].get(other) for p in own if p >= cut)
                found.update([next((p for p in same if p is not None), ends[0])])
        return sorted(found)
