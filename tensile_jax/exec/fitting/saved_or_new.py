"""Runs a step under a saved plan, or under a new one within the same budget if only the weak types of its arguments are others.

JAX calls the type of an array weak if it comes from a Python number. State that begins with such arrays mostly has strong types
from the second call on, so that JAX traces the step once more, and gets another program. A saved plan is for one of the two
programs. If a call with the same shapes and dtypes has run under it already, the other program is planned anew, so that a
training does not end after its first step.
"""

from tensile_jax.budget import Budget
from tensile_jax.exec.compiling.step import CompiledPlan, Step
from tensile_jax.exec.fitting.find_plan import begin
from tensile_jax.exec.fitting.forms import fit_fastest, form_of, predict_fastest
from tensile_jax.exec.fitting.saved_plan import load, lower_budget, refuse_saved
from tensile_jax.plan_format import Plan

_NOTE = "The saved plan is for arguments of other weak types, so this plan was made anew within the same budget."


def fit_saved(step: Step, budget: Budget | None, saved: Plan, *, has_run: bool) -> CompiledPlan:
    """The saved plan, compiled, or a new one.

    Args:
        has_run: whether a call whose arguments differ in their weak types only has run under the saved plan.

    Raises:
        PlanFileError: the saved plan cannot be run (`load`), and no such call has run.
        BudgetTooSmall: no plan keeps the budget.
    """
    form = form_of(step, saved)
    if not _needs_new(form, saved, has_run=has_run):
        return load(form, budget, saved)
    return fit_fastest(step, lower_budget(begin(step, budget), saved)).noted(_NOTE)


def predict_saved(step: Step, budget: Budget | None, saved: Plan, *, has_run: bool) -> Plan:
    """The saved plan, checked, or a new one with estimated workspaces. Arguments and errors are those of `fit_saved`."""
    form = form_of(step, saved)
    if _needs_new(form, saved, has_run=has_run):
        return predict_fastest(step, lower_budget(begin(step, budget), saved)).noted(_NOTE).plan
    refuse_saved(form, budget, saved)
    return saved


def _needs_new(form: Step, saved: Plan, *, has_run: bool) -> bool:
    return has_run and form.graph.fingerprint != saved.fingerprint
