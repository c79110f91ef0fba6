"""Computes the memory profile of a compiled plan: the bytes that each move of an iteration needs and holds, for the controller.

The moves of an iteration are the plan's instructions (`exec/running/instructions.py`) in their order, with `begin` before them
and `end` after them. What they change in the bytes that the job holds on the device:

    begin          adds the batch and the state that an iteration expects on the device
    StartSwapOut   changes nothing: the tensors stay on the device until their copies have ended
    FinishSwapOut  removes the tensors, once their copies to the host have ended
    StartSwapIn    adds the tensors, from the moment the copies are issued
    FinishSwapIn   changes nothing: it waits until copies to the device have ended
    Launch         needs the segment's footprint (`Segment.device_bytes`); then adds its outputs and removes what it frees
    Free           removes arguments that were donated to the step
    end            leaves the state for the next iteration, and the metrics until they are read

What the step itself has in host memory counts there all the time.

The metrics of the last iteration are always counted, also between iterations and while the job is parked. So are the constants of
a plan with segments. A step that runs whole has one launch between `begin` and `end`. That launch needs plain jit's peak, plus
the arguments that plain jit leaves out of its peak because nothing reads them.

The bytes in host memory are those of the plan (`plan/result/memory_curve.py`), or those of the parked state if these are more.
"""

from collections.abc import Sequence
from typing import NamedTuple

from tensile_jax.exec.running.instructions import (
    FinishSwapIn,
    FinishSwapOut,
    Free,
    Instructions,
    Launch,
    StartSwapIn,
    StartSwapOut,
)
from tensile_jax.ir import Graph
from tensile_jax.plan import DeviceProfile
from tensile_jax.plan.analysis.copy_time import copy_in_us, copy_out_us
from tensile_jax.plan.multi_job.memory_profile import INSTANT, LAUNCH, WAIT, MemoryProfile
from tensile_jax.plan.result.memory_curve import host_bytes
from tensile_jax.plan_format import Plan

_ARRAY_US = 31.0  # to issue the copy of one array, however small (measured)


def memory_profile_of(plan: Plan, graph: Graph, instructions: Instructions | None, profile: DeviceProfile) -> MemoryProfile:
    """The memory profile of one iteration of `plan`; `instructions` are None for a step that runs whole."""
    new_state = [graph.tensors[pair.output] for pair in graph.carried]
    state_bytes = sum(t.nbytes + (t.host_bytes or 0) for t in new_state)
    there = sum(t.host_bytes or 0 for t in plan.tensors)
    if instructions is None:
        moves = _whole(plan, graph)
    else:
        moves = _segmented(plan, graph, instructions)
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


def _segmented(plan: Plan, graph: Graph, instructions: Instructions) -> _Moves:
    carried, metrics = {pair.output for pair in graph.carried}, metrics_bytes(graph)
    size = instructions.nbytes

    def total(slots: Sequence[int]) -> int:
        return sum(size[slot] for slot in slots)

    constants = total([slot for slot, _ in instructions.constants])
    on_device = [slot for slot in instructions.inputs if slot not in instructions.arrive_on_host]
    results = zip(instructions.outputs, graph.outputs, strict=True)
    idle_state = total([slot for slot, t in results if t in carried and slot not in instructions.left_on_host])
    always = constants + metrics  # the metrics are those of the last iteration, until they are read
    idle = always + idle_state
    held = max(always + total(on_device), idle)
    kinds, needs, holds = [INSTANT], [held], [idle, held]
    for instruction in instructions.code:
        need = held
        match instruction:
            case Launch(index=index, outputs=outputs, drops=drops):
                made = total(range(outputs.start, outputs.stop))
                need = metrics + plan.segments[index].device_bytes
                taken_over = sum(graph.tensors[t].nbytes for t in plan.segments[index].donated if t in graph.donated)
                held += made - total(drops) - taken_over
                kind = LAUNCH
            case StartSwapOut():
                kind = INSTANT
            case StartSwapIn(slots):
                held += total(slots)
                need = held
                kind = INSTANT
            case FinishSwapOut(slots):
                held -= total(slots)
                kind = WAIT
            case Free(slots):
                held -= total(slots)
                kind = INSTANT
            case FinishSwapIn():
                kind = WAIT
        kinds.append(kind)
        needs.append(max(need, held, holds[-1]))
        holds.append(held)
    kinds.append(INSTANT)
    needs.append(max(held, idle))
    holds.append(idle)
    return _Moves(tuple(kinds), tuple(needs), tuple(holds), always, max(host_bytes(graph, plan.segments, plan.events)))


def metrics_bytes(graph: Graph) -> int:
    """The bytes that the step returns beside its state."""
    carried = {pair.output for pair in graph.carried}
    return sum(graph.tensors[t].nbytes for t in set(graph.outputs) - carried)


def unused_bytes(graph: Graph) -> int:
    """The bytes of arguments that nothing in the step reads: on the device here, although plain jit's peak leaves them out."""
    used = {t for operator in graph.operators for t in operator.inputs} | set(graph.outputs)
    return sum(graph.tensors[t].nbytes for t in set(graph.inputs) - used)
