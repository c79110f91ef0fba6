"""Makes the next plan of a running step, from what was measured while the present plan ran (TENSILE section IV-E).

    measured latencies -> corrected predictions -> a choice of segments and copies -> its segments compiled -> the next plan

The choice is made in a process of its own (`planning_process.py`), so that training goes on meanwhile. `plan/drift.py` decides
when a new plan is due, and what is chosen. Segments that the present plan also has are not compiled again. The new plan has the
same budget. If compiling shows that it exceeds the budget, the step is planned again with a larger margin. If several attempts
fail, the present segments and copies stay.
"""

from dataclasses import replace

from tensile_jax.exec.compiling.step import CompiledPlan
from tensile_jax.exec.fitting.find_plan import begin, budget_of, learn
from tensile_jax.exec.fitting.planning_process import PlanningProcess
from tensile_jax.plan import Goal
from tensile_jax.plan.drift import Tracked, choose_again, corrections_from

_MOST_ATTEMPTS = 3
_MARGIN = 0.02
"""Of the limit: what is kept free for what predictions miss, once more after every attempt. A larger margin gives memory away, a
smaller one needs more rounds of compiling (`make bench-renewal`)."""


def renew(running: CompiledPlan, tracked: Tracked, reason: str) -> CompiledPlan:
    """The next plan of a step. Its segments and copies are those of `running` if no others are predicted to be faster.

    Takes seconds, most of them in another process. The step of the new plan predicts what was measured.

    Args:
        running: the plan in use; the planner has made it.
        reason: a sentence about why the plan is made, which is kept in it.

    Raises:
        TensileError: planning has failed.
    """
    step, choice = running.step, running.choice
    assert choice is not None
    limit = running.plan.peak_bytes if running.plan.budget_bytes is None else running.plan.budget_bytes
    goal = Goal(limit, running.plan.max_slowdown)
    corrections = corrections_from(step.planner, running.plan, tracked)
    fitting = begin(step.corrected(corrections), budget_of(running.plan))
    try:
        with PlanningProcess() as process:
            for attempt in range(_MOST_ATTEMPTS):
                measured = replace(fitting.measured, margin=int(limit * _MARGIN * (attempt + 1)))
                found = process.call(choose_again, step.planner, corrections, choice, goal, measured)
                if not found.changed:
                    break
                compiled = fitting.compiled(found.choice, goal)
                if compiled is not None and compiled.plan.peak_bytes <= limit:
                    return compiled.because(reason, running)
        same = fitting.compiled(choice, goal)
    finally:
        learn(fitting)
    if same is None:  # a mistake of this package: only the times of a plan that was verified are others
        raise fitting.planner.no_verified_plan()
    return same.because(f"{reason} No other plan is predicted to be faster.", running)
