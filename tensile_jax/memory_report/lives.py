"""Computes when each tensor is in device memory under plain `jax.jit`, and what is there when the predicted peak is reached.

*Plain jit* runs a step as one executable. The planner predicts the peak of an executable by the rules in
`plan/search/cost/segment_account.py`. Here, the same rules are applied to each tensor by itself:

    argument    from the beginning to the end, or until the result that takes over the argument's memory is made
    result      from the operator that makes it to the end
    temporary   from the operator that makes it to the last one that needs it, if XLA writes it to memory
                (`plan/analysis/fusion.py`). XLA fuses most light operators, such as additions, into the operators that read
                their outputs. Then the outputs are not written, and the inputs live until the outputs are read.
                Small outputs, such as sums, are taken to be written (`plan/search/condensed/condensed_step.py`)

    in use(q) = bytes of the tensors that live at operator q + workspace of q (what the operator needs inside)
    peak      = the predicted peak of the executable (`plan/search/choice.py`), reached where `in use` is highest

The peak is usually more than `in use` at that operator. One part of the difference is the buffers of the step's results: the
executable holds them from its beginning, but `in use` counts each only from the operator that makes it. The rest is called
packing (`report.py`). The order of operators is the planner's; XLA's own may differ. Sizes are in bytes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from tensile_jax.ir import Graph, Operator, Origin
from tensile_jax.memory_report.records import Held, HeldRole, PeakPoint, RoleCurve, Tensor
from tensile_jax.plan.search.step_model import StepModel
from tensile_jax.units import format_bytes, format_count

SMALL = 1e-4
"""Of the peak: smaller tensors are counted together. Smaller values name more tensors and make pages larger: `make bench-memory`
prints both."""

OriginOf = Callable[[Operator, int | None], Origin]
"""Where the user's code has an operator, or makes its result of this number, from 0 on."""


_RESERVED = "results that are not written yet: XLA has their buffers from the beginning"
_GAPS = "gaps between buffers, and what XLA's own order of operators adds"
_SHARED = "tensors that XLA is expected to place into the buffers of others"
_NOT_MADE = Origin("", "", "", "", "")  # that of an argument


@dataclass(frozen=True, slots=True, eq=False)
class Lives:
    """What lives when, as `MemoryReport` has it. The parts in `held` add up to the peak that was given."""

    peak: PeakPoint | None
    held: tuple[Held, ...]
    tensors: tuple[Tensor, ...]
    small_bytes: int
    curves: tuple[RoleCurve, ...]
    begin_us: tuple[float, ...]


def find_lives(model: StepModel, peak_bytes: int, origin_of: OriginOf) -> Lives:
    """What lives when in the step of `model`, each loop of which is one operator, where plain jit's peak is `peak_bytes`."""
    graph, liveness = model.graph, model.liveness
    count = len(graph.operators)
    begin, end, last_use, in_memory = _spans(model)
    roles = _roles(graph)
    size = np.where(in_memory, liveness.nbytes, 0)
    workspace = np.array([op.inner for op in graph.operators], dtype=np.int64)
    if model.profile.canonical_layouts:
        workspace = workspace + liveness.relayout.astype(np.int64)

    by_role: dict[HeldRole, np.ndarray] = {
        role: _curve(size, begin, end, [r == role for r in roles], max(count, 1)) for role in dict.fromkeys(roles)
    }
    used = sum(by_role.values(), np.zeros(max(count, 1), dtype=np.int64))
    if count:
        by_role["workspace"] = workspace
        used = used + workspace
    at = int(used.argmax())
    small_bytes = max(int(SMALL * peak_bytes), 1)
    shown = sorted(np.flatnonzero(size >= small_bytes).tolist(), key=lambda t: (-int(size[t]), t))
    own: dict[int, Origin] = {}

    def own_origin(place: int) -> Origin:
        """That of the operator itself."""
        if place not in own:
            own[place] = origin_of(graph.operators[place], None)
        return own[place]

    def record(t: int) -> Tensor:
        tensor, made, last = graph.tensors[t], liveness.begin[t], int(last_use[t])
        operator = graph.operators[made] if made >= 0 else None
        origin = _NOT_MADE if operator is None else origin_of(operator, operator.outputs.index(tensor.id))
        return Tensor(
            tensor.name, roles[t], tensor.nbytes, tensor.shape, tensor.dtype, int(begin[t]), int(end[t]),
            origin.made_by, origin.made_at, origin.code, origin.stacked_at, origin.called_from,
            graph.operators[last].name if last >= 0 else "", own_origin(last).made_at if last >= 0 else "",
        )  # fmt: skip

    records = {t: record(t) for t in shown}
    lives_at = np.flatnonzero((begin <= at) & (at < end) & (size > 0)).tolist()
    held = [Held(records[t].name, roles[t], int(size[t]), records[t]) for t in shown if begin[t] <= at < end[t]]
    held += _together(graph, roles, [t for t in lives_at if t not in records], small_bytes)
    if count and workspace[at]:
        held.append(Held(f"inside {graph.operators[at].name}", "workspace", int(workspace[at])))
    taking_over = {new for _, new in liveness.possible_aliases}
    unwritten = sum(int(size[t]) for t in set(graph.outputs) - taking_over if begin[t] > at)
    left = peak_bytes - sum(part.nbytes for part in held)
    reserved = min(max(left, 0), unwritten)
    if reserved:
        held.append(Held(_RESERVED, "reserved", reserved))
    if left - reserved:
        held.append(Held(_GAPS if left > reserved else _SHARED, "packing", left - reserved))
    held.sort(key=lambda part: (part.role == "packing", -part.nbytes, part.tensor is None))  # equal tensors keep their order
    operator = graph.operators[at] if count else None
    return Lives(
        peak=None if operator is None else PeakPoint(at, operator.name, own_origin(at).made_at, own_origin(at).code),
        held=tuple(held),
        tensors=tuple(records.values()),
        small_bytes=small_bytes,
        curves=tuple(RoleCurve(role, tuple(nbytes.tolist())) for role, nbytes in by_role.items() if nbytes.any()),
        begin_us=tuple(round(us, 3) for us in accumulate((0.0, *model.latencies[:-1]))) if count else (),
    )


def _spans(model: StepModel) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """By tensor: `begin` and `end` of its life, the last operator that needs it (-1 for none), and whether it is in memory."""
    graph, liveness = model.graph, model.liveness
    count = max(len(graph.operators), 1)
    outputs = list(set(graph.outputs))
    in_memory = model.fusion.written.copy()
    in_memory[outputs] = True
    needed = [-1] * len(graph.tensors)
    significant, derived = model.classes
    fused: list[bool] = (~in_memory & (significant | derived)).tolist()
    for place in range(len(graph.operators) - 1, -1, -1):
        op = graph.operators[place]
        # where it runs: here, or where its results are read that XLA does not write
        runs = max([place, *(needed[t] for t in op.outputs if fused[t])])
        for t in op.inputs:
            needed[t] = max(needed[t], runs)
    begin, last = np.maximum(liveness.begins, 0), np.array(needed, dtype=np.int64)
    end = np.maximum(last, begin) + 1
    end[liveness.begins < 0] = count  # XLA has its arguments to the end
    end[outputs] = count
    for old, new in liveness.possible_aliases:
        end[old] = begin[new]
    return begin, end, last, in_memory


def _roles(graph: Graph) -> list[HeldRole]:
    """The roles of the tensors. The arguments of a function that returns no state are neither parameters nor a batch."""
    if graph.carried:
        return [tensor.role for tensor in graph.tensors]
    inputs = set(graph.inputs)
    return ["argument" if tensor.id in inputs else tensor.role for tensor in graph.tensors]


def _curve(size: np.ndarray, begin: np.ndarray, end: np.ndarray, which: Sequence[bool], count: int) -> np.ndarray:
    """The bytes at each operator of the tensors in `which`."""
    those = np.array(which, dtype=bool) & (size > 0)
    change = np.zeros(count + 1, dtype=np.int64)
    np.add.at(change, begin[those], size[those])
    np.add.at(change, end[those], -size[those])
    return np.cumsum(change)[:count]


def _together(graph: Graph, roles: Sequence[HeldRole], those: Sequence[int], small_bytes: int) -> list[Held]:
    """The small tensors, one row for each role."""
    by_role: dict[HeldRole, list[int]] = {}
    for t in those:
        by_role.setdefault(roles[t], []).append(graph.tensors[t].nbytes)
    below = format_bytes(small_bytes)
    return [Held(f"{format_count(len(some), 'tensor')} below {below}", role, sum(some)) for role, some in by_role.items()]
