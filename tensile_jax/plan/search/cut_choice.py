"""Cuts what a policy has decided into segments: what is kept until when, and what is absent when, by places of operators.

`auto` searches for its segments itself (`search.py`). The other policies decide on the operators' places, and find their segments
here: the cheapest boundaries with which every segment keeps the limit (`cut.py`), or boundaries of their own.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence

import numpy as np

from tensile_jax.ir import TensorId
from tensile_jax.plan.analysis.absence import Absences
from tensile_jax.plan.analysis.retention import Retention, retain
from tensile_jax.plan.result.layout import layout_of
from tensile_jax.plan.search.choice import LEAST, WHOLE, Choice, peak_of, whole_peak
from tensile_jax.plan.search.cut import cheapest_cuts
from tensile_jax.plan.search.step_model import StepModel
from tensile_jax.plan.search.workspace import Measured

_TRIES = 5  # limits that are tried if choices turn out to be above the limit
_PENALTY = 1e6  # microseconds for each byte above the limit: no cut exceeds the limit if any keeps it
_HALVINGS = 12  # steps of the bisection for the least peak


def choice_with(step: StepModel, retention: Retention, absences: Absences, boundaries: Sequence[int]) -> Choice:
    """The choice with these boundaries (places). Derived tensors are never kept (`condensed.py`)."""
    _, derived = step.classes
    begin = step.liveness.begin
    dropped = {**retention.dropped, **{t.id: begin[t.id] for t in step.graph.tensors if derived[t.id]}}
    return Choice(layout_of(retain(step.liveness, dropped), absences, boundaries))


def cut_of(step: StepModel, retention: Retention, absences: Absences, limit: float, measured: Measured) -> Choice | None:
    """The cheapest cut under the limit; None if there is none."""
    lower = limit
    for _ in range(_TRIES):
        boundaries = _cheapest(step, retention, absences, lower, measured)
        if boundaries is None:
            return None
        choice = choice_with(step, retention, absences, boundaries)
        above = peak_of(step, choice, measured) - limit
        if above <= 0:
            return choice
        lower -= above
    return None


def least_cut(step: StepModel, retention: Retention, absences: Absences, measured: Measured) -> Choice:
    """The cut with the least peak that bisection finds."""
    finest = choice_with(step, retention, absences, step.boundaries)
    best, least = finest, peak_of(step, finest, measured)
    low, high = 0.0, float(least)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        boundaries = _cheapest(step, retention, absences, middle, measured)
        choice = None if boundaries is None else choice_with(step, retention, absences, boundaries)
        peak = float("inf") if choice is None else peak_of(step, choice, measured)
        if choice is not None and peak <= high:
            best, high = choice, peak
        else:
            low = middle
        if high - low < 1:
            break
    return best


Decision = tuple[Retention, Absences]
"""What is dropped, and what is absent when."""


def first_that_fits(
    step: StepModel, options: Iterable[tuple[Hashable, Callable[[], Decision]]], limit: float, measured: Measured
) -> Choice | None:
    """The cheapest cut under the limit of the first decision that has one; the step as one executable if that fits.

    This is for policies whose decisions differ only in how much memory they save.

    Args:
        options: a key of each decision, and a function that makes it; each is called once for a key.
    """
    if limit > LEAST and whole_peak(step, measured) <= limit:
        return WHOLE
    decisions = (step.decided(key, make) for key, make in options)
    if limit == LEAST:
        cuts = (least_cut(step, *decision, measured) for decision in decisions)
        return min(cuts, key=lambda choice: peak_of(step, choice, measured))
    return next((c for decision in decisions if (c := cut_of(step, *decision, limit, measured)) is not None), None)


def _cheapest(
    step: StepModel, retention: Retention, absences: Absences, limit: float, measured: Measured
) -> tuple[int, ...] | None:
    """The places of the cheapest boundaries with which no segment is above the limit, as far as the account of `cut.py` says."""
    model = step.model.with_measured(measured)
    condensed = model.step
    ids = np.array(condensed.tensors, dtype=np.int64)
    begin, end = step.liveness.begins[ids], retention.ends[ids]
    stored: list[int] = []
    for place in model.places:
        there = (begin < place) & (place <= end)
        for bit in np.flatnonzero(there).tolist():
            there[bit] = not any(a.leave < place <= a.back for a in absences.get(condensed.tensors[bit], ()))
        stored.append(sum(1 << bit for bit in np.flatnonzero(there).tolist()))
    stored[0] = condensed.at_begin & ~sum(1 << bit for bit, t in enumerate(condensed.tensors) if _away_at_first(absences, t))
    cuts = cheapest_cuts(model, stored, limit, _PENALTY, range(len(model.places)))
    return tuple(model.places[cut] for cut in cuts)


def _away_at_first(absences: Absences, tensor: TensorId) -> bool:
    return any(a.leave < 0 <= a.back for a in absences.get(tensor, ()))
