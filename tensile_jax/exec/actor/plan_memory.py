"""Computes how many bytes each move (launch, copy or wait) of an iteration needs and holds. From these numbers, the controller
decides which job may go on.

The moves of an iteration are the plan's instructions (`plan/result/instructions.py`) in their order, with `begin` before them and
`end` after them. Each move changes the bytes that the job holds on the device:

    begin          adds the batch and the state that an iteration expects on the device
    StartSwapOut   changes nothing: the tensors stay on the device until their copies have ended
    FinishSwapOut  removes the tensors, once their copies to the host have ended
    StartSwapIn    adds the tensors, from the moment the copies are issued
    FinishSwapIn   changes nothing: it waits until copies to the device have ended
    Launch         needs what is on the device while the segment runs (`Segment.device_bytes`: tensors and XLA's temporary
                   memory); then adds the segment's outputs and removes what it frees
    Free           removes arguments that were donated to the step
    end            leaves the state for the next iteration, and the metrics

Two things count on the device all the time, even while the job is *parked* (while its whole state is in host memory): the
metrics of the previous iteration, since they may not have been read yet, and the constants of a plan with segments.

A step that runs whole, as one executable, has one launch between `begin` and `end`. It needs plain jit's peak, plus the arguments
that nothing reads, which that peak leaves out.

The job's bytes in host memory are the larger of two numbers. One is what an iteration needs: the tensors that the plan copies
to the host (`plan/result/memory_curve.py`), and those that the step itself keeps in host memory. The other is the parked state.
"""

from collections.abc import Iterable
from typing import NamedTuple

from tensile_jax.ir import Graph, TensorId
from tensile_jax.plan import DeviceProfile
from tensile_jax.plan.analysis.copy_time import copy_in_us, copy_out_us
from tensile_jax.plan.multi_job.memory_profile import INSTANT, LAUNCH, WAIT, MemoryProfile
from tensile_jax.plan.result.instructions import (
    FinishSwapIn,
    FinishSwapOut,
    Instruction,
    Launch,
    change_of,
    decode,
    on_host_between_iterations,
)
from tensile_jax.plan.result.memory_curve import waiting_bytes
from tensile_jax.plan_format import Plan

_KINDS: dict[type[Instruction], int] = {Launch: LAUNCH, FinishSwapOut: WAIT, FinishSwapIn: WAIT}  # of others, INSTANT
_ARRAY_US = 31.0  # to issue the copy of one array, however small (measured)


def memory_profile_of(plan: Plan, graph: Graph, profile: DeviceProfile) -> MemoryProfile:
    """The memory profile of one iteration of `plan`."""
    new_state = [graph.tensors[pair.output] for pair in graph.carried]
    state_bytes = sum(t.nbytes + (t.host_bytes or 0) for t in new_state)
    there = sum(t.host_bytes or 0 for t in plan.tensors)
    moves = _whole(plan, graph) if plan.whole else _segmented(plan, graph)
    moved = moves.holds[0] - moves.parked_bytes
    switch_us = copy_out_us(moved, profile) + copy_in_us(moved, profile)
    switch_us += 2 * _ARRAY_US * len({pair.output for pair in graph.carried})
    host_bytes = max(moves.host_bytes + there, state_bytes)
    labels = tuple(s.name for s in plan.segments)
    return MemoryProfile(*moves[:4], state_bytes, host_bytes, plan.step_us, switch_us, labels)


class _Moves(NamedTuple):
    kinds: tuple[int, ...]
    needs: tuple[int, ...]
    holds: tuple[int, ...]
    parked_bytes: int
    host_bytes: int


def _whole(plan: Plan, graph: Graph) -> _Moves:
    metrics = metrics_bytes(graph)
    idle = sum(graph.tensors[pair.output].nbytes for pair in graph.carried) + metrics
    begun = max(sum(graph.tensors[t].nbytes for t in graph.inputs) + metrics, idle)
    launch = max(plan.peak_bytes + metrics + unused_bytes(graph), begun)
    return _Moves((INSTANT, LAUNCH, INSTANT), (begun, launch, begun), (idle, begun, begun, idle), metrics, 0)


def _segmented(plan: Plan, graph: Graph) -> _Moves:
    carried, metrics = {pair.output for pair in graph.carried}, metrics_bytes(graph)
    code = decode(plan, graph)
    arriving, left = on_host_between_iterations(code)

    def total(tensors: Iterable[TensorId]) -> int:
        return sum(graph.tensors[t].nbytes for t in tensors)

    constants = total(t.id for t in graph.tensors if t.role == "constant" and t.producer is None)
    idle_state = total(t for t in graph.outputs if t in carried and t not in left)
    always = constants + metrics  # the metrics are those of the last iteration, until they are read
    idle = always + idle_state
    held = max(always + total(t for t in graph.inputs if t not in arriving), idle)
    kinds, needs, holds = [INSTANT], [held], [idle, held]
    for instruction in code:
        added, freed = change_of(instruction)
        held += total(added) - total(freed)
        launch = metrics + plan.segments[instruction.index].device_bytes if isinstance(instruction, Launch) else 0
        kinds.append(_KINDS.get(type(instruction), INSTANT))
        needs.append(max(launch, held, holds[-1]))
        holds.append(held)
    kinds.append(INSTANT)
    needs.append(max(held, idle))
    holds.append(idle)
    return _Moves(tuple(kinds), tuple(needs), tuple(holds), always, max(waiting_bytes(code, graph, "host")))


def metrics_bytes(graph: Graph) -> int:
    """The bytes that the step returns beside its state."""
    carried = {pair.output for pair in graph.carried}
    return sum(graph.tensors[t].nbytes for t in set(graph.outputs) - carried)


def unused_bytes(graph: Graph) -> int:
    """The bytes of arguments that nothing in the step reads. They are on the device, but plain jit's peak leaves them out."""
    used = {t for operator in graph.operators for t in operator.inputs} | set(graph.outputs)
    return sum(graph.tensors[t].nbytes for t in set(graph.inputs) - used)
