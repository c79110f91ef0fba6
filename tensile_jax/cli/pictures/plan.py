# matplotlib's own types leave much unknown.
# pyright: reportUnknownMemberType=false
"""Draws the device memory of a saved plan over the time of a step: what is on the device while each part of the step runs.

The step runs as *segments*, parts that are compiled as one executable each. While a segment runs, the device holds tensors and
the segment's *workspace*, which is the memory that its executable needs beside inputs and outputs. The picture stacks the tensors
by their *role* (parameters, optimizer state, activations, gradients and so on), and the workspace. Two lines show the budget and
the peak under plain `jax.jit`.
"""

from collections import defaultdict
from io import BytesIO
from pathlib import Path

from matplotlib.figure import Figure

from tensile_jax.atomic_file import write_whole
from tensile_jax.pages.memory_page import COLOUR_OF
from tensile_jax.pages.traces import GRAY, unit_of
from tensile_jax.plan_format import Plan
from tensile_jax.plan_residency import on_device
from tensile_jax.units import format_bytes

_OTHER = "other"


def draw_plan(plan: Plan, file: Path) -> Path:
    """Write the picture as PNG to `file`, and return `file`."""
    by_role: dict[str, list[int]] = defaultdict(lambda: [0] * len(plan.segments))
    for place in range(len(plan.segments)):
        for row in on_device(plan, place):
            by_role[row.role if row.role in COLOUR_OF else _OTHER][place] += row.nbytes
    unit = unit_of(max(plan.peak_bytes, plan.budget_bytes or 0, plan.jit_peak_bytes or 0))
    last = plan.segments[-1]
    times = [*(segment.begin_us / 1e3 for segment in plan.segments), (last.begin_us + last.latency_us) / 1e3]
    roles = [role for role in (*COLOUR_OF, _OTHER) if role in by_role]
    figure = Figure(figsize=(9.0, 4.4), layout="constrained")
    axes = figure.add_subplot()
    stacks = [[nbytes / unit.nbytes for nbytes in (*by_role[role], by_role[role][-1])] for role in roles]
    labels = [role.replace("_", " ") for role in roles]
    axes.stackplot(times, stacks, labels=labels, colors=[COLOUR_OF.get(role, GRAY) for role in roles], step="post", linewidth=0)
    for name, nbytes, style in (("budget", plan.budget_bytes, "k--"), ("plain jit", plan.jit_peak_bytes, "k:")):
        if nbytes is not None:
            axes.plot([times[0], times[-1]], [nbytes / unit.nbytes] * 2, style, label=f"{name}, {format_bytes(nbytes)}")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("time of a step [ms], predicted")
    axes.set_ylabel(f"on the device [{unit.name}]")
    axes.set_title(
        f"Plan of {plan.program}: peak {format_bytes(plan.peak_bytes)} in {plan.segments[plan.peak_segment].name}", loc="left"
    )
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize=9, frameon=False)
    drawn = BytesIO()
    figure.savefig(drawn, dpi=150, format="png")
    write_whole(file, drawn.getvalue())
    return file
