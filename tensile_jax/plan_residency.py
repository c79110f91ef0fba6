"""Says which tensors are on the device while each segment of a plan runs, from the plan alone, without the step's graph.

A *segment* is a stretch of operators that is compiled as one executable. The module goes through the segments of an iteration
in order. Boundary j lies before segment j, and the last boundary lies at the end of the iteration.

    at boundary j              tensors whose copies to the host end here leave the device; tensors whose copies to the device
                               start here are on the device from now on
    while segment j runs       its outputs are on the device as well, in place of its donated inputs
    when segment j has ended   the tensors that it frees leave the device

`on_device` lists everything that takes device memory while a segment runs. The sizes add up to the bytes that the plan states
for the segment. `at_peak` lists this for the segment with the peak. Its sizes add up to the plan's peak.

Sizes in bytes.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from tensile_jax.ir import Role, TensorId
from tensile_jax.plan_format import Plan, PlannedTensor, Segment

RowRole = Role | Literal["workspace", "allocator", "unnamed", "ends", "joined"]
"""The role of a tensor, which says what the tensor is for; or a name for bytes that are no tensor of the plan:

    workspace   the memory that a segment needs beside its inputs and results
    allocator   what the device's allocator hands out without being asked
    unnamed     constants, and arguments that the plan does not name
    ends        what is on the device only when the iteration begins or ends
    joined      what is added if segments are compiled together as one executable
"""


@dataclass(frozen=True, slots=True)
class Resident:
    """A part of the peak; `tensor` is None for what is no tensor of the plan."""

    what: str
    role: RowRole
    nbytes: int
    tensor: TensorId | None = None


@dataclass(frozen=True, slots=True)
class Stay:
    """A tensor is on the device from the begin of segment `first` to the end of segment `last`, both included."""

    tensor: PlannedTensor
    first: int
    last: int


def residents(plan: Plan) -> list[frozenset[TensorId]]:
    """For each segment, the tensors whose bytes are its `resident_bytes`; those in host memory are among them, with 0 bytes."""
    if plan.whole:
        return [frozenset(segment.inputs) for segment in plan.segments]
    made = {t for segment in plan.segments for t in segment.outputs}
    again = {event.tensor for event in plan.events if event.kind == "recompute"}
    there = {tensor.id for tensor in plan.tensors} - made - again - _arriving(plan)
    found: list[frozenset[TensorId]] = []
    for place, segment in enumerate(plan.segments):
        there -= {e.tensor for e in plan.events if e.kind == "swap_out" and e.until == place}
        there |= {e.tensor for e in plan.events if e.kind == "swap_in" and e.trigger == place - 1}
        there |= set(segment.outputs)
        there -= set(segment.donated)
        found.append(frozenset(there))
        there -= set(segment.frees)
    return found


def stays(plan: Plan) -> Iterator[Stay]:
    """Each time that a tensor is on the device, in the order of the tensors."""
    found = residents(plan)
    for tensor in plan.tensors:
        first: int | None = None
        for place in range(len(found) + 1):
            there = place < len(found) and tensor.id in found[place]
            if there and first is None:
                first = place
            if not there and first is not None:
                yield Stay(tensor, first, place - 1)
                first = None


def on_device(plan: Plan, index: int) -> tuple[Resident, ...]:
    """What is on the device while segment `index` runs, the largest first. The sizes add up to its `device_bytes`."""
    segment = plan.segments[index]
    there = residents(plan)[index]
    named = [Resident(t.name, t.role, t.nbytes, t.id) for t in plan.tensors if t.id in there and t.nbytes]
    beside: tuple[tuple[str, RowRole, int], ...] = (
        (f"workspace of {segment.name}", "workspace", segment.workspace_bytes),
        ("handed out by the allocator without being asked", "allocator", segment.allocator_bytes),
        ("constants and arguments that the plan does not name", "unnamed", segment.resident_bytes - sum(r.nbytes for r in named)),
        ("when the iteration begins or ends", "ends", bytes_at_ends(segment)),
    )
    return _sorted([*named, *(Resident(what, role, nbytes) for what, role, nbytes in beside if nbytes)])


def bytes_at_ends(segment: Segment) -> int:
    """What the `device_bytes` of a segment cover in addition, since it is on the device when the iteration begins or ends."""
    return segment.device_bytes - segment.resident_bytes - segment.workspace_bytes - segment.allocator_bytes


def at_peak(plan: Plan) -> tuple[Resident, ...]:
    """What is on the device in the segment that holds the peak, the largest first. The sizes add up to `plan.peak_bytes`."""
    joined = plan.peak_bytes - plan.segments[plan.peak_segment].device_bytes
    rest = [Resident("segments that run as one program", "joined", joined)] if joined else []
    return _sorted([*on_device(plan, plan.peak_segment), *rest])


def _sorted(rows: Iterable[Resident]) -> tuple[Resident, ...]:
    return tuple(sorted(rows, key=lambda row: (-row.nbytes, row.what)))


def _arriving(plan: Plan) -> set[TensorId]:
    """The tensors that are in host memory when the iteration begins: their first copy is one to the device."""
    first: dict[TensorId, str] = {}
    for event in sorted(plan.events, key=lambda e: e.trigger):
        if event.kind in ("swap_out", "swap_in"):
            first.setdefault(event.tensor, event.kind)
    made = {t for segment in plan.segments for t in segment.outputs}
    return {t for t, kind in first.items() if kind == "swap_in" and t not in made}
