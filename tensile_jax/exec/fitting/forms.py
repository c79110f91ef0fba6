"""Chooses the *form* in which a step is planned: the step as it is, or a variant that computes the same results.

    rewritten            by the rewrites that cost nothing, and by at most one other (`rewritten_forms.py`)
    with driven loops    each iteration of a long loop runs under a plan of the loop's body (`exec/running/driven_loop.py`)

A form is chosen if it is predicted to be faster than the step as it is, or if no plan keeps the budget without it. Rewrites that
cost nothing are done wherever possible. There are three restrictions:

    - Only the policy `auto`, this project's own planner, has other forms than the step as it is.
    - If the user asks for the least memory within a slowdown, only the rewrites that cost nothing are done. Every other form
      would have to be planned many times.
    - Jobs of a `Runtime`, which share a device, have no driven loops: one job could hold up the others for a whole training.
"""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import NamedTuple

from tensile_jax.budget import Budget
from tensile_jax.errors import BudgetTooSmall, PlanFileError
from tensile_jax.exec.compiling.step import CompiledPlan, DrivenBody, Options, Spent, Step, step_of
from tensile_jax.exec.fitting.find_plan import (
    begin,
    begin_to_predict,
    drafted,
    fit,
    learn,
    predict,
    try_whole,
    whole_may_help,
)
from tensile_jax.exec.fitting.fitting import Fitting
from tensile_jax.exec.fitting.knowledge import Entry, Precedent
from tensile_jax.exec.fitting.knowledge_store import STORE
from tensile_jax.exec.fitting.rewritten_forms import all_rewritten, always_rewritten, rewritten_each, worth_trying
from tensile_jax.exec.fitting.saved_plan import load, refuse_saved
from tensile_jax.ir import OperatorId
from tensile_jax.plan import Comparison, CompiledSizes, Planner, compare_policies
from tensile_jax.plan_format import Plan
from tensile_jax.trace import Immediate
from tensile_jax.trace.plannable_loops import PlannableLoop, plannable_loops, with_driven

_OTHER_FORM_TIME = 0.98  # of the best time so far: what another form must reach, since rewrites may round differently; not tuned
_LARGE_LOOP = 1 / 100  # of plain jit's peak: loops that need less beside their inputs and outputs are not driven
_AS_EXPECTED = 0.9, 1.35
"""Of plain jit's predicted peak: if the compiled peak is outside, a new plan is made. A wider range saves planning, and gives
plans that are 1 to 3 % slower (`make bench-workloads`)."""
_NEARLY_FITS = 1.15
"""Of the limit: before a refusal, other rewrites are compiled whose predicted floor is at most this. More finds more plans, and
refuses later. Not tuned."""
_LOWER = 0.9  # of the budget: the next budget after the device ran out of memory
_FREE, _MOST_FREE = 0.005, 0.1  # of the limit: what the plan of a loop's body leaves to the small tensors around the loop


def fit_fastest(step: Step, budget: Budget | None, *, drive_loops: bool = True, may_run_whole: bool = True) -> CompiledPlan:
    """The plan of the fastest form under the budget, compiled; that of the step as one executable, if it fits.

    Args:
        drive_loops: whether loops may run under plans of their own.
        may_run_whole: whether to try first if the step fits as one executable.

    Raises:
        BudgetTooSmall: no plan keeps the budget.
    """
    fitting = begin(step, budget)
    draft = try_whole(fitting, partial(_drafted, fitting, drive_loops=drive_loops)) if may_run_whole else None
    before = Spent() if draft is None else draft.spent
    if draft is not None and is_as_expected(draft, fitting):
        try:
            return _fit_drafted(fitting, draft)
        except BudgetTooSmall:
            pass  # the form of the draft needs too much; another one may not
    try:
        return _fit_ranked(fitting, before, drive_loops=drive_loops)
    except BudgetTooSmall as refusal:
        if not may_run_whole or not _more_is_known(fitting, refusal):
            raise
    return _fit_ranked(fitting, before, drive_loops=drive_loops)


def predict_fastest(step: Step, budget: Budget | None, *, drive_loops: bool = True) -> CompiledPlan:
    """The plan of the fastest form under the budget, with estimated workspaces. Nothing is compiled unless it would be refused.

    Before a refusal, plain jit is compiled if it may need less than every plan, or so much more that a share of it suffices.

    Raises:
        BudgetTooSmall: no plan keeps the budget.
    """
    fitting = begin_to_predict(step, budget)
    try:
        return predict(fastest_form(fitting, drive_loops=drive_loops))
    except BudgetTooSmall as refusal:
        alone = len(step.agreement.processes) == 1  # others do not wait for orders now
        if not alone or not _more_is_known(fitting, refusal):
            raise
    return predict(fastest_form(fitting, drive_loops=drive_loops))


def fit_for_less(compiled: CompiledPlan) -> CompiledPlan | None:
    """A plan that needs less memory than `compiled`, under which the device ran out of memory; None if there is none."""
    plan = compiled.plan
    most = plan.peak_bytes if plan.budget_bytes is None else min(plan.budget_bytes, plan.peak_bytes)
    try:
        return fit_fastest(compiled.step.origin, Budget(int(most * _LOWER), None), may_run_whole=False)
    except BudgetTooSmall:
        return None


class Draft(NamedTuple):
    """What was planned before plain jit's peak was known.

    Attributes:
        form: the form of the step that was chosen.
        precedent: its plan; None if the plan of such a form cannot be adapted, and is made once the peak is known.
        expected_bytes: plain jit's peak as predicted.
        spent: what it has taken.
    """

    form: Step
    precedent: Precedent | None
    expected_bytes: int
    spent: Spent


def _drafted(fitting: Fitting, *, drive_loops: bool) -> Draft | None:
    """The form and the plan for the share of plain jit's predicted peak, made while plain jit compiles to show its peak.

    None if a plan of the step is known that can be adapted sooner, or if other processes wait for plain jit's executable.
    """
    step = fitting.step
    alone, is_new = len(step.agreement.processes) == 1, STORE.form_of(step.structure) is None
    if not alone or not is_new or step.options.policy != "auto" or step.in_one_program:
        return None
    predicting = begin_to_predict(step, fitting.budget)
    try:
        form, before = _ranked(predicting, drive_loops=drive_loops)
        precedent = drafted(form)
    except BudgetTooSmall:
        return None
    if precedent is None and (form.step.bodies or not form.planner.model.has_iterations):
        return None
    expected = predicting.planner.whole_peak_bytes(predicting.measured)
    return Draft(form.step, precedent, expected, before + form.spent)


def is_as_expected(draft: Draft, fitting: Fitting) -> bool:
    """Whether plain jit's peak is so near to its prediction that the adapted draft is as good as a new plan."""
    least, most = _AS_EXPECTED
    return least * draft.expected_bytes <= fitting.jit_peak_bytes <= most * draft.expected_bytes


def _fit_drafted(fitting: Fitting, draft: Draft) -> CompiledPlan:
    """The plan of the draft's form, compiled: the draft's own, once it is adapted to what is known by now, or a new one."""
    form = fitting.of(draft.form)
    found = fit(form, draft.precedent)
    return replace(found, spent=draft.spent + spent_around(form, fitting) + found.spent)


def spent_around(form: Fitting, fitting: Fitting) -> Spent:
    """What it has taken to fit the step itself, if `form` is another form of it."""
    return Spent() if form is fitting else fitting.spent


def _fit_ranked(fitting: Fitting, before: Spent, *, drive_loops: bool) -> CompiledPlan:
    """The compiled plan of the form that is predicted to be the fastest, or of another one if compiling refuses that.

    Args:
        before: what was spent on plans that are not used.
    """
    chosen, choosing = _ranked(fitting, drive_loops=drive_loops)
    try:
        found = fit(chosen)
    except BudgetTooSmall as refusal:
        found = _fit_another(fitting, chosen.step, refusal)
    return replace(found, spent=before + choosing + found.spent)


def _ranked(fitting: Fitting, *, drive_loops: bool) -> tuple[Fitting, Spent]:
    """The form that is predicted to be the fastest, and what it took to choose it. What it takes to fit it comes on top."""
    began = time.perf_counter()
    chosen = fastest_form(fitting, drive_loops=drive_loops)
    return chosen, Spent(ranking_s=time.perf_counter() - began) + spent_around(chosen, fitting)


def _fit_another(fitting: Fitting, refused: Step, refusal: BudgetTooSmall) -> CompiledPlan:
    """The compiled plan of a rewritten form that is predicted to need hardly more than the budget, where `refused` has none.

    Raises:
        BudgetTooSmall: there is no such plan either; of the refusals, the one with the smallest budget that works.
    """
    if len(fitting.step.agreement.processes) > 1:  # each process would have to try the same forms
        raise refusal
    others = [fitting.of(form) for form in dict.fromkeys(all_rewritten(fitting.step)) if form is not refused]
    most = _NEARLY_FITS * fitting.limit()
    for form in sorted((form for form in others if form.floor_bytes() <= most), key=lambda form: form.floor_bytes()):
        try:
            return fit(form)
        except BudgetTooSmall as other:
            refusal = min(refusal, other, key=lambda error: error.floor_bytes)
    raise refusal


def _more_is_known(fitting: Fitting, refusal: BudgetTooSmall) -> bool:
    """Whether compiling plain jit changes the answer: plain jit needs less than every plan, or so much that a share of its peak
    suffices.

    Plain jit is compiled only if that may be so.
    """
    if not whole_may_help(fitting, refusal.floor_bytes):
        return False
    peak = fitting.jit_peak_bytes
    learn(fitting)
    return peak < refusal.floor_bytes or refusal.floor_bytes <= fitting.limit()


def fastest_form(fitting: Fitting, *, drive_loops: bool = True) -> Fitting:
    """The form of the step that is predicted to be the fastest under the budget, or a simpler one that is hardly slower.

    Stops doubling the chunks of rows once a doubling gains less than 2 %. If no form is known to have a plan, the result is the
    form that needs least. If the plan of the next higher budget fits, the result is that plan's form, so that a lower budget
    never gives a higher peak.

    Args:
        fitting: of the step, or of one of its forms. A form whose latencies were measured stays if it has a plan, because
            nothing was measured of the others.
        drive_loops: whether loops may run under plans of their own.
    """
    step = fitting.step
    if step.origin is not step:
        measured = not fitting.planner.model.corrections.change_nothing
        if measured and fitting.floor_bytes() <= fitting.limit():
            return fitting
        fitting = fitting.of(step.origin)
    found = _fastest(fitting, drive_loops=drive_loops)
    found.expect_plans(1)
    return found


def _fastest(fitting: Fitting, *, drive_loops: bool) -> Fitting:
    step = fitting.step
    if fitting.budget is None and step.options.max_slowdown is not None:
        return fitting.of(always_rewritten(step))
    limit, whole_us = fitting.limit(), fitting.planner.model.whole_us
    if fitting.planner.whole_peak_bytes(fitting.measured) <= limit:
        return fitting
    base = fitting.of(always_rewritten(step))
    rewrites = worth_trying(step, base, limit)
    loops = _loops_that_need_plans(fitting, limit) if drive_loops else []
    if not rewrites and not loops:
        return base

    fitting.expect_plans(2 + len(rewrites) + bool(loops))

    @cache
    def driven() -> list[Fitting]:
        return [fitting.of(_driven(fitting, loops, limit))] if loops else []

    def others(*, that_may_fit: bool = False) -> Iterator[Fitting]:
        """Each is made when it is asked for; with `that_may_fit`, no driven loops whose stacks exceed the limit."""
        yield from map(fitting.of, rewritten_each(step, base.step, rewrites))
        if not that_may_fit or all(_bytes_around(step, loop) <= limit for loop in loops):
            yield from driven()

    forms = STORE.known(step.kind).forms
    if any(STORE.known(kind).next_higher(limit) for kind in (base.step.kind, *forms)) and (
        found := _confirmed([base, *others()], limit)
    ):
        return found
    if found := _as_before([base, *others()] if STORE.form_of(step.structure) else [], step):
        return found
    best, best_us = base, base.quick_us(float("inf"))
    if _OTHER_FORM_TIME * best_us <= whole_us:
        return base  # no form computes less than the whole step
    base_us, latest_us = best_us, dict[str, float]()  # of the latest rewrite in each series
    exhausted = set[str]()
    for form in others(that_may_fit=True):
        done = form.step.traced.rewrites
        rewrite = done[-1] if done and not form.step.bodies else None
        if rewrite is not None and (rewrite.series in exhausted or best_us < rewrite.slowdown * whole_us):
            continue
        upper = _OTHER_FORM_TIME * best_us if best_us < float("inf") else best_us
        form_us = form.quick_us(upper)
        if rewrite is not None and rewrite.series:
            if _ends_series(form_us, latest_us.get(rewrite.series, base_us), has_loops=base.planner.model.has_iterations):
                exhausted.add(rewrite.series)
            latest_us[rewrite.series] = form_us
        if form_us < upper:
            best, best_us = form, form_us
    if best_us == float("inf"):
        return min([base, *others()], key=lambda form: form.floor_bytes())
    return best


def _ends_series(form_us: float, before_us: float, *, has_loops: bool) -> bool:
    """Whether further rewrites of a series need not be tried, by the quick plans of the latest one and of the one before.

    Quick plans of steps with opened loops treat iterations alike. So there may be none, although there are other plans, and their
    times fall slowly from one rewrite to the next.
    """
    if has_loops:
        return before_us <= form_us < float("inf")
    return before_us < float("inf") and form_us >= _OTHER_FORM_TIME * before_us


def _confirmed(forms: Iterable[Fitting], limit: float) -> Fitting | None:
    """The form with the plan of the next higher budget; None if that plan exceeds the limit, or if there is none."""
    found: list[tuple[Entry, Fitting]] = [
        (entry, form) for form in forms if (entry := STORE.known(form.step.kind).next_higher(limit)) is not None
    ]
    if not found:
        return None
    entry, form = min(found, key=lambda one: one[0].limit)
    return form if entry.peak_bytes <= limit else None


def _as_before(forms: Iterable[Fitting], step: Step) -> Fitting | None:
    """The form in which the step was planned before, on other shapes under nearly the same share of plain jit's peak."""
    structure = STORE.form_of(step.structure)
    precedent = STORE.precedent(structure)
    return next((f for f in forms if f.step.structure == structure and precedent and f.resembles(precedent, f.goal())), None)


def bound_us(step: Step, budget: Budget | None) -> float:
    """A lower bound, in microseconds, of the time of any plan under the budget that evaluates nothing in chunks."""
    return begin_to_predict(always_rewritten(step), budget).bound_us()


def compare_forms(step: Step) -> Comparison:
    """The plans of every policy under many budgets, `auto` with the forms of the step. State may be in host memory, of which
    there is enough."""
    options = replace(step.options, policy="auto", state_memory="any", max_slowdown=None, host_limit=float("inf"))
    free = step_of(step.traced, options, step.compiler)

    def fastest(limit: float) -> Planner:
        budget = None if limit == float("inf") else Budget(max(int(limit), 1), None)
        return fastest_form(begin_to_predict(free, budget), drive_loops=False).planner

    bounded = always_rewritten(free).planner
    return compare_policies(free.planner, fastest=fastest, bounded=bounded, progress=options.progress)


def form_of(step: Step, saved: Plan) -> Step:
    """The form of the step that the saved plan is for; the step itself, if it is for none."""
    if saved.loops:
        return _driven_as(step, saved)
    return next((one for one in all_rewritten(step) if one.graph.fingerprint == saved.fingerprint), step)


# -- with driven loops ----------------------------------------------------------------------------------------------------------


def _loops_that_need_plans(fitting: Fitting, limit: float) -> list[PlannableLoop]:
    """The loops that need too much under the limit as they are."""
    step = fitting.step
    if step.options.policy != "auto":
        return []
    least = _LARGE_LOOP * fitting.planner.whole_peak_bytes(fitting.measured)
    inner = {op.id: op.inner for op in step.graph.operators}
    return [
        loop for loop in _loops(step)
        if inner[loop.operator] >= least and _bytes_around(step, loop) + inner[loop.operator] > limit
    ]  # fmt: skip


def _driven(fitting: Fitting, loops: Sequence[PlannableLoop], limit: float) -> Step:
    """The step with these loops driven."""
    step = fitting.step
    around = {loop.operator: _bytes_around(step, loop) for loop in loops}
    free = _FREE * limit
    while True:
        bodies = {loop.operator: _body_under(step, loop, limit - around[loop.operator] - free) for loop in loops}
        form = _with_bodies(step, bodies)
        above = form.planner.floor_bytes(CompiledSizes(whole=fitting.measured.whole)) - limit
        if above <= 0 or free > _MOST_FREE * limit or any(body.plan.budget_bytes is None for body in bodies.values()):
            return form
        free += above + _FREE * limit


def _with_bodies(step: Step, bodies: Mapping[OperatorId, DrivenBody]) -> Step:
    """The step whose loops in `bodies` run under plans of their own.

    The planner sees such a loop as an operator that needs so many bytes and so many microseconds. A limit of host memory is
    divided: one half is for the copies of a body's plan, and one for those of the step around it.
    """
    traced = with_driven(step.traced, [body.loop.driven(body.nbytes, body.us) for body in bodies.values()])
    made = step_of(traced, with_half_the_host(step.options), step.compiler)
    return replace(made, plain_jit=step.plain_jit, form_of=step, bodies=bodies)


def with_half_the_host(options: Options) -> Options:
    """The options of a step with driven loops, and of the bodies of these loops."""
    return replace(options, host_limit=options.host_limit / 2)


def _loops(step: Step) -> list[PlannableLoop]:
    """The loops of a step that could be driven."""
    return step.once("loops", lambda: plannable_loops(step.traced))


def _bytes_around(step: Step, loop: PlannableLoop) -> int:
    """What is on the device while a loop runs, beside what the loop needs inside: its inputs and outputs, and the caller's."""
    graph, liveness = step.graph, step.planner.model.liveness
    there = {t for t in loop.inputs if not isinstance(t, Immediate)}
    taken_over = {new for old, new in liveness.aliases if old in there}
    return sum(graph.tensors[t].nbytes for t in {*there, *liveness.kept_by_caller, *loop.outputs} - taken_over)


def _body(step: Step, loop: PlannableLoop) -> Step:
    """The body of a loop, traced as a step once."""
    return step.once(
        ("body", loop.operator),
        lambda: step_of(loop.traced_body(step.traced), with_half_the_host(step.options), step.compiler),
    )


def _body_under(step: Step, loop: PlannableLoop, beside: float) -> DrivenBody:
    """The body of a loop that may need so many bytes beside its inputs and outputs; or that needs the least, if it needs more."""
    body = _body(step, loop)
    shared = body.graph.inputs[: loop.loop.constants + loop.loop.carried]
    most = int(beside) + sum(body.graph.tensors[t].nbytes for t in shared)
    chosen = fastest_form(begin(body, Budget(max(most, 1), None)))
    try:
        plan = predict(chosen).plan
    except BudgetTooSmall as refusal:
        most, plan = refusal.floor_bytes, chosen.planner.least_plan(chosen.measured)
    budget = Budget(max(most, 1), None)
    return DrivenBody(loop, chosen.step, plan, lambda: fit(begin(chosen.step, budget)), fit_for_less)


def _driven_as(step: Step, saved: Plan) -> Step:
    """The step with the loops driven that are driven in a saved plan.

    Raises:
        PlanFileError: the step has no such loops, or the plan of a body is for another one.
    """
    known = {loop.operator: loop for loop in _loops(step)}
    bodies: dict[OperatorId, DrivenBody] = {}
    for planned in saved.loops:
        loop = known.get(planned.operator)
        if loop is None or loop.loop.length != planned.iterations:
            raise PlanFileError(
                f"plan= has a loop of {planned.iterations} iterations, {planned.name}, which is not in this step. Make a new one "
                "with step.plan(...)."
            )
        body = form_of(_body(step, loop), planned.plan)
        refuse_saved(body, None, planned.plan)
        bodies[planned.operator] = DrivenBody(
            loop, body, planned.plan, partial(load, body, None, planned.plan), fit_for_less
        )  # fmt: skip
    return _with_bodies(step, bodies)
