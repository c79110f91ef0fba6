"""The memory curve of a plan, one bar for each segment:

    segment 4    |############::::   !    |   512 MiB  <- peak
                  resident    workspace  budget

`#` is what lies on the device while the segment runs, `:` the segment's own workspace, `!` the budget. Where the terminal
can show more than ASCII the bars are solid. The scale ends at the largest of peak, budget and plain jit's peak.
"""

from rich.console import Console

from tensile_jax.plan_format import Plan, Segment, format_bytes

_MOST_ROWS = 60
_NARROWEST_BAR = 10
_PEAK = "  <- peak"


def memory_curve(plan: Plan, console: Console) -> list[str]:
    """The lines of the curve, none wider than the console."""
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
        peak = _PEAK if holds_peak else ""
        lines.append(f"{label:<{label_width}} |{''.join(bar)}| {size:>{size_width}}{peak}")
    return lines


def _rows(plan: Plan) -> list[tuple[str, Segment, bool]]:
    """Label, segment, and whether it has the peak, for each row; neighbours share one if there are many."""
    count = len(plan.segments)
    together = -(-count // _MOST_ROWS)
    rows: list[tuple[str, Segment, bool]] = []
    for begin in range(0, count, together):
        group = range(begin, min(begin + together, count))
        fullest = max(group, key=lambda i: (i == plan.peak_segment, plan.segments[i].device_bytes))
        label = str(begin) if len(group) == 1 else f"{begin}-{group[-1]}"
        rows.append((f"segment {label}", plan.segments[fullest], fullest == plan.peak_segment))
    return rows
