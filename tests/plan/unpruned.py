"""Looks at every layout of a very small step, one after another: what the oracle (`oracle.py`) is checked against."""

from collections.abc import Iterator
from itertools import combinations, product

from tensile_jax.plan import CompiledSizes
from tensile_jax.plan.result.build import build_plan
from tensile_jax.plan.result.check import check
from tensile_jax.plan.result.layout import BEGINS, COPIED, MADE, Arrival, Residency
from tensile_jax.plan.search.choice import whole_peak, with_small_tensors, workspaces_of
from tensile_jax.plan.search.cost.segment_evaluator import Evaluator
from tensile_jax.plan.search.schedule import Schedule, Several
from tensile_jax.plan.search.starts.start_schedules import assemble
from tensile_jax.plan.search.step_model import StepModel
from tests.builders import header_for


def unpruned(step: StepModel) -> list[tuple[int, float]]:
    """The peak and the time of every plan that the oracle considers."""
    count = len(step.graph.operators)
    evaluator = step.evaluator_for(tuple(range(count + 1)))
    header = header_for(step.graph, state_memory="any" if step.state_may_stay_out else "device")
    found = [(whole_peak(step, CompiledSizes()), step.whole_us)]
    for inner in range(1, count):
        for cuts in ([0, *some, count] for some in combinations(range(1, count), inner)):
            for several in every_residencies(evaluator, cuts):
                schedule = assemble(evaluator, cuts, several, as_they_are=True)
                if schedule is None or not no_longer_than_needed(schedule):
                    continue
                layout = with_small_tensors(
                    step, cuts, {t: s for (t,), s in zip(evaluator.condensed.tensors, several, strict=True) if s}
                )
                workspaces = [nbytes for nbytes, _ in workspaces_of(schedule)]
                plan = build_plan(layout, step.liveness, workspaces, step.costs, header)
                check(plan, step.graph)
                found.append((plan.peak_bytes, plan.step_us))
    return found


def every_residencies(evaluator: Evaluator, cuts: list[int]) -> Iterator[list[Several]]:
    """Every combination of residencies of the tensors with which the step's results are there in the end."""
    step, k = evaluator.condensed, len(cuts) - 1
    segment_of = [j for j in range(k) for _ in range(cuts[j], cuts[j + 1])]
    new_of = dict(step.pairs)
    alone = [t for t in range(len(step.tensors)) if t not in new_of and t not in evaluator.old_of]

    def made(t: int) -> int:
        return segment_of[step.starts[step.made[t]]] if step.made[t] >= 0 else -1

    def of(t: int) -> list[Several]:
        return list(residencies(made(t), k, to_the_end=bool(step.at_end >> t & 1)))

    def of_pair(old: int, new: int) -> list[tuple[Several, Several]]:
        stays = list(product(of(old), of(new)))
        away = product(residencies(-1, k, starts_out=True), residencies(made(new), k, stays_out=True))
        return [*stays, *away]

    for singles in product(*map(of, alone)):
        for pairs in product(*(of_pair(old, new) for old, new in step.pairs)):
            several: list[Several] = [()] * len(step.tensors)
            for t, some in zip(alone, singles, strict=True):
                several[t] = some
            for (old, new), (one, two) in zip(step.pairs, pairs, strict=True):
                several[old], several[new] = one, two
            yield several


def residencies(
    made: int, k: int, *, to_the_end: bool = False, starts_out: bool = False, stays_out: bool = False
) -> Iterator[Several]:
    """Every sequence of residencies of a tensor that segment `made` makes, or -1 for an input, in a step of k segments."""

    def extend(found: Several) -> Iterator[Several]:
        last = found[-1].last if found else made - 1
        if stays_out == bool(found and found[-1].leaves) and to_the_end == (last == k):
            yield found
        if starts_out and not found:
            starts: list[tuple[int, Arrival]] = [(f, COPIED) for f in range(k)]
        elif not found:
            starts = [(0, BEGINS)] if made < 0 else [(f, MADE) for f in range(made + 1, k + 1)]
        elif found[-1].leaves:
            starts = [(f, COPIED) for f in range(last + 2, k + 1)]
        elif made >= 0 and all(r.arrival == MADE for r in found):
            starts = [(f, MADE) for f in range(last + 2, k + 1)]
        else:
            starts = []
        for first, arrival in starts:
            for until in range(first, k + 1):
                yield from extend((*found, Residency(first, until, arrival, False)))
            if arrival == COPIED or not found:
                for until in range(first if arrival == COPIED else first - 1, k):
                    yield from extend((*found, Residency(first, until, arrival, True)))

    return extend(())


def no_longer_than_needed(schedule: Schedule) -> bool:
    """Whether each residency ends with a use, with the end of the iteration, or with a copy to the host."""
    k = schedule.count
    for t, several in enumerate(schedule.residencies):
        for first, last, arrival, leaves in several:
            if last == k or (leaves and arrival != COPIED):
                continue
            if schedule.last_use(t, first, last) != last:
                return False
    return True
