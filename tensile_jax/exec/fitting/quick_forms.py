"""Finds a plan of a step in a short search, so that training begins soon (`improve="background"`).

The plan is that of the step as it is, with the rewrites that cost nothing. If the short search finds none for that, the plan is
that of the first other form for which it finds one (`rewritten_forms.py`). `forms.py` compares all forms, and finds the fastest.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from tensile_jax.budget import Budget
from tensile_jax.exec.compiling.step import CompiledPlan, Spent, Step
from tensile_jax.exec.fitting.find_plan import (
    begin,
    begin_to_predict,
    chosen_soon,
    drafted,
    fit_soon,
    has_been_planned,
    try_whole,
)
from tensile_jax.exec.fitting.fitting import Fitting
from tensile_jax.exec.fitting.forms import Draft, is_as_expected, spent_around
from tensile_jax.exec.fitting.knowledge_store import STORE
from tensile_jax.exec.fitting.rewritten_forms import always_rewritten, rewritten_each, worth_trying


def fit_quickly(step: Step, budget: Budget | None) -> CompiledPlan | None:
    """A plan of the step that is found in a short search and compiled to be there soon; `fit_fastest` may find a faster one.

    None if the short search finds none, if the step fits as one executable, or if an equal step was planned before, after which
    the whole search is short, too.
    """
    if STORE.form_of(step.structure) is not None:
        return None
    fitting = begin(step, budget, quickly=True)
    draft = try_whole(fitting, partial(_drafted, step, budget))
    if fitting.planner.whole_peak_bytes(fitting.measured) <= fitting.limit():
        return None
    if has_been_planned(fitting.of(always_rewritten(step))):
        return None
    before = Spent() if draft is None else draft.spent
    if draft is not None and is_as_expected(draft, fitting):
        form = fitting.of(draft.form)
        before += spent_around(form, fitting)
        found = fit_soon(form, chosen_soon(form, draft.precedent))
    else:
        found = _fit_first(fitting)
    return None if found is None else replace(found, spent=before + found.spent, soon=True)


def _fit_first(fitting: Fitting) -> CompiledPlan | None:
    """The plan of the first form for which a short search finds a choice, compiled; None if there is none, or if compiling
    refuses it.
    """
    before = Spent()  # on forms that have no plan
    for form in _in_turn(fitting):
        chosen = chosen_soon(form)
        if chosen is not None:
            before += spent_around(form, fitting)
            found = fit_soon(form, chosen)
            return None if found is None else replace(found, spent=before + found.spent)
        before += Spent() if form is fitting else form.spent
    return None


def _in_turn(fitting: Fitting) -> Iterator[Fitting]:
    """The forms of the step, each made when it is asked for."""
    step = fitting.step
    base = fitting.of(always_rewritten(step))
    yield base
    yield from map(fitting.of, rewritten_each(step, base.step, worth_trying(step, base, fitting.limit())))


def _drafted(step: Step, budget: Budget | None) -> Draft | None:
    """The plan for the share of plain jit's predicted peak, made while plain jit compiles to show its peak.

    None if the short search finds none, or if loops are opened: such a plan cannot be adapted to the peak.
    """
    fitting = begin_to_predict(step, budget)
    spent = Spent()
    for form in _in_turn(fitting):
        if form.planner.model.has_iterations:
            return None
        precedent = drafted(form, quickly=True)
        spent += form.spent
        if precedent is not None:
            return Draft(form.step, precedent, fitting.planner.whole_peak_bytes(fitting.measured), spent)
    return None
