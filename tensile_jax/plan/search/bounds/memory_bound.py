"""Computes a lower bound on the peak memory of every schedule of a step.

A *schedule* is a plan while it is searched. It cuts the step into *segments*, stretches of operators that are each compiled as
one executable. A *node* is a group of consecutive operators; no schedule cuts inside of a node (`condensed/condensed_step.py`).
Every schedule has these bytes on the device:

    at the ends of an iteration      arguments and results, except state that may be on the host then
    while a node runs                what the node reads and makes, further buffers that it needs, and every tensor that is still
                                     needed and can be neither swapped nor computed again

A tensor that is made and read inside of one segment belongs to the segment's *workspace*, the memory beside its inputs and
results. The search predicts the workspace as a weighted sum of sizes (`cost/workspace.py`). What a node reads and makes may all
be workspace, so this bound counts it with the same weights, in order not to be above any prediction. It leaves out updates, since
each may take over the memory of the state that it replaces, and tensors that XLA does not write.

Once segments have been compiled, a bound made of predictions may be too high, so only the ends of an iteration count.
`bytes_at_ends` computes these from the graph alone. They also bound the memory of plain jit's executable. Sizes in bytes.
"""

from tensile_jax.ir import Graph, TensorId
from tensile_jax.plan.search.cost.segment_evaluator import Evaluator


def necessary_bytes(evaluator: Evaluator) -> int:
    """A lower bound on the peak of every schedule, in bytes."""
    step = evaluator.condensed
    last = len(step.boundaries) - 1
    begins = step.at_begin & ~sum(1 << old for old, _ in step.pairs)
    ends = step.at_end & ~sum(1 << new for _, new in step.pairs)
    least = max(
        step.bytes_of(begins) + int(step.small_bytes[0, 0]),
        step.bytes_of(ends) + int(step.small_bytes[last, last]),
    )
    return step.base_bytes + (least if evaluator.is_measured else max(least, _of_nodes(evaluator)))


def bytes_at_ends(graph: Graph, *, state_may_stay_out: bool) -> int:
    """Bytes of arguments and results that are on the device when an iteration begins or ends, whatever runs the step.

    Constants and arguments that nothing reads do not count: plain jit's executable holds neither.
    """
    used = {t for operator in graph.operators for t in operator.inputs} | set(graph.outputs)
    away = {t for pair in graph.carried for t in (pair.input, pair.output)} if state_may_stay_out else set[TensorId]()
    inputs = {t for t in graph.inputs if t in used and t not in away}
    results = {t for t in graph.outputs if t not in away} | (inputs - graph.donated)
    begins, ends = (sum(graph.tensors[t].nbytes for t in those) for those in (inputs, results))
    return max(begins, ends)


def _of_nodes(evaluator: Evaluator) -> int:
    """The most that any node needs, without what the caller owns."""
    step, profile = evaluator.condensed, evaluator.profile
    weight = min(1.0, profile.late_weight + profile.early_weight)
    fixed = sum(1 << t for t, recipe in enumerate(step.recipes) if recipe is None) & ~step.movable
    needed: list[int] = []  # by node, from the last one back, what is needed then or later
    later = step.at_end
    for read in reversed(step.reads):
        later |= read
        needed.append(later)
    made, most = step.at_begin, 0
    for read, makes, extra, later in zip(step.reads, step.makes, step.extra, reversed(needed), strict=True):
        there = fixed & made & later
        own = (read | makes) & step.written & ~evaluator.updates & ~there
        most = max(most, step.bytes_of(there) + int(weight * (step.bytes_of(own) + extra)))
        made |= makes
    return most
