"""Translates a plan's instructions (`plan/result/instructions.py`) into instructions for the executor, which work on slots.

A *slot* has a number and holds one tensor. The results of a launch always get new slots, with consecutive numbers. So a tensor
gets a different slot each time it is computed. Each instruction of the plan becomes one instruction of the executor, with
slots in place of tensor ids. A launch also gets its executable. The order stays the same, and the executor (`executor.py`)
issues the instructions in this order.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

from tensile_jax.ir import Graph, TensorId
from tensile_jax.plan.result import instructions as planned
from tensile_jax.plan_format import Memory, Plan

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
    """Start copies to `memory`. The tensors stay on the device as well, until `FinishSwapOut`."""

    slots: Slots
    memory: Memory = "host"


@dataclass(frozen=True, slots=True, eq=False)
class FinishSwapOut:
    """Wait until the copies of these tensors to the host have ended, then free their device memory."""

    slots: Slots


@dataclass(frozen=True, slots=True, eq=False)
class StartSwapIn:
    """Start copies to device memory. The copies off the device are kept, except those in the slots `forgotten`."""

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
        arrive_on_host: the slots of arguments that an iteration expects off the device, each with the memory.
        left_on_host: the slots of results that an iteration leaves in host memory.
        always_on_host: the slots of tensors that the step itself has in host memory; no instruction copies them.
        keep: the slots of constants and of arguments that are not donated, whose memory must not be freed.
        effectful: whether an iteration must be over before the next one begins.
        layouts: the memory layouts (`jax.experimental.layout.Layout`) of donated arguments that are not row-major, by slot.
    """

    code: tuple[Instruction, ...]
    nbytes: tuple[int, ...]
    inputs: Slots
    outputs: Slots
    constants: tuple[tuple[int, TensorId], ...]
    arrive_on_host: Mapping[int, Memory]
    left_on_host: frozenset[int]
    keep: frozenset[int]
    effectful: bool
    always_on_host: frozenset[int] = frozenset()
    layouts: Mapping[int, Any] = field(default_factory=dict[int, Any])


def instructions_of(
    plan: Plan, graph: Graph, calls: Sequence[Any], layouts: Mapping[TensorId, Any] | None = None
) -> Instructions:
    """The instructions that carry `plan` out.

    Args:
        calls: `calls[i]` runs segment i.
        layouts: the memory layouts of the arguments that are not row-major (`jax.experimental.layout.Layout`).
    """
    layouts = layouts or {}
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
    acts = planned.decode(plan, graph)
    arriving, left = planned.on_host_between_iterations(acts)
    code: list[Instruction] = []
    for act in acts:
        match act:
            case planned.StartSwapOut(tensors, _, memory):
                code.append(StartSwapOut(of(tensors), memory))
            case planned.FinishSwapOut(tensors):
                code.append(FinishSwapOut(of(tensors)))
            case planned.StartSwapIn(tensors, _, forgotten):
                code.append(StartSwapIn(of(tensors), of(forgotten)))
            case planned.FinishSwapIn(tensors):
                code.append(FinishSwapIn(of(tensors)))
            case planned.Free(tensors):
                code.append(Free(of(tensors)))
            case planned.Launch(index, read, made, donated, dropped):
                gone = read if plan.whole else (*dropped, *(t for t in donated if t not in graph.donated))
                drops, reads = of(gone), of(read)
                first_new = len(held_by)
                slot.update((t, first_new + i) for i, t in enumerate(made))  # new values, so their slots are consecutive
                held_by += made
                writes = slice(first_new, len(held_by))
                workspace_bytes = plan.segments[index].workspace_bytes
                code.append(Launch(index, calls[index], _getter(reads), reads, writes, drops, workspace_bytes))
    return Instructions(
        code=tuple(code),
        inputs=inputs,
        outputs=of(graph.outputs),
        constants=tuple(zip(constant_slots, constants, strict=True)),
        arrive_on_host=dict(zip(of(arriving), arriving.values(), strict=True)),
        left_on_host=frozenset(of(t for t in graph.outputs if t in left)),
        keep=frozenset(of(t.id for t in graph.tensors if t.producer is None and t.id not in graph.donated)),
        effectful=any(operator.effectful for operator in graph.operators),
        always_on_host=frozenset(slot for slot, t in enumerate(held_by) if graph.tensors[t].in_host_memory),
        layouts={number: layouts[t] for number, t in zip(inputs, graph.inputs, strict=True) if t in layouts},
        nbytes=tuple(graph.tensors[t].nbytes for t in held_by),  # last, since by now every tensor has its slot
    )


def _getter(slots: Slots) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """A function that takes the values of all slots and returns those of `slots`."""
    if len(slots) > 1:
        return itemgetter(*slots)
    return lambda held: [held[slot] for slot in slots]
