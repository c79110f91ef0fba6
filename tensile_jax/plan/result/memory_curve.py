"""Counts the bytes of tensors on the device during each segment of a plan, and those in host memory at each boundary.

A plan states these bytes as `resident_bytes` and `host_peak_bytes`. A *segment* is a stretch of operators that is compiled as one
executable. The module counts them from the plan's instructions (`instructions.py`), whatever the planner expected. When an
iteration begins, the device holds

    held = inputs and constants of the step, except those that are in host memory at that time

Each instruction adds the tensors that it brings to the device, and removes those that it frees (`change_of`). While segment i
runs, the device holds

    resident(i) = held before its launch + outputs - donated

The memory of a donated input becomes the memory of an output, so the two count once.

A tensor waits in host memory from the boundary at which its first copy to the host starts to the boundary at which its last
copy to the device has ended, both included. State that an iteration leaves in host memory waits until the end of this
iteration, and from the beginning of the next one. The bytes in host memory are

    waiting(j) = sum of the sizes of the tensors that wait at boundary j,  their peak = max over j of waiting(j)

`check.py` counts the same bytes by going through the plan with sets of tensors. It shares no code with this file, and must agree
with it.

Sizes in bytes.
"""

from collections.abc import Sequence

from tensile_jax.ir import Graph, TensorId
from tensile_jax.plan.result.instructions import (
    FinishSwapIn,
    Instruction,
    Launch,
    StartSwapIn,
    StartSwapOut,
    change_of,
    on_host_between_iterations,
)
from tensile_jax.plan_format import Memory


def resident_bytes(code: Sequence[Instruction], graph: Graph) -> list[int]:
    """For each segment, the bytes on the device while it runs, without its workspace.

    Before these come the bytes when the iteration begins, and after them those when it ends.
    """
    size = [t.nbytes for t in graph.tensors]
    arriving, _ = on_host_between_iterations(code)
    held = sum(t.nbytes for t in graph.tensors if t.producer is None and t.id not in arriving)
    found = [held]
    for instruction in code:
        if isinstance(instruction, Launch):
            found.append(held + sum(size[t] for t in instruction.outputs) - sum(size[t] for t in instruction.donated))
        added, freed = change_of(instruction)
        held += sum(size[t] for t in added) - sum(size[t] for t in freed)
    return [*found, held]


def waiting_bytes(code: Sequence[Instruction], graph: Graph, memory: Memory) -> list[int]:
    """For each boundary, from the one before the first segment to the end of the iteration, the bytes that wait in `memory`."""
    arriving, _ = on_host_between_iterations(code)
    there, leaving = {t for t, where in arriving.items() if where == memory}, set[TensorId]()
    returned = set[TensorId]()  # leave after this boundary
    found: list[set[TensorId]] = []
    for instruction in code:
        match instruction:
            case StartSwapOut(tensors, memory=where) if where == memory:
                there.update(tensors)
            case StartSwapIn(forgotten=forgotten, memory=where) if where == memory:
                leaving.update(forgotten)
            case FinishSwapIn(tensors):
                returned = leaving.intersection(tensors)
            case Launch():
                found.append(set(there))
                there -= returned
                returned = set[TensorId]()
            case _:
                pass
    return [sum(graph.tensors[t].nbytes for t in tensors) for tensors in (*found, there)]
