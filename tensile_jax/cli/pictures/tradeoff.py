# matplotlib's own types leave much unknown.
# pyright: reportUnknownMemberType=false
"""Draws how a step's time grows with the memory that is saved: the default policy `auto` as a curve, others as points.

The axes are two measures of the TENSILE paper, both against a run without any schedule (`plan/comparison.py`): MSR is the share
of the peak that is saved, and EOR is the time of a step, where 1 is the time without a schedule.
"""

from io import BytesIO
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, ScalarFormatter

from tensile_jax.atomic_file import write_whole
from tensile_jax.plan.comparison import Comparison

_MARKERS = "osD^vP"


def draw(made: Comparison, name: Path, *, title: str) -> tuple[Path, Path]:
    """Write `name`.png and `name`.svg, and return their paths."""
    figure = Figure(figsize=(7.0, 4.2), layout="constrained")
    axes = figure.add_subplot()
    curve = sorted({(e.msr, e.eor) for e in made.curve})
    axes.plot([m for m, _ in curve], [e for _, e in curve], color="tab:blue", marker=".", label="auto")
    bounds = [(1 - b.budget_bytes / made.vanilla.peak_bytes, b.bound_eor) for b in made.budgets if b.bound_eor is not None]
    axes.plot(
        [m for m, _ in bounds], [e for _, e in bounds], color="tab:gray", linestyle=":", label="no plan without chunks is faster"
    )
    for marker, (entry, _) in zip(_MARKERS, made.least, strict=False):
        axes.plot([entry.msr], [entry.eor], marker, label=entry.policy)
    axes.plot([made.whole.msr], [made.whole.eor], "k*", markersize=10, label="plain jit (predicted)")
    axes.set_xlabel("MSR: memory saved, part of the unplanned peak")
    axes.set_ylabel("EOR: time of a step, unplanned = 1 (log)")
    axes.set_yticks([1, 1.1, 1.2, 1.5, 2, 3, 5, 8, 12, 20, 40])
    axes.set_ylim(0.95, 1.1 * max(e for _, e in curve))
    axes.set_title(f"{title}: predicted for {made.device_profile}")
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(ScalarFormatter())
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.grid(visible=True, which="both", alpha=0.3)
    axes.legend()
    files = Path(f"{name}.png"), Path(f"{name}.svg")
    for file in files:
        drawn = BytesIO()
        metadata = {"Date": None} if file.suffix == ".svg" else None
        figure.savefig(drawn, format=file.suffix.removeprefix("."), dpi=150, metadata=metadata)
        write_whole(file, drawn.getvalue())
    return files
