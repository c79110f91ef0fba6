"""Plans all iterations of an opened loop alike, so that they share their executables.

A loop is *opened* if the step contains the operators of every iteration, one iteration after another (`trace/reading/scans.py`).
A *segment* is a stretch of operators that is compiled as one executable. If a plan cuts every iteration at the same places and
keeps the same tensors in each, the segments of all iterations are equal. Each distinct segment is compiled once, however many
layers a network has. Almost all segments of the plans of the search (`search.py`) differ.

Two choices determine a first schedule: which tensors are *dropped* (not kept, but computed again where they are needed), and the
cuts into segments:

    dropped   A minimum cut of a flow network chooses which tensors are dropped (`analysis/minimum_cut.py`). A parameter of the
              network, the *price*, says how many bytes may be kept to save one byte of memory traffic. A tensor is dropped in
              all iterations if the minimum cut drops it in most of them.
    cuts      At first, every iteration is cut once, where least is stored. If no such plan stays under the limit, or if the
              best one takes over 5 % longer than the step as one executable, the module finds the cheapest cuts of the whole
              step under the limit (`starts/segment_boundaries.py`). It keeps the cuts outside of loops. In each loop, it leaves
              the first and the last iteration aside, picks the iteration with the most cuts among the others, and cuts every
              iteration at the places of these cuts.

Two prices may be combined: the first k iterations use the lower price, at which more is dropped, and the others the higher one. k
is the smallest number found with which the plan stays under the limit. In nested loops, k counts iterations of the innermost
loop.

If no first schedule stays under the limit, one that exceeds it is *repaired*: local search lowers its peak
(`moves/local_search.py`). Local search then makes the schedule faster. Both make each of their moves in all iterations
(`moves/in_all_iterations.py`).
"""

from collections.abc import Mapping, Sequence

from tensile_jax.ir import TensorId
from tensile_jax.plan.analysis.absence import stored_unless_swapped
from tensile_jax.plan.search.bounds.memory_bound import necessary_bytes
from tensile_jax.plan.search.cost.segment_evaluator import Evaluator
from tensile_jax.plan.search.cost.workspace import CompiledSizes
from tensile_jax.plan.search.iterations import Iterations
from tensile_jax.plan.search.moves.best_moves import Elsewhere
from tensile_jax.plan.search.moves.in_all_iterations import InAllIterations
from tensile_jax.plan.search.moves.local_search import improve, repair
from tensile_jax.plan.search.schedule import Schedule
from tensile_jax.plan.search.starts.segment_boundaries import cheapest_cuts
from tensile_jax.plan.search.starts.start_schedules import held_at, last_held, nodes_of, start
from tensile_jax.plan.search.step_model import PRICES, StepModel

_LOWER = (None, 1.0, 0.85, 0.7)
"""Of the limit: limits for cuts, since cuts that are taken over may need more. None cuts each iteration once, which plans faster
(`make bench-loops`)."""
_ONE_CUT_SUFFICES = 1.05  # of the whole step's time: slower schedules make a search for cuts worth its time (`make bench-loops`)
_CUT_UNDER = 0.8  # of the limit: limit for the cuts of a schedule that is then repaired, so that segments are short
_REPAIRABLE = 3.0  # of the limit: repairs of schedules with a higher peak take long and fail
_ATTEMPTS = 2  # repairs of schedules of different prices
_REPAIRS, _REPAIR_EVALUATIONS = 100, 12_000  # moves of a repair, and segments that it evaluates
_FAST, _EVALUATIONS = 1.03, 8000  # of the whole step's time: slower schedules are improved, with so many evaluations


def alike(model: StepModel, limit: float, measured: CompiledSizes) -> Schedule | None:
    """The fastest schedule of this kind under the limit; None if none is found, or if no loop of the step is opened.

    It is remembered, since variants of a step are ranked by it first.
    """
    if not model.has_iterations:
        return None
    return model.evaluator.with_measured(measured).found("alike", limit, lambda: _alike(model, limit, measured))


def possible_in_all(model: StepModel) -> tuple[int, ...]:
    """The places where every iteration of opened loops may be cut, so that all of them can be cut alike."""
    stored = stored_unless_swapped(model.undropped)
    return model.decided("possible in all", lambda: tuple(_iterations(model).everywhere(model.boundaries, stored)))


def in_all_iterations(model: StepModel, schedule: Schedule) -> Elsewhere | None:
    """What makes moves of a schedule in all iterations; None if it does not cut all iterations of each loop alike.

    Moves that cut the schedule need an evaluator with the places of `possible_in_all`.
    """
    evaluator = schedule.evaluator
    if not model.has_iterations or not _iterations(model).are_alike([evaluator.places[cut] for cut in schedule.cuts]):
        return None
    return InAllIterations(_iterations(model), evaluator)


def _iterations(model: StepModel) -> Iterations:
    return model.decided("iterations", lambda: Iterations(model))


def _alike(model: StepModel, limit: float, measured: CompiledSizes) -> Schedule | None:
    best: Schedule | None = None
    for lower in _LOWER:
        found = _highest(model, limit, measured, lower)
        if found is not None and (best is None or found.cost < best.cost):
            best = found
        if best is not None and (lower is not None or best.step_us <= _ONE_CUT_SUFFICES * model.whole_us):
            break
    return _improved(model, best or _repaired(model, limit, measured), limit)


def _improved(model: StepModel, schedule: Schedule | None, limit: float) -> Schedule | None:
    """The schedule, made faster by changes in all iterations if it is slower than the step as one executable."""
    if schedule is None or schedule.step_us <= _FAST * model.whole_us:
        return schedule
    return improve(schedule, limit, _EVALUATIONS, elsewhere=in_all_iterations(model, schedule))


def _repaired(model: StepModel, limit: float, measured: CompiledSizes) -> Schedule | None:
    """A schedule above the limit, repaired by moves in all iterations: that of the highest price with a peak that is not too high
    to be repaired, or if its repair fails, of the next price; None if that fails, too.
    """
    base = model.evaluator.with_measured(measured)
    if limit < necessary_bytes(base):
        return None
    before: dict[TensorId, int] | None = None
    failed = 0
    for price in PRICES:
        dropped = _dropped(model, price)
        if dropped == before or failed == _ATTEMPTS:
            continue
        before = dropped
        schedule = _schedule(model, measured, _cuts(model, base, price, _CUT_UNDER * limit), dropped)
        if schedule is None or schedule.peak > _REPAIRABLE * limit:
            continue
        elsewhere = in_all_iterations(model, schedule)
        repaired = repair(schedule, limit, _REPAIRS, evaluations=_REPAIR_EVALUATIONS, elsewhere=elsewhere)
        if repaired is not None:
            return repaired
        failed += 1
    return None


def _highest(model: StepModel, limit: float, measured: CompiledSizes, lower: float | None) -> Schedule | None:
    """The schedule of the highest price at which one fits, combined with the two prices above it, if that is faster.

    Cuts are sought under `lower` times the limit; if that is None, every iteration is cut once.
    """
    base = model.evaluator.with_measured(measured)
    drops = [_dropped(model, price) for price in PRICES]
    for i, price in enumerate(PRICES):
        if i and drops[i] == drops[i - 1]:
            continue  # the price before it has led to nothing
        held = _held(base, drops[i])
        if base.condensed.base_bytes + max(map(base.condensed.bytes_of, held)) > limit:
            continue
        cuts = _cuts(model, base, price, None if lower is None else lower * limit)
        schedule = _schedule(model, measured, cuts, drops[i])
        if schedule is not None and schedule.peak <= limit:
            mixed = (_mixed(model, measured, limit, cuts, drops[i], drop) for drop in drops[max(0, i - 2) : i])
            return min((schedule, *(s for s in mixed if s is not None)), key=lambda s: s.cost)
    return None


def _dropped(model: StepModel, price: float) -> dict[TensorId, int]:
    return model.decided(("alike", price), lambda: _iterations(model).dropped_at(price))


def _held(evaluator: Evaluator, dropped: Mapping[TensorId, int]) -> list[int]:
    """By possible boundary, the set of tensors on the device."""
    return held_at(evaluator.condensed, last_held(evaluator.condensed, nodes_of(evaluator, dropped)))


def _cuts(model: StepModel, base: Evaluator, price: float, under: float | None) -> list[int]:
    """The places of the cheapest cuts under a limit, in every iteration; if the limit is None, every iteration is cut once."""
    held = _held(base, _dropped(model, price))
    found = (0, len(base.places) - 1) if under is None else cheapest_cuts(base, held, under)
    stored = stored_unless_swapped(model.dropped_at(price))
    return _iterations(model).everywhere([base.places[c] for c in {*found, *base.required}], stored)


def _mixed(
    model: StepModel,
    measured: CompiledSizes,
    limit: float,
    cuts: list[int],
    lower: Mapping[TensorId, int],
    higher: Mapping[TensorId, int],
) -> Schedule | None:
    """The schedule that drops `lower` in the first iterations, and `higher` in as many of the last ones as the limit allows."""
    best: Schedule | None = None
    index, fits, exceeds = _iterations(model).index, _iterations(model).most, 0
    while fits - exceeds > 1:
        k = (fits + exceeds) // 2
        dropped = {t: last for t, last in lower.items() if t not in index or index[t] < k}
        dropped |= {t: last for t, last in higher.items() if t in index and index[t] >= k}
        schedule = _schedule(model, measured, cuts, dropped)
        if schedule is not None and schedule.peak <= limit:
            best, fits = schedule, k
        else:
            exceeds = k
    return best


def _schedule(model: StepModel, measured: CompiledSizes, cuts: Sequence[int], dropped: Mapping[TensorId, int]) -> Schedule | None:
    """The schedule with these cuts (places) and dropped tensors."""
    possible = {*cuts, *possible_in_all(model)} - set(model.boundaries)
    evaluator = model.evaluator_for(tuple(sorted(possible))).with_measured(measured)
    at = {place: c for c, place in enumerate(evaluator.places)}
    return start(evaluator, [at[p] for p in cuts], last_held(evaluator.condensed, nodes_of(evaluator, dropped)))
