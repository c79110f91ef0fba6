"""`tensile show`: prints which tensors a saved plan copies to the host, computes again and frees, when, and why, without JAX.

A plan cuts a step into *segments*, stretches of operators that are each compiled as one executable. Without an option, the
command prints the whole plan: its memory curve, and tables of the tensors at the peak, the segments, the swaps (copies to the
host and back), the scopes (such as layers) that are computed again in part, and the largest tensors. `--segment` prints one
segment. `--tensor` prints all events of the tensors whose name contains a given text. The iterations of some loops run under a
plan of their own. `--loop` prints such a plan, and the other options apply to it. `--html` writes the plan as a page instead.

The memory curve has one bar for each segment:

    segment 4    |############::::   !    |   512 MiB  <- peak
                  resident    workspace  budget

`#` stands for the tensors on the device while the segment runs, `:` for the segment's workspace (the memory that it needs beside
its inputs and results), and `!` marks the budget. If the terminal can show more than ASCII, the bars are solid. The scale ends at
the largest of three values: the peak, the budget and plain jit's peak.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from tensile_jax.cli.errors import Refusal
from tensile_jax.cli.formatting import format_share, format_us, readable_console, table_of
from tensile_jax.cli.options import POSITIVE_COUNT, html_option
from tensile_jax.ir import TensorId
from tensile_jax.plan_format import Event, EventKind, Plan, PlannedTensor, Segment
from tensile_jax.plan_residency import Resident, at_peak, on_device
from tensile_jax.units import format_bytes

_READABLE_WIDTH = 110
_MOST_ROWS = 60
_NARROWEST_BAR = 10
_PEAK = "  <- peak"
_WHAT_HAPPENS = {
    "swap_out": "copied out to the host",
    "swap_in": "copied in from the host",
    "recompute": "computed again",
    "release": "released",
}


@click.command(short_help="Show what a saved plan does, when and why.")
@click.argument("plan_file", metavar="PLAN.JSON", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--segment", metavar="N", type=int, help="Only segment N, in detail.")
@click.option("--tensor", metavar="TEXT", help="Only the life of tensors whose name contains TEXT.")
@click.option("--loop", metavar="N", type=int, help="The plan of the body of loop N, instead of the whole plan.")
@click.option("--top", metavar="N", type=POSITIVE_COUNT, default=12, show_default=True, help="Rows in a table.")
@html_option
def show(
    plan_file: Path, segment: int | None, tensor: str | None, loop: int | None, top: int, html: Path | None
) -> None:  # fmt: skip
    """Show what the saved plan PLAN.JSON does, when and why, and its memory curve."""
    if segment is not None and tensor is not None:
        raise Refusal("--segment and --tensor exclude each other. Leave one of them out.")
    plan = Plan.load(plan_file)
    if loop is not None:
        plan = _body_of_loop(plan, loop)
    if html is not None:
        plan.save_html(html)
        click.echo(f"Written to {html}")
        return
    console = readable_console(_READABLE_WIDTH, highlight=False, markup=False)
    if segment is not None:
        _show_segment(plan, segment, top, console)
    elif tensor is not None:
        _show_tensors(plan, tensor, top, console)
    else:
        _show_all(plan, top, console)


def _body_of_loop(plan: Plan, index: int) -> Plan:
    if not 0 <= index < len(plan.loops):
        has = f"the plan has loops 0 to {len(plan.loops) - 1}" if plan.loops else "no loop of the plan has a plan of its own"
        raise Refusal(f"--loop={index}: {has}. {'Name one of these.' if plan.loops else 'Leave it out.'}")
    return plan.loops[index].plan


def _show_all(plan: Plan, top: int, console: Console) -> None:
    _print_lines(console, str(plan).splitlines())
    console.print()
    _print_lines(console, memory_curve(plan, console))
    console.print()
    fullest = plan.segments[plan.peak_segment].name
    _print_lines(console, [f"On the device at the peak, in {fullest}: {format_bytes(plan.peak_bytes)}"])
    for table in _resident_tables(at_peak(plan), top):
        console.print(table)
    console.print(_segments_table(plan))
    if any(_events_of(plan, "swap_out", "swap_in")):
        console.print(_swaps_table(plan, top))
    if any(_events_of(plan, "recompute")):
        console.print(_recomputed_table(plan, top))
    console.print(_largest_table(plan, top))
    released = [event.nbytes for event in _events_of(plan, "release")]
    _print_lines(
        console,
        [
            f"Released after their last use: {len(released)} tensors, {format_bytes(sum(released))}",
            "More: --segment N, --tensor TEXT" + (", --loop N." if plan.loops else "."),
        ],
    )


def _show_segment(plan: Plan, index: int, top: int, console: Console) -> None:
    if not 0 <= index < len(plan.segments):
        raise Refusal(f"--segment={index}: the plan has segments 0 to {len(plan.segments) - 1}. Name one of these.")
    _print_lines(console, _segment_lines(plan, index))
    for table in _segment_tables(plan, index, top):
        console.print(table)


def _show_tensors(plan: Plan, text: str, top: int, console: Console) -> None:
    found = _largest_first(tensor for tensor in plan.tensors if text.lower() in tensor.name.lower())
    if not found:
        largest = max(plan.tensors, key=lambda t: t.nbytes).name if plan.tensors else "none: the step runs whole"
        raise Refusal(f"--tensor={text}: no tensor's name contains it. The largest is {largest}.")
    for tensor in found[:top]:
        _print_lines(console, _tensor_lines(plan, tensor))
    if len(found) > top:
        _print_lines(console, [f"... {len(found) - top} more tensors match (--top N)"])


def _print_lines(console: Console, lines: list[str]) -> None:
    for line in lines:
        console.print(line, soft_wrap=True)


# -- the memory curve ---------------------------------------------------------------------------------------------------------


def memory_curve(plan: Plan, console: Console) -> list[str]:
    """The lines of the memory curve, none wider than the console."""
    solid, light, mark = ("#", ":", "!") if console.options.ascii_only else ("█", "░", "┃")
    rows = _rows(plan)
    label_width = max(len(label) for label, _, _ in rows)
    sizes = [format_bytes(segment.device_bytes) for _, segment, _ in rows]
    size_width = max(map(len, sizes))
    bar_width = max(_NARROWEST_BAR, console.width - label_width - size_width - len(" || " + _PEAK))
    scale = max(plan.peak_bytes, plan.budget_bytes or 0, plan.jit_peak_bytes or 0, 1) / bar_width
    budget_at = None if plan.budget_bytes is None else min(round(plan.budget_bytes / scale), bar_width - 1)
    lines = [f"Memory on the device by segment, scale 0 to {format_bytes(scale * bar_width)}"]
    lines.append(f"{solid} resident  {light} workspace" + ("" if budget_at is None else f"  {mark} budget"))
    for (label, segment, holds_peak), size in zip(rows, sizes, strict=True):
        full = round(segment.device_bytes / scale)
        held = min(full, round(segment.resident_bytes / scale))
        bar = list((solid * held + light * (full - held)).ljust(bar_width)[:bar_width])
        if budget_at is not None:
            bar[budget_at] = mark
        lines.append(f"{label:<{label_width}} |{''.join(bar)}| {size:>{size_width}}{_PEAK if holds_peak else ''}")
    return lines


def _rows(plan: Plan) -> list[tuple[str, Segment, bool]]:
    """(label, segment, whether it has the peak) for each row. If there are many segments, neighbours share a row."""
    count = len(plan.segments)
    together = -(-count // _MOST_ROWS)
    rows: list[tuple[str, Segment, bool]] = []
    for begin in range(0, count, together):
        group = range(begin, min(begin + together, count))
        fullest = max(group, key=lambda i: (i == plan.peak_segment, plan.segments[i].device_bytes))
        label = str(begin) if len(group) == 1 else f"{begin}-{group[-1]}"
        rows.append((f"segment {label}", plan.segments[fullest], fullest == plan.peak_segment))
    return rows


# -- what is on the device ----------------------------------------------------------------------------------------------------


def _resident_tables(there: Sequence[Resident], top: int) -> list[Table]:
    """What is on the device, by role and by scope. Each table adds up to the same."""
    total = sum(row.nbytes for row in there)
    tables: list[Table] = []
    for what, key in {"role": _role_in_words, "scope": _scope_of_resident}.items():
        sizes: dict[str, list[int]] = defaultdict(list)
        for row in there:
            sizes[key(row)].append(row.nbytes)
        ranked = sorted(sizes, key=lambda name: (-sum(sizes[name]), name))
        table = table_of(f"On the device, by {what}", what, ">bytes", ">share", ">parts")
        for name in ranked[:top]:
            nbytes = sum(sizes[name])
            table.add_row(name, format_bytes(nbytes), format_share(nbytes, max(total, 1)), str(len(sizes[name])))
        _add_rest(table, f"{what}s", [sum(sizes[name]) for name in ranked[top:]])
        table.add_section()
        table.add_row("together", format_bytes(total), "", str(len(there)))
        tables.append(table)
    return tables


def _role_in_words(row: Resident) -> str:
    return row.role.replace("_", " ") if row.role not in ("allocator", "unnamed", "ends", "joined") else row.what


def _scope_of_resident(row: Resident) -> str:
    if row.tensor is not None:
        return _scope_of(row.what)
    return "workspace" if row.role == "workspace" else row.what


# -- the whole plan -----------------------------------------------------------------------------------------------------------


def _segments_table(plan: Plan) -> Table:
    """One row for each segment, in the order in which they run."""
    table = table_of("Segments", ">#", "name", ">on device", ">workspace", ">begins", ">runs", ">again", ">waits", ">frees")
    sizes = {tensor.id: tensor.nbytes for tensor in plan.tensors}
    for index, s in enumerate(plan.segments):
        memory = (s.device_bytes, s.workspace_bytes)
        times = (s.begin_us, s.latency_us, s.recomputed_us, s.stall_us)
        freed = sum(sizes.get(t, 0) for t in s.frees)
        cells = (str(index), s.name, *map(format_bytes, memory), *map(format_us, times), format_bytes(freed))
        table.add_row(*cells, style="bold" if index == plan.peak_segment else "")
    table.caption = "runs, again: predicted, and how much of it does work twice; waits: for copies; bold: the peak"
    return table


def _swaps_table(plan: Plan, top: int) -> Table:
    """The largest tensors that are swapped, with the times of their copies."""
    columns = (">leaves after", ">from - to", ">returns after", ">from - to")
    table = table_of("Swaps (largest first)", "tensor", ">bytes", *columns)
    swaps = _swaps(plan)
    for one, out, back in swaps[:top]:
        leaves = _when(out) or ("the iteration", "before")
        returns = _when(back) or ("the iteration", "after")
        table.add_row(one.name, format_bytes(one.nbytes), *leaves, *returns)
    _add_rest(table, "swaps", [one.nbytes for one, _, _ in swaps[top:]])
    _explain(table, "leaves", {e.reason for e in _events_of(plan, "swap_out")})
    return table


def _swaps(plan: Plan) -> list[tuple[Event, Event | None, Event | None]]:
    """(either event, out, in): each swap-out with the next swap-in of the same tensor; the largest first."""
    swaps: list[tuple[Event, Event | None, Event | None]] = []
    leaving: dict[TensorId, Event] = {}
    for event in sorted(_events_of(plan, "swap_out", "swap_in"), key=lambda e: e.begin_us):
        out = leaving.pop(event.tensor, None)
        if event.kind == "swap_in":
            swaps.append((event, out, event))
        else:
            if out is not None:
                swaps.append((out, out, None))
            leaving[event.tensor] = event
    swaps += [(out, out, None) for out in leaving.values()]
    return sorted(swaps, key=lambda swap: (-swap[0].nbytes, swap[0].begin_us))


def _when(event: Event | None) -> tuple[str, str] | None:
    if event is None:
        return None
    begin = "begin" if event.trigger < 0 else f"segment {event.trigger}"
    return begin, f"{event.begin_us / 1e3:.1f} - {event.end_us / 1e3:.1f} ms"


def _recomputed_table(plan: Plan, top: int) -> Table:
    """The scopes of the model with the most recomputed bytes, and the segments that recompute them."""
    table = table_of("Recomputed (by scope)", "scope", ">bytes", ">tensors", "again in segments")
    by_scope: dict[str, list[Event]] = defaultdict(list)
    for event in _events_of(plan, "recompute"):
        by_scope[_scope_of(event.name)].append(event)
    sizes = {scope: sum(e.nbytes for e in events) for scope, events in by_scope.items()}
    ranked = sorted(sizes, key=lambda scope: (-sizes[scope], scope))
    for scope in ranked[:top]:
        segments = ", ".join(str(i) for i in sorted({event.until for event in by_scope[scope]}))
        table.add_row(scope, format_bytes(sizes[scope]), str(len(by_scope[scope])), segments)
    _add_rest(table, "scopes", [sizes[scope] for scope in ranked[top:]])
    _explain(table, "why", {re.sub(r"segment \d+", "the segment", e.reason) for e in _events_of(plan, "recompute")})
    return table


def _scope_of(name: str) -> str:
    """The scope in the model that a tensor comes from: its name without the operation, at most two levels deep.

    >>> _scope_of("ResNet/Block_3/Norm_0:mul_1"), _scope_of("state.params['Head']['bias']")
    ('ResNet/Block_3', 'state.params')
    """
    if ":" not in name and "." not in name:
        return "outside the model"
    path = name.rsplit(":", 1)[0] if ":" in name else name.split("['", 1)[0]
    return "/".join(path.split("/")[:2])


def _largest_table(plan: Plan, top: int) -> Table:
    """The largest tensors between segments, and what the plan does with them."""
    table = table_of("Largest tensors", "tensor", ">bytes", "role", "what happens to it")
    words = {"swap_out": "swapped out", "swap_in": "swapped in", "recompute": "recomputed", "release": "released"}
    for tensor in _largest_first(plan.tensors)[:top]:
        kinds = {event.kind for event in plan.events if event.tensor == tensor.id}
        happens = [word for kind, word in words.items() if kind in kinds]
        if any(tensor.id in segment.donated for segment in plan.segments):
            happens.append("its memory is taken over")
        table.add_row(tensor.name, format_bytes(tensor.nbytes), tensor.role.replace("_", " "), ", ".join(happens) or "kept")
    return table


def _explain(table: Table, what: str, reasons: set[str]) -> None:
    """Write the reasons of the events below the table, if there are at most three."""
    if 0 < len(reasons) <= 3:
        table.caption = f"{what}: {'; or: '.join(sorted(reasons))}"


def _add_rest(table: Table, what: str, sizes: Sequence[int]) -> None:
    """Add a last row with the number and the bytes of the entries that are not shown."""
    if sizes:
        table.add_row(f"... {len(sizes)} more {what} (--top N)", format_bytes(sum(sizes)), style="dim")


def _events_of(plan: Plan, *kinds: EventKind) -> Iterable[Event]:
    """The plan's events of these kinds, in the plan's order."""
    return (event for event in plan.events if event.kind in kinds)


def _largest_first(tensors: Iterable[PlannedTensor]) -> list[PlannedTensor]:
    return sorted(tensors, key=lambda t: (-t.nbytes, t.id))


# -- one segment --------------------------------------------------------------------------------------------------------------


def _segment_lines(plan: Plan, index: int) -> list[str]:
    s = plan.segments[index]
    return [
        f"Segment {index} of {len(plan.segments)} ({s.name})",
        f"  on the device  {format_bytes(s.device_bytes)}: {format_bytes(s.resident_bytes)} resident, "
        f"{format_bytes(s.workspace_bytes)} workspace"
        + (f", {format_bytes(s.allocator_bytes)} unasked for by the allocator" if s.allocator_bytes else "")
        + (" <- the plan's peak" if index == plan.peak_segment else ""),
        f"  time           begins at {format_us(s.begin_us)}, runs {format_us(s.latency_us)} "
        f"({format_us(s.recomputed_us)} of it again), waits {format_us(s.stall_us)} for copies",
        f"  operators      {_spans(s.operators)}",
        f"  again          {_spans(s.recomputes)}",
    ]


def _spans(spans: tuple[tuple[int, int], ...]) -> str:
    count = sum(end - begin for begin, end in spans)
    if not count:
        return "none"
    shown = ", ".join(str(a) if b == a + 1 else f"{a}-{b - 1}" for a, b in spans[:8])
    return f"{count}: {shown}{', ...' if len(spans) > 8 else ''}"


def _segment_tables(plan: Plan, index: int, top: int) -> list[Table]:
    """What segment `index` reads, writes and frees, and the events that begin after it or end before it."""
    s = plan.segments[index]
    known = {tensor.id: tensor for tensor in plan.tensors}
    tables = _resident_tables(on_device(plan, index), top)
    for title, ids in {"Reads": s.inputs, "Writes": s.outputs, "Frees when it ends": s.frees}.items():
        tensors = _largest_first(known[t] for t in ids if t in known)
        if not ids:
            continue
        title = f"{title}: {len(tensors)} tensors, {format_bytes(sum(t.nbytes for t in tensors))}"
        table = table_of(title, "tensor", ">bytes", "")
        for tensor in tensors[:top]:
            note = "; an output takes its memory over" if tensor.id in s.donated else ""
            table.add_row(tensor.name, format_bytes(tensor.nbytes), tensor.role.replace("_", " ") + note)
        _add_rest(table, "tensors", [tensor.nbytes for tensor in tensors[top:]])
        tables.append(table)
    events = [e for e in plan.events if e.trigger == index or (e.until == index and e.kind != "release")]
    if events:
        table = table_of("Events after it, or awaited by it", "tensor", ">bytes", "event", "why")
        events.sort(key=lambda e: (-e.nbytes, e.begin_us))
        for event in events[:top]:
            table.add_row(event.name, format_bytes(event.nbytes), _what_happens(event), event.reason)
        _add_rest(table, "events", [event.nbytes for event in events[top:]])
        tables.append(table)
    return tables


# -- the life of a tensor -----------------------------------------------------------------------------------------------------


def _tensor_lines(plan: Plan, tensor: PlannedTensor) -> list[str]:
    """Everything that happens to the tensor in an iteration, in order."""
    shape = "x".join(map(str, tensor.shape)) or "scalar"
    lines = [f"{tensor.name}  {format_bytes(tensor.nbytes)}, {tensor.dtype} {shape}, {tensor.role.replace('_', ' ')}"]
    happens: list[tuple[float, int, str]] = []
    for index, segment in enumerate(plan.segments):
        end_us = segment.begin_us + segment.latency_us
        if tensor.id in segment.outputs:
            happens.append((end_us, 1, f"written by segment {index}"))
        if tensor.id in segment.inputs:
            what = "read by, and its memory taken over by," if tensor.id in segment.donated else "read by"
            happens.append((segment.begin_us, 2, f"{what} segment {index}"))
        if tensor.id in segment.frees:
            happens.append((end_us, 4, f"leaves the device when segment {index} ends"))
    events = [e for e in plan.events if e.tensor == tensor.id and e.kind != "release"]  # a release is shown already, by `frees`
    happens += [(e.begin_us, 3, f"{_what_happens(e)}: {e.reason}") for e in events]
    written = any(tensor.id in segment.outputs for segment in plan.segments)
    if not written and not any(e.kind == "recompute" for e in events):
        first = min(events, key=lambda e: e.begin_us, default=None)
        out = first is not None and first.kind == "swap_in"
        lines.append(f"  {0:>9} us  {'on the host' if out else 'on the device'} when the iteration begins")
    return lines + [f"  {at:>9.0f} us  {what}" for at, _, what in sorted(happens)]


def _what_happens(event: Event) -> str:
    what = _WHAT_HAPPENS[event.kind]
    if event.kind in ("swap_out", "swap_in"):
        return f"{what}, until {format_us(event.end_us)}"
    return f"{what} in segment {event.until}" if event.kind == "recompute" else what
