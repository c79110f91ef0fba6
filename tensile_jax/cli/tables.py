"""What `tensile show` says of a whole plan: segments, swaps, recomputed scopes, releases, the largest tensors."""

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from tensile_jax.cli.units import format_us
from tensile_jax.ir import TensorId
from tensile_jax.plan_format import Event, EventKind, Plan, PlannedTensor, format_bytes


def readable_console(width: int, **options: Any) -> Console:
    """Stdout, at least so wide where it is not a terminal."""
    console = Console(**options)
    if not console.is_terminal:
        console.width = max(console.width, width)
    return console


def table_of(title: str, *columns: str) -> Table:
    """An empty table; a column whose name begins with `>` is set to the right."""
    table = Table(title=title, title_justify="left", title_style="bold")
    for name in columns:
        right = name.startswith(">")
        table.add_column(name.removeprefix(">"), justify="right" if right else "left", overflow="fold", no_wrap=right)
    return table


def add_rest(table: Table, what: str, sizes: Sequence[int]) -> None:
    """A last row for what is not shown: how many, how many bytes."""
    if sizes:
        table.add_row(f"... {len(sizes)} more {what} (--top N)", format_bytes(sum(sizes)), style="dim")


def segments_table(plan: Plan) -> Table:
    """One row for each segment, in the order in which they run."""
    table = table_of("Segments", ">#", "name", ">on device", ">workspace", ">begins", ">runs", ">again", ">waits", ">frees")
    sizes = {tensor.id: tensor.nbytes for tensor in plan.tensors}
    for index, segment in enumerate(plan.segments):
        table.add_row(
            str(index),
            segment.name,
            format_bytes(segment.device_bytes),
            format_bytes(segment.workspace_bytes),
            format_us(segment.begin_us),
            format_us(segment.latency_us),
            format_us(segment.recomputed_us),
            format_us(segment.stall_us),
            format_bytes(sum(sizes.get(t, 0) for t in segment.frees)),
            style="bold" if index == plan.peak_segment else "",
        )
    table.caption = "runs, again: predicted, and how much of it does work twice; waits: for copies; bold: the peak"
    table.caption_justify = "left"
    return table


def swaps_table(plan: Plan, top: int) -> Table:
    """The largest tensors that leave the device, and when they leave and return."""
    columns = (">leaves after", ">from - to", ">returns after", ">from - to")
    table = table_of("Swaps (largest first)", "tensor", ">bytes", *columns)
    trips = _trips(plan)
    trips.sort(key=lambda trip: (-trip[0].nbytes, trip[0].begin_us))
    for one, out, back in trips[:top]:
        leaves = _window(out) or ("the iteration", "before")
        returns = _window(back) or ("the iteration", "after")
        table.add_row(one.name, format_bytes(one.nbytes), *leaves, *returns)
    add_rest(table, "swaps", [one.nbytes for one, _, _ in trips[top:]])
    _explain(table, "leaves", {e.reason for e in events_of(plan, "swap_out")})
    return table


def _trips(plan: Plan) -> list[tuple[Event, Event | None, Event | None]]:
    """(either event, out, in): each swap-out with the next swap-in of the same tensor."""
    by_tensor: dict[TensorId, list[Event]] = defaultdict(list)
    for event in sorted(events_of(plan, "swap_out", "swap_in"), key=lambda e: e.begin_us):
        by_tensor[event.tensor].append(event)
    trips: list[tuple[Event, Event | None, Event | None]] = []
    for events in by_tensor.values():
        out: Event | None = None
        for event in events:
            if event.kind == "swap_out":
                if out is not None:
                    trips.append((out, out, None))
                out = event
            else:
                trips.append((event, out, event))
                out = None
        if out is not None:
            trips.append((out, out, None))
    return trips


def _window(event: Event | None) -> tuple[str, str] | None:
    if event is None:
        return None
    begin = "begin" if event.trigger < 0 else f"segment {event.trigger}"
    return begin, f"{event.begin_us / 1e3:.1f} - {event.end_us / 1e3:.1f} ms"


def _explain(table: Table, what: str, reasons: set[str]) -> None:
    """Why, under the table, where there are only a few reasons."""
    if 0 < len(reasons) <= 3:
        table.caption = f"{what}: {'; or: '.join(sorted(reasons))}"
        table.caption_justify = "left"


def recomputed_table(plan: Plan, top: int) -> Table:
    """Scopes of the model by the bytes that are computed again in them, and where."""
    table = table_of("Recomputed (by scope)", "scope", ">bytes", ">tensors", "again in segments")
    by_scope: dict[str, list[Event]] = defaultdict(list)
    for event in events_of(plan, "recompute"):
        by_scope[scope_of(event.name)].append(event)
    ranked = sorted(by_scope.items(), key=lambda item: (-sum(e.nbytes for e in item[1]), item[0]))
    for scope, events in ranked[:top]:
        segments = ", ".join(str(i) for i in sorted({event.until for event in events}))
        table.add_row(scope, format_bytes(sum(e.nbytes for e in events)), str(len(events)), segments)
    add_rest(table, "scopes", [sum(e.nbytes for e in events) for _, events in ranked[top:]])
    _explain(table, "why", {re.sub(r"segment \d+", "the segment", e.reason) for e in events_of(plan, "recompute")})
    return table


def scope_of(name: str) -> str:
    """Where in the model a tensor is from: its name without the operation, at most two levels deep.

    >>> scope_of("ResNet/Block_3/Norm_0:mul_1"), scope_of("state.params['Head']['bias']")
    ('ResNet/Block_3', 'state.params')
    """
    if ":" not in name and "." not in name:
        return "outside the model"
    path = name.rsplit(":", 1)[0] if ":" in name else name.split("['", 1)[0]
    return "/".join(path.split("/")[:2])


def largest_table(plan: Plan, top: int) -> Table:
    """The largest tensors between segments, and what the plan does with them."""
    table = table_of("Largest tensors", "tensor", ">bytes", "role", "what happens to it")
    for tensor in sorted(plan.tensors, key=lambda t: (-t.nbytes, t.id))[:top]:
        table.add_row(tensor.name, format_bytes(tensor.nbytes), tensor.role.replace("_", " "), fate_of(tensor, plan))
    return table


def fate_of(tensor: PlannedTensor, plan: Plan) -> str:
    """In a few words: kept, swapped, recomputed, released."""
    kinds = {event.kind for event in plan.events if event.tensor == tensor.id}
    words = {"swap_out": "swapped out", "swap_in": "swapped in", "recompute": "recomputed", "release": "released"}
    done = [word for kind, word in words.items() if kind in kinds]
    if any(tensor.id in segment.donated for segment in plan.segments):
        done.append("its memory is taken over")
    return ", ".join(done) or "kept"


def events_of(plan: Plan, *kinds: EventKind) -> Iterable[Event]:
    """The plan's events of these kinds, in the plan's order."""
    return (event for event in plan.events if event.kind in kinds)


def releases_line(plan: Plan) -> str:
    """How much is given up at its last use."""
    sizes = [event.nbytes for event in events_of(plan, "release")]
    return f"Released after their last use: {len(sizes)} tensors, {format_bytes(sum(sizes))}"
