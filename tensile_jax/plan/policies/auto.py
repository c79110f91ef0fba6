"""Policy `auto`, the default: chooses the fastest plan that the planner finds under a memory limit.

If the step fits the limit as one executable, that is the plan. Otherwise `search/search.py` searches for a *schedule*: where to
cut the step into *segments* (stretches of operators that are each compiled as one executable), and when each tensor is on the
device.

The search works on a *condensed step*: its operators are joined into groups, and only its large tensors are left. This makes
the search fast, but it may count a little less memory than the plan needs. If segments of the plan exceed the limit, the
schedule is *repaired*: small changes, such as releasing a tensor and computing it again later, bring it under a lower limit.
This limit is lower by the memory that the search did not count. If the lower limit is far below the schedule's peak, or no
repair succeeds, the search is repeated under the lower limit. If no plan that is found in this way keeps the limit, the policy
takes the *quick plan*, the result of a short search (`fast` in `search/search.py`). If that plan does not keep the limit
either, the policy takes the plan with the least peak.

Three cases are special:

    - The device's allocator may hand out more than it is asked for. The search then begins with the quick plan, and repairs it
      under a lower limit: the limit minus the bytes that the allocator would hand out unasked under the quick plan. How many
      bytes it hands out differs from plan to plan, so plans are made faster under higher limits as long as they leave memory
      unused. If the result is slow, and slower than the quick plan, another quick plan is made under the lower limit, and the
      faster one is taken. Only if the quick plan cannot be repaired, the longer search is made.
    - If state may be on the host between two iterations, the search also starts from the plan of the policy `tensile`, which
      fills the link between host and device with copies of state. The search does not start there if the plan's segments and
      copies are joined into one executable (`StepModel.as_one_program`), in which some of these copies would free nothing.
    - A loop is *opened* if the step contains the operators of every iteration. For a step with opened loops, a plan that treats
      all iterations alike (`search/alike_iterations.py`) needs far fewer executables. The policy takes it if it is hardly slower
      than the step as one executable, or if local search without this condition does not make it much faster.
"""

from functools import partial

from tensile_jax.plan.policies.host_limit import host_peak_of, within_host_limit
from tensile_jax.plan.policies.tensile.policy import tensile
from tensile_jax.plan.search.alike_iterations import alike, in_all_iterations, possible_in_all
from tensile_jax.plan.search.choice import (
    LEAST,
    WHOLE,
    Choice,
    choice_of,
    peak_of,
    predicted_plan,
    schedule_of,
    whole_peak,
)
from tensile_jax.plan.search.cost.workspace import CompiledSizes
from tensile_jax.plan.search.moves.local_search import improve, repair
from tensile_jax.plan.search.schedule import Schedule
from tensile_jax.plan.search.search import Found, fast, fastest, least, perturbed, soon
from tensile_jax.plan.search.step_model import StepModel
from tensile_jax.plan_format import Plan

_EVALUATIONS = 3000  # spent on making a repaired plan faster: more takes longer to plan (`make bench-constants`)
_REPAIRS = 100  # moves that may bring a choice under the limit (`make bench-constants`)
_REPAIRED = 0.96  # of a schedule's peak: for a lower limit, a new search finds faster plans than repairs (`make bench-allocator`)
_STEP = 0.01  # of the limit: by how much it is lowered at least from the second try on (`make bench-allocator`)
_REPAIRS_OF_QUICK = 400  # moves that may bring a quickly found schedule under a lower limit (`make bench-planning`)
_UNUSED = 0.005  # of the limit: unused memory for which a schedule is not improved under a higher limit (`make bench-planning`)
_TRIES = 8  # limits tried while plans turn out to be above the limit (`make bench-constants`)
_WITHOUT_TENSILE = 1.02  # of the whole step's time: faster schedules skip the comparison with `tensile` (`make bench-planning`)
_SLOW = 1.2  # of the whole step's time: for slower schedules, another one is made under a lower limit (`make bench-planning`)
_NEAR_QUICK = 1.01  # of the quick plan's time: a schedule that is no slower than that is taken, too (`make bench-scale`)
_PROMISING = 1.05  # of the schedule's time: what the other one may take to be made faster (`make bench-planning`)
_ALIKE_WITHOUT_SEARCH = 1.1  # of the whole step's time: iterations planned alike are taken without a search; not tuned
_ALIKE_OVER_OTHERS = 1.05  # of the time without this condition: iterations planned alike compile one layer, not all; not tuned


def auto(model: StepModel, limit: float, measured: CompiledSizes) -> Choice | None:
    """The fastest plan that is found under the limit; one executable, if that fits."""
    return within_host_limit(model, limit, measured, lambda model: _auto(model, limit, measured))


def _auto(model: StepModel, limit: float, measured: CompiledSizes) -> Choice | None:
    if not model.graph.operators or (limit > LEAST and whole_peak(model, measured) <= limit):
        return WHOLE
    if limit == LEAST:
        return _least(model, measured)
    quick = None if model.profile.allocator == "exact" else fast(model, limit, measured)
    unasked = 0 if quick is None else predicted_plan(model, choice_of(model, quick), measured).allocator_bytes or 0
    if quick is not None and unasked:
        repaired = _beside_unasked(model, quick, limit, limit - unasked, measured)
        if repaired is not None:
            return choice_of(model, repaired)
    found = _found(model, limit - unasked, measured) or (_found(model, limit, measured) if unasked else None)
    kept = None if found is None else _kept(model, found, limit, measured)
    if kept is not None:
        return choice_of(model, kept.schedule)
    choice = None if found is None else _found_quickly(model, limit, measured)
    if choice is not None:
        return choice
    return _least(model, measured) if peak_of(model, _lowest(model, measured), measured) <= limit else None


def quick(model: StepModel, limit: float, measured: CompiledSizes) -> Choice | None:
    """A choice under the limit that is found in a short search; None if that search finds none.

    It may be slower than the one of `auto`. If its plan is above the limit, the choice is repaired.
    """
    return within_host_limit(model, limit, measured, lambda model: _quick(model, limit, measured))


def _quick(model: StepModel, limit: float, measured: CompiledSizes) -> Choice | None:
    if not model.graph.operators or whole_peak(model, measured) <= limit:
        return WHOLE
    schedule = alike(model, limit, measured) or soon(model, limit, measured)
    choice = None if schedule is None else choice_of(model, schedule)
    if choice is None or peak_of(model, choice, measured) <= limit:
        return choice
    return revise(model, choice, limit, measured)


def _beside_unasked(model: StepModel, quick: Schedule, limit: float, lower: float, measured: CompiledSizes) -> Schedule | None:
    """A schedule whose plan keeps the limit with the bytes that the allocator hands out unasked; None if no move leads there.

    It is made from the quick plan. If it is slow, and slower than the quick plan, another one is made from a quick plan under the
    lower limit. The faster one is the result.

    Args:
        lower: the limit without the bytes that would be handed out unasked under the quick plan.
    """
    keep = partial(_kept, model, limit=limit, measured=measured, may_search=False)
    repaired = None if model.has_iterations else repair(quick, lower, _REPAIRS_OF_QUICK)
    first = None if repaired is None else keep(Found(improve(repaired, lower, _EVALUATIONS), lower))
    if first is None:
        return None
    best = perturbed(model, first, keep)
    if best.schedule.cost > max(_SLOW * model.whole_us, _NEAR_QUICK * quick.cost):
        other = fast(model, lower, measured)
        second = None if other is None else keep(Found(other, lower))
        if second is not None and second.schedule.cost < _PROMISING * best.schedule.cost:
            best = min(best, perturbed(model, second, keep), key=lambda found: found.schedule.cost)
    return best.schedule


def _found(model: StepModel, limit: float, measured: CompiledSizes) -> Found | None:
    schedule = _fastest(model, limit, measured)
    return None if schedule is None else Found(schedule, limit)


def _kept(model: StepModel, found: Found, limit: float, measured: CompiledSizes, *, may_search: bool = True) -> Found | None:
    """The fastest schedule whose plan keeps the limit, of those that are tried in turn; None if no plan does.

    As long as plans are above the limit, the schedule is repaired under lower limits. Once a plan keeps the limit, but leaves
    memory unused because of the device's allocator, its schedule is improved under a higher limit, and if that was too high,
    under one in the middle.

    Args:
        may_search: whether to search anew instead of a repair that must free much.
    """
    best: Found | None = None
    is_exact = model.profile.allocator == "exact"
    lower = limit
    above = float("inf")  # the lowest limit that was too high for the schedule to be improved under
    for _ in range(_TRIES):
        plan = predicted_plan(model, choice_of(model, found.schedule), measured)
        if plan.peak_bytes <= limit:
            best = found
            higher = min(found.limit + limit - plan.peak_bytes, (found.limit + above) / 2)
        elif best is not None:
            above = found.limit
            higher = (best.limit + above) / 2
        else:
            lower = _lower(lower, _needed_limit(plan, found.schedule, limit), limit)
            again = _under(model, found.schedule, lower, measured, may_search=may_search)
            if again is None:
                return None
            found = Found(again, lower)
            continue
        if is_exact or higher < best.limit + _UNUSED * limit or (model.has_iterations and _is_fast(model, best.schedule)):
            break
        found = Found(_improved(model, best.schedule, higher), higher)
    return best


def _under(model: StepModel, schedule: Schedule, limit: float, measured: CompiledSizes, *, may_search: bool) -> Schedule | None:
    """The schedule, repaired under a limit, or another one that is found under it."""
    far = limit < _REPAIRED * schedule.peak
    repaired = None if far and may_search else _repaired(model, schedule, limit)
    if repaired is not None:
        return _improved(model, repaired, limit)
    return _fastest(model, limit, measured) if may_search else None


def _lower(before: float, needed: float, limit: float) -> float:
    """The next limit to try, after `before`. From the second time on, it falls by at least one step, because what the device's
    allocator hands out unasked differs from plan to plan.
    """
    return needed if before == limit else min(needed, before - _STEP * limit)


def _found_quickly(model: StepModel, limit: float, measured: CompiledSizes) -> Choice | None:
    """The choice that ranks the variants of a step (`Planner.quick_us`), if its plan keeps the limit."""
    schedule = fast(model, limit, measured)
    choice = None if schedule is None else choice_of(model, schedule)
    return choice if choice is not None and peak_of(model, choice, measured) <= limit else None


def _needed_limit(plan: Plan, schedule: Schedule, limit: float) -> float:
    """The limit for the schedule with which its plan, which is above `limit`, keeps it.

    It is lower by the most that a segment needs beyond what the condensed step counts. If less than half of the limit would
    remain, the limit shrinks by the ratio of the two instead, because shorter segments are counted more exactly.
    """
    above = [(s.device_bytes, peak) for s, peak in zip(plan.segments, schedule.peaks, strict=True) if s.device_bytes > limit]
    lower = limit - max((needed - peak for needed, peak in above), default=0)
    if lower < limit / 2:
        lower = limit * min(peak / needed for needed, peak in above)
    return min(lower, schedule.peak - 1)


def _fastest(model: StepModel, limit: float, measured: CompiledSizes) -> Schedule | None:
    """The fastest schedule under the limit, or one that treats iterations of loops alike and is hardly slower."""
    if model.has_iterations:
        return _fastest_with_loops(model, limit, measured)
    found = fastest(model, limit, measured)
    is_fast = found is not None and found.step_us <= _WITHOUT_TENSILE * model.whole_us
    if is_fast or model.in_one_program or not model.state_may_stay_out:
        return found
    return _as_tensile(model, limit, measured, found)


def _fastest_with_loops(model: StepModel, limit: float, measured: CompiledSizes) -> Schedule | None:
    """The schedule that treats iterations alike, unless others are much faster: that schedule improved without this condition, or
    one that is searched without it.
    """
    same = alike(model, limit, measured)
    if same is None:
        return fastest(model, limit, measured)
    if _is_fast(model, same):
        return same
    free = perturbed(model, Found(improve(same, limit, _EVALUATIONS), limit)).schedule
    if same.step_us <= _ALIKE_OVER_OTHERS * free.step_us:
        return same
    searched = fastest(model, limit, measured)
    return free if searched is None else min(free, searched, key=lambda schedule: schedule.cost)


def _is_fast(model: StepModel, schedule: Schedule) -> bool:
    """Whether a schedule that treats iterations alike is taken as it is."""
    return schedule.step_us <= _ALIKE_WITHOUT_SEARCH * model.whole_us


def _as_tensile(model: StepModel, limit: float, measured: CompiledSizes, other: Schedule | None) -> Schedule | None:
    """The schedule of `tensile`, improved, if there is one that is faster than `other`; otherwise `other`."""
    choice = tensile(model, limit, measured)
    if choice is None or choice.layout is None:
        return other
    schedule = improve(schedule_of(model, choice.layout, measured), limit, _EVALUATIONS)
    return schedule if other is None or schedule.cost < other.cost else other


def _repaired(model: StepModel, schedule: Schedule, limit: float) -> Schedule | None:
    """The schedule under the limit. If it treats the iterations of loops alike, it still does so."""
    return repair(schedule, limit, _REPAIRS, elsewhere=in_all_iterations(model, schedule))


def _improved(model: StepModel, schedule: Schedule, limit: float) -> Schedule:
    """The schedule, made faster under the limit. If it treats the iterations of loops alike, it still does so."""
    return improve(schedule, limit, _EVALUATIONS, elsewhere=in_all_iterations(model, schedule))


def _schedule_of(model: StepModel, choice: Choice, measured: CompiledSizes) -> Schedule:
    assert choice.layout is not None
    return schedule_of(model, choice.layout, measured, possible_in_all(model) if model.has_iterations else ())


def revise(model: StepModel, choice: Choice, limit: float, measured: CompiledSizes) -> Choice | None:
    """The choice with as few changes as bring it under the limit; None if the search finds none."""
    lower = limit
    for _ in range(_TRIES):
        schedule = _repaired(model, _schedule_of(model, choice, measured), lower)
        if schedule is None:
            return None
        revised = choice_of(model, schedule)
        plan = predicted_plan(model, revised, measured)
        if plan.peak_bytes <= limit:
            return revised if host_peak_of(model, revised) <= model.host_limit else None
        lower = _lower(lower, _needed_limit(plan, schedule, limit), limit)
    return None


def improved(model: StepModel, choice: Choice, limit: float, measured: CompiledSizes) -> Choice | None:
    """The choice, made faster by changes that stay under the limit; None if the search finds none.

    If loops are opened, changes would make their iterations differ, so that more segments were compiled.
    """
    if model.has_iterations:
        return None
    assert choice.layout is not None
    before = schedule_of(model, choice.layout, measured)
    schedule = improve(before, limit, _EVALUATIONS)
    if schedule is before:
        return None
    found = _kept(model, Found(schedule, limit), limit, measured)
    faster = None if found is None else choice_of(model, found.schedule)
    return faster if faster is not None and host_peak_of(model, faster) <= model.host_limit else None


def _least(model: StepModel, measured: CompiledSizes) -> Choice:
    """The fastest plan with the least peak that is known."""
    found = _lowest(model, measured)
    if found is WHOLE:
        return WHOLE
    schedule = least(model, measured)
    faster = choice_of(model, improve(schedule, schedule.peak, _EVALUATIONS))
    return faster if peak_of(model, faster, measured) <= peak_of(model, found, measured) else found


def lowest(model: StepModel, measured: CompiledSizes) -> Choice:
    """A plan with the least peak that is known, however slow."""
    choice = within_host_limit(model, LEAST, measured, lambda model: _lowest(model, measured))
    assert choice is not None
    return choice


def _lowest(model: StepModel, measured: CompiledSizes) -> Choice:
    if not model.graph.operators:
        return WHOLE
    found = choice_of(model, least(model, measured))
    return WHOLE if whole_peak(model, measured) <= peak_of(model, found, measured) else found


def floor_bytes(model: StepModel, measured: CompiledSizes) -> int:
    """The least peak that is known: the smallest limit for which `auto` has a plan."""
    return peak_of(model, lowest(model, measured), measured)
