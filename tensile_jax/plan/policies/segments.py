"""Cuts a step into *segments*, stretches of operators that are each compiled as one executable, for the policies from papers.

The policy `auto` searches for its own segments (`search/search.py`). The other policies (ways to plan) come from papers that run
operators one by one. Such a policy decides which tensors are dropped (and computed again later), which are swapped, and at which
operators. This module then finds the cheapest boundaries that keep every segment under the limit
(`search/starts/segment_boundaries.py`).
"""

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from tensile_jax.ir import TensorId
from tensile_jax.plan.analysis.absence import Absences
from tensile_jax.plan.analysis.retention import Retention
from tensile_jax.plan.result.layout import layout_of
from tensile_jax.plan.search.choice import LEAST, WHOLE, Choice, peak_of, whole_peak
from tensile_jax.plan.search.cost.workspace import CompiledSizes
from tensile_jax.plan.search.starts.segment_boundaries import cheapest_cuts, least_peak
from tensile_jax.plan.search.step_model import StepModel

_TRIES = 5  # limits tried while choices turn out to be above the limit (`make bench-constants`)


@dataclass(eq=False)
class Decision:
    """What is kept until when, what is absent when, and the boundaries (places) that every cut must have.

    Derived tensors (`search/condensed/condensed_step.py`) are never kept: a policy starts from `StepModel.base`, and drops more.
    """

    retention: Retention
    absences: Absences
    own: tuple[int, ...]
    _stored: "tuple[StepModel, list[int]] | None" = field(default=None, init=False, repr=False)

    def stored(self, model: StepModel) -> list[int]:
        """By possible boundary, the set of significant tensors on the device."""
        if self._stored is None or self._stored[0] is not model:
            self._stored = model, RetainedSegments(model, self.retention, self.absences, self.own).stored
        return self._stored[1]


Option = tuple[Hashable, Callable[[], Decision]]
"""A key, and a function that makes the decision that belongs to it."""


def choice_with(decision: Decision, boundaries: Iterable[int]) -> Choice:
    """The choice with these boundaries (places)."""
    return Choice(layout_of(decision.retention, decision.absences, tuple(boundaries)))


def cut_of(model: StepModel, decision: Decision, limit: float, measured: CompiledSizes) -> Choice | None:
    """The cheapest cut under the limit; None if there is none."""
    lower = limit
    for _ in range(_TRIES):
        choice = _cheapest(model, decision, lower, measured)
        above = peak_of(model, choice, measured) - limit
        if above <= 0:
            return choice
        lower -= above
    return None


def least_cut(model: StepModel, decision: Decision, measured: CompiledSizes) -> Choice:
    """The cheapest cut with the least peak."""
    evaluator = model.evaluator_for(decision.own).with_measured(measured)
    limit = least_peak(evaluator, decision.stored(model), _required(model, decision))
    return _cheapest(model, decision, limit, measured)


def first_that_fits(model: StepModel, options: Iterable[Option], limit: float, measured: CompiledSizes) -> Choice | None:
    """The cheapest cut under the limit of the first decision that has one; the step as one executable if that fits.

    This is for policies whose decisions differ only in how much memory they save. A decision is made once for each key.
    """
    if limit > LEAST and whole_peak(model, measured) <= limit:
        return WHOLE
    if not model.graph.operators:  # nothing to cut
        return WHOLE if limit == LEAST else None
    decisions: list[Decision] = []
    for key, make in options:
        decisions.append(model.decided(key, make))
        choice = cut_of(model, decisions[-1], limit, measured) if limit > LEAST else None
        if choice is not None:
            return choice
    cuts = (least_cut(model, decision, measured) for decision in decisions)
    lowest = min(cuts, key=lambda choice: peak_of(model, choice, measured))
    return lowest if limit == LEAST or peak_of(model, lowest, measured) <= limit else None


def _cheapest(model: StepModel, decision: Decision, limit: float, measured: CompiledSizes) -> Choice:
    """The cheapest cut with which no segment is above the limit, or the least above."""
    evaluator = model.evaluator_for(decision.own).with_measured(measured)
    cuts = cheapest_cuts(evaluator, decision.stored(model), limit, _required(model, decision), thorough=True)
    return choice_with(decision, (evaluator.places[cut] for cut in cuts))


def _required(model: StepModel, decision: Decision) -> set[int]:
    """The decision's own boundaries, as indices of the possible ones."""
    own = set(decision.own)
    return {i for i, place in enumerate(model.evaluator_for(decision.own).places) if place in own}


class RetainedSegments:
    """The segments between any two possible boundaries, given what is kept until when."""

    def __init__(
        self, model: StepModel, retention: Retention, absences: Absences | None = None, own: tuple[int, ...] = ()
    ) -> None:
        self._evaluator = model.evaluator_for(own)
        self._liveness = model.liveness
        self._retention = retention
        self._absences: Absences = absences or {}

    @cached_property
    def stored(self) -> list[int]:
        """By possible boundary, the set of significant tensors on the device."""
        condensed = self._evaluator.condensed
        tensors = [t for (t,) in condensed.tensors]
        ids = np.array(tensors, dtype=np.int64)
        begin, end = self._liveness.begins[ids], self._retention.ends[ids]
        found: list[int] = []
        for place in self._evaluator.places:
            there = 0
            for bit in np.flatnonzero((begin < max(place, 0)) & (place <= end)).tolist():
                if not self._is_absent(tensors[bit], place):
                    there |= 1 << bit
            found.append(there)
        return found

    def _is_absent(self, tensor: TensorId, place: int) -> bool:
        return any(a.leave < place <= a.back for a in self._absences.get(tensor, ()))

    def sizes(self, a: int, b: int) -> tuple[int, int]:
        """What the segment between two possible boundaries holds, and its predicted workspace, in bytes."""
        evaluator = self._evaluator
        there = self.stored[a]
        wanted = self.stored[b] & ~there
        found = evaluator.evaluate(a, b, there, wanted, evaluator.aliased(there, self.stored[b], wanted))
        assert found is not None  # a retention keeps what dropped tensors are computed from
        held = (
            evaluator.condensed.base_bytes
            + int(evaluator.condensed.small_bytes[a, b])
            + evaluator.condensed.bytes_of(there)
            + found.result_bytes
        )
        return held, evaluator.workspace(a, b, found.account, wanted)[0]
