"""Changes a finished plan so that some state stays on the host from its last use to its first use in the next iteration.

The old value is copied to the device as late as possible, but before the first segment (executable) that needs it. The updated
value is copied to the host right after its last use, and its device memory is freed when that copy has ended. The copies in one
direction run one after another. All times follow from the latencies of the plan's segments.
"""

from collections.abc import Collection
from dataclasses import replace
from itertools import accumulate, pairwise

from tensile_jax.ir import TensorId
from tensile_jax.plan.analysis.copy_time import copy_in_us, copy_out_us
from tensile_jax.plan.result.layout import COPIED, Residency, segments_of
from tensile_jax.plan.search.choice import Choice
from tensile_jax.plan.search.step_model import StepModel


def keep_state_out(model: StepModel, choice: Choice, tensors: Collection[TensorId]) -> Choice:
    """The choice with these state tensors (old values) on the host across the iteration boundary."""
    assert choice.layout is not None
    layout = choice.layout
    k = len(layout.boundaries) - 1
    contents = segments_of(model.liveness, layout)
    elapsed = [0.0, *accumulate(model.latencies)]
    us = [
        model.profile.launch_us + elapsed[b] - elapsed[a] + sum(model.rerun_us[p] for p in found.again)
        for (a, b), found in zip(pairwise(layout.boundaries), contents, strict=True)
    ]
    residencies = dict(layout.residencies)
    lane_in: list[tuple[float, TensorId]] = []
    begins = [0.0, *accumulate(us)]
    wanted = [(old, new) for old, new in model.pairs if old in tensors]
    uses = {t: [j for j, found in enumerate(contents) if t in found.inputs] for pair in wanted for t in pair}
    free = float("inf")  # the copies to the device, from the last one to the first
    for old, _ in sorted(wanted, key=lambda pair: (-(uses[pair[0]] or [0])[0], pair[0])):
        first = (uses[old] or [0])[0]
        free = min(free, begins[first]) - copy_in_us(model.graph.tensors[old].nbytes, model.profile)
        issued = max((j for j in range(first + 1) if begins[j] <= free), default=0)
        before = residencies[old]
        residencies[old] = (before[0]._replace(first=issued, arrival=COPIED), *before[1:])
        lane_in.append((free, old))
    free = 0.0
    for _, new in sorted(wanted, key=lambda pair: (residencies[pair[1]][-1].first, pair[1])):
        last = residencies[new][-1]
        idle = max([j + 1 for j in uses[new]], default=last.first)
        free = max(free, begins[idle]) + copy_out_us(model.graph.tensors[new].nbytes, model.profile)
        gone = min((j for j in range(idle, k + 1) if begins[j] >= free), default=k + 1)
        leaving = Residency(last.first, max(min(gone - 1, k - 1), last.first - 1), last.arrival, True)
        residencies[new] = (*residencies[new][:-1], leaving)
    return replace(choice, layout=replace(layout, residencies=residencies))
