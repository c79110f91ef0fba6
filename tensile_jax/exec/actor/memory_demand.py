"""What a plan's instructions ask of memory, as the controller needs to know it.

    begin      the batch and the constants join the state that is on the device
    copy_in    more is held from the moment it is issued;  leave: less, once the copies to the host have ended
    launch     needs the segment's footprint (`Segment.device_bytes`); then its outputs are held, and what it frees is not
    end        the state for the next iteration and the metrics, which are read, are left

Moves are the instructions of `Instructions`, in their order, with *begin* before and *end* after them. For a step that runs whole
there is one launch between the two, with plain jit's peak and the arguments that plain jit leaves out.
"""

from collections.abc import Sequence

from tensile_jax.exec.step.instructions import (
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
from tensile_jax.plan.multi_job.memory_profile import INSTANT, LAUNCH, WAIT, MemoryProfile
from tensile_jax.plan_format import Plan

_ARRAY_US = 31.0  # to issue the copy of one array, however small (measured)


def demand_of(plan: Plan, graph: Graph, instructions: Instructions | None, profile: DeviceProfile) -> MemoryProfile:
    """The demand of one iteration of `plan`; `instructions` are None for a step that runs whole."""
    state = sum(graph.tensors[pair.output].nbytes for pair in graph.carried)
    carried = {pair.output for pair in graph.carried}
    metrics = metrics_bytes(graph)
    if instructions is None:
        arguments = sum(graph.tensors[t].nbytes for t in graph.inputs)
        idle = state + metrics
        begun = max(arguments + metrics, idle)
        kinds = (INSTANT, LAUNCH, INSTANT)
        launch = max(plan.peak_bytes + metrics + unused_bytes(graph), begun)
        needs = (begun, launch, begun)
        return _demand(plan, kinds, needs, (idle, begun, begun, idle), metrics, state, state, profile, len(carried))
    size = instructions.nbytes

    def total(slots: Sequence[int]) -> int:
        return sum(size[slot] for slot in slots)

    constants = total([slot for slot, _ in instructions.constants])
    on_device = [slot for slot in instructions.inputs if slot not in instructions.arrive_on_host]
    results = zip(instructions.outputs, graph.outputs, strict=True)
    idle_state = total([slot for slot, t in results if t in carried and slot not in instructions.left_on_host])
    always = constants + metrics  # of the last iteration, until they are read
    idle = always + idle_state
    held = max(always + total(on_device), idle)
    hosted = host_peak = total(sorted(instructions.arrive_on_host))
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
            case StartSwapOut(slots):
                hosted += total(slots)
                kind = INSTANT
            case StartSwapIn(slots, forgotten):
                held += total(slots)
                need = held
                hosted -= total(forgotten)
                kind = INSTANT
            case FinishSwapOut(slots):
                held -= total(slots)
                kind = WAIT
            case Free(slots):
                held -= total(slots)
                kind = INSTANT
            case FinishSwapIn():
                kind = WAIT
        host_peak = max(host_peak, hosted)
        kinds.append(kind)
        needs.append(max(need, held, holds[-1]))
        holds.append(held)
    kinds.append(INSTANT)
    needs.append(max(held, idle))
    holds.append(idle)
    return _demand(plan, kinds, needs, holds, always, state, max(host_peak, state), profile, len(carried))


def metrics_bytes(graph: Graph) -> int:
    """What the step returns beside its state."""
    carried = {pair.output for pair in graph.carried}
    return sum(graph.tensors[t].nbytes for t in set(graph.outputs) - carried)


def unused_bytes(graph: Graph) -> int:
    """Arguments that nothing in the step reads. Plain jit's peak leaves them out; here they lie on the device all the same."""
    used = {t for operator in graph.operators for t in operator.inputs} | set(graph.outputs)
    return sum(graph.tensors[t].nbytes for t in set(graph.inputs) - used)


def _demand(
    plan: Plan,
    kinds: Sequence[int],
    needs: Sequence[int],
    holds: Sequence[int],
    parked: int,
    state: int,
    host: int,
    profile: DeviceProfile,
    arrays: int,
) -> MemoryProfile:
    moved = holds[0] - parked
    switch_us = moved / profile.device_to_host_bytes_per_us + moved / profile.host_to_device_bytes_per_us
    switch_us += 2 * _ARRAY_US * arrays
    labels = tuple(s.name for s in plan.segments)
    return MemoryProfile(tuple(kinds), tuple(needs), tuple(holds), parked, state, host, plan.step_us, switch_us, labels)
