"""Says which tensors are on the device while each segment of a plan runs, from the plan alone, without the step's graph.

The plan is replayed over its boundaries; boundary j lies before segment j, and boundary k at the end of the iteration:

    at boundary j       copies to the host that end there free their tensors; copies to the device that start there bring theirs
    while segment j runs   what is there, and the segment's outputs; a donated input has become an output
    when it has ended      its donated inputs and what it frees are gone

The rows of `on_device` add up to the bytes of a segment, and those of `at_peak` to the plan's peak. Sizes in bytes.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from tensile_jax.ir import Role, TensorId
from tensile_jax.plan_format import Plan, PlannedTensor

RowRole = Role | Literal["workspace", "unnamed", "ends", "joined"]
"""The role of a tensor, or what is no tensor of the plan: a segment's workspace, constants and arguments that the plan does not
name, what is there only when the iteration begins or ends, what joining segments into programs adds."""


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
        ("constants and arguments that the plan does not name", "unnamed", segment.resident_bytes - sum(r.nbytes for r in named)),
        ("when the iteration begins or ends", "ends", segment.device_bytes - segment.resident_bytes - segment.workspace_bytes),
    )
    return _sorted([*named, *(Resident(what, role, nbytes) for what, role, nbytes in beside if nbytes)])


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
