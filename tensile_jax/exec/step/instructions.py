"""From a plan to a flat list of instructions over numbered slots.

    launch   (executable, getter of the inputs, input slots, slice of output slots, slots to drop, index)
    copy_out slots       start copies to the host
    leave    slots       wait until those copies are done, then give the device memory back
    copy_in  (slots, forgotten)   start copies to the device; the host keeps its own but for those `forgotten`
    await    slots       those copies to the device must have arrived before the launch that follows
    free     slots       give the device memory back, now

At each boundary copies out are started first, then what must have left is waited for, then copies in are started, then the
segment is launched: issue order is the schedule. A slot holds one tensor.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from operator import itemgetter
from typing import Any

from tensile_jax.ir import Graph, TensorId
from tensile_jax.plan_format import Plan


class Op(IntEnum):
    """What an instruction does."""

    LAUNCH = 0
    COPY_OUT = 1
    LEAVE = 2
    COPY_IN = 3
    FREE = 4
    AWAIT = 5


@dataclass(frozen=True, slots=True, eq=False)
class Instructions:
    """`code` is a list of (op, operands); `inputs` and `outputs` are the slots of the step's arguments and results.

    `constants` are (slot, tensor), `nbytes` the size of what each slot holds. `arrive_on_host` are the slots of state that an
    iteration expects on the host, `left_on_host` those that it leaves there; `keep` are arguments that are not ours to give back.
    Of an `effectful` step, an iteration must be over before the next one begins.
    """

    code: tuple[tuple[Any, ...], ...]
    nbytes: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    constants: tuple[tuple[int, TensorId], ...]
    arrive_on_host: frozenset[int]
    left_on_host: frozenset[int]
    keep: frozenset[int]
    effectful: bool

    @property
    def slots(self) -> int:
        """How many there are."""
        return len(self.nbytes)


def instructions_of(plan: Plan, graph: Graph, calls: Sequence[Any]) -> Instructions:
    """The instructions that carry `plan` out; `calls[i]` runs segment i."""
    slot: dict[TensorId, int] = {}

    def of(t: TensorId) -> int:
        return slot.setdefault(t, len(slot))

    inputs = tuple(of(t) for t in graph.inputs)
    constants = tuple((of(t.id), t.id) for t in graph.tensors if t.role == "constant" and t.producer is None)
    owned = {t for t in graph.donated}
    code: list[tuple[Any, ...]] = []
    first: dict[TensorId, str] = {}
    latest: dict[TensorId, str] = {}
    copies: Mapping[int, list[Any]] = _by_trigger(plan)
    leaving: dict[int, list[TensorId]] = {}
    arriving: dict[int, list[TensorId]] = {}
    comes_last: dict[TensorId, int] = {}
    for e in plan.events:
        if e.kind == "swap_out":
            leaving.setdefault(e.until, []).append(e.tensor)
        elif e.kind == "swap_in":
            arriving.setdefault(e.until, []).append(e.tensor)
            comes_last[e.tensor] = max(e.trigger + 1, comes_last.get(e.tensor, 0))

    def together(op: Op, tensors: Iterable[TensorId]) -> None:
        slots = tuple(map(of, tensors))
        if slots:
            code.append((op, slots))

    last = len(plan.segments)
    for index in range(last + 1):
        for event in copies.get(index, ()):
            first.setdefault(event.tensor, event.kind)
            latest[event.tensor] = event.kind
        together(Op.COPY_OUT, (e.tensor for e in copies.get(index, ()) if e.kind == "swap_out"))
        together(Op.LEAVE, leaving.get(index, ()))
        back = [e.tensor for e in copies.get(index, ()) if e.kind == "swap_in"]
        if back:
            code.append((Op.COPY_IN, tuple(map(of, back)), tuple(of(t) for t in back if comes_last[t] == index)))
        if index == last:
            break
        together(Op.AWAIT, arriving.get(index, ()))
        segment = plan.segments[index]
        drops = tuple(of(t) for t in (*segment.frees, *segment.donated) if t not in owned)
        reads = tuple(map(of, segment.inputs))
        first_new = len(slot)
        slot.update((t, first_new + i) for i, t in enumerate(segment.outputs))  # new tensors: their slots are consecutive
        writes = slice(first_new, len(slot))
        code.append((Op.LAUNCH, calls[index], _getter(reads), reads, writes, drops, index))
        together(Op.FREE, (t for t in segment.frees if t in owned))
    outputs = tuple(of(t) for t in graph.outputs)
    arrive = frozenset(of(t) for t, kind in first.items() if kind == "swap_in")
    left = frozenset(of(t) for t in graph.outputs if latest.get(t) == "swap_out")
    keep = frozenset(of(t.id) for t in graph.tensors if t.producer is None and t.id not in owned)
    sizes = tuple(graph.tensors[t].nbytes for t in slot)
    effectful = any(op.effectful for op in graph.operators)
    return Instructions(tuple(code), sizes, inputs, outputs, constants, arrive, left, keep, effectful)


def _getter(slots: tuple[int, ...]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """What `slots` hold, as a sequence."""
    if len(slots) > 1:
        return itemgetter(*slots)
    return lambda held: [held[slot] for slot in slots]


def _by_trigger(plan: Plan) -> dict[int, list[Any]]:
    found: dict[int, list[Any]] = {}
    for event in plan.events:
        if event.kind in ("swap_out", "swap_in"):
            found.setdefault(event.trigger + 1, []).append(event)
    return found
