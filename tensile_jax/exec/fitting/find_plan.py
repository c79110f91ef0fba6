"""Finds a plan that keeps a step within its memory budget: only predicted, or also confirmed by compiling the plan's segments.

    trace -> plan -> compile its segments -> the plan with XLA's own sizes -> run it, or plan again if it exceeds the budget

A *segment* is a stretch of operators that is compiled as one executable. Its *workspace* is the memory that it needs beside
inputs and outputs. The planner (`plan/planner.py`) estimates each segment's workspace until XLA has compiled that segment.
XLA's figure then replaces the estimate. If the plan then exceeds the budget, the planner makes another one from what is known
by now. This goes on until a plan's *compiled* peak is within the budget, or until several attempts have failed. In the second
case, the plans with the least predicted peaks are compiled. If their compiled peaks also exceed the budget, `BudgetTooSmall` is
raised. The error names the least of these compiled peaks, which is a budget that works.

If the budget is a share of plain jit's peak, or if plain jit may fit, plain `jax.jit` compiles the unplanned step first.

A step can be planned in several *forms*, which are variants of the step with the same results. This module plans one form under
one budget, and decides which plans are compiled. `fitting.py` makes and compiles these plans. `forms.py` chooses the form.
"""

from collections.abc import Callable, Collection, Hashable
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TypeVar

import jax

from tensile_jax.budget import Budget
from tensile_jax.errors import BudgetTooSmall
from tensile_jax.exec.compiling.compiler import memory_of
from tensile_jax.exec.compiling.step import CompiledPlan, Step, package_version
from tensile_jax.exec.fitting.fitting import Fitting
from tensile_jax.exec.fitting.knowledge import Knowledge, Precedent
from tensile_jax.exec.fitting.knowledge_store import STORE, keep, kept_file, load
from tensile_jax.exec.fitting.programs import NEARLY_PLAIN_TIME, as_program, predicted_program
from tensile_jax.ir import TensorId
from tensile_jax.plan import Choice, CompiledSizes, Goal, Planned, Planner
from tensile_jax.plan.search.choice import WHOLE
from tensile_jax.plan_format import Plan

# Each trades compilations for a faster plan (`make bench-h200`, `make bench-first-call`), unless it says otherwise.
_MOST_ATTEMPTS = 8
_MORE_ATTEMPTS = 2  # of a plan that is improved or adapted
_SOON_ATTEMPTS = 4  # of a plan of a short search
_FRUITLESS = 2  # attempts in a row that do not lower the peak, after which a plan is not revised any more
_ROOM = 0.03  # of the limit: what a plan must leave free to be improved
_LIKELY_ATTEMPTS = 2  # compiled to run at once; later ones are first compiled for their sizes only
_NEXT_PLAN_TIME = 0.97  # of the plan's time: what another plan must be predicted to reach to be compiled
_MOST_SLOWDOWN_ATTEMPTS = 4
_NEAR = 1.3  # of a budget in bytes: plain jit is compiled if its predicted peak, often too high, is below; not tuned
_NEAR_SHOWN = 1.1  # the same, once segments have shown by how much predictions are wrong; not tuned
_NEAR_FLOOR = 0.5
"""Before refusing, compile plain jit if it could change the answer: for bytes, if the floor is at least 0.5 of its predicted
peak; for a share, if the limit is at least 0.5 of the floor. Not tuned."""
_MANY_OPERATORS = 1000  # a larger step whose arguments and results exceed the budget is refused without compiling; not tuned

_Found = TypeVar("_Found")


def begin(step: Step, budget: Budget | None, *, quickly: bool = False) -> Fitting:
    """Begin to fit a step to a budget, with what this process knows of its kind.

    Args:
        quickly: whether executables are to be there soon, and may run more slowly.
    """
    whole = STORE.known(step.origin.kind).jit_peak_bytes
    return Fitting(step, budget, STORE.known(step.kind).with_jit_peak(whole), quickly=quickly)


def budget_of(plan: Plan) -> Budget | None:
    """The budget that a plan was made for; None if there was none."""
    return None if plan.budget_bytes is None else Budget(plan.budget_bytes, None, plan.budget_basis)


def begin_to_predict(step: Step, budget: Budget | None) -> Fitting:
    """Begin to predict a plan. Of all that compiling has shown, only plain jit's peak is used."""
    known = Knowledge().with_jit_peak(STORE.known(step.origin.kind).jit_peak_bytes)
    return Fitting(step, budget, known, predicts=True)


def jit_peak_bytes(step: Step) -> int:
    """The peak of plain `jax.jit`, which is compiled for this, if that was not done yet."""
    fitting = begin(step, None)
    found = fitting.jit_peak_bytes
    learn(fitting)
    return found


def predict(fitting: Fitting) -> CompiledPlan:
    """The plan with estimated workspaces. Nothing is compiled.

    Raises:
        BudgetTooSmall: not even the plan with the least peak keeps the budget.
    """
    goal = fitting.goal()
    if fitting.options.policy != "auto" or goal.max_slowdown is not None or fitting.measured.workspaces:
        return _predict_anew(fitting, goal)
    kind = "predicted", fitting.step.kind, fitting.measured.whole
    found = _in_line_with(fitting, STORE.known(kind), goal, partial(_predict_anew, fitting), fitting.predicted)
    _confirm(kind, goal.limit, found)
    return found


def drafted(fitting: Fitting, *, quickly: bool = False) -> Precedent | None:
    """A plan that is made before plain jit's peak is known, and adapted once it is; None if there is no such plan.

    Args:
        fitting: one that predicts.
        quickly: whether it is found in a short search.
    """
    if fitting.step.bodies or fitting.planner.model.has_iterations:
        return None
    goal = fitting.goal()
    chosen = fitting.chosen_quickly(goal) if quickly else fitting.chosen_with_margin(goal)
    return None if chosen is None or chosen.plan.whole else _precedent(fitting.planner, goal.limit, fitting.measured, chosen)


def fit(fitting: Fitting, draft: Precedent | None = None) -> CompiledPlan:
    """A plan whose compiled peak is within the budget. What was learned is stored, also where there is no such plan.

    Args:
        draft: a plan of the same step, which is adapted if it resembles what is asked for.

    Raises:
        BudgetTooSmall: there is no such plan; the error names the least peak that compiling has confirmed.
    """
    try:
        return _fit(fitting, draft)
    finally:
        learn(fitting)


def chosen_soon(fitting: Fitting, draft: Precedent | None = None) -> Planned | None:
    """The choice of a short search, and the plan of that choice; None if none is found.

    Args:
        draft: a plan of the same step, which is adapted if it resembles what is asked for.
    """
    goal = fitting.goal()
    adapted = None if draft is None else fitting.adapted(draft, goal)
    found = adapted or fitting.chosen_quickly(goal)
    return None if found is None or found.plan.whole else found


def fit_soon(fitting: Fitting, chosen: Planned | None) -> CompiledPlan | None:
    """The plan of this choice, compiled, or a few revisions of it, until one is within the budget; None if none is.

    Other budgets do not know of it: they are searched for as if it was not there.
    """
    try:
        return None if chosen is None else _within(fitting, fitting.goal(), _SOON_ATTEMPTS, chosen)
    finally:
        learn(fitting)


def has_been_planned(fitting: Fitting) -> bool:
    """Whether this process, or an earlier one, has confirmed a plan of the step."""
    take_over(fitting)
    return bool(fitting.known.confirmed or STORE.known(fitting.step.kind).confirmed)


def offload_state(compiled: CompiledPlan, tensors: Collection[TensorId]) -> CompiledPlan:
    """The same segments with these state tensors on the host between their uses, across the iteration boundary.

    The new plan is compiled if `compiled` has executables. If the replay, which checks every plan, refuses it, the result is
    `compiled`.
    """
    fitting = begin(compiled.step, budget_of(compiled.plan))
    found = fitting.offload_state(compiled, tensors)
    learn(fitting)
    return found


def learn(fitting: Fitting) -> None:
    """Store what is known of the step's kind by now, and plain jit's peak for all of the step's forms."""
    step, learned = fitting.step, fitting.known
    STORE.learn(step.kind, lambda known: known.merged(learned))
    if step.origin is not step:
        STORE.learn(step.origin.kind, lambda known: known.with_jit_peak(learned.jit_peak_bytes))


def _fit(fitting: Fitting, draft: Precedent | None) -> CompiledPlan:
    step, options = fitting.step, fitting.options
    wants_least = fitting.budget is None and options.max_slowdown is not None
    if options.policy != "auto" or wants_least:
        limit = float("inf") if wants_least else fitting.limit()
        found = _chosen_before(fitting, limit)
        if found is None:
            found = _fast_enough(fitting) if wants_least else _search(fitting, None, fitting.goal())
            _confirm(step.kind, limit, found)
        return found
    file = take_over(fitting)
    goal = fitting.goal()
    before = STORE.known(step.kind).merged(fitting.known)
    found = _in_line_with(fitting, before, goal, partial(_search, fitting, draft), fitting.compiled)
    learn(fitting)
    known = _confirm(step.kind, goal.limit, found)
    STORE.learn(step.origin.kind, lambda known: replace(known, forms=known.forms | {step.kind}))
    if before.at(goal.limit) is None and file is not None:
        keep(file, known, fitting.planner.quick_floor(fitting.measured))
    return found


def _confirm(kind: Hashable, limit: float, found: CompiledPlan) -> Knowledge:
    """Store the choice of a plan that keeps a budget."""
    choice = found.choice
    assert choice is not None  # the planner has made it
    step = found.step
    if found.executables is not None and not found.plan.whole and not step.bodies and limit < float("inf"):
        precedent = _precedent(step.planner, limit, STORE.known(kind).measured, Planned(found.plan, choice))
        STORE.set_precedent(step.origin.structure, step.structure, precedent)
    return STORE.learn(kind, lambda known: known.with_confirmed(limit, found.plan.peak_bytes, choice))


def _precedent(planner: Planner, limit: float, measured: CompiledSizes, found: Planned) -> Precedent:
    share = limit / max(planner.whole_peak_bytes(measured), 1)
    return Precedent(share, found.plan.step_us / planner.model.whole_us, found.choice, measured.workspaces)


def try_whole(fitting: Fitting, meanwhile: Callable[[], _Found | None] = lambda: None) -> _Found | None:
    """Compile plain `jax.jit`'s executable if the budget is a share of its peak, or not far below its predicted peak.

    If plain jit keeps a budget in bytes, it is the plan. While plain jit compiles for a share, the planner finds the smallest
    budget, which it needs in any case, and `meanwhile` is called; what that returns is the result. Equal steps share the
    executable. Nothing is compiled if arguments and results alone exceed a budget in bytes or, in a large step, twice the
    predicted share.
    """
    if _is_share(fitting) and fitting.options.policy == "auto":
        take_over(fitting)
    share = None if fitting.budget is None else fitting.budget.share
    predicted = untried_whole_bytes(fitting)
    found = None
    if share is not None and share >= 1:
        fitting.compile_plain_jit(to_run=True)
    elif share is not None and predicted is not None and not _is_refused_at_once(fitting, fitting.limit() / _NEAR_FLOOR):
        fitting.begin_plain_jit()
        fitting.planner.quick_floor(fitting.measured)
        found = meanwhile()
        fitting.compile_plain_jit(to_run=False)
    elif predicted is not None and fitting.options.policy == "auto" and predicted <= _NEAR * fitting.limit():
        if not _exceeded_at_ends(fitting, fitting.limit()):
            fitting.compile_plain_jit(to_run=True)
    learn(fitting)
    return found


def whole_may_help(fitting: Fitting, floor_bytes: int) -> bool:
    """Whether compiling plain jit could save a budget from being refused, if every other plan needs `floor_bytes` or more.

    Plain jit may need less than predicted, and so fit a budget in bytes; or more, so that a share of its peak suffices.
    """
    predicted = untried_whole_bytes(fitting)
    if predicted is None or fitting.options.policy != "auto":
        return False
    if not _is_share(fitting) and _is_refused_at_once(fitting, fitting.limit()):
        return False
    return floor_bytes <= fitting.limit() / _NEAR_FLOOR if _is_share(fitting) else predicted <= floor_bytes / _NEAR_FLOOR


def _exceeded_at_ends(fitting: Fitting, limit: float) -> bool:
    """Whether arguments and results alone exceed the limit."""
    return limit < fitting.planner.bytes_at_ends()


def _is_refused_at_once(fitting: Fitting, limit: float) -> bool:
    """Whether a budget of this step is refused without compiling it."""
    return len(fitting.step.graph.operators) > _MANY_OPERATORS and _exceeded_at_ends(fitting, limit)


def untried_whole_bytes(fitting: Fitting) -> int | None:
    """Plain jit's peak as predicted; None if it is known already, or if plain jit's step is not to be tried.

    A peak that may be above the device's memory does not count: XLA may then compute tensors of plain jit's step again by
    itself, which is slower than a plan (docs/predicted.md, "XLA's own rematerialization").
    """
    if fitting.measured.whole is not None or fitting.budget is None or not fitting.step.compiles_for_profile:
        return None
    predicted = fitting.planner.whole_peak_bytes(fitting.measured)
    return predicted if predicted <= memory_of(fitting.step.compiler.device) else None


# -- predicted ----------------------------------------------------------------------------------------------------------------


def _predict_anew(fitting: Fitting, goal: Goal) -> CompiledPlan:
    in_one_program = fitting.step.in_one_program
    program = predicted_program(fitting, goal) if in_one_program else None
    if program is not None and program.plan.peak_bytes <= goal.limit:
        return fitting.as_predicted(program)
    without_margin = in_one_program or goal.max_slowdown is not None
    found = fitting.chosen(goal) if without_margin else fitting.chosen_with_margin(goal)
    if found is None and fitting.planner.has_choice(goal.limit, fitting.measured):
        raise fitting.planner.no_verified_plan()
    if found is None:
        raise fitting.too_small(goal.limit, fitting.floor_bytes(), None)
    if not without_margin:
        shown = fitting.predicted(found.choice, goal)
        if shown is None:
            raise fitting.planner.no_verified_plan()
        return shown
    return fitting.as_predicted(found)


# -- in line with the plans of other budgets ----------------------------------------------------------------------------------


def _chosen_before(fitting: Fitting, limit: float) -> CompiledPlan | None:
    """The plan that an equal step has under this budget, compiled; None if there is none."""
    choice = STORE.known(fitting.step.kind).at(limit)
    if choice is None:
        return None
    goal = fitting.goal()
    found = fitting.compiled(choice, goal)
    exceeded = found is not None and fitting.budget is not None and found.plan.peak_bytes > goal.limit
    return None if exceeded else found


def _in_line_with(
    fitting: Fitting,
    known: Knowledge,
    goal: Goal,
    search: Callable[[Goal], CompiledPlan],
    plan_of: Callable[[Choice, Goal], CompiledPlan | None],
) -> CompiledPlan:
    """The plan that `search` finds, unless the plan of another budget fits better (`knowledge.py`).

    Nothing fits better than the step as one executable, once that is known to keep the limit.

    Raises:
        BudgetTooSmall: `search` has found none, and no other fits.
    """
    limit = goal.limit
    whole = fitting.measured.whole
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


def take_over(fitting: Fitting) -> Path | None:
    """Take over what earlier processes have kept, unless this one has confirmed a choice itself; the file to keep it in."""
    step = fitting.step
    order = [op.id for op in step.graph.operators]
    file = kept_file(repr((step.kind, order, package_version(), jax.__version__, version("jaxlib"))))
    kept = None if file is None or STORE.known(step.kind).confirmed else load(file)
    if kept is not None and all(fitting.planner.is_possible(entry.choice) for entry in kept.confirmed):
        fitting.recall(kept)
    return file


# -- confirmed by compiling ---------------------------------------------------------------------------------------------------


def _fast_enough(fitting: Fitting) -> CompiledPlan:
    """The plan with the least compiled peak among those that were tried and are predicted to be fast enough."""
    best: CompiledPlan | None = None
    for _ in range(_MOST_SLOWDOWN_ATTEMPTS):
        goal = fitting.goal()
        if best is not None and best.plan.peak_bytes <= goal.limit:
            break
        chosen = fitting.chosen(goal)
        found = None if chosen is None else as_program(fitting, goal) or fitting.compiled(chosen.choice, goal)
        if found is not None and (best is None or found.plan.peak_bytes < best.plan.peak_bytes):
            best = found
    if best is None:
        raise fitting.planner.no_verified_plan()
    return best


def _search(fitting: Fitting, draft: Precedent | None, goal: Goal) -> CompiledPlan:
    """The plan of the planner's choice, compiled, within the limit; or `draft`, or the plan for other shapes, adapted.

    If the planner has no choice that compiling confirms, the plan with the least peak is compiled. Where compiling shows that
    predictions were too high, the step may fit as one executable, or the planner may have a faster plan by then.
    """
    found = as_program(fitting, goal)
    if found is not None:
        return found
    if _is_refused_at_once(fitting, goal.limit):
        raise fitting.too_small(goal.limit, fitting.floor_bytes(), None)
    if not _exceeded_at_ends(fitting, goal.limit):
        precedent = draft or STORE.precedent(fitting.step.structure)
        adapted = None if precedent is None else fitting.adapted(precedent, goal)
        found = None if adapted is None else _within(fitting, goal, _MORE_ATTEMPTS, adapted)
        found = found or _within(fitting, goal, _MOST_ATTEMPTS)
    found = found or _smallest_plan(fitting, goal)
    predicted = None if found.plan.whole or fitting.options.policy != "auto" else untried_whole_bytes(fitting)
    if predicted is not None and predicted * _shown_ratio(fitting) <= _NEAR_SHOWN * goal.limit:
        whole = fitting.compiled(WHOLE, goal)
        if whole is not None and whole.plan.peak_bytes <= goal.limit:
            return whole
    return _improved(fitting, goal, found)


def _improved(fitting: Fitting, goal: Goal, found: CompiledPlan) -> CompiledPlan:
    """The plan, made faster once where compiling has shown that it leaves memory unused."""
    slow = found.plan.step_us > NEARLY_PLAIN_TIME * fitting.planner.model.whole_us
    if found.choice is None or not slow or found.plan.peak_bytes > (1 - _ROOM) * goal.limit:
        return found
    better = fitting.improved(found.choice, goal)
    other = None if better is None else _within(fitting, goal, _MORE_ATTEMPTS, better, _NEXT_PLAN_TIME * found.plan.step_us)
    return found if other is None or other.plan.step_us >= found.plan.step_us else other


def _shown_ratio(fitting: Fitting) -> float:
    """What the segments compiled so far have needed as workspace, over what was predicted; 1 if that was nothing."""
    shown = fitting.measured.workspaces.values()
    needed, expected = sum(one.nbytes for one in shown), sum(one.predicted for one in shown)
    return needed / expected if expected > 0 else 1.0


def _is_share(fitting: Fitting) -> bool:
    return fitting.budget is not None and fitting.budget.share is not None


def _within(
    fitting: Fitting, goal: Goal, attempts: int, chosen: Planned | None = None, faster_than: float = float("inf")
) -> CompiledPlan | None:
    """The planner's choice, or `chosen`, compiled; if that exceeds the limit, the same choice with as few changes as possible.

    Few changes matter because segments that do not change are not compiled again. None if the planner has no choice, if its
    choice is predicted to take more than `faster_than` microseconds, or if the last attempt still exceeds the limit. The last
    attempt is the one after which two in a row have not lowered the peak, or else number `attempts`.
    """
    given = chosen
    least, fruitless = float("inf"), 0
    for attempt in range(1, attempts + 1):
        if chosen is not None and attempt > 1:
            chosen = fitting.revised(chosen.choice, goal, attempt)
        if chosen is None and given is None:
            chosen = fitting.chosen_with_margin(goal, attempt)
            chosen = (fitting.chosen_in_hope(goal, chosen) if attempt == 1 else None) or chosen
        if chosen is None or chosen.plan.step_us > faster_than:
            return None
        found = _tried(fitting, chosen.choice, goal, likely=attempt <= _LIKELY_ATTEMPTS)
        peak = float("inf") if found is None else found.plan.peak_bytes
        if peak <= goal.limit:
            return found
        least, fruitless = min(least, peak), 0 if peak < least else fruitless + 1
        if fruitless == _FRUITLESS:
            return None
    return None


def _tried(fitting: Fitting, choice: Choice, goal: Goal, *, likely: bool) -> CompiledPlan | None:
    """The plan of `choice` with XLA's sizes, and with its executables if it keeps the limit; None if its replay refuses it.

    Args:
        likely: whether the plan will probably keep the limit. Otherwise only its sizes are asked for at first.
    """
    if not likely and not fitting.quickly:
        sized = fitting.sized(choice, goal)
        if sized is None or sized.plan.peak_bytes > goal.limit:
            return sized
    return fitting.compiled(choice, goal)


def _smallest_plan(fitting: Fitting, goal: Goal) -> CompiledPlan:
    """The plan with the least peak that compiling shows, made faster if it keeps the limit.

    Earlier compiled sizes do not decide which plans are compiled here. A budget that the error names must also work in another
    process, which knows other sizes.

    Raises:
        BudgetTooSmall: it does not.
    """
    with fitting.without_workspaces():
        best = _lowest_sized(fitting, goal)
    if best is None:
        raise fitting.planner.no_verified_plan()
    if best.plan.peak_bytes > goal.limit:
        tried = not _is_share(fitting) and whole_may_help(fitting, best.plan.peak_bytes)
        whole = fitting.sized(WHOLE, goal) if tried else None
        if whole is not None and whole.plan.peak_bytes < best.plan.peak_bytes:
            best = whole
    if best.plan.peak_bytes <= goal.limit and not best.plan.whole:
        other = fitting.sized(fitting.planner.least_choice(fitting.measured), goal)
        if other is not None and other.plan.peak_bytes <= goal.limit and other.plan.step_us < best.plan.step_us:
            best = other
    found = _to_run(fitting, best, goal) if best.plan.peak_bytes <= goal.limit else best
    if found.plan.peak_bytes > goal.limit:
        raise fitting.too_small(goal.limit, found.plan.peak_bytes, found.plan)
    return found


def _to_run(fitting: Fitting, sized: CompiledPlan, goal: Goal) -> CompiledPlan:
    """The plan with its executables."""
    if sized.executables is not None:
        return sized
    assert sized.choice is not None  # the planner has made it
    found = fitting.compiled(sized.choice, goal)
    if found is None:
        raise fitting.planner.no_verified_plan()
    return found


def _lowest_sized(fitting: Fitting, goal: Goal) -> CompiledPlan | None:
    """The plan with the least peak that compiling shows, or the first one that keeps the limit; None if all are refused."""
    best: CompiledPlan | None = None
    seen: set[object] = set()
    for _ in range(_MOST_ATTEMPTS):
        choice = fitting.planner.lowest_choice(fitting.measured)
        if choice.key in seen or (best is not None and best.plan.peak_bytes <= goal.limit):
            break
        seen.add(choice.key)
        found = fitting.sized(choice, goal)
        if found is not None and (best is None or found.plan.peak_bytes < best.plan.peak_bytes):
            best = found
    return best
