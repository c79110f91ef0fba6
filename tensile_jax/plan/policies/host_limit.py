"""Keeps the plan of every policy under the limit of host memory.

A *policy* is a way to plan. It first decides without this limit. If the plan exceeds the limit, the policy decides again, this
time with the limit. The policy `auto` then considers no plan that exceeds it (`search/moves/local_search.py`). The other
policies choose tensors to swap as before. The largest of these are swapped, as many as the host can hold, and the others are
not.

Before a plan is built, its host memory is only estimated. The estimate can be too low. For example, the search works on a
simplified step, which does not show exactly which operators need a swapped tensor (`search/condensed/condensed_step.py`). So
the host memory of the built plan is computed as well. If that exceeds the limit, the policy decides again, under a lower limit
of host memory.

A few swaps can need more device memory than none. So if the policy finds no plan with swaps, it plans without them. If it is
asked for the lowest peak that it can reach, it plans in both ways, and the plan with the lower peak is taken.

Sizes in bytes.
"""

from collections.abc import Callable

import numpy as np

from tensile_jax.ir import TensorId
from tensile_jax.plan.analysis.absence import Absence, Absences
from tensile_jax.plan.analysis.retention import Retention
from tensile_jax.plan.search.choice import LEAST, Choice, peak_of, predicted_plan
from tensile_jax.plan.search.cost.workspace import CompiledSizes
from tensile_jax.plan.search.step_model import StepModel

_LOWER = (1.0, 0.9, 0.7)  # of the limit: host limits tried if the built plan needs more than was counted; not tuned


def within_host_limit(
    model: StepModel, limit: float, measured: CompiledSizes, decide: Callable[[StepModel], Choice | None]
) -> Choice | None:
    """What `decide` chooses, so that its plan keeps the step's limit of host memory; None if it chooses nothing.

    `decide` is called with the step, or with the same step under another limit of host memory.

    Args:
        limit: of device memory; `LEAST` asks for the choice with the least peak.
    """
    choice = decide(model.with_host_limit(float("inf")))
    if choice is None or host_peak_of(model, choice) <= model.host_limit:
        return choice
    tries = (decide(model.with_host_limit(part * model.host_limit)) for part in _LOWER if model.may_swap)
    choice = next((one for one in tries if one is None or host_peak_of(model, one) <= model.host_limit), None)
    if choice is not None and limit > LEAST:
        return choice
    without = decide(model.with_host_limit(0))
    found = [one for one in (choice, without) if one is not None]
    return min(found, key=lambda one: peak_of(model, one, measured), default=None)


def host_peak_of(model: StepModel, choice: Choice) -> int:
    """The most that the plan of a choice has in host memory, in bytes; zero without looking where there is no limit."""
    if choice.layout is None or model.host_limit == float("inf"):
        return 0
    return predicted_plan(model, choice, CompiledSizes()).host_peak_bytes or 0


def that_fit(model: StepModel, retention: Retention, absences: Absences) -> Absences:
    """The absences of the tensors whose copies the host can hold together: the largest tensors first, ties by their ids.

    A tensor of the state goes with its update. The host keeps a copy from the last need before the tensor's first absence to the
    first need after its last absence.
    """
    if model.host_limit == float("inf"):
        return absences
    nbytes, count = model.liveness.nbytes, len(model.graph.operators)
    mate = {t: u for pair in model.pairs for t, u in (pair, pair[::-1])}
    held = np.zeros(count + 2)  # by place, from -1 on
    kept: dict[TensorId, tuple[Absence, ...]] = {}
    seen: set[TensorId] = set()
    for t in sorted(absences, key=lambda t: (-int(nbytes[t]), t)):
        if t in seen:
            continue
        both = [u for u in (t, mate.get(t)) if u is not None and u in absences]
        seen.update(both)
        after = held.copy()
        for u in both:
            first, last = absences[u][0], absences[u][-1]
            begin = -1 if first.leave < 0 else retention.last_need(u, first.leave)
            end = count if last.back >= count else retention.next_need(u, last.leave)
            after[begin + 1 : end + 2] += nbytes[u]
        if after.max() <= model.host_limit:
            held = after
            kept.update((u, absences[u]) for u in both)
    return kept
