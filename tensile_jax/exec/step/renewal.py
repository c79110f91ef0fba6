"""Makes the next plan of a step that runs, from what was measured of the plan in use (TENSILE section IV-E).

    measured latencies -> corrected latencies -> a choice (planned in a process of its own) -> its segments compiled -> new plan

`plan/update.py` decides when a plan is due, and what to choose. Segments that the old plan has too are not compiled again. The
new plan keeps the same budget; if compiling shows that it does not, the step is planned again, and after some attempts the plan
in use stays.
"""

from dataclasses import replace
from typing import NamedTuple

from tensile_jax.exec.step.planning_process import choose_in_process
from tensile_jax.exec.step.prepared_step import Compiled, PreparedStep
from tensile_jax.plan import Goal
from tensile_jax.plan.update import Tracked, corrections_from

_MOST_ATTEMPTS = 3
_MARGIN = 0.02
"""The share of the limit that is kept free for what predictions miss, once more after every attempt, as when a step is first
planned (`prepared_step.py`)."""


class Renewed(NamedTuple):
    """A compiled plan, and the step whose planner has the corrections that it was made with."""

    prepared: PreparedStep
    found: Compiled


def renew(prepared: PreparedStep, running: Compiled, tracked: Tracked, reason: str) -> Renewed:
    """The next plan of a step. Its segments and copies are those of `running` if no others are predicted to be faster.

    Takes seconds, most of them in another process.

    Args:
        prepared: the step, with the planner that made `running`.
        reason: a sentence about why the plan is made, which is kept in it.

    Raises:
        TensileError: planning has failed.
    """
    limit = running.plan.peak_bytes if running.plan.budget_bytes is None else running.plan.budget_bytes
    goal = Goal(limit, running.plan.max_slowdown)
    corrections = corrections_from(prepared.planner, running.plan, tracked)
    corrected = prepared.corrected(corrections)
    measured = prepared.measured
    for attempt in range(_MOST_ATTEMPTS):
        margin = int(limit * _MARGIN * (attempt + 1))
        ask = (prepared.planner, corrections, running.choice, goal, replace(measured, margin=margin))
        found = choose_in_process(ask)
        if not found.changed:
            break
        compiled = corrected.compiled(found.choice, goal)
        if compiled is not None and compiled.plan.peak_bytes <= limit:
            return Renewed(corrected, _because(compiled, reason))
        measured = corrected.measured
    same = corrected.compiled(running.choice, goal)
    if same is None:  # a mistake of this package: only the times of a plan that was verified are others
        raise corrected.planner.no_verified_plan()
    return Renewed(corrected, _because(same, f"{reason} No other plan is predicted to be faster."))


def _because(found: Compiled, reason: str) -> Compiled:
    return replace(found, plan=replace(found.plan, reason=reason))
