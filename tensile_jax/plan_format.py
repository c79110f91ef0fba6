"""Defines the format of a plan: its records, their JSON, the check that they agree with each other, and the text for people.

A plan says what runs when, and which tensors are copied to the host and back. It also predicts the time and the memory. A
*segment* is a stretch of operators that is compiled as one executable. An *event* happens to a tensor between two segments.

    Plan    ::= header  PlannedTensor*  Segment*  Event*
    Segment ::= operators  recomputed operators  inputs  outputs  frees  workspace  time
    Event   ::= swap_out | swap_in | recompute | release, with the segment that triggers it

A saved plan contains exactly these records. It names operators by their positions in the step as it was traced, in half-open
ranges, and tensors by id and name. An event's `trigger` is the index of a segment, or -1 for the beginning of the iteration. The
event is issued right after the launch of this segment, and is predicted to start `delta_us` after the segment's end ("each
instruction is a tuple (trigger, delta time)", TENSILE section III-D).

Sizes are in bytes, and times in microseconds since the iteration began.
"""

import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from os import PathLike
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import msgspec

from tensile_jax.atomic_file import write_whole
from tensile_jax.errors import PlanFileError
from tensile_jax.html_tables import ShownAsText
from tensile_jax.ir import OperatorId, Role, TensorId
from tensile_jax.tracebacks import hides_frames
from tensile_jax.units import format_bytes, times_plain_jit

SCHEMA_VERSION = 1
_WIDTH = 110  # characters of a line for a person
_MOST = 2**62  # bytes, microseconds or operators; a number as large as this is an error

Memory = Literal["host"]
"""A memory where a tensor waits while it is not on the device. `exec/transfer.py` says which memory of JAX that is."""
MEMORIES: tuple[Memory, ...] = get_args(Memory)
EventKind = Literal["swap_out", "swap_in", "recompute", "release"]
Barriers = Literal["live", "inputs", "lag", "chain"]
StateLayoutName = Literal["row_major", "auto"]
_Report = TypeVar("_Report")


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """A tensor that is in memory between segments, or that an event names.

    `nbytes` are its bytes in device memory. If the step itself puts it in host memory, `nbytes` are 0, and `host_bytes` are its
    bytes there.
    """

    id: TensorId
    name: str
    role: Role
    nbytes: int
    shape: tuple[int, ...]
    dtype: str
    host_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of operators that is compiled as one executable.

    Attributes:
        recomputes: the operators that have run in an earlier segment and run again in this one.
        donated: the inputs whose memory an output takes over. These outputs come first in `outputs`, in the same order.
        frees: the tensors that are released when the segment ends.
        resident_bytes: the tensors on the device while the segment runs.
        workspace_bytes: what the segment needs beside its inputs and outputs.
        allocator_bytes: what the device's allocator hands out without being asked, since it rounds sizes and hands out some
            pieces of free memory whole.
        device_bytes: the device memory in use while the segment runs: the three numbers above, added up. For the first and the
            last segment, it is at least what is on the device when the iteration begins and ends.
        stall_us: how long the segment waits for copies before it begins.
    """

    name: str
    operators: tuple[tuple[int, int], ...]
    recomputes: tuple[tuple[int, int], ...]
    inputs: tuple[TensorId, ...]
    outputs: tuple[TensorId, ...]
    donated: tuple[TensorId, ...]
    frees: tuple[TensorId, ...]
    resident_bytes: int
    workspace_bytes: int
    device_bytes: int
    begin_us: float
    latency_us: float
    recomputed_us: float
    stall_us: float
    allocator_bytes: int = 0


class Event(msgspec.Struct, frozen=True, omit_defaults=True):
    """Something that happens to a tensor: it is issued after segment `trigger`, and ends before segment `until` is launched.

    A swap copies the tensor to `memory`, or from there.
    """

    kind: EventKind
    tensor: TensorId
    name: str
    nbytes: int
    trigger: int
    until: int
    delta_us: float
    begin_us: float
    end_us: float
    reason: str
    memory: Memory = "host"


@dataclass(frozen=True, slots=True)
class PlannedLoop:
    """A loop that is one operator of the step, and whose body has a plan of its own. Every iteration follows this `plan`."""

    operator: OperatorId
    name: str
    iterations: int
    plan: "Plan"


@dataclass(frozen=True, slots=True)
class StateLayout:
    """The memory layout of a tensor of the state: its dimensions, from the one with the largest stride to that with the smallest.

    The tensor is an argument of the step. The result that takes over its memory has the same layout.
    """

    tensor: TensorId
    major_to_minor: tuple[int, ...]


@dataclass(frozen=True, slots=True, repr=False)
class Plan(ShownAsText):
    """A scheduling plan for one step at one set of shapes, with what it is predicted to need.

    Attributes:
        whole: the step runs as one executable, exactly as `jax.jit` compiles it.
        budget_bytes: the budget; None for no limit.
        budget_basis: what the budget was computed from, for people: a share of plain jit's peak, which was compiled or predicted,
            or the memory of the device. Empty if the user gave a number of bytes, or no limit holds.
        max_slowdown: what the user gave instead of a budget: the allowed time of the step, as a multiple of its time as one
            executable.
        peak_bytes: predicted peak of device memory, workspaces included. A *workspace* is the memory that a segment needs beside
            its inputs and outputs. What the device's allocator hands out without being asked is included, too.
        allocator_bytes: how much higher the peak is for that reason; None if the allocator hands out what it is asked for.
        workspaces: "predicted" before compiling: every workspace, and with it every `device_bytes` and the peak, is an estimate.
            "compiled" once the sizes of the compiled segments have replaced the estimates. Times are always predictions.
        peak_segment: the index of the segment that needs most.
        floor_bytes: a budget for which there is a plan of the step in this form, hardly above the smallest one. If the notes say
            that the step was rewritten, it may need less in another form. `BudgetTooSmall` names the least of all.
        floor_tensors: the names of the largest inputs and constants of the step, which make up much of the floor.
        jit_peak_bytes: the peak of plain `jax.jit`; None if it has not been compiled.
        step_us, stall_us, recomputed_us: predicted time of an iteration, of waiting for copies in it, and of recomputation in it.
        jit_step_us: predicted time of an iteration of plain `jax.jit`; None if the plan was saved by a version that did not say.
        swapped_out_bytes, swapped_in_bytes: bytes copied to the host and to the device in an iteration.
        host_peak_bytes: the most that is in pinned host memory at once; None if the plan was saved by a version that did not say.
        host_budget_bytes: the budget of host memory; None for no limit.
        bound_us: no plan under this budget takes less time; None if the bound was not computed (`PlannedFunction.bound_us`).
        notes: sentences for people about how the plan was made: a check refused another plan, or a saved plan needed more than
            its budget and the step was planned again.
        rates: where the rates of the device profile come from, on which all times depend: measurements, figures that the device's
            vendor has published, or nowhere, since the device is not known.
        loops: the loops whose bodies have plans of their own. Each loop is a segment by itself, which needs what the plan of its
            body needs. The body's plan is that of one iteration.
        launch: "segments": every segment is an executable of its own. "program": all segments between two copies are one
            executable, and with `barriers` "chain" all segments are, with the copies inside (`plan/result/joined.py`). The sizes
            and times of single segments are then estimates.
        launches: with "program", how many executables an iteration launches; otherwise None.
        launch_us: what the launch of an executable is predicted to take, in addition to the latencies of segments.
        devices: on how many devices the step runs. All of them do the same, and all sizes in the plan are those of one device.
        barriers: with "program", which values pass through the optimization barriers that separate segments within an executable
            (`exec/compiling/program_code.py`); otherwise None.
        state_layout: "row_major", as `jax.jit` lays arrays out. "auto": XLA chooses the memory layouts of state of four and more
            dimensions that stays on the device, when it compiles the one program that the plan is.
        layouts: what XLA has chosen, where that is not row-major; None if `state_layout` is not "auto", or before compiling.
        reason: why this plan has replaced an earlier one of the same run (`plan/drift.py`, `exec/fitting/improvement.py`), or why
            it was made by a short search; empty for other first plans.
        donated: the arguments whose memory the step may reuse; None if the plan was saved by a version that did not say.
        jax_version: the version of JAX that has traced the step; empty if that was not said.
    """

    schema_version: int
    tensile_version: str
    program: str
    fingerprint: str
    policy: str
    device_profile: str
    state_memory: Literal["device", "any"]
    whole: bool
    workspaces: Literal["predicted", "compiled"]
    budget_bytes: int | None
    peak_bytes: int
    peak_segment: int
    jit_peak_bytes: int | None
    unplanned_peak_bytes: int
    floor_bytes: int
    floor_tensors: tuple[str, ...]
    step_us: float
    stall_us: float
    recomputed_us: float
    swapped_out_bytes: int
    swapped_in_bytes: int
    tensors: tuple[PlannedTensor, ...]
    segments: tuple[Segment, ...]
    events: tuple[Event, ...]
    bound_us: float | None = None
    max_slowdown: float | None = None
    notes: tuple[str, ...] = ()
    budget_basis: str = ""
    loops: tuple[PlannedLoop, ...] = ()
    rates: Literal["measured", "published", "unknown"] = "measured"
    reason: str = ""
    launch: Literal["segments", "program"] = "segments"
    launches: int | None = None
    barriers: Barriers | None = None
    devices: int = 1
    launch_us: float = 0.0
    host_peak_bytes: int | None = None
    host_budget_bytes: int | None = None
    donated: tuple[TensorId, ...] | None = None
    jax_version: str = ""
    allocator_bytes: int | None = None
    jit_step_us: float | None = None
    state_layout: StateLayoutName = "row_major"
    layouts: tuple[StateLayout, ...] | None = None

    @hides_frames
    def save(self, path: str | PathLike[str]) -> None:
        """Write the plan as JSON, indented, with a newline at its end."""
        save_json(self, path)

    @hides_frames
    def save_html(self, path: str | PathLike[str], *, memory: Any = None) -> None:
        """Write the plan as a page that a browser shows without a network: one HTML file.

        Args:
            memory: the `MemoryReport` of the same function; plain jit's curve is then drawn behind the plan's.

        Raises:
            ModuleNotFoundError: plotly, which draws the page, is not installed (`pip install 'tensile_jax[html]'`).
            OSError: the file cannot be written.
        """
        # the page reads these records, so it is looked up when it is needed
        import_module("tensile_jax.pages.plan_page").save_plan(self, path, memory=memory)

    @staticmethod
    @hides_frames
    def load(path: str | PathLike[str]) -> "Plan":
        """Read a saved plan.

        Raises:
            PlanFileError: the file is not a plan, is truncated, was written with another schema, or contradicts itself.
            OSError: there is no such file, or it cannot be read.
        """
        try:
            raw = msgspec.json.decode(Path(path).read_bytes())
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise PlanFileError(
                f"{path} is not JSON, or was cut short ({error}). Save the plan again with plan.save(path)."
            ) from error
        version = raw.get("schema_version") if isinstance(raw, dict) else None
        if version != SCHEMA_VERSION or isinstance(version, bool):
            raise PlanFileError(
                f"{path} has schema_version {version!r}; this version of tensile_jax reads {SCHEMA_VERSION}. "
                "Plan the step again with this version."
            )
        try:
            plan = msgspec.convert(raw, Plan)
        except (msgspec.ValidationError, OverflowError) as error:
            raise PlanFileError(f"{path} is not a plan: {error}. Save the plan again with plan.save(path).") from error
        story = next(contradictions(plan), None)
        if story is not None:
            raise PlanFileError(f"{path} is not a plan: {story}. Save the plan again with plan.save(path).")
        return plan

    def __str__(self) -> str:
        return describe(self)


def peaks_of(plan: Plan) -> Mapping[Memory, int | None]:
    """The most that waits in each memory at once, in bytes; None if the plan does not say."""
    return {"host": plan.host_peak_bytes}


def budgets_of(plan: Plan) -> Mapping[Memory, int | None]:
    """The budget of each memory in which tensors wait, in bytes; None for no limit."""
    return {"host": plan.host_budget_bytes}


def with_peaks(plan: Plan, peaks: Mapping[Memory, int]) -> Plan:
    """The plan with these for `peaks_of`."""
    return replace(plan, host_peak_bytes=peaks["host"])


def with_budgets(plan: Plan, budgets: Mapping[Memory, int | None]) -> Plan:
    """The plan with these for `budgets_of`."""
    return replace(plan, host_budget_bytes=budgets["host"])


def contradictions(plan: Plan) -> Iterator[str]:
    """What contradicts itself in a plan, whatever its step; each result is a clause of a sentence.

    Whether the plan does what the step does is another check, which needs the step's graph (`plan/result/check.py`).
    """
    yield from _impossible_numbers(plan, "the plan")
    for what, several in (("tensor", plan.tensors), ("segment", plan.segments), ("event", plan.events)):
        for place, one in enumerate(several):
            yield from _impossible_numbers(one, f"{what} {place}")
    if not (plan.launch == "program") == (plan.barriers is not None) == (plan.launches is not None):
        yield f"its launch is {plan.launch!r}, its launches are {plan.launches} and its barriers {plan.barriers!r}"
    if not 1 <= plan.devices < _MOST:
        yield f"its devices are {plan.devices}"
    if plan.launches is not None and not 0 < plan.launches <= len(plan.segments):
        yield f"it launches {plan.launches} executables, and it has {len(plan.segments)} segments"
    if plan.launch == "program" and (plan.whole or plan.loops):
        yield "its segments are programs, and yet it runs whole, or loops in it have plans of their own"
    yield from _contradictory_layouts(plan)
    if not plan.segments:
        yield "it has no segments"
    elif not 0 <= plan.peak_segment < len(plan.segments):
        yield f"its peak is in segment {plan.peak_segment}, and it has {len(plan.segments)} segments"
    elif plan.launch == "program":
        pass  # its peak is not that of a segment
    elif plan.peak_bytes != max(s.device_bytes for s in plan.segments):
        yield f"its peak is {plan.peak_bytes} bytes, and its largest segment's {max(s.device_bytes for s in plan.segments)}"
    elif plan.segments[plan.peak_segment].device_bytes != plan.peak_bytes:
        yield f"segment {plan.peak_segment}, which is to hold the peak, is not the largest"
    elif plan.allocator_bytes not in (None, unasked_bytes(plan.segments)):
        yield f"its allocator_bytes are {plan.allocator_bytes}, and its segments' {unasked_bytes(plan.segments)}"
    if plan.budget_bytes is not None and plan.peak_bytes > plan.budget_bytes:
        yield f"its peak of {plan.peak_bytes} bytes is above its budget of {plan.budget_bytes}"
    for memory, budget in budgets_of(plan).items():
        peak = peaks_of(plan)[memory] or 0
        if budget is not None and peak > budget:
            yield f"its peak of {peak} bytes in {memory} memory is above its {memory} budget of {budget}"
    if plan.max_slowdown is not None and plan.max_slowdown < 1:
        yield f"its max_slowdown is {plan.max_slowdown}, which is below 1"
    if plan.whole and (len(plan.segments) != 1 or plan.events):
        yield "it runs whole, and yet has more than one segment, or events"
    yield from _contradictory_tensors(plan)
    yield from _contradictory_segments(plan)
    yield from _contradictory_loops(plan)


def unasked_bytes(segments: Sequence[Segment]) -> int:
    """How much higher the peak of these segments is than without what the allocator hands out without being asked."""
    return max(s.device_bytes for s in segments) - max(s.device_bytes - s.allocator_bytes for s in segments)


def _impossible_numbers(record: Any, what: str) -> Iterator[str]:
    for name in type(record).__match_args__:
        value = getattr(record, name)
        if isinstance(value, float) and not math.isfinite(value):
            yield f"{name} of {what} is {value}"
        if name.endswith(("_bytes", "_us", "nbytes")) and isinstance(value, int | float) and not 0 <= value < _MOST:
            yield f"{name} of {what} is {value}"


def _contradictory_tensors(plan: Plan) -> Iterator[str]:
    known = {tensor.id: tensor for tensor in plan.tensors}
    if len(known) != len(plan.tensors):
        yield "a tensor stands in it twice"
    count = len(plan.segments)
    for place, event in enumerate(plan.events):
        tensor = known.get(event.tensor)
        if tensor is None or (tensor.name, tensor.nbytes) != (event.name, event.nbytes):
            yield f"event {place} is of tensor {event.tensor}, {event.name!r} with {event.nbytes} bytes, which is not in the plan"
        if not -1 <= event.trigger < count or not 0 <= event.until <= count:
            yield f"event {place} lies between segments {event.trigger} and {event.until}, and there are {count}"


def _contradictory_segments(plan: Plan) -> Iterator[str]:
    known = {tensor.id for tensor in plan.tensors}
    there: set[TensorId] = set()  # what earlier segments have given and no segment has freed since
    for place, segment in enumerate(plan.segments):
        groups: dict[str, Sequence[TensorId]] = {
            "inputs": segment.inputs, "outputs": segment.outputs, "donated": segment.donated, "frees": segment.frees,
        }  # fmt: skip
        for name, ids in groups.items():
            if not known.issuperset(ids):
                yield f"{name} of segment {place} name tensors that are not in the plan"
            if len(set(ids)) != len(ids) and not plan.whole:  # a step may return one tensor twice
                yield f"a tensor stands twice in {name} of segment {place}"
        if not there.isdisjoint(segment.outputs):
            yield f"segment {place} gives an output that an earlier segment gives"
        there.update(segment.outputs)
        there.difference_update(segment.frees)
        if any(not 0 <= a < b < _MOST for a, b in (*segment.operators, *segment.recomputes)):
            yield f"segment {place} has an empty or negative range of operators"
        needed = segment.resident_bytes + segment.workspace_bytes + segment.allocator_bytes
        if needed > segment.device_bytes and not plan.whole:
            yield f"segment {place} has less on the device than is resident, its workspace and what its allocator hands out"


def _contradictory_layouts(plan: Plan) -> Iterator[str]:
    if plan.state_layout == "auto" and plan.launches != 1:
        yield f"XLA is to choose the layouts of its state, and it launches {plan.launches or len(plan.segments)} executables"
    if plan.layouts is not None and plan.state_layout != "auto":
        yield f"it has layouts of its state, and its state_layout is {plan.state_layout!r}"
    shapes = {tensor.id: tensor.shape for tensor in plan.tensors}
    for layout in plan.layouts or ():
        if sorted(layout.major_to_minor) != list(range(len(shapes.get(layout.tensor, ())))):
            yield f"the layout {layout.major_to_minor} is none of tensor {layout.tensor}"


def _contradictory_loops(plan: Plan) -> Iterator[str]:
    alone = {s.operators[0][0] for s in plan.segments if [b - a for a, b in s.operators] == [1] and not s.recomputes}
    for loop in plan.loops:
        if loop.operator not in alone:
            yield f"the loop {loop.name} is not a segment by itself"
        if not 1 <= loop.iterations < _MOST:
            yield f"the loop {loop.name} has {loop.iterations} iterations"
        yield from (f"in the plan of the loop {loop.name}, {story}" for story in contradictions(loop.plan))


def save_json(value: Any, path: str | PathLike[str]) -> None:
    """Write records as JSON, indented, with a newline at the end. A file of that name is replaced once everything is written."""
    write_whole(path, msgspec.json.format(msgspec.json.encode(value), indent=1) + b"\n")


def read_report(text: str | bytes, kind: type[_Report], what: str, field: str, version: int) -> _Report:
    """The record that JSON stands for, if its `field` is `version`; `what` names the record in errors.

    Raises:
        ValueError: the text is no such JSON, or was written by another version of this package.
    """
    try:
        report = msgspec.json.decode(text, type=kind)
    except msgspec.DecodeError as error:
        raise ValueError(f"This is not the JSON of {what}: {error}. Write one with report.to_json().") from error
    if (found := getattr(report, field)) != version:
        raise ValueError(
            f"The report has {field} {found}, and this version of tensile_jax reads {version}. Make the report again."
        )
    return report


def _over_plain(plan: Plan) -> str:
    if plan.whole:
        return ": as plain jit runs it"
    return "" if not plan.jit_step_us else f": {times_plain_jit(plan.step_us, plan.jit_step_us)}, predicted"


def _profile(plan: Plan) -> str:
    said = {"measured": "", "published": ", rates not measured", "unknown": ", uncalibrated"}[plan.rates]
    return f"profile {plan.device_profile}{said}"


def describe(plan: Plan) -> str:
    """A dozen lines: what the plan does and what it costs."""
    basis = f" ({plan.budget_basis})" if plan.budget_basis else ""
    budget = "none" if plan.budget_bytes is None else format_bytes(plan.budget_bytes) + basis
    if plan.max_slowdown is not None:
        budget = f"the least for a step of at most {plan.max_slowdown:g} times plain jit's time"
    jit = "" if plan.jit_peak_bytes is None else f"plain jit {format_bytes(plan.jit_peak_bytes)}, "
    counts = {kind: sum(e.kind == kind for e in plan.events) for kind in ("swap_out", "swap_in", "recompute")}
    recomputed = sum(e.nbytes for e in plan.events if e.kind == "recompute")
    about = "about " if plan.workspaces == "predicted" else ""
    lines = [
        f"Plan of {plan.program!r}{_over_plain(plan)} (policy {plan.policy}, {_profile(plan)}, memory as {plan.workspaces})",
        *([f"  devices    {plan.devices}, all alike; sizes are those of one"] if plan.devices > 1 else []),
        f"  budget     {budget}",
        f"  peak       {about}{format_bytes(plan.peak_bytes)} in {plan.segments[plan.peak_segment].name}"
        f" ({jit}least for such a plan {format_bytes(plan.floor_bytes)})" + _of_the_allocator(plan),
        f"  step       {_step(plan)}",
    ]
    if plan.bound_us is not None:
        above = plan.step_us / plan.bound_us - 1
        lines.append(
            f"  bound      {plan.bound_us / 1e3:.1f} ms: no plan without chunks is faster here; this one is {above:.1%} above"
        )
    if plan.whole:
        lines.append("  the whole step runs as one executable, as jax.jit compiles it")
    else:
        lines += [
            f"  segments   {len(plan.segments)}" + _launches(plan),
            *_layouts(plan),
            f"  swaps      {counts['swap_out']} out ({format_bytes(plan.swapped_out_bytes)}), "
            f"{counts['swap_in']} in ({format_bytes(plan.swapped_in_bytes)})" + "".join(_waiting(plan)),
            f"  recomputes {counts['recompute']} tensors ({format_bytes(recomputed)})",
        ]
    for loop in plan.loops:
        lines += [f"  loop       {loop.iterations} iterations of {loop.name}, each under this plan:"]
        lines += [f"    {line}" for line in describe(loop.plan).splitlines()[1:]]
    if plan.workspaces == "predicted":
        workspace = max(s.workspace_bytes for s in plan.segments)
        lines.append(
            f"  estimates  workspaces (the largest {format_bytes(workspace)}), and so the peak; running the plan corrects them"
        )
    if plan.reason:
        lines += textwrap.wrap(plan.reason, _WIDTH, initial_indent="  reason     ", subsequent_indent=" " * 13)
    for note in plan.notes:
        lines += textwrap.wrap(note, _WIDTH, initial_indent="  note       ", subsequent_indent=" " * 13)
    return "\n".join(lines)


def _step(plan: Plan) -> str:
    """The predicted time of a step, as a sum of its parts."""
    uncalibrated = "uncalibrated, " if plan.rates == "unknown" else ""
    whole, again, waits = (round(us / 1e3, 1) for us in (plan.step_us, plan.recomputed_us, plan.stall_us))
    if plan.whole or plan.jit_step_us is None:
        return f"{uncalibrated}{whole} ms"
    plain = round(plan.jit_step_us / 1e3, 1)
    cuts = whole - plain - again - waits  # so that the parts add up as they are printed
    rest = f"- {-cuts:.1f} less memory traffic" if cuts < 0 else f"+ {cuts:.1f} at the cuts between segments"
    return f"{uncalibrated}{whole} ms = plain jit {plain} + recomputation {again} + waiting for copies {waits} {rest}"


def _of_the_allocator(plan: Plan) -> str:
    if plan.allocator_bytes is None:
        return ""
    return f", {format_bytes(plan.allocator_bytes)} of it unasked for by the allocator"


def _waiting(plan: Plan) -> Iterator[str]:
    for memory, peak in peaks_of(plan).items():
        budget = budgets_of(plan)[memory]
        if peak:
            yield f", {format_bytes(peak)}{'' if budget is None else f' of {format_bytes(budget)}'} in {memory} memory at once"


def _launches(plan: Plan) -> str:
    if plan.launches is None:
        return ""
    return ", all in one launch" if plan.launches == 1 else f", in {plan.launches} launches"


def _layouts(plan: Plan) -> list[str]:
    if plan.state_layout != "auto":
        return []
    if plan.layouts is None:
        return ["  layouts    XLA chooses those of state of four and more dimensions"]
    sizes = {tensor.id: tensor.nbytes for tensor in plan.tensors}
    nbytes = format_bytes(sum(sizes[layout.tensor] for layout in plan.layouts))
    return [f"  layouts    {len(plan.layouts)} tensors of the state ({nbytes}) are not row-major, as XLA has chosen"]


def ranges(ids: list[OperatorId]) -> tuple[tuple[int, int], ...]:
    """Half-open ranges of consecutive ids, in the order given: [1, 2, 3, 7] -> ((1, 4), (7, 8))."""
    found: list[list[int]] = []
    for i in ids:
        if found and found[-1][1] == i:
            found[-1][1] = i + 1
        else:
            found.append([i, i + 1])
    return tuple((a, b) for a, b in found)


def unranged(spans: tuple[tuple[int, int], ...]) -> list[OperatorId]:
    """The ids of `ranges`, in order."""
    return [OperatorId(i) for a, b in spans for i in range(a, b)]
