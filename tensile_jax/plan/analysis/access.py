"""Makes the tensor access sequence of a step: which operator generates and uses which tensor, and when.

This is TENSILE sections III-A, III-C and IV-A. A *tensor access* is one operator generating or using one tensor. This module and
the policy `tensile`, which plans with the paper's algorithms, use the paper's names:

    begin(k) = latency(0) + ... + latency(k - 1),    end(k) = begin(k) + latency(k)
    TGA      Tensor Generating Access: operator k generates the tensor during [begin(k), end(k))
    TUA      Tensor Using Access: operator k uses the tensor as an input during [begin(k), end(k))
    TAT(t)   the accesses of tensor t alone, sorted by time: one TGA, then its TUAs. (The paper does not spell TAT out.)

Some tensors are in memory when the iteration begins. They count as generated at time 0 by an imaginary operator with the number
-1, the *placeholder* ("We regard the placeholder as a TGA").

An operator here is what is executed as one piece: a single equation, or a *segment*, a stretch of equations that is compiled as
one executable.

An updated parameter takes over the memory of the old one (section IV-B). `updates` maps each updated parameter to the old one.
The old parameter is in memory until the update begins.

Difference from the paper: the paper predicts latencies with an MLP (section IV-A). Here the caller gives them.

Times in microseconds since the iteration began, intervals half-open, sizes in bytes. Every latency is above zero: a tensor that
existed for no time would never count in the *footprint*, the bytes in device memory at a given time.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Literal, NamedTuple

from tensile_jax.ir import TensorId
from tensile_jax.plan.analysis.retention import Retention, segment_contents

PLACEHOLDER = -1
"""The operator that generates what is there when the iteration begins."""

_SHORTEST_US = 1e-3  # the latency of a segment whose operators all take no time by the cost model


@dataclass(frozen=True, slots=True)
class Access:
    """One access of `tensor` by the operator at that index of the sequence."""

    tensor: TensorId
    operator: int
    kind: Literal["generating", "using"]
    begin_us: float
    end_us: float
    nbytes: int


@dataclass(frozen=True, slots=True)
class Execution:
    """One executed operator: what it uses, what it generates, how long it takes."""

    inputs: tuple[TensorId, ...]
    outputs: tuple[TensorId, ...]
    latency_us: float


@dataclass(frozen=True, slots=True)
class RecomputeNeeds:
    """What it takes to generate a tensor again: the tensors that must be on the device, and the time."""

    inputs: tuple[TensorId, ...]
    latency_us: float


@dataclass(frozen=True, slots=True)
class AccessSequence:
    """The accesses of one iteration of one job.

    `accesses` has the accesses of each tensor, sorted by time (TAT). The memory of `initial` tensors is in use when the iteration
    begins, and that of `results` when it ends. `fixed` tensors are never swapped or recomputed. `making` says how to recompute
    what the operators generate.
    """

    job: int
    begins_us: tuple[float, ...]
    ends_us: tuple[float, ...]
    nbytes: Mapping[TensorId, int]
    accesses: Mapping[TensorId, tuple[Access, ...]]
    initial: frozenset[TensorId]
    results: frozenset[TensorId]
    fixed: frozenset[TensorId]
    updates: Mapping[TensorId, TensorId]
    making: Mapping[TensorId, RecomputeNeeds]

    @property
    def end_us(self) -> float:
        """When the iteration ends."""
        return max(self.ends_us, default=0.0)

    def last_ended(self, time_us: float) -> int:
        """The last operator that has ended by that time, or -1 if none has. An event at that time is issued after it."""
        return bisect_right(self.ends_us, time_us) - 1

    def generating(self, tensor: TensorId) -> Access:
        """The TGA of the tensor; the last one if there are two.

        A tensor has two TGAs if its memory is in use from the beginning and an operator generates its value later.
        """
        return next(access for access in reversed(self.accesses[tensor]) if access.kind == "generating")

    def uses(self, tensor: TensorId) -> tuple[Access, ...]:
        """The TUAs of the tensor."""
        accesses = self.accesses[tensor]
        return accesses[2:] if len(accesses) > 1 and accesses[1].kind == "generating" else accesses[1:]

    def first_use_from(self, tensor: TensorId, time_us: float) -> Access | None:
        """The first TUA of the tensor that begins at that time or later."""
        uses = self.uses(tensor)
        place = bisect_left(uses, time_us, key=lambda access: access.begin_us)
        return uses[place] if place < len(uses) else None

    def lifetimes(self) -> dict[TensorId, tuple[float, float]]:
        """`[begin, end)` of each tensor in device memory when it is released after its last access (activity analysis).

        The memory of an old parameter passes to the updated one when the update begins. A tensor that is in memory at the
        beginning and never used is released after the first operator.
        """
        overwritten = {old: self.accesses[new][0].begin_us for new, old in self.updates.items()}
        first_end_us = min(self.ends_us, default=0.0)
        found: dict[TensorId, tuple[float, float]] = {}
        for t, accesses in self.accesses.items():
            end = self.end_us if t in self.results else max(accesses[-1].end_us, first_end_us)
            found[t] = (accesses[0].begin_us, overwritten.get(t, end))
        return found


def find_accesses(
    executions: Sequence[Execution],
    nbytes: Mapping[TensorId, int],
    *,
    initial: Collection[TensorId],
    results: Collection[TensorId] = (),
    fixed: Collection[TensorId] = (),
    updates: Mapping[TensorId, TensorId] | None = None,
    making: Mapping[TensorId, RecomputeNeeds] | None = None,
    job: int = 0,
) -> AccessSequence:
    """The access sequence of the operators in the order in which they are executed.

    Args:
        nbytes: of every tensor.
        updates: updated parameter, which is a result, -> the old parameter whose memory it takes.
        making: how to recompute a tensor, where that is not its operator as a whole.
    """
    times = [0.0, *accumulate(execution.latency_us for execution in executions)]
    accesses = {t: [Access(t, PLACEHOLDER, "generating", 0.0, 0.0, nbytes[t])] for t in initial}
    makings: dict[TensorId, RecomputeNeeds] = {}
    for k, execution in enumerate(executions):
        if not execution.latency_us > 0.0:
            raise ValueError(f"Operator {k} must take more than 0 us: got {execution.latency_us}.")
        for t in dict.fromkeys(execution.inputs):
            if t not in accesses:
                raise ValueError(f"Operator {k} uses tensor {t} before it is generated: make it one of `initial`.")
            accesses[t].append(Access(t, k, "using", times[k], times[k + 1], nbytes[t]))
        for t in execution.outputs:
            accesses.setdefault(t, []).append(Access(t, k, "generating", times[k], times[k + 1], nbytes[t]))
            makings[t] = RecomputeNeeds(execution.inputs, execution.latency_us)
    for new, old in (updates or {}).items():
        if accesses[old][-1].operator > accesses[new][0].operator:
            raise ValueError(f"Tensor {old} cannot give its memory to tensor {new}: it is used after the update.")
    return AccessSequence(
        job=job,
        begins_us=tuple(times[:-1]),
        ends_us=tuple(times[1:]),
        nbytes={t: nbytes[t] for t in accesses},
        accesses={t: tuple(some) for t, some in accesses.items()},
        initial=frozenset(initial),
        results=frozenset(results) | set(updates or {}),
        fixed=frozenset(fixed),
        updates=dict(updates or {}),
        making={**makings, **(making or {})},
    )


def access_sequence(
    retention: Retention, boundaries: Sequence[int], latencies: Sequence[float], *, smallest_bytes: int = 0
) -> AccessSequence:
    """The access sequence of a graph cut at the boundaries. Each segment, with what it computes again, is one operator of it.

    A tensor is recomputed by its chain (`find_chain`). Some tensors are fixed, which means that they are never swapped or
    recomputed: what the caller owns, results of effectful operators, keys of random numbers, and tensors below `smallest_bytes`.

    Args:
        boundaries: ascending, from 0 to the number of operators of the graph.
        latencies: of every place.
    """
    liveness, graph = retention.liveness, retention.liveness.graph
    all_contents = [segment_contents(retention, a, b) for a, b in pairwise(boundaries)]

    def latency(places: Collection[int]) -> float:
        return max(sum(latencies[place] for place in places), _SHORTEST_US)

    executions = [Execution(e.inputs, e.outputs, latency((*e.again, *range(e.begin, e.end)))) for e in all_contents]
    making: dict[TensorId, RecomputeNeeds] = {}
    for t in (t for contents in all_contents for t in contents.outputs):
        chain = find_chain(retention, t, smallest_bytes=smallest_bytes)
        making[t] = RecomputeNeeds(chain.inputs, latency(chain.places))
    return find_accesses(
        executions,
        {t.id: t.nbytes for t in graph.tensors},
        initial=[t.id for t in graph.tensors if t.producer is None],
        results=liveness.kept_by_caller.union(graph.outputs),
        fixed=liveness.kept_by_caller
        | liveness.made_once
        | {t.id for t in graph.tensors if t.dtype.startswith("key<") or t.nbytes < max(smallest_bytes, 1)},
        updates={new: old for old, new in retention.aliases.items()},
        making=making,
    )


class Chain(NamedTuple):
    """What a tensor is recomputed from, and the places of the operators that run again for it."""

    inputs: tuple[TensorId, ...]
    places: tuple[int, ...]


def find_chain(retention: Retention, tensor: TensorId, *, smallest_bytes: int = 0) -> Chain:
    """How to compute the tensor again: the operators that run again, of which the last one makes the tensor.

    The chain starts from inputs of the step, from tensors that are stored at least as long as this tensor, and from results of
    effectful operators, which do not run again. Tensors below `smallest_bytes` are always kept, so they are neither listed as
    inputs nor recomputed.
    """
    begin, end, graph = retention.liveness.begin, retention.end, retention.liveness.graph
    places = {begin[tensor]}
    inputs: set[TensorId] = set()
    wanted = [*graph.operators[begin[tensor]].inputs]
    while wanted:
        t = wanted.pop()
        if graph.tensors[t].nbytes < smallest_bytes and t not in retention.dropped:
            continue
        if begin[t] < 0 or end[t] >= end[tensor] or t in retention.liveness.made_once:
            inputs.add(t)
        elif begin[t] not in places:
            places.add(begin[t])
            wanted += graph.operators[begin[t]].inputs
    return Chain(tuple(sorted(inputs)), tuple(sorted(places)))
