"""Turn a plan into the instructions that carry it out: a flat list over numbered slots, each of which holds one tensor.

    StartSwapOut    start copies to host memory
    FinishSwapOut   wait until copies to host memory are done, then give their device memory back
    StartSwapIn     start copies to device memory
    FinishSwapIn    wait until copies to device memory are done
    Launch          run a segment
    Free            give device memory back

The instructions at each boundary between segments stand in this order, so the order in which they are issued is the plan's
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
    """Call the executable of segment `index`, and drop the references to what nothing reads after it.

    Attributes:
        call: the executable.
        arguments: gives what `inputs` hold, out of what all slots hold.
        outputs: the slots of its results, which are consecutive.
        drops: the slots that are empty afterwards.
        workspace_bytes: what it needs beyond its arguments and results, as the plan says.
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
    """Start copies to host memory. What was on the device stays there."""

    slots: Slots


@dataclass(frozen=True, slots=True, eq=False)
class FinishSwapOut:
    """Wait until the host has these tensors, then give their device memory back."""

    slots: Slots


@dataclass(frozen=True, slots=True, eq=False)
class StartSwapIn:
    """Start copies to device memory. The host keeps its own, but for those that are `forgotten`."""

    slots: Slots
    forgotten: Slots


@dataclass(frozen=True, slots=True, eq=False)
class FinishSwapIn:
    """Wait until the device has these tensors, which the launch that follows reads."""

    slots: Slots


@dataclass(frozen=True, slots=True, eq=False)
class Free:
    """Give the device memory of donated arguments back, which the caller still names."""

    slots: Slots


Instruction = Launch | StartSwapOut | FinishSwapOut | StartSwapIn | FinishSwapIn | Free


@dataclass(frozen=True, slots=True, eq=False)
class Instructions:
    """The instructions of one iteration, and where its arguments and results are.

    Attributes:
        code: the instructions, in order.
        nbytes: the size of what each slot holds.
        inputs: the slots of the step's arguments.
        outputs: the slots of the step's results.
        constants: pairs (slot, tensor) of what the step captures.
        arrive_on_host: the slots of state that an iteration expects in host memory.
        left_on_host: the slots of state that an iteration leaves in host memory.
        keep: the slots of constants and of arguments that are not donated, whose memory is not ours to give back.
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


def instructions_of(plan: Plan, graph: Graph, calls: Sequence[Any]) -> Instructions:
    """The instructions that carry `plan` out; `calls[i]` runs segment i."""
    slot: dict[TensorId, int] = {}

    def of(tensors: Iterable[TensorId]) -> Slots:
        return tuple(slot.setdefault(t, len(slot)) for t in tensors)

    inputs = of(graph.inputs)
    constants = [t.id for t in graph.tensors if t.role == "constant" and t.producer is None]
    constant_slots = of(constants)
    started: defaultdict[tuple[str, int], list[TensorId]] = defaultdict(list)  # by kind, and the segment before which it is
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

    code: list[Instruction] = []
    for index in range(len(plan.segments) + 1):
        if leaving := started["swap_out", index]:
            code.append(StartSwapOut(of(leaving)))
        if gone := finished["swap_out", index]:
            code.append(FinishSwapOut(of(gone)))
        if returning := started["swap_in", index]:
            code.append(StartSwapIn(of(returning), of(t for t in returning if last_swap_in[t] == index)))
        if index == len(plan.segments):
            break
        if awaited := finished["swap_in", index]:
            code.append(FinishSwapIn(of(awaited)))
        segment = plan.segments[index]
        drops = of(t for t in (*segment.frees, *segment.donated) if t not in graph.donated)
        reads = of(segment.inputs)
        first_new = len(slot)
        slot.update((t, first_new + i) for i, t in enumerate(segment.outputs))  # new tensors, so their slots are consecutive
        writes = slice(first_new, len(slot))
        code.append(Launch(index, calls[index], _getter(reads), reads, writes, drops, segment.workspace_bytes))
        if freed := of(t for t in segment.frees if t in graph.donated):
            code.append(Free(freed))
    return Instructions(
        code=tuple(code),
        inputs=inputs,
        outputs=of(graph.outputs),
        constants=tuple(zip(constant_slots, constants, strict=True)),
        arrive_on_host=frozenset(of(t for t, event in first.items() if event.kind == "swap_in")),
        left_on_host=frozenset(of(t for t in graph.outputs if t in last and last[t].kind == "swap_out")),
        keep=frozenset(of(t.id for t in graph.tensors if t.producer is None and t.id not in graph.donated)),
        effectful=any(operator.effectful for operator in graph.operators),
        nbytes=tuple(graph.tensors[t].nbytes for t in slot),  # last, for then every slot has been given out
    )


def _getter(slots: Slots) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """What `slots` hold, as a sequence."""
    if len(slots) > 1:
        return itemgetter(*slots)
    return lambda held: [held[slot] for slot in slots]
