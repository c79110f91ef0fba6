"""Decodes a plan into the instructions of one iteration, in the order in which they happen. Instructions name tensors by ids.

    StartSwapOut    start copies to the host, or to another memory; the tensors stay on the device
    FinishSwapOut   wait until such copies have ended, and free the tensors' device memory
    StartSwapIn     start copies to the device; the tensors take device memory from now on
    FinishSwapIn    wait until such copies have ended, since the next launch reads the tensors
    Launch          run a segment, with the recomputations that the plan puts into this segment
    Free            free arguments that were donated to the step

A *segment* is a stretch of operators that is compiled as one executable. Boundary j lies before segment j. Boundary k comes after
all k segments, at the end of the iteration. At each boundary, the instructions come in the order of this table. A copy that the
plan triggers after segment i starts at boundary i + 1. The `until` of its event is the boundary at which the plan waits for it.
If no segment reads a tensor that was copied to the device, nothing waits for the copy, and it has no FinishSwapIn.

Other modules compute from these instructions what a plan does: bytes on the device and on the host (`memory_curve.py`), times
(`simulate.py`), segments that are joined into larger executables (`joined.py`), the executor's instructions
(`exec/running/instructions.py`) and the memory that each part of a job's iteration needs (`exec/actor/plan_memory.py`). The
checker (`check.py`) does not use them. It reads the plan's events itself, so a mistake in this module cannot hide a bad plan
from the checker.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tensile_jax.ir import Graph, TensorId
from tensile_jax.plan_format import Event, EventKind, Memory, Plan

Tensors = tuple[TensorId, ...]


@dataclass(frozen=True, slots=True)
class StartSwapOut:
    """Start copies to `memory`. `events` are the places of these copies in `plan.events`."""

    tensors: Tensors
    events: tuple[int, ...]
    memory: Memory = "host"


@dataclass(frozen=True, slots=True)
class FinishSwapOut:
    """Wait until the copies of these tensors to the host have ended, then free their device memory."""

    tensors: Tensors


@dataclass(frozen=True, slots=True)
class StartSwapIn:
    """Start copies from `memory` to device memory. `events` are the places of these copies in `plan.events`.

    The copies in that memory are kept, except those of the tensors `forgotten`: neither this iteration nor the next one copies
    these in again.
    """

    tensors: Tensors
    events: tuple[int, ...]
    forgotten: Tensors
    memory: Memory = "host"


@dataclass(frozen=True, slots=True)
class FinishSwapIn:
    """Wait until the copies of these tensors to the device have ended, since the next launch reads them."""

    tensors: Tensors


@dataclass(frozen=True, slots=True)
class Launch:
    """Run segment `index`, which reads `inputs` and makes `outputs`.

    The memory of `donated` inputs becomes memory of outputs. The memory of `drops` is free when the segment has ended.
    """

    index: int
    inputs: Tensors
    outputs: Tensors
    donated: Tensors
    drops: Tensors


@dataclass(frozen=True, slots=True)
class Free:
    """Free the device memory of arguments that were donated to the step, which the caller may still refer to."""

    tensors: Tensors


Instruction = StartSwapOut | FinishSwapOut | StartSwapIn | FinishSwapIn | Launch | Free


def decode(plan: Plan, graph: Graph) -> tuple[Instruction, ...]:
    """The instructions of one iteration of `plan`, a plan for `graph`. Sizes and times that the plan states are not read."""
    copies = sorted((e.trigger, place) for place, e in enumerate(plan.events) if e.kind in ("swap_out", "swap_in"))
    # by kind, and the index of the segment before which it happens
    starts: dict[tuple[EventKind, int], dict[Memory, list[int]]] = {}
    finishes: dict[tuple[EventKind, int], list[int]] = {}
    last: dict[TensorId, Event] = {}
    last_swap_in: dict[TensorId, int] = {}
    for trigger, place in copies:
        event = plan.events[place]
        starts.setdefault((event.kind, trigger + 1), {}).setdefault(event.memory, []).append(place)
        finishes.setdefault((event.kind, event.until), []).append(place)
        last[event.tensor] = event
        if event.kind == "swap_in":
            last_swap_in[event.tensor] = place
    # results that an iteration leaves on the host: the last copy goes there, or it is freed after the last copy from there
    freed = {t: index for index, segment in enumerate(plan.segments) for t in segment.frees}
    resting = {t for t in graph.outputs if t in last and (last[t].kind == "swap_out" or freed.get(t, -1) > last[t].trigger)}

    def tensors(places: Sequence[int]) -> Tensors:
        return tuple(plan.events[place].tensor for place in places)

    code: list[Instruction] = []
    count = len(plan.segments)
    for index in range(count + 1):
        for memory, places in starts.get(("swap_out", index), {}).items():
            code.append(StartSwapOut(tensors(places), tuple(places), memory))
        if places := finishes.get(("swap_out", index)):
            code.append(FinishSwapOut(tensors(places)))
        for memory, places in starts.get(("swap_in", index), {}).items():
            returning = tensors(places)
            forgotten = tuple(t for t in returning if last_swap_in[t] in places and t not in resting)
            code.append(StartSwapIn(returning, tuple(places), forgotten, memory))
        if index == count:
            break
        if places := finishes.get(("swap_in", index)):
            code.append(FinishSwapIn(tensors(places)))
        segment = plan.segments[index]
        drops = tuple(t for t in segment.frees if t not in graph.donated)
        code.append(Launch(index, segment.inputs, segment.outputs, segment.donated, drops))
        if donated := tuple(t for t in segment.frees if t in graph.donated):
            code.append(Free(donated))
    return tuple(code)


def change_of(instruction: Instruction) -> tuple[Tensors, Tensors]:
    """The tensors that the instruction brings into device memory, and those whose device memory is free when it is over."""
    match instruction:
        case StartSwapIn(tensors):
            return tensors, ()
        case FinishSwapOut(tensors) | Free(tensors):
            return (), tensors
        case Launch(_, _, outputs, donated, drops):
            return outputs, (*donated, *drops)
        case StartSwapOut() | FinishSwapIn():
            return (), ()


def on_host_between_iterations(code: Sequence[Instruction]) -> tuple[Mapping[TensorId, Memory], frozenset[TensorId]]:
    """The tensors that wait off the device when the iteration begins, each with its memory, and those that do when it ends."""
    arriving: dict[TensorId, Memory] = {}
    known: set[TensorId] = set()
    there: set[TensorId] = set()
    for instruction in code:
        match instruction:
            case StartSwapOut(tensors):
                known.update(tensors)
                there.update(tensors)
            case StartSwapIn(tensors, forgotten=forgotten, memory=memory):
                arriving.update((t, memory) for t in tensors if t not in known)
                known.update(tensors)
                there.update(tensors)
                there.difference_update(forgotten)
            case _:
                pass
    return arriving, frozenset(there)
