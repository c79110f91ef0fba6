"""What `tensile show` says of one segment, or of the life of one tensor."""

from rich.table import Table

from tensile_jax.cli.tables import add_rest, table_of
from tensile_jax.cli.units import format_us
from tensile_jax.ir import TensorId
from tensile_jax.plan_format import Event, Plan, PlannedTensor, format_bytes

_DEEDS = {
    "swap_out": "copied out to the host",
    "swap_in": "copied in from the host",
    "recompute": "computed again",
    "release": "released",
}


def segment_lines(plan: Plan, index: int) -> list[str]:
    """The figures of segment `index`."""
    s = plan.segments[index]
    return [
        f"Segment {index} of {len(plan.segments)} ({s.name})",
        f"  on the device  {format_bytes(s.device_bytes)}: {format_bytes(s.resident_bytes)} resident, "
        f"{format_bytes(s.workspace_bytes)} workspace" + (" <- the plan's peak" if index == plan.peak_segment else ""),
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


def segment_tables(plan: Plan, index: int, top: int) -> list[Table]:
    """What segment `index` reads, writes and frees, and the events that begin after it or end before it."""
    s = plan.segments[index]
    known = {tensor.id: tensor for tensor in plan.tensors}
    donated = set(s.donated)
    groups = {"Reads": s.inputs, "Writes": s.outputs, "Frees when it ends": s.frees}
    tables = [_tensors(title, ids, known, donated, top) for title, ids in groups.items() if ids]
    events = [e for e in plan.events if e.trigger == index or (e.until == index and e.kind != "release")]
    if events:
        table = table_of("Events after it, or awaited by it", "tensor", ">bytes", "event", "why")
        events.sort(key=lambda e: (-e.nbytes, e.begin_us))
        for event in events[:top]:
            table.add_row(event.name, format_bytes(event.nbytes), _deed(event), event.reason)
        add_rest(table, "events", [event.nbytes for event in events[top:]])
        tables.append(table)
    return tables


def _tensors(
    title: str, ids: tuple[TensorId, ...], known: dict[TensorId, PlannedTensor], donated: set[TensorId], top: int
) -> Table:
    tensors = sorted((known[t] for t in ids if t in known), key=lambda t: (-t.nbytes, t.id))
    table = table_of(f"{title}: {len(tensors)} tensors, {format_bytes(sum(t.nbytes for t in tensors))}", "tensor", ">bytes", "")
    for tensor in tensors[:top]:
        note = "; an output takes its memory over" if tensor.id in donated else ""
        table.add_row(tensor.name, format_bytes(tensor.nbytes), tensor.role.replace("_", " ") + note)
    add_rest(table, "tensors", [tensor.nbytes for tensor in tensors[top:]])
    return table


def matching(plan: Plan, text: str) -> list[PlannedTensor]:
    """Tensors whose name contains `text`, in any case, the largest first."""
    found = [tensor for tensor in plan.tensors if text.lower() in tensor.name.lower()]
    return sorted(found, key=lambda t: (-t.nbytes, t.id))


def life_lines(plan: Plan, tensor: PlannedTensor) -> list[str]:
    """Everything that happens to the tensor in an iteration, in order."""
    shape = "x".join(map(str, tensor.shape)) or "scalar"
    lines = [f"{tensor.name}  {format_bytes(tensor.nbytes)}, {tensor.dtype} {shape}, {tensor.role.replace('_', ' ')}"]
    happens: list[tuple[float, int, str]] = []
    made = False
    for index, segment in enumerate(plan.segments):
        end_us = segment.begin_us + segment.latency_us
        if tensor.id in segment.outputs:
            made = True
            happens.append((end_us, 1, f"written by segment {index}"))
        if tensor.id in segment.inputs:
            what = "read by, and its memory taken over by," if tensor.id in segment.donated else "read by"
            happens.append((segment.begin_us, 2, f"{what} segment {index}"))
        if tensor.id in segment.frees:
            happens.append((end_us, 4, f"leaves the device when segment {index} ends"))
    for event in plan.events:
        if event.tensor == tensor.id and event.kind != "release":  # said by `frees` already
            happens.append((event.begin_us, 3, f"{_deed(event)}: {event.reason}"))
    if not made and not any(e.tensor == tensor.id and e.kind == "recompute" for e in plan.events):
        own = [e for e in plan.events if e.tensor == tensor.id and e.kind in ("swap_out", "swap_in")]
        out = bool(own) and min(own, key=lambda e: e.begin_us).kind == "swap_in"
        lines.append(f"  {0:>9} us  {'on the host' if out else 'on the device'} when the iteration begins")
    lines += [f"  {at:>9.0f} us  {what}" for at, _, what in sorted(happens)]
    return lines


def _deed(event: Event) -> str:
    deed = _DEEDS[event.kind]
    if event.kind in ("swap_out", "swap_in"):
        return f"{deed}, until {format_us(event.end_us)}"
    return f"{deed} in segment {event.until}" if event.kind == "recompute" else deed
