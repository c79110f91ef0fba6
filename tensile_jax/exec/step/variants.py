"""Chooses how a step is brought into a form that can be planned: as it is, or as one of its variants.

    with outer products  large products of few terms are computed where they are used (`outer_products.py`): wherever there are
                         any, since they then need no memory
    with split loops     long loops run as several shorter ones (`trace/loops/rules.py`)
    in chunks of rows    its largest product or convolution, and what is computed from that, is evaluated in 2, 4 or 8 chunks
                         (`trace/rewrites/row_chunks.py`)
    with driven loops    long loops run under plans of their own (`driven_step.py`)

Only the policy `auto` has variants. A variant must be predicted to be faster than the step as it is, or the step as it is has no
plan under the budget. Where the least memory within a slowdown is wanted, there are only outer products: each variant would be
planned many times. Jobs of a `Runtime` keep their loops whole, so that one job does not hold up the others for a whole training.
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
from tensile_jax.trace import Immediate, TracedStep
from tensile_jax.trace.plannable_loops import PlannableLoop, plannable_loops

# Not tuned: with chunks, results are rounded differently, so they must gain something.
_FASTER = 0.98  # times the time with fewer chunks or without any
_CHUNKS = (2, 4, 8)  # of rows
_SLOW = 1.2
"""Times the step as one executable: loops are split where plans without that are slower. Not tuned, but seen on 2026-11-28: an
LSTM of two layers and 64 steps under 60 % takes 1.16 times plain jit's time without. Its first call takes 12 seconds where
splitting is tried, in the place of 4, for nothing. Under 30 % there is no plan without, and with it one of 1.8 times."""
_LARGE_TENSOR = 1 / 32  # of plain jit's peak: if all tensors are smaller, they are in chunks only where no plan fits without
_MANY_EQUATIONS = 200  # likewise, if the part that could be in chunks has more: each number of chunks is planned
_LARGE_LOOP = 1 / 100  # of plain jit's peak: loops that need less beside their inputs and outputs are not driven
_LOWER = 0.9  # the next budget as a share of this one, after the device ran out of memory
_FREE, _MOST_FREE = 0.005, 0.1  # of the limit: what the plan of a loop's body leaves to the small tensors around the loop


def fastest_variant(prepared: PreparedStep, *, drive_loops: bool = True) -> PreparedStep:
    """The variant that is predicted to be the fastest under the budget, or a simpler one that is hardly slower.

    Once twice as many chunks of rows gain little, still more are not tried. If no variant is known to have a plan, it is the one
    that needs least. If the plan of the next higher budget fits, it is the
    variant of that plan, so that a lower budget does not give a higher peak.

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
        return with_outer_products(prepared)
    limit = prepared.limit()
    if prepared.planner.whole_peak_bytes(prepared.measured) <= limit:
        return prepared
    whole = with_outer_products(prepared)
    in_chunks, loops = _may_need_chunks(whole, limit), _loops_that_need_plans(prepared, limit) if drive_loops else []
    split = _with_split_loops(prepared)
    if not split and not in_chunks and not loops:
        return whole

    @cache
    def driven() -> list[PreparedStep]:
        return _driven(prepared, loops, limit) if loops else []

    def others(*, that_may_fit: bool = False) -> Iterator[PreparedStep]:
        """Each is made when it is asked for; with `that_may_fit`, no driven loops whose stacks exceed the limit."""
        yield from split
        yield from _in_row_chunks(prepared, whole) if in_chunks else ()
        if not that_may_fit or all(_bytes_around(prepared, loop) <= limit for loop in loops):
            yield from driven()

    known = any(_next_higher(kind, limit) for kind in (whole.kind, *confirmed_for(prepared.kind).variants))
    if known and (found := _confirmed([whole, *others()], limit)):
        return found
    best, best_us = whole, whole.quick_us(float("inf"))
    if _FASTER * best_us <= prepared.planner.step.whole_us:
        return whole  # no variant computes less than the whole step
    with_fewer_us, enough = best_us, False
    for variant in others(that_may_fit=True):
        chunks = variant.step.row_chunks
        if (chunks and enough) or (variant in split and best_us < _SLOW * prepared.planner.step.whole_us):
            continue
        upper = _FASTER * best_us if best_us < float("inf") else best_us
        variant_us = variant.quick_us(upper)
        if chunks:
            enough = with_fewer_us < float("inf") and variant_us >= _FASTER * with_fewer_us
            with_fewer_us = variant_us
        if variant_us < upper:
            best, best_us = variant, variant_us
    if best_us == float("inf"):
        return min([whole, *others()], key=lambda variant: variant.planner.floor_bytes(variant.measured))
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


def with_outer_products(prepared: PreparedStep) -> PreparedStep:
    """The step with its large products of few terms computed where they are used; itself, if it has none."""
    found = _made(prepared, "outer products", lambda: [prepared.step.with_outer_products()])
    return found[0] if found else prepared


def compare_variants(prepared: PreparedStep) -> Comparison:
    """The plans of every policy under many budgets, `auto` with the variants of the step. State may be in host memory, of which
    there is enough."""
    options = replace(prepared.options, policy="auto", state_memory="any", max_slowdown=None, host_limit=float("inf"))
    step = PreparedStep(prepared.step, None, options, prepared.compiler)

    def fastest(limit: float) -> Planner:
        step.budget = None if limit == float("inf") else Budget(max(int(limit), 1), None)
        return fastest_variant(step, drive_loops=False).planner

    bounded = with_outer_products(step).planner
    return compare_policies(step.planner, fastest=fastest, bounded=bounded, progress=options.progress)


def variant_of(prepared: PreparedStep, saved: Plan) -> PreparedStep:
    """The variant of the step that the saved plan is for; the step itself, if it is for none."""
    if saved.loops:
        return _driven_as(prepared, saved)
    return next((one for one in _with_other_programs(prepared) if one.graph.fingerprint == saved.fingerprint), prepared)


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


# -- with another program -------------------------------------------------------------------------------------------------------


def _with_other_programs(prepared: PreparedStep) -> Iterator[PreparedStep]:
    """The step and its variants whose programs are rewritten, each made when it is asked for."""
    yield prepared
    whole = with_outer_products(prepared)
    yield whole
    yield from _with_split_loops(prepared)
    yield from _in_row_chunks(prepared, whole)


def _with_split_loops(prepared: PreparedStep) -> list[PreparedStep]:
    """The step with its long loops split, if it has any."""
    return _made(prepared, "split loops", lambda: [prepared.step.with_split_loops()])


def _in_row_chunks(prepared: PreparedStep, whole: PreparedStep) -> list[PreparedStep]:
    """The step as `whole`, if it has a part that can be, with that in chunks of rows: fewer chunks first."""
    return _made(prepared, "chunks of rows", lambda: map(whole.step.in_row_chunks, _CHUNKS))


def _made(prepared: PreparedStep, what: str, rewritten: Callable[[], Iterable[TracedStep | None]]) -> list[PreparedStep]:
    """The variants with the programs that `rewritten` gives, or gave before. Only the policy `auto` has any.

    Budget and plain jit's peak, of which a budget may be a share, are those of the step.
    """
    if what not in prepared.variants:
        steps = rewritten() if prepared.options.policy == "auto" else ()
        prepared.variants[what] = [_variant(prepared, step) for step in steps if step is not None]
    for variant in prepared.variants[what]:
        variant.budget = prepared.budget
        variant.measured = replace(variant.measured, whole=prepared.measured.whole)
    return prepared.variants[what]


def _variant(prepared: PreparedStep, step: TracedStep) -> PreparedStep:
    variant = PreparedStep(step, prepared.budget, prepared.options, prepared.compiler)
    variant.variant_of = prepared
    return variant


def _may_need_chunks(prepared: PreparedStep, limit: float) -> bool:
    """Whether a part of the step should be tried in chunks: it is small with a large tensor, or no plan without chunks fits."""
    region = prepared.step.region_of_rows() if prepared.options.policy == "auto" else None
    if region is None:
        return False
    large = region.nbytes >= _LARGE_TENSOR * prepared.planner.whole_peak_bytes(prepared.measured)
    return (large and len(region.places) <= _MANY_EQUATIONS) or prepared.planner.floor_bytes(prepared.measured) > limit


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
