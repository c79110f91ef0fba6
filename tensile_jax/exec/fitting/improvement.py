"""Seeks a better plan for a step that trains under one that was found in a short search (`improve="background"`).

    first call: a short search -> compiled quickly -> training begins
    meanwhile:  the whole search, in another process -> compiled -> the next call runs under the plan that it has found

The search is that of a call without `improve`. It begins with what compiling the first plan has shown. On CPUs, the executables
of the first plan are compiled with fewer optimizations, so they are always replaced.
"""

from functools import partial

from tensile_jax.budget import Budget
from tensile_jax.errors import BudgetTooSmall
from tensile_jax.exec.compiling.step import CompiledPlan, Step
from tensile_jax.exec.fitting.find_plan import begin, budget_of
from tensile_jax.exec.fitting.forms import fit_fastest
from tensile_jax.exec.fitting.planner_elsewhere import PlannerElsewhere
from tensile_jax.exec.fitting.planning_process import PlanningProcess
from tensile_jax.exec.fitting.quick_forms import fit_quickly

_SOON = "It was found in a short search, so that training begins soon. A faster one is sought meanwhile."
_BETTER = "It was sought while training went on, and replaces the one that a short search had found."
_SAME = "No faster plan was found while training went on. Its segments are compiled again, with all optimizations."


def fit_soon_or_fastest(step: Step, budget: Budget | None) -> CompiledPlan:
    """The plan of a short search, or that of the whole search if the short one finds none or is not needed; compiled.

    Raises:
        BudgetTooSmall: no plan keeps the budget.
    """
    soon = fit_quickly(step, budget)
    return fit_fastest(step, budget) if soon is None else soon.because(_SOON)


def improve(running: CompiledPlan) -> CompiledPlan | None:
    """The plan that the whole search finds for the budget of `running`, compiled; None if `running` is predicted to be as fast.

    Takes seconds, most of them in another process. Where `running` has executables with fewer optimizations, the result has
    better ones in any case.

    Args:
        running: the plan of a short search.

    Raises:
        TensileError: planning has failed.
    """
    with PlanningProcess() as process:
        step = running.step.origin.planned_by(partial(PlannerElsewhere, process))
        try:
            found = fit_fastest(step, budget_of(running.plan))
        except BudgetTooSmall:  # what is known says so, and yet `running` keeps the budget
            found = None
    if found is not None and found.plan.step_us < running.plan.step_us:
        return found.because(_BETTER, running)
    if not running.step.compiler.sizes_quickly:
        return None
    assert running.choice is not None  # the planner has made it
    fitting = begin(running.step, budget_of(running.plan))
    same = fitting.compiled(running.choice, fitting.goal())
    return None if same is None else same.because(_SAME, running)
