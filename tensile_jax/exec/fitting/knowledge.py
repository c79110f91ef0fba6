"""Remembers what was learned of one kind of step: the sizes that compiling has shown, and the planner's choices that kept a
budget. Steps are of one kind if they have the same program and options.

A *choice* says where the step is cut into segments, and when each tensor is on the device. Plans are made from choices, with
estimated sizes until compiling shows the true ones. A lower budget must never have a plan with a higher peak, nor a plan where a
higher budget has none. But each budget has a search of its own, and the searches of two budgets may compile different choices.
Therefore a new budget follows the plans of the budgets that were planned before:

    1. If the plan of the next higher budget keeps the new budget, that plan is taken.
    2. Otherwise a search is made. If the search finds no plan, or a plan with a lower peak than that of the next lower budget,
       the plan of the next lower budget is taken instead.

If a plan was made before for a budget, no new search is made for that budget. `Knowledge` is an immutable value: whoever learns
more makes a new one. The store (`knowledge_store.py`) holds the latest value for each kind of step.
"""

from bisect import insort
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from tensile_jax.plan import Choice, CompiledSizes
from tensile_jax.plan.search.cost.workspace import Compared, SegmentKey


class Entry(NamedTuple):
    """A choice that was compiled for a limit, and the peak of its plan."""

    limit: float
    peak_bytes: int
    choice: Choice


class Precedent(NamedTuple):
    """An earlier plan of a step with the same operators, which can be adapted to make a new plan without a search.

    It was made for other shapes, or before plain jit's peak was known.

    Attributes:
        share: its limit over plain jit's peak.
        slowdown: the predicted time of a step over that of the step as one executable.
        choice: what the planner chose.
        workspaces: what compiling has shown of its segments, and of others that were tried.
    """

    share: float
    slowdown: float
    choice: Choice
    workspaces: Mapping[SegmentKey, Compared]


@dataclass(frozen=True, slots=True)
class Knowledge:
    """What is known of one kind of step.

    Attributes:
        measured: the workspaces that XLA has shown, and plain jit's peak, if plain jit was compiled.
        confirmed: the choices that were compiled, in the order of their budgets, which is also the order of their peaks.
        floor_bytes: the smallest budget that works, as far as `measured` shows; None unless an earlier process has stored it.
        forms: the kinds of the forms of this step (`forms.py`) of which any plan is confirmed.
    """

    measured: CompiledSizes = CompiledSizes()
    confirmed: tuple[Entry, ...] = ()
    floor_bytes: int | None = None
    forms: frozenset[Hashable] = frozenset()

    @property
    def jit_peak_bytes(self) -> int | None:
        """Plain jit's peak; None if plain jit was not compiled."""
        return self.measured.whole

    def at(self, limit: float) -> Choice | None:
        """The choice that was confirmed for this budget; None if there is none."""
        return next((entry.choice for entry in self.confirmed if entry.limit == limit), None)

    def next_higher(self, limit: float) -> Entry | None:
        """What was confirmed for the lowest budget that is not below `limit`."""
        return next((entry for entry in self.confirmed if entry.limit >= limit), None)

    def above(self, limit: float) -> Choice | None:
        """The choice of the same or the next higher budget, if its plan keeps `limit`; otherwise None."""
        entry = self.next_higher(limit)
        return entry.choice if entry is not None and entry.peak_bytes <= limit else None

    def below(self, limit: float, peak_bytes: float) -> Choice | None:
        """The choice of the next lower budget, if its plan has a higher peak than `peak_bytes`; otherwise None."""
        entry = next((e for e in reversed(self.confirmed) if e.limit < limit), None)
        return entry.choice if entry is not None and entry.peak_bytes > peak_bytes else None

    def with_confirmed(self, limit: float, peak_bytes: int, choice: Choice) -> "Knowledge":
        """With this choice for a budget; the same if there is one for it already."""
        if self.at(limit) is not None:
            return self
        confirmed = list(self.confirmed)
        insort(confirmed, Entry(limit, peak_bytes, choice), key=lambda e: e.limit)
        return replace(self, confirmed=tuple(confirmed))

    def with_jit_peak(self, nbytes: int | None) -> "Knowledge":
        """With this peak of plain jit; the same if it is None, or known already."""
        if nbytes is None or nbytes == self.measured.whole:
            return self
        return replace(self, measured=replace(self.measured, whole=nbytes))

    def merged(self, other: "Knowledge") -> "Knowledge":
        """Both together; where they differ, what `other` says."""
        found = self.with_jit_peak(other.jit_peak_bytes)
        for entry in other.confirmed:
            found = found.with_confirmed(*entry)
        workspaces = {**self.measured.workspaces, **other.measured.workspaces}
        if workspaces != self.measured.workspaces:
            found = replace(found, measured=replace(found.measured, workspaces=workspaces))
        return replace(found, floor_bytes=None, forms=self.forms | other.forms)
