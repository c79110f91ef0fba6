"""Makes the page of a `Plan`: memory over the time of a step, the tensors on the device, and when segments and copies run.

A *segment* is a stretch of operators that is compiled as one executable. The areas of the first plot are what is on the device
while each segment runs: the tensors, by their role (parameters, activations and so on; `plan_residency.py`), and the segment's
workspace, which is the memory that its executable needs beside inputs and outputs. Times are in milliseconds.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from os import PathLike

import numpy as np

from tensile_jax.memory_report.records import WORDS
from tensile_jax.memory_report.report import MemoryReport
from tensile_jax.pages.memory_page import COLOUR_OF, MOST_BANDS
from tensile_jax.pages.offsets import offsets
from tensile_jax.pages.page import Cell, Column, Page, Plot, Table, refuse_without_plotly, write_page
from tensile_jax.pages.traces import COLOURS, GRAY, Band, Span, Trace, Unit, area, bands, line, marked, spans, unit_of
from tensile_jax.plan_format import Event, Plan, Segment
from tensile_jax.plan_residency import Stay, at_peak, bytes_at_ends, residents, stays
from tensile_jax.units import format_bytes, times_plain_jit

_SEGMENTS, _AGAIN, _OUT, _IN = "segments", "computes again", "to the host", "to the device"
_LANES = (_SEGMENTS, _AGAIN, _OUT, _IN)
_OTHER = {
    "allocator": "unasked for, by the allocator",
    "unnamed": "other constants and arguments",
    "ends": "between iterations",
    "joined": "joined into programs",
}
_POINTS = 2000  # of plain jit's curve


def save_plan(plan: Plan, path: str | PathLike[str], *, memory: MemoryReport | None = None) -> None:
    """Write the page of a plan to a file.

    Args:
        memory: the report on the same function, for plain jit's curve.

    Raises:
        ModuleNotFoundError: plotly is not installed.
        OSError: the file cannot be written.
    """
    refuse_without_plotly()
    write_page(page_of(plan, memory=memory), path)


def page_of(plan: Plan, *, memory: MemoryReport | None = None) -> Page:
    """The page of a plan."""
    levels = [("budget", plan.budget_bytes), ("plain jit's peak", plan.jit_peak_bytes)]
    unit = unit_of(max(plan.peak_bytes, *(nbytes or 0 for _, nbytes in levels)))
    end = max(plan.step_us, *(s.begin_us + s.latency_us for s in plan.segments), *(e.end_us for e in plan.events), 1.0) / 1e3
    if memory is not None:
        end = max(end, memory.step_us / 1e3)
    lines = [
        line(f"{name}, {format_bytes(nbytes)}", [0, end], [nbytes / unit.nbytes] * 2, colour, dash=dash)
        for (name, nbytes), colour, dash in zip(levels, ("#d55e00", GRAY), ("dash", "dot"), strict=True)
        if nbytes is not None
    ]
    behind = [] if memory is None else [_plain_curve(memory, unit)]
    fullest = plan.segments[plan.peak_segment]
    middle = (fullest.begin_us + fullest.latency_us / 2) / 1e3
    stayed = sorted(stays(plan), key=lambda stay: (-stay.tensor.nbytes, stay.tensor.id, stay.first))
    stayed = [stay for stay in stayed if stay.tensor.nbytes][:MOST_BANDS]
    return Page(
        title=f"Plan of {plan.program}",
        subtitle=f"Policy {plan.policy}, profile {plan.device_profile}, {plan.workspaces} workspaces; times are predicted.",
        figures=_figures(plan),
        description=_description(plan),
        plots=(
            Plot(f"on the device [{unit.name}]", 320),
            Plot("runs and copies", 140, lanes=_LANES),
            Plot(f"each tensor [{unit.name}]", 360),
        ),
        traces=(
            *_areas(plan, unit), *behind, *lines, marked("peak", middle, plan.peak_bytes, unit, "peak"),
            *_lanes(plan), *_bands(plan, stayed, unit),
        ),
        x_title="time of a step [ms], predicted",
        x_range=(0, end),
        table=Table("Tensors on the device between segments", _COLUMNS, tuple(_row(plan, stay) for stay in stayed)),
        above=(("On the device at the peak", tuple(_at_peak(plan))),),
        below=(("What the plan does", tuple(str(plan).splitlines()[1:])),),
    )  # fmt: skip


def _begin(segment: Segment) -> float:
    return segment.begin_us / 1e3


def _end(segment: Segment) -> float:
    return (segment.begin_us + segment.latency_us) / 1e3


def _areas(plan: Plan, unit: Unit) -> Iterator[Trace]:
    """The areas of the roles, of the workspaces and of what the plan does not name."""
    tensors = {tensor.id: tensor for tensor in plan.tensors}
    by_role: dict[str, list[int]] = defaultdict(lambda: [0] * len(plan.segments))
    for place, (segment, there) in enumerate(zip(plan.segments, residents(plan), strict=True)):
        for t in there:
            by_role[tensors[t].role][place] += tensors[t].nbytes
        named = sum(tensors[t].nbytes for t in there)
        by_role["unnamed"][place] = segment.resident_bytes - named
        by_role["workspace"][place] = segment.workspace_bytes
        by_role["allocator"][place] = segment.allocator_bytes
        by_role["ends"][place] = bytes_at_ends(segment)
    x = [*map(_begin, plan.segments), _end(plan.segments[-1])]
    order = [*WORDS, *_OTHER]
    for role in sorted(by_role, key=order.index):
        values = by_role[role]
        if any(values):
            yield area(WORDS.get(role, _OTHER.get(role, role)), x, [*values, values[-1]], unit, COLOUR_OF.get(role, GRAY))


def _plain_curve(memory: MemoryReport, unit: Unit) -> Trace:
    """The memory in use under plain jit over its own time; each point is the highest of the operators that share it."""
    used = np.sum([curve.nbytes for curve in memory.curves], axis=0)
    edges = np.unique(np.linspace(0, len(used), min(len(used), _POINTS) + 1).astype(int))
    x = [memory.begin_us[place] / 1e3 for place in edges[:-1]] if memory.begin_us else [0.0]
    values = [int(used[a:b].max()) / unit.nbytes for a, b in zip(edges[:-1], edges[1:], strict=True)]
    return line("plain jit", [*x, memory.step_us / 1e3], [*values, values[-1]], GRAY, hover=f"%{{y:.4~g}} {unit.name}")


def _lanes(plan: Plan) -> Iterator[Trace]:
    """When segments run, how long of it they compute again, and when copies run."""
    segments = [Span(_SEGMENTS, _begin(s), _end(s), _of_segment(place, s)) for place, s in enumerate(plan.segments)]
    again = [
        Span(_AGAIN, _begin(s), _begin(s) + s.recomputed_us / 1e3, f"segment {place}: {s.recomputed_us / 1e3:.4g} ms of it again")
        for place, s in enumerate(plan.segments)
        if s.recomputed_us
    ]
    yield spans("segments", segments, COLOURS[0], row=2)
    yield spans("computes again", again, COLOURS[1], row=2)
    for kind, lane, colour in (("swap_out", _OUT, COLOURS[3]), ("swap_in", _IN, COLOURS[2])):
        copies = [e for e in plan.events if e.kind == kind]
        yield spans(lane, [Span(lane, e.begin_us / 1e3, e.end_us / 1e3, _of_copy(e)) for e in copies], colour, row=2)


def _of_segment(place: int, segment: Segment) -> str:
    runs = f"{format_bytes(segment.device_bytes)}, {segment.latency_us / 1e3:.4g} ms"
    return f"segment {place}: {_plain(segment.name)}<br>{runs}"


def _of_copy(event: Event) -> str:
    return f"{_plain(event.name)}<br>{format_bytes(event.nbytes)}: {_plain(event.reason)}"


def _plain(text: str) -> str:
    """The text for plotly's hover, which reads some HTML."""
    return text.replace("&", "&amp;").replace("<", "&lt;")


def _bands(plan: Plan, stayed: Sequence[Stay], unit: Unit) -> list[Trace]:
    """The times that tensors are on the device, one trace for each role."""
    times = [(_begin(plan.segments[s.first]), _end(plan.segments[s.last])) for s in stayed]
    found = offsets([(begin, end, s.tensor.nbytes) for (begin, end), s in zip(times, stayed, strict=True)])
    by_role: dict[str, list[Band]] = defaultdict(list)
    for number, (stay, (begin, end), offset) in enumerate(zip(stayed, times, found, strict=True)):
        t = stay.tensor
        text = f"<b>{_plain(t.name)}</b><br>{WORDS[t.role]}, {t.dtype}{list(t.shape)}, {format_bytes(t.nbytes)}<br>"
        text += f"from segment {stay.first} to segment {stay.last}"
        by_role[t.role].append(Band(begin, end, offset, t.nbytes, text, number))
    return [bands(WORDS[role], some, unit, COLOUR_OF.get(role, GRAY), row=3) for role, some in by_role.items()]


_COLUMNS = (
    Column("name"), Column("size", number=True), Column("role"), Column("form"), Column("from segment", number=True),
    Column("to segment", number=True), Column("what happens to it"),
)  # fmt: skip
_HAPPENS = {"swap_out": "copied to the host", "swap_in": "copied to the device", "recompute": "computed again"}


def _row(plan: Plan, stay: Stay) -> tuple[Cell, ...]:
    t = stay.tensor
    kinds = {event.kind for event in plan.events if event.tensor == t.id}
    return (
        t.name, (t.nbytes, format_bytes(t.nbytes)), WORDS[t.role], f"{t.dtype}[{','.join(map(str, t.shape))}]",
        (stay.first, str(stay.first)), (stay.last, str(stay.last)),
        ", ".join(word for kind, word in _HAPPENS.items() if kind in kinds) or "kept",
    )  # fmt: skip


def _figures(plan: Plan) -> tuple[tuple[str, str], ...]:
    found = [("peak", f"{format_bytes(plan.peak_bytes)} in {plan.segments[plan.peak_segment].name}")]
    if plan.budget_bytes is not None:
        found.append(("budget", format_bytes(plan.budget_bytes)))
    if plan.jit_peak_bytes is not None:
        found.append(("plain jit's peak", format_bytes(plan.jit_peak_bytes)))
    plain_us = plan.jit_step_us
    over = f", {times_plain_jit(plan.step_us, plain_us)}" if plain_us and not plan.whole else ""
    found += [
        ("step, predicted", f"{plan.step_us / 1e3:.4g} ms{over}"), ("segments", str(len(plan.segments))),
        ("copied in a step", format_bytes(plan.swapped_out_bytes + plan.swapped_in_bytes)),
        ("computed again", f"{plan.recomputed_us / 1e3:.4g} ms"),
    ]  # fmt: skip
    return tuple(found)


def _description(plan: Plan) -> str:
    return (
        f"Above, the memory on the device over a step, stacked by role; the peak is {format_bytes(plan.peak_bytes)}, in "
        f"{plan.segments[plan.peak_segment].name}. Below it, when the {len(plan.segments)} segments run, what they compute "
        "again, and when tensors are copied. At the bottom, when each tensor is on the device. The table has the same."
    )


def _at_peak(plan: Plan) -> Iterator[str]:
    sizes: dict[str, int] = defaultdict(int)
    for row in at_peak(plan):
        sizes[WORDS.get(row.role, _OTHER.get(row.role, row.role))] += row.nbytes
    for name, nbytes in sorted(sizes.items(), key=lambda item: -item[1]):
        yield f"{name}: {format_bytes(nbytes)} ({nbytes / max(plan.peak_bytes, 1):.1%})"
