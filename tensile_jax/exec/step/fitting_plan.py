"""Finds the plan of a step that keeps its budget: predicted, or confirmed by compiling its segments.

    trace -> plan -> compile its segments -> the plan with XLA's own sizes -> run it, or plan again if it exceeds the budget

The planner (`plan/planner.py`) estimates each segment's workspace until XLA has compiled that segment. XLA's figure then replaces
the estimate. If the plan with these figures exceeds the budget, the planner chooses again, with what is known now, until a plan's
*compiled* peak is within the budget. If no choice is left, plans with the least peaks are compiled, so that the error can name a
budget that is known to work. Plain jit's own step is compiled first where the budget is a share of its peak, or where it may keep
a budget in bytes.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path

import jax

from tensile_jax.errors import BudgetTooSmall
from tensile_jax.exec.step.compile import memory_of
from tensile_jax.exec.step.confirmed_plans import Confirmed, confirmed_for
from tensile_jax.exec.step.kept_plans import Kept, keep, kept_file, load
from tensile_jax.exec.step.next_try import Tried, Try, first_try, next_try
from tensile_jax.exec.step.prepared_step import Compiled, PreparedStep, RunningPlan, package_version
from tensile_jax.plan import Choice, Goal, Planned
from tensile_jax.plan.result.joined import can_be_joined
from tensile_jax.plan.search.choice import WHOLE
from tensile_jax.plan_format import Plan

_MOST_ATTEMPTS = 8
_MORE_SEARCHES, _MORE_ATTEMPTS, _ROOM, _FASTER = 2, 4, 0.03, 0.99
"""Searches with what compiling has shown, and their attempts; the part of the limit that a plan must leave free for a search,
and the part of the plan's time in which another one must be predicted to run. A decoder of 124 million parameters at 50 %,
compiled for an H200, needs 40 % with its first plan, and takes 1.096 times plain time; with the second one 50 % and 1.073. At
30 %, its first plan needs 28.9 % and moves 1.243 times plain jit's bytes: with a room of 0.05 it was kept, and a second one moves
1.188. In the size of `make paper`, InceptionV4 was predicted to need 59 MB of a CPU, and needs 33: under 50 MB it had the plan
with the least peak, which takes 3 times as long as plain jit, and has one that takes 1.1 times as long."""
_MOST_SLOWDOWN_ATTEMPTS = 4
_NEAR = 1.3
"""Times the budget, if that is a number of bytes: a step that is predicted to need no more as one executable is compiled so,
since it may need less. Not tuned, but seen on 2026-11-27: plain jit's peak is predicted more than 1.3 times too high for 9 of 64
kinds of training steps on a CPU and for 1 of 53 that were compiled for an H200, and more than 1.1 times for 18 and 7."""
_NEAR_FLOOR = 0.5
"""A budget in bytes is not refused before the step is compiled as one executable, if no plan is known to need less than this part
of plain jit's predicted peak; nor is a share of that, if it is this part of what some plan needs. Not tuned."""
_MANY_OPERATORS = 1000
"""A step with more is refused without compiling it if its arguments and results alone exceed the budget; the smallest budget that
the error names is then a prediction. Not tuned: a step of 2,000 weights of 16 x 16 with Adam, which XLA compiles in half a minute
as one executable, was refused after more than a minute."""
_MOST_PROGRAMS = 3  # that are compiled of a step, each with a plan of its own (`next_try.py`)
_FAST = 1.02
"""Times the step as one executable: a plan that keeps the limit and is no slower is taken. A better one would gain less than
the compilations of a long training cost."""


def predict(prepared: PreparedStep) -> Plan:
    """The plan with estimated workspaces. Nothing is compiled.

    Raises:
        BudgetTooSmall: not even the plan with the least peak keeps the budget.
    """
    return predicted(prepared).plan


def predicted(prepared: PreparedStep) -> Compiled:
    """The plan that `predict` returns, with the choice from which it was made."""
    began = time.perf_counter()
    goal = prepared.goal()
    if prepared.options.policy == "auto" and goal.max_slowdown is None and not prepared.measured.workspaces:
        known = confirmed_for((prepared.kind, prepared.measured.whole))
        found = _in_line_with(prepared, known, goal, partial(_predict_anew, prepared), prepared.predicted_choice)
        known.add(goal.limit, found.plan.peak_bytes, found.choice)
    else:
        found = _predict_anew(prepared, goal)
    prepared.plan_s = time.perf_counter() - began
    return found


def prepare(prepared: PreparedStep) -> RunningPlan:
    """A plan whose compiled peak is within the budget, ready to run.

    Raises:
        BudgetTooSmall: there is no such plan; the error names the least peak that compiling has confirmed.
    """
    found = choose_and_compile(prepared)
    return RunningPlan(prepared, found.plan, found.executables, found.choice, found.joined)


def choose_and_compile(prepared: PreparedStep) -> Compiled:
    """A plan whose compiled peak is within the budget, and the executables of its segments.

    Raises:
        BudgetTooSmall: there is no such plan; the error names the least peak that compiling has confirmed.
    """
    if prepared.budget is None and prepared.options.max_slowdown is not None:
        return _chosen_before(prepared) or _choose(prepared, lambda: _fast_enough(prepared))
    if prepared.options.policy != "auto":
        return _chosen_before(prepared) or _choose(prepared, lambda: _search(prepared, prepared.goal()))
    confirmed = confirmed_for(prepared.kind)
    file = _take_over(prepared, confirmed)
    goal = prepared.goal()
    found = _in_line_with(prepared, confirmed, goal, partial(_search, prepared), prepared.compiled)
    confirmed_for(prepared.origin.kind).variants.add(prepared.kind)
    if confirmed.add(goal.limit, found.plan.peak_bytes, found.choice) and file is not None:
        floor = prepared.planner.floor_bytes(prepared.measured)
        keep(file, Kept(confirmed.entries, prepared.measured.workspaces, floor, prepared.measured.whole))
    return found


def try_whole(prepared: PreparedStep) -> None:
    """Compile plain `jax.jit`'s executable if the budget is a share of its peak, or hardly below its predicted peak.

    In the second case it may keep the budget: it is then the plan, and no other is sought. In the first case the planner
    meanwhile finds the smallest budget, which it needs in any case. Of equal steps, one is compiled so. None is compiled for
    nothing: where arguments and results alone exceed a budget in bytes, or, in a large step, even twice the predicted share.
    """
    prepared.recall_whole()
    if _is_share(prepared) and prepared.options.policy == "auto":
        _take_over(prepared, confirmed_for(prepared.kind))
    share = None if prepared.budget is None else prepared.budget.share
    predicted = untried_whole_bytes(prepared)
    if share is not None and share >= 1:
        prepared.whole_executable()  # it will run
    elif share is not None and predicted is not None and not _is_refused_at_once(prepared, prepared.limit() / _NEAR_FLOOR):
        prepared.begin_whole()
        prepared.planner.floor_bytes(prepared.measured)
        prepared.whole_executable()
    elif predicted is not None and prepared.options.policy == "auto" and predicted <= _NEAR * prepared.limit():
        if not _exceeded_at_ends(prepared, prepared.limit()):
            prepared.whole_executable()


def recall_share(prepared: PreparedStep) -> None:
    """If the budget is a share of plain jit's peak, take that peak over from an equal step, if plain jit was compiled for it."""
    if _is_share(prepared):
        prepared.recall_whole()


def whole_may_help(prepared: PreparedStep, floor_bytes: int) -> bool:
    """Whether plain jit's step should be compiled before a budget is refused of which no other plan needs less than this.

    It may need less than was predicted, and keep a budget in bytes; or more, so that a share of its peak suffices.
    """
    predicted = untried_whole_bytes(prepared)
    if predicted is None or prepared.options.policy != "auto":
        return False
    if not _is_share(prepared) and _is_refused_at_once(prepared, prepared.limit()):
        return False
    return floor_bytes <= prepared.limit() / _NEAR_FLOOR if _is_share(prepared) else predicted <= floor_bytes / _NEAR_FLOOR


def _exceeded_at_ends(prepared: PreparedStep, limit: float) -> bool:
    """Whether arguments and results alone exceed the limit."""
    return limit < prepared.planner.bytes_at_ends()


def _is_refused_at_once(prepared: PreparedStep, limit: float) -> bool:
    """Whether a budget of this step is refused without compiling it."""
    return len(prepared.graph.operators) > _MANY_OPERATORS and _exceeded_at_ends(prepared, limit)


def untried_whole_bytes(prepared: PreparedStep) -> int | None:
    """Plain jit's peak as predicted; None if it is known already, or if plain jit's step is not to be tried.

    A peak that may be above the device's memory does not count: XLA may then compute tensors of plain jit's step again by
    itself, which is slower than a plan (docs/results.md, "XLA's own rematerialization").
    """
    if prepared.measured.whole is not None or prepared.budget is None or not prepared.compiles_for_profile:
        return None
    predicted = prepared.planner.whole_peak_bytes(prepared.measured)
    return predicted if predicted <= memory_of(prepared.compiler.device) else None


# -- predicted ----------------------------------------------------------------------------------------------------------------


def _predict_anew(prepared: PreparedStep, goal: Goal) -> Compiled:
    without_margin = prepared.in_one_program or goal.max_slowdown is not None
    found = prepared.planner.plan(goal, prepared.measured) if without_margin else prepared.planned(goal)
    if found is None and prepared.planner.has_choice(goal.limit, prepared.measured):
        raise prepared.planner.no_verified_plan()
    if found is None:
        raise prepared.too_small(goal.limit, prepared.planner.floor_bytes(prepared.measured), None)
    if not without_margin:
        shown = prepared.predicted_choice(found.choice, goal)
        if shown is None:
            raise prepared.planner.no_verified_plan()
        return shown
    if prepared.in_one_program and can_be_joined(found.plan, prepared.graph):
        choice = replace(found.choice, barriers=first_try(goal.limit, devices=prepared.step.devices).form)
        as_program = prepared.planner.plan_of(choice, goal, prepared.measured)
        if as_program is not None:
            found = Planned(as_program, choice)
    return Compiled(prepared.with_basis(found.plan), None, found.choice)


# -- in line with the plans of other budgets ----------------------------------------------------------------------------------


def _choose(prepared: PreparedStep, search: Callable[[], Compiled]) -> Compiled:
    """What `search` finds. An equal step then has the same plan, although more is known of the step by then."""
    found = search()
    prepared.chosen[prepared.budget, prepared.planner.step.host_limit] = found.choice
    return found


def _chosen_before(prepared: PreparedStep) -> Compiled | None:
    """The plan that this step or an equal one has under this budget, compiled; None if there is none."""
    choice = prepared.chosen.get((prepared.budget, prepared.planner.step.host_limit))
    if choice is None:
        return None
    goal = prepared.goal()
    found = prepared.compiled(choice, goal)
    exceeded = found is not None and prepared.budget is not None and found.plan.peak_bytes > goal.limit
    return None if exceeded else found


def _in_line_with(
    prepared: PreparedStep,
    known: Confirmed,
    goal: Goal,
    search: Callable[[Goal], Compiled],
    plan_of: Callable[[Choice, Goal], Compiled | None],
) -> Compiled:
    """The plan that `search` finds, unless the plan of another budget fits better (`confirmed_plans.py`).

    Nothing fits better than the step as one executable, once that is known to keep the limit.

    Raises:
        BudgetTooSmall: `search` has found none, and no other fits.
    """
    limit = goal.limit
    whole = prepared.measured.whole
    above = WHOLE if whole is not None and whole <= limit else known.above(limit)
    found = None if above is None else plan_of(above, goal)
    # XLA may have chosen a kernel that needs more workspace than before
    if found is not None and found.plan.peak_bytes <= limit:
        return found
    try:
        found = search(goal)
    except BudgetTooSmall:
        lower = known.below(limit, 0)
        found = None if lower is None else plan_of(lower, goal)
        if found is None or found.plan.peak_bytes > limit:
            raise
        return found
    lower = None if found.plan.whole else known.below(limit, found.plan.peak_bytes)
    other = None if lower is None else plan_of(lower, goal)
    return found if other is None or other.plan.peak_bytes > limit else other


def _take_over(prepared: PreparedStep, confirmed: Confirmed) -> Path | None:
    """Add to `confirmed` what earlier processes have kept, unless this one has confirmed a choice itself; the file to keep
    it in."""
    order = [op.id for op in prepared.graph.operators]
    file = kept_file(repr((prepared.kind, order, package_version(), jax.__version__, version("jaxlib"))))
    kept = None if file is None or confirmed.entries else load(file)
    if kept is None or not all(prepared.planner.is_possible(entry.choice) for entry in kept.choices):
        return file
    for entry in kept.choices:
        confirmed.add(*entry)
    whole = prepared.measured.whole or kept.whole_bytes
    prepared.measured = replace(prepared.measured, workspaces={**kept.workspaces, **prepared.measured.workspaces}, whole=whole)
    prepared.planner.remember_floor(prepared.measured, kept.floor_bytes)
    return file


# -- confirmed by compiling ---------------------------------------------------------------------------------------------------


def _fast_enough(prepared: PreparedStep) -> Compiled:
    """The plan with the least compiled peak among those that were tried and are predicted to be fast enough."""
    best: Compiled | None = None
    for _ in range(_MOST_SLOWDOWN_ATTEMPTS):
        goal = prepared.goal()
        if best is not None and best.plan.peak_bytes <= goal.limit:
            break
        chosen = prepared.planner.plan(goal, prepared.measured)
        found = None if chosen is None else _as_program(prepared, chosen, goal) or prepared.compiled(chosen.choice, goal)
        if found is not None and (best is None or found.plan.peak_bytes < best.plan.peak_bytes):
            best = found
    if best is None:
        raise prepared.planner.no_verified_plan()
    return best


def _search(prepared: PreparedStep, goal: Goal) -> Compiled:
    """The plan of the planner's choice, compiled, within the limit.

    If the planner has no choice that compiling confirms, the plan with the least peak is compiled. Where compiling shows that
    predictions were too high, the step may fit as one executable, or the planner may have a faster plan by then.
    """
    chosen = prepared.planner.plan(goal, prepared.measured) if prepared.in_one_program else None
    found = None if chosen is None else _as_program(prepared, chosen, goal)
    if found is not None:
        return found
    if _is_refused_at_once(prepared, goal.limit):
        raise prepared.too_small(goal.limit, prepared.planner.floor_bytes(prepared.measured), None)
    if not _exceeded_at_ends(prepared, goal.limit):
        found = _within(prepared, goal, _MOST_ATTEMPTS)
    found = found or _smallest_plan(prepared, goal)
    predicted = None if found.plan.whole or prepared.options.policy != "auto" else untried_whole_bytes(prepared)
    if predicted is not None and predicted * _shown_ratio(prepared) <= goal.limit:
        whole = prepared.compiled(WHOLE, goal)
        if whole is not None and whole.plan.peak_bytes <= goal.limit:
            return whole
    for _ in range(_MORE_SEARCHES):
        slow = found.plan.step_us > _FAST * prepared.planner.step.whole_us
        if not slow or found.plan.peak_bytes > (1 - _ROOM) * goal.limit:
            break
        other = _within(prepared, goal, _MORE_ATTEMPTS, faster_than=_FASTER * found.plan.step_us)
        if other is None or other.plan.step_us >= found.plan.step_us:
            break
        found = other
    return found


def _shown_ratio(prepared: PreparedStep) -> float:
    """What the segments compiled so far have needed as workspace, over what was predicted; 1 if that was nothing."""
    shown = prepared.measured.workspaces.values()
    needed, expected = sum(one.nbytes for one in shown), sum(one.predicted for one in shown)
    return needed / expected if expected > 0 else 1.0


def _is_share(prepared: PreparedStep) -> bool:
    return prepared.budget is not None and prepared.budget.share is not None


def _within(prepared: PreparedStep, goal: Goal, attempts: int, faster_than: float = float("inf")) -> Compiled | None:
    """The planner's choice, compiled; if that exceeds the limit, the same choice with as few changes as possible.

    Compiling takes long, and what does not change is not compiled again. None if there is no choice, or none of which the
    planner says that it is faster than so many microseconds, or if the last attempt exceeds the limit, too.
    """
    chosen: Planned | None = None
    for attempt in range(1, attempts + 1):
        began = time.perf_counter()
        if chosen is not None:
            chosen = prepared.planner.revise(chosen.choice, goal, prepared.with_margin(goal, attempt))
        if chosen is None:
            chosen = prepared.planned(goal, attempt)
        prepared.plan_s += time.perf_counter() - began
        if chosen is None or chosen.plan.step_us > faster_than:
            return None
        found = prepared.compiled(chosen.choice, goal)
        if found is not None and found.plan.peak_bytes <= goal.limit:
            return found
    return None


def _as_program(prepared: PreparedStep, chosen: Planned, goal: Goal) -> Compiled | None:
    """The fastest plan in one program that keeps the limit, of those that are compiled in turn (`next_try.py`).

    None if none does, or segments cannot be joined; or if on one device, they are predicted to be faster launched one by one.
    """
    if not prepared.in_one_program:
        return None
    best: Compiled | None = None
    plan: Planned | None = chosen
    tried: list[Tried] = []
    following: Try | None = first_try(goal.limit, devices=prepared.step.devices)
    while following is not None and plan is not None and can_be_joined(plan.plan, prepared.graph):
        found = prepared.compiled(replace(plan.choice, barriers=following.form), goal)
        if found is None:
            break
        if found.plan.peak_bytes <= goal.limit and (best is None or found.plan.step_us < best.plan.step_us):
            best = found
        tried.append(Tried(*following, found.plan.peak_bytes))
        fast = best is not None and best.plan.step_us <= _FAST * prepared.planner.step.whole_us
        if fast or len(tried) == _MOST_PROGRAMS:
            break
        following = next_try(tried, goal.limit, devices=prepared.step.devices)
        if following is not None:
            began = time.perf_counter()
            plan = prepared.planner.plan(Goal(following.limit, goal.max_slowdown), prepared.measured)
            prepared.plan_s += time.perf_counter() - began
    slower = best is not None and best.joined is not None and best.joined.step_us > chosen.plan.step_us
    return None if slower and prepared.options.launch == "auto" and prepared.step.devices == 1 else best


def _smallest_plan(prepared: PreparedStep, goal: Goal) -> Compiled:
    """The plan with the least peak that compiling shows, made faster if it keeps the limit.

    Which plans are compiled does not depend on what was measured before: a budget that the error names must work in another
    process, too, which comes here with other measurements.

    Raises:
        BudgetTooSmall: it does not.
    """
    before = prepared.measured.workspaces
    prepared.measured = replace(prepared.measured, workspaces={})
    try:
        best = _lowest_compiled(prepared, goal)
    finally:
        prepared.measured = replace(prepared.measured, workspaces={**before, **prepared.measured.workspaces})
    if best is None:
        raise prepared.planner.no_verified_plan()
    if best.plan.peak_bytes > goal.limit:
        tried = not _is_share(prepared) and whole_may_help(prepared, best.plan.peak_bytes)
        whole = prepared.compiled(WHOLE, goal) if tried else None
        if whole is not None and whole.plan.peak_bytes < best.plan.peak_bytes:
            best = whole
    if best.plan.peak_bytes > goal.limit:
        raise prepared.too_small(goal.limit, best.plan.peak_bytes, best.plan)
    if best.plan.whole:
        return best
    other = prepared.compiled(prepared.planner.least_choice(prepared.measured), goal)
    faster = other is not None and other.plan.peak_bytes <= goal.limit and other.plan.step_us < best.plan.step_us
    return other if other is not None and faster else best


def _lowest_compiled(prepared: PreparedStep, goal: Goal) -> Compiled | None:
    """The plan with the least peak that compiling shows, or the first one that keeps the limit; None if all are refused."""
    best: Compiled | None = None
    seen: set[object] = set()
    for _ in range(_MOST_ATTEMPTS):
        choice = prepared.planner.lowest_choice(prepared.measured)
        if choice.key in seen or (best is not None and best.plan.peak_bytes <= goal.limit):
            break
        seen.add(choice.key)
        found = prepared.compiled(choice, goal)
        if found is not None and (best is None or found.plan.peak_bytes < best.plan.peak_bytes):
            best = found
    return best
