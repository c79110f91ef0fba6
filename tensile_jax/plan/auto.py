"""Policy `auto`, the default: the least time under the limit, of everything that the ladder has to offer.

Recomputation, swaps and segments compete by the microseconds that they add to the step; see `ladder.py` for what there is to
choose from, `cut.py` for how segments are priced. Where the choice swaps, windows are then fitted to the segments (`windows.py`).
If the step as one executable is under the limit, that is the plan.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

from tensile_jax.plan.assemble import Layout, assemble, empty_plan
from tensile_jax.plan.choice import LEAST, Choice, cheapest, layout, least, whole, whole_peak
from tensile_jax.plan.ladder import Ladder
from tensile_jax.plan.windows import fitted
from tensile_jax.plan.workspace import Measured, hopeful_workspaces, workspaces
from tensile_jax.schedule import Plan

_NO_STALL = 1e-3  # of a step: waiting that is not worth another look
_FLOOR_RUNGS = 3  # the last rungs, of which the least peak is the floor


def auto(ladder: Ladder, limit: float, measured: Measured) -> Choice | None:
    """The cheapest of the cheapest cuts of all rungs; one executable, if that fits."""
    if limit > LEAST and whole_peak(ladder, measured) <= limit:
        return whole(ladder)
    lowest, choice = hopeful_floor(ladder, measured)
    if limit == LEAST:
        return choice
    found = None if limit < lowest else cheapest(ladder, ladder.families(), limit, measured)
    return None if found is None else _with_fitted_windows(ladder, found, limit, measured)


def _with_fitted_windows(ladder: Ladder, choice: Choice, limit: float, measured: Measured) -> Choice:
    """The same with the windows of its swaps fitted to its segments: the fastest of several ways that are under the limit.

    None of them depends on the limit, and none has a lower peak than the choice itself. So a lower limit still never gives a
    higher peak: if the way taken is under the lower limit, then so is the choice, and both are taken again.
    """
    rung = ladder.rung(choice.rung)
    chosen = layout(ladder, choice, measured)
    plan = _timed(ladder, chosen)
    if not rung.absences or plan.stall_us <= _NO_STALL * plan.step_us:
        return choice
    segment_us = [ladder.profile.launch_us + s.latency_us for s in plan.segments]
    best_us, best = plan.step_us, None
    for absences in fitted(rung.retention, rung.absences, choice.boundaries, segment_us, ladder.profile):
        other = _timed(ladder, replace(chosen, absences=absences))
        if plan.peak_bytes <= other.peak_bytes <= limit and other.step_us < best_us:
            best_us, best = other.step_us, absences
    if best is None:
        return choice
    absences = best
    key = "fitted", choice.rung, choice.boundaries, tuple(away for several in absences.values() for away in several)
    return Choice(ladder.add(key, lambda: (rung.retention, absences), boundaries=rung.board.boundaries), choice.boundaries)


def _timed(ladder: Ladder, chosen: Layout) -> Plan:
    return assemble(chosen, ladder.traffic, ladder.profile, ladder.latencies, empty_plan(ladder.graph))


@lru_cache(maxsize=16)
def hopeful_floor(ladder: Ladder, measured: Measured) -> tuple[int, Choice]:
    """The least peak of the last rungs, and the choice that has it, before compiling says more."""
    return least(ladder, range(len(ladder) - _FLOOR_RUNGS, len(ladder)), measured, hopeful_workspaces)


def refuted_floors(ladder: Ladder, measured: Measured) -> Iterator[tuple[int, Choice]]:
    """The same when compiling has refuted that floor, the likeliest first. Looks at every rung.

    The first heeds all that was learnt, which may be too much to fear for small segments; the second what was measured only.
    """
    for needed in (workspaces, hopeful_workspaces):
        yield least(ladder, range(len(ladder)), measured, needed)
