"""Turns a plan into the instructions that carry it out: a flat list over numbered slots, each of which holds one tensor.

    StartSwapOut    start copies to host memory
    FinishSwapOut   wait until copies to host memory are done, then free their device memory
    StartSwapIn     start copies to device memory
    FinishSwapIn    wait until copies to device memory are done
    Launch          run a segment
    Free            free the device memory of donated arguments

Between two segments, the instructions come in this order. They are issued in the order of the list, so the list is the plan's
schedule.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from tensile_jax.ir import Graph, TensorId
from tensile_jax.plan_format import Event, Plan

Slots = tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Launch:
    """Call the executable of segment `index`, and drop the references to tensors that nothing reads afterwards.

    Attributes:
        call: the executable.
        arguments: takes the values of all slots and returns those of `inputs`.
        inputs: the slots of its arguments.
        outputs: the slots of its results, which are consecutive.
        drops: the slots that become empty.
        workspace_bytes: the workspace of the segment, as the plan says.
    """

    index: int
    call: Callable[..., Any]
    arguments: Callable[[Sequence[Any]], Sequence[Any]]
    inputs: Slots
    outputs: slice
    drops: Slots
    workspace_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class StartSwapOut:
    """Start copies to host memory. The tensors stay on the device as well, until `FinishSwapOut`."""

    slots: Slots


@dataclass(frozen=True, slots=True, eq=False)
class FinishSwapOut:
    """Wait until the copies of these tensors to the host have ended, then free their device memory."""

    slots: Slots


@dataclass(frozen=True, slots=True, eq=False)
class StartSwapIn:
    """Start copies to device memory. The copies in host memory are kept, except those in the slots `forgotten`."""

    slots: Slots
    forgotten: Slots


@dataclass(frozen=True, slots=True, eq=False)
class FinishSwapIn:
    """Wait until the copies of these tensors to the device have ended, since the next launch reads them."""

    slots: Slots


@dataclass(frozen=True, slots=True, eq=False)
class Free:
    """Free the device memory of donated arguments. The caller may still refer to these arrays, so they are deleted."""

    slots: Slots


Instruction = Launch | StartSwapOut | FinishSwapOut | StartSwapIn | FinishSwapIn | Free


@dataclass(frozen=True, slots=True, eq=False)
class Instructions:
    """The instructions of one iteration, and the slots of its arguments and results.

    Attributes:
        code: the instructions, in order.
        nbytes: the size of the tensor in each slot, in device memory.
        inputs: the slots of the step's arguments.
        outputs: the slots of the step's results.
        constants: (slot, tensor) for each array that the step captures from outside.
        arrive_on_host: the slots of arguments that an iteration expects in host memory.
        left_on_host: the slots of results that an iteration leaves in host memory.
        always_on_host: the slots of tensors that the step itself has in host memory; no instruction copies them.
        keep: the slots of constants and of arguments that are not donated, whose memory must not be freed.
        effectful: whether an iteration must be over before the next one begins.
    """

    code: tuple[Instruction, ...]
    nbytes: tuple[int, ...]
    inputs: Slots
    outputs: Slots
    constants: tuple[tuple[int, TensorId], ...]
    arrive_on_host: frozenset[int]
    left_on_host: frozenset[int]
    keep: frozenset[int]
    effectful: bool
    always_on_host: frozenset[int] = frozenset()


def instructions_of(plan: Plan, graph: Graph, calls: Sequence[Any]) -> Instructions:
    """The instructions that carry `plan` out; `calls[i]` runs segment i."""
    slot: dict[TensorId, int] = {}  # the latest slot of each tensor; what is made again gets a new one
    held_by: list[TensorId] = []  # by slot

    def of(tensors: Iterable[TensorId]) -> Slots:
        several = tuple(tensors)
        for t in several:
            if t not in slot:
                slot[t] = len(held_by)
                held_by.append(t)
        return tuple(slot[t] for t in several)

    inputs = of(graph.inputs)
    # plain jit's executable has them inside
    constants = [] if plan.whole else [t.id for t in graph.tensors if t.role == "constant" and t.producer is None]
    constant_slots = of(constants)
    # by kind of event, and the index of the segment before which the event happens
    started: defaultdict[tuple[str, int], list[TensorId]] = defaultdict(list)
    finished: defaultdict[tuple[str, int], list[TensorId]] = defaultdict(list)
    first: dict[TensorId, Event] = {}
    last: dict[TensorId, Event] = {}
    last_swap_in: dict[TensorId, int] = {}
    for event in sorted((e for e in plan.events if e.kind in ("swap_out", "swap_in")), key=lambda e: e.trigger):
        t, index = event.tensor, event.trigger + 1
        started[event.kind, index].append(t)
        finished[event.kind, event.until].append(t)
        first.setdefault(t, event)
        last[t] = event
        if event.kind == "swap_in":
            last_swap_in[t] = index

    freed = {t: index for index, segment in enumerate(plan.segments) for t in segment.frees}
    # results that an iteration leaves on the host: the last copy goes there, or it is freed after the last copy from there
    resting = {t for t in graph.outputs if t in last and (last[t].kind == "swap_out" or freed.get(t, -1) >= last_swap_in[t])}

    code: list[Instruction] = []
    for index in range(len(plan.segments) + 1):
        if leaving := started["swap_out", index]:
            code.append(StartSwapOut(of(leaving)))
        if gone := finished["swap_out", index]:
            code.append(FinishSwapOut(of(gone)))
        if returning := started["swap_in", index]:
            code.append(StartSwapIn(of(returning), of(t for t in returning if last_swap_in[t] == index and t not in resting)))
        if index == len(plan.segments):
            break
        if awaited := finished["swap_in", index]:
            code.append(FinishSwapIn(of(awaited)))
        segment = plan.segments[index]
        gone = segment.inputs if plan.whole else (t for t in (*segment.frees, *segment.donated) if t not in graph.donated)
        drops = of(gone)
        reads = of(segment.inputs)
        first_new = len(held_by)
        slot.update((t, first_new + i) for i, t in enumerate(segment.outputs))  # new values, so their slots are consecutive
        held_by += segment.outputs
        writes = slice(first_new, len(held_by))
        code.append(Launch(index, calls[index], _getter(reads), reads, writes, drops, segment.workspace_bytes))
        if donated := of(t for t in segment.frees if t in graph.donated):
            code.append(Free(donated))
    return Instructions(
        code=tuple(code),
        inputs=inputs,
        outputs=of(graph.outputs),
        constants=tuple(zip(constant_slots, constants, strict=True)),
        arrive_on_host=frozenset(of(t for t, event in first.items() if event.kind == "swap_in")),
        left_on_host=frozenset(of(t for t in graph.outputs if t in resting)),
        keep=frozenset(of(t.id for t in graph.tensors if t.producer is None and t.id not in graph.donated)),
        effectful=any(operator.effectful for operator in graph.operators),
        always_on_host=frozenset(slot for slot, t in enumerate(held_by) if graph.tensors[t].in_host_memory),
        nbytes=tuple(graph.tensors[t].nbytes for t in held_by),  # last, since by now every tensor has its slot
    )


def _getter(slots: Slots) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """A function that takes the values of all slots and returns those of `slots`."""
    if len(slots) > 1:
        return itemgetter(*slots)
    return lambda held: [held[slot] for slot in slots]
