"""Makes the schedules that the search starts from. The caller says where segments begin, and which tensors are dropped.

A *schedule* is a plan while it is searched (`schedule.py`), and a *segment* is a stretch of operators that is compiled as one
executable. A minimum cut has divided the tensors into kept and dropped ones (`analysis/minimum_cut.py`). A kept tensor is on the
device from where it is made to its last use. A dropped tensor is on the device up to a given earlier use, and computed again for
later ones. For schedules that no minimum cut describes, `assemble` takes the intervals in which each tensor is on the device.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence

import numpy as np

from tensile_jax.ir import TensorId
from tensile_jax.plan.result.layout import BEGINS, MADE, Residency
from tensile_jax.plan.search.condensed.condensed_step import Condensed, members
from tensile_jax.plan.search.cost.segment_evaluator import Evaluator
from tensile_jax.plan.search.cost.timing import CopiesOfAll
from tensile_jax.plan.search.schedule import UNSEEN, Schedule, Several


def nodes_of(evaluator: Evaluator, dropped: Mapping[TensorId, int]) -> dict[int, int]:
    """By tensor of the condensed step, the last node up to which it is kept, if these are dropped, each after a place."""
    starts = evaluator.condensed.starts
    nodes = np.searchsorted(np.array(starts), np.arange(starts[-1] + 1), side="right") - 1
    found: dict[int, int] = {}
    for t, last in dropped.items():
        if t in evaluator.bit:
            found[evaluator.bit[t]] = max(int(nodes[last]), found.get(evaluator.bit[t], 0))
    return found


def last_held(step: Condensed, dropped: Mapping[int, int]) -> list[int]:
    """By tensor, the last node before which a boundary holds it, if the `dropped` ones are held up to these nodes only.

    What a dropped tensor is computed from is held as long as a node may need the dropped tensor.
    """
    needs = [0] * len(step.tensors)  # sets of nodes
    for node, read in enumerate(step.reads):
        for t in members(read):
            needs[t] |= 1 << node
    count = len(step.reads)
    end = [0] * len(needs)
    for t in range(len(needs) - 1, -1, -1):  # a recipe reads what was made before
        recipe, last = step.recipes[t], dropped.get(t)
        if step.at_end >> t & 1:
            end[t] = count
        elif last is None or recipe is None:
            end[t] = needs[t].bit_length() - 1 if needs[t] else step.made[t]
        else:
            end[t] = last
            far = needs[t] >> last + 1 << last + 1
            for u in members(recipe.reads):
                needs[u] |= far
    return end


def held_at(step: Condensed, end: Sequence[int]) -> list[int]:
    """By possible boundary, the set of tensors on the device."""
    bounds = step.boundaries
    changes = [0] * (len(bounds) + 1)
    for t, (made, last) in enumerate(zip(step.made, end, strict=True)):
        first, behind = max(bisect_right(bounds, made), 1), bisect_right(bounds, last)
        if first < behind:
            changes[first] ^= 1 << t
            changes[behind] ^= 1 << t
    found: list[int] = []
    there = 0
    for change in changes[:-1]:
        there ^= change
        found.append(there)
    found[0] = step.at_begin
    return found


def start(evaluator: Evaluator, cuts: Sequence[int], end: Sequence[int]) -> Schedule | None:
    """The schedule of these cuts in which every tensor is held from where it is made to `end` (`last_held`)."""
    step = evaluator.condensed
    edges = [step.boundaries[c] for c in cuts]
    residencies: list[Several] = []
    for t, made in enumerate(step.made):
        last = bisect_right(edges, end[t]) - 1
        if made < 0:
            residencies.append((Residency(0, max(last, 0), BEGINS, False),))
        else:
            first = bisect_right(edges, made)
            residencies.append((Residency(first, last, MADE, False),) if first <= last else ())
    return assemble(evaluator, list(cuts), residencies)


def assemble(evaluator: Evaluator, cuts: list[int], residencies: list[Several], *, as_they_are: bool = False) -> Schedule | None:
    """The schedule of these cuts and residencies; None if a segment cannot run.

    Tensors that nothing needs are released earlier, unless the residencies are to be left as they are.
    """
    k = len(cuts) - 1
    none = evaluator.nothing
    made = Schedule(
        evaluator,
        cuts,
        [()] * len(residencies),
        [0] * (k + 1),
        [0] * k,
        CopiesOfAll(evaluator.copies_us),
        [none] * k,
        [0] * (k + 1),
        [0] * k,
        [0.0] * k,
        [0.0] * k,
        [UNSEEN] * k,
    )
    for t, those in enumerate(residencies):
        if those:
            made.set_residencies(t, those)
    if as_they_are:
        if not all(map(made.refresh, range(k))):
            return None
    elif not made.settle(range(k), range(len(residencies))):
        return None
    return made
