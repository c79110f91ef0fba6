"""Chooses the form in which a step is planned: the step as it is, or one of its variants.

    rewritten            by the rewrites that cost nothing, and by at most one other (`trace/rewrites/registry.py`)
    with driven loops    long loops run under plans of their own (`driven_step.py`)

Only the policy `auto` has variants. The rewrites that cost nothing are done wherever they can be done. Another variant is chosen
if it is predicted to be faster, or if the step without it has no plan under the budget. If the user wants the least memory within
a slowdown, only the rewrites that cost nothing are done, since each other variant would be planned many times. Jobs of a
`Runtime` drive no loops: otherwise one job could hold up the others for a whole training.
"""

import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial

from tensile_jax.budget import Budget
from tensile_jax.errors import BudgetTooSmall, PlanFileError
from tensile_jax.exec.step.confirmed_plans import Entry, confirmed_for
from tensile_jax.exec.step.driven_step import Body, DrivenStep, with_half_the_host
from tensile_jax.exec.step.fitting_plan import predict, prepare, recall_share, try_whole, whole_may_help
from tensile_jax.exec.step.prepared_step import PreparedStep, RunningPlan
from tensile_jax.exec.step.saved_plan import load, refuse_saved
from tensile_jax.ir import OperatorId
from tensile_jax.plan import Comparison, Planner, compare_policies
from tensile_jax.plan_format import Plan
from tensile_jax.trace import REWRITES, Immediate, Part, Program, Rewrite, TracedStep
from tensile_jax.trace.plannable_loops import PlannableLoop, plannable_loops

# Not tuned: with a rewrite, results may be rounded differently, so the rewrite must gain something.
_FASTER = 0.98  # times the time of the best variant so far, or of the rewrite before in a series
_LARGE_TENSOR = 1 / 32  # of plain jit's peak: a part without such a tensor is rewritten only where nothing else fits
_MANY_EQUATIONS = 200  # likewise, if the part has more: each rewrite of it is planned
_LARGE_LOOP = 1 / 100  # of plain jit's peak: loops that need less beside their inputs and outputs are not driven
_LOWER = 0.9  # the next budget as a share of this one, after the device ran out of memory
_FREE, _MOST_FREE = 0.005, 0.1  # of the limit: what the plan of a loop's body leaves to the small tensors around the loop


def fastest_variant(prepared: PreparedStep, *, drive_loops: bool = True) -> PreparedStep:
    """The variant that is predicted to be the fastest under the budget, or a simpler one that is hardly slower.

    Stops trying the rewrites of a series once one of them gains less than 2 %. If no variant is known to have a plan, the result
    is the variant that needs least. If the plan of the next higher budget fits, the result is the variant of that plan, so that a
    lower budget does not give a higher peak.

    Args:
        prepared: the step; or a variant of it, which is then one of those to choose from. If its latencies were measured, and
            it has a plan, it stays: nothing was measured of the others.
        drive_loops: whether loops may run under plans of their own.
    """
    if prepared.origin is not prepared:
        measured = not prepared.planner.step.corrections.change_nothing
        if measured and prepared.planner.floor_bytes(prepared.measured) <= prepared.limit():
            return prepared
        prepared.origin.budget = prepared.budget
        prepared = prepared.origin
    if prepared.budget is None and prepared.options.max_slowdown is not None:
        return always_rewritten(prepared)
    limit = prepared.limit()
    if prepared.planner.whole_peak_bytes(prepared.measured) <= limit:
        return prepared
    base = always_rewritten(prepared)
    rewrites = _worth_trying(prepared, base, limit)
    loops = _loops_that_need_plans(prepared, limit) if drive_loops else []
    if not rewrites and not loops:
        return base

    @cache
    def driven() -> list[PreparedStep]:
        return _driven(prepared, loops, limit) if loops else []

    def others(*, that_may_fit: bool = False) -> Iterator[PreparedStep]:
        """Each is made when it is asked for; with `that_may_fit`, no driven loops whose stacks exceed the limit."""
        yield from _rewritten_each(prepared, base, rewrites)
        if not that_may_fit or all(_bytes_around(prepared, loop) <= limit for loop in loops):
            yield from driven()

    known = any(_next_higher(kind, limit) for kind in (base.kind, *confirmed_for(prepared.kind).variants))
    if known and (found := _confirmed([base, *others()], limit)):
        return found
    whole_us = prepared.planner.step.whole_us
    best, best_us = base, base.quick_us(float("inf"))
    if _FASTER * best_us <= whole_us:
        return base  # no variant computes less than the whole step
    base_us, latest_us = best_us, dict[str, float]()  # of the latest rewrite in each series
    exhausted = set[str]()
    for variant in others(that_may_fit=True):
        rewrite = variant.step.rewrites[-1] if variant.step.rewrites else None
        if rewrite is not None and (rewrite.series in exhausted or best_us < rewrite.slowdown * whole_us):
            continue
        upper = _FASTER * best_us if best_us < float("inf") else best_us
        variant_us = variant.quick_us(upper)
        if rewrite is not None and rewrite.series:
            before_us = latest_us.get(rewrite.series, base_us)
            if before_us < float("inf") and variant_us >= _FASTER * before_us:
                exhausted.add(rewrite.series)
            latest_us[rewrite.series] = variant_us
        if variant_us < upper:
            best, best_us = variant, variant_us
    if best_us == float("inf"):
        return min([base, *others()], key=lambda variant: variant.planner.floor_bytes(variant.measured))
    return best


def prepare_fastest(prepared: PreparedStep) -> RunningPlan:
    """The plan of the fastest variant under the budget, compiled; that of the step as one executable, if it fits.

    Raises:
        BudgetTooSmall: no plan keeps the budget.
    """
    try_whole(prepared)
    try:
        return prepare(_ranked(prepared))
    except BudgetTooSmall as refusal:
        if not _more_is_known(prepared, refusal):
            raise
    return prepare(_ranked(prepared))


def _ranked(prepared: PreparedStep) -> PreparedStep:
    """The fastest variant, which knows how long it took to find it."""
    began = time.perf_counter()
    chosen = fastest_variant(prepared)
    chosen.ranking_s = time.perf_counter() - began
    return chosen


def predict_fastest(prepared: PreparedStep) -> Plan:
    """The plan of the fastest variant under the budget, with estimated workspaces. Nothing is compiled, but before a refusal.

    Then plain jit's step is compiled, if that may need less than all plans, or so much more that the budget, a share of it, is
    enough.

    Raises:
        BudgetTooSmall: no plan keeps the budget.
    """
    recall_share(prepared)
    try:
        return predict(fastest_variant(prepared))
    except BudgetTooSmall as refusal:
        alone = len(prepared.agreement.processes) == 1  # others do not wait for orders now
        if not alone or not _more_is_known(prepared, refusal):
            raise
    return predict(fastest_variant(prepared))


def _more_is_known(prepared: PreparedStep, refusal: BudgetTooSmall) -> bool:
    """Whether plain jit's step, compiled now if that may help, keeps the budget or names a smaller one, or makes it suffice."""
    if not whole_may_help(prepared, refusal.floor_bytes):
        return False
    return prepared.jit_peak_bytes < refusal.floor_bytes or refusal.floor_bytes <= prepared.limit()


def _next_higher(kind: Hashable, limit: float) -> Entry | None:
    """What was confirmed for the lowest budget that is not below the limit."""
    return next((entry for entry in confirmed_for(kind).entries if entry.limit >= limit), None)


def _confirmed(variants: Iterable[PreparedStep], limit: float) -> PreparedStep | None:
    """The variant with the plan of the next higher budget; None if that plan exceeds the limit, or if there is none."""
    entries = [(entry, variant) for variant in variants if (entry := _next_higher(variant.kind, limit)) is not None]
    if not entries:
        return None
    entry, variant = min(entries, key=lambda found: found[0].limit)
    return variant if entry.peak_bytes <= limit else None


def compare_variants(prepared: PreparedStep) -> Comparison:
    """The plans of every policy under many budgets, `auto` with the variants of the step. State may be in host memory, of which
    there is enough."""
    options = replace(prepared.options, policy="auto", state_memory="any", max_slowdown=None, host_limit=float("inf"))
    step = PreparedStep(prepared.step, None, options, prepared.compiler)

    def fastest(limit: float) -> Planner:
        step.budget = None if limit == float("inf") else Budget(max(int(limit), 1), None)
        return fastest_variant(step, drive_loops=False).planner

    bounded = always_rewritten(step).planner
    return compare_policies(step.planner, fastest=fastest, bounded=bounded, progress=options.progress)


def variant_of(prepared: PreparedStep, saved: Plan) -> PreparedStep:
    """The variant of the step that the saved plan is for; the step itself, if it is for none."""
    if saved.loops:
        return _driven_as(prepared, saved)
    return next((one for one in _all_rewritten(prepared) if one.graph.fingerprint == saved.fingerprint), prepared)


def prepare_for_less(running: RunningPlan) -> RunningPlan:
    """A plan that needs less memory than `running`, under which the device ran out of memory; `running` if there is none.

    The lower budget holds from then on. If there is no plan for it, the old budget holds again, and `running` continues, which
    has just recovered.
    """
    prepared, origin = running.prepared, running.prepared.origin
    before = origin.budget
    if running.lowest:
        return running
    origin.budget = Budget(int(min(prepared.limit(), running.plan.peak_bytes) * _LOWER), None)
    try:
        lower = prepare(fastest_variant(origin))
    except BudgetTooSmall:
        origin.budget, running.lowest = before, True
        return running
    if lower.prepared is not prepared:
        lower.prepared.out_of_memory = prepared.out_of_memory
    lower.prepared.out_of_memory += 1 if running.executor is None else running.executor.out_of_memory
    return lower


# -- with a rewritten program ---------------------------------------------------------------------------------------------------


def always_rewritten(prepared: PreparedStep) -> PreparedStep:
    """The step with all rewrites that cost nothing; itself, if none of them can be done."""
    base = prepared
    for rewrite in REWRITES:
        if rewrite.always:
            base = _rewritten(prepared, base, rewrite) or base
    return base


def _worth_trying(prepared: PreparedStep, base: PreparedStep, limit: float) -> list[Rewrite]:
    """The other rewrites that may give a faster plan under the limit, or a plan where there is none."""

    @cache
    def is_worth_it(find: Callable[[Program], Part | None]) -> bool:
        found = None if base.step.divided is not None or base.options.policy != "auto" else find(base.step.program)
        if found is None:
            return False
        large = found.nbytes >= _LARGE_TENSOR * base.planner.whole_peak_bytes(base.measured)
        return (large and found.equations <= _MANY_EQUATIONS) or base.planner.floor_bytes(base.measured) > limit

    return [
        r for r in REWRITES
        if not r.always and (is_worth_it(r.part) if r.part is not None else _rewritten(prepared, base, r) is not None)
    ]  # fmt: skip


def _all_rewritten(prepared: PreparedStep) -> Iterator[PreparedStep]:
    """The step and its variants whose programs are rewritten, each made when it is asked for."""
    yield prepared
    base = always_rewritten(prepared)
    yield base
    yield from _rewritten_each(prepared, base, [rewrite for rewrite in REWRITES if not rewrite.always])


def _rewritten_each(prepared: PreparedStep, base: PreparedStep, rewrites: Iterable[Rewrite]) -> Iterator[PreparedStep]:
    return (variant for rewrite in rewrites if (variant := _rewritten(prepared, base, rewrite)) is not None)


def _rewritten(prepared: PreparedStep, base: PreparedStep, rewrite: Rewrite) -> PreparedStep | None:
    """The variant of a step that the rewrite makes of `base`; None if it makes none. Only the policy `auto` has any.

    A variant is made once. Its budget, and plain jit's peak, of which a budget may be a share, are those of the step.
    """
    if rewrite not in prepared.variants:
        step = base.step.rewritten(rewrite) if prepared.options.policy == "auto" else None
        prepared.variants[rewrite] = None if step is None else _variant(prepared, step)
    variant = prepared.variants[rewrite]
    if variant is not None:
        variant.budget = prepared.budget
        variant.measured = replace(variant.measured, whole=prepared.measured.whole)
    return variant


def _variant(prepared: PreparedStep, step: TracedStep) -> PreparedStep:
    variant = PreparedStep(step, prepared.budget, prepared.options, prepared.compiler)
    variant.variant_of = prepared
    return variant


# -- with driven loops ----------------------------------------------------------------------------------------------------------


def _loops_that_need_plans(prepared: PreparedStep, limit: float) -> list[PlannableLoop]:
    """The loops that need too much under the limit as they are."""
    if prepared.options.policy != "auto":
        return []
    least = _LARGE_LOOP * prepared.planner.whole_peak_bytes(prepared.measured)
    inner = {op.id: op.inner for op in prepared.graph.operators}
    return [
        loop for loop in _loops(prepared)
        if inner[loop.operator] >= least and _bytes_around(prepared, loop) + inner[loop.operator] > limit
    ]  # fmt: skip


def _driven(prepared: PreparedStep, loops: Sequence[PlannableLoop], limit: float) -> list[PreparedStep]:
    """The step with these loops driven."""
    around = {loop.operator: _bytes_around(prepared, loop) for loop in loops}
    free = _FREE * limit
    while True:
        bodies = {loop.operator: _body_under(prepared, loop, limit - around[loop.operator] - free) for loop in loops}
        variant = DrivenStep(prepared, bodies, prepare_for_less)
        above = variant.planner.floor_bytes(variant.measured) - limit
        if above <= 0 or free > _MOST_FREE * limit or any(body.plan.budget_bytes is None for body in bodies.values()):
            return [variant]
        free += above + _FREE * limit


def _loops(prepared: PreparedStep) -> list[PlannableLoop]:
    """The loops of a step that could be driven."""
    if prepared.loops is None:
        prepared.loops = plannable_loops(prepared.step)
    return prepared.loops


def _bytes_around(prepared: PreparedStep, loop: PlannableLoop) -> int:
    """What is on the device while a loop runs, beside what the loop needs inside: its inputs and outputs, and the caller's."""
    graph, liveness = prepared.graph, prepared.planner.step.liveness
    there = {t for t in loop.inputs if not isinstance(t, Immediate)}
    taken_over = {new for old, new in liveness.aliases if old in there}
    return sum(graph.tensors[t].nbytes for t in {*there, *liveness.kept_by_caller, *loop.outputs} - taken_over)


def _body(prepared: PreparedStep, loop: PlannableLoop) -> PreparedStep:
    """The body of a loop, traced as a step once."""
    found = prepared.traced_bodies.get(loop.operator)
    if found is None:
        options = with_half_the_host(prepared.options)
        found = PreparedStep(loop.traced_body(prepared.step), None, options, prepared.compiler)
        prepared.traced_bodies[loop.operator] = found
    return found


def _body_under(prepared: PreparedStep, loop: PlannableLoop, beside: float) -> Body:
    """The body of a loop that may need so many bytes beside its inputs and outputs; or that needs the least, if it needs more."""
    body = _body(prepared, loop)
    shared = body.graph.inputs[: loop.loop.constants + loop.loop.carried]
    most = int(beside) + sum(body.graph.tensors[t].nbytes for t in shared)
    body.budget = Budget(max(most, 1), None)
    chosen = fastest_variant(body)
    try:
        plan = predict(chosen)
    except BudgetTooSmall as refusal:
        most, plan = refusal.floor_bytes, chosen.planner.least_plan(chosen.measured)
    return Body(loop, chosen, plan, partial(_prepared, body, chosen, most))


def _prepared(body: PreparedStep, chosen: PreparedStep, nbytes: int) -> RunningPlan:
    """The plan of a body under this budget, compiled."""
    body.budget = chosen.budget = Budget(max(nbytes, 1), None)
    return prepare(chosen)


def _driven_as(prepared: PreparedStep, saved: Plan) -> PreparedStep:
    """The step with the loops driven that are driven in a saved plan.

    Raises:
        PlanFileError: the step has no such loops, or the plan of a body is for another one.
    """
    known = {loop.operator: loop for loop in _loops(prepared)}
    bodies: dict[OperatorId, Body] = {}
    for planned in saved.loops:
        loop = known.get(planned.operator)
        if loop is None or loop.loop.length != planned.iterations:
            raise PlanFileError(
                f"plan= has a loop of {planned.iterations} iterations, {planned.name}, which is not in this step. Make a new one "
                "with step.plan(...)."
            )
        body = _body(prepared, loop)
        body.budget = None
        chosen = variant_of(body, planned.plan)
        refuse_saved(chosen, planned.plan)
        bodies[planned.operator] = Body(loop, chosen, planned.plan, partial(load, chosen, planned.plan))
    return DrivenStep(prepared, bodies, prepare_for_less)
