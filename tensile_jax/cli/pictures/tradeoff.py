# matplotlib's own types leave much unknown.
# pyright: reportUnknownMemberType=false
"""Draws how a step's time grows with the memory that is saved: the default policy `auto` as a curve, others as points.

The axes are two measures of the TENSILE paper, both against a run without any schedule (`plan/comparison.py`): MSR is the share
of the peak that is saved, and EOR is the time of a step, where 1 is the time without a schedule. The axis of EOR is logarithmic,
because plans near the least memory can take ten times as long.
"""

import math
from io import BytesIO
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from tensile_jax.atomic_file import write_whole
from tensile_jax.pages.policy_looks import BOUND, LOOKS, PLAIN_JIT
from tensile_jax.pages.traces import GRAY
from tensile_jax.plan.comparison import Comparison

_ROUND = (
    (1.0,), (10.0, 100.0, 0.1), (2.0, 5.0, 20.0, 50.0, 0.5, 0.2), (1.5, 3.0, 7.0, 15.0, 30.0, 70.0, 0.7), (1.2, 4.0, 0.8, 0.9),
    (1.1, 1.3, 1.7, 2.5), (1.4, 1.6, 1.05, 0.95), (1.15, 1.25, 1.02, 1.08),
)  # fmt: skip
_LABELS = 16  # so many fit above one another


def draw(made: Comparison, name: Path, *, title: str) -> tuple[Path, Path]:
    """Write `name`.png and `name`.svg, and return their paths."""
    figure = Figure(figsize=(7.0, 4.2), layout="constrained")
    axes = figure.add_subplot()
    curve = sorted({(e.msr, e.eor) for e in made.curve})
    bounds = [(1 - b.budget_bytes / made.vanilla.peak_bytes, b.bound_eor) for b in made.budgets if b.bound_eor is not None]
    points = [(entry.policy, entry.msr, entry.eor) for entry, _ in made.least] + [(PLAIN_JIT, made.whole.msr, made.whole.eor)]
    auto = LOOKS["auto"]
    axes.plot([m for m, _ in curve], [e for _, e in curve], color=auto.colour, marker=auto.marker, markersize=3.5, label="auto")
    axes.plot([m for m, _ in bounds], [e for _, e in bounds], color=GRAY, linestyle=":", label=BOUND)
    for policy, msr, eor in points:
        label = f"{policy} (predicted)" if policy == PLAIN_JIT else policy
        axes.plot([msr], [eor], linestyle="", label=label, **_mark(policy))
    heights = [eor for _, eor in (*curve, *bounds)] + [eor for _, _, eor in points]
    _scale(axes, min(*heights, 1.0), max(heights))
    axes.set_xlabel("MSR: memory saved, part of the unplanned peak")
    axes.set_ylabel("EOR: time of a step, unplanned = 1 (log)")
    axes.set_title(f"{title}: predicted for {made.device_profile}")
    axes.grid(visible=True, alpha=0.3)
    axes.legend(fontsize=9)
    files = Path(f"{name}.png"), Path(f"{name}.svg")
    for file in files:
        drawn = BytesIO()
        metadata = {"Date": None} if file.suffix == ".svg" else None
        figure.savefig(drawn, format=file.suffix.removeprefix("."), dpi=150, metadata=metadata)
        write_whole(file, drawn.getvalue())
    return files


def _mark(policy: str) -> dict[str, Any]:
    """The mark of a policy, with a dark edge so that it can be seen on the curve."""
    look = LOOKS[policy]
    size = 13.0 if policy == PLAIN_JIT else 7.5
    return {"color": look.colour, "marker": look.marker, "markersize": size, "markeredgecolor": "#222222", "markeredgewidth": 0.6}


def _scale(axes: Axes, lowest: float, highest: float) -> None:
    """A logarithmic axis from `lowest` to `highest`, with round numbers on it."""
    low, high = lowest / 1.04, max(highest, 1.1) * 1.06
    axes.set_yscale("log")
    axes.set_ylim(low, high)
    ticks = round_numbers(low, high)
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.yaxis.set_minor_locator(NullLocator())


def round_numbers(low: float, high: float) -> list[float]:
    """Round numbers of `[low, high]` whose labels do not overlap on a logarithmic axis. Rounder ones are preferred.

    >>> round_numbers(0.95, 1.3)
    [0.95, 1.0, 1.02, 1.05, 1.1, 1.15, 1.2, 1.25, 1.3]
    >>> round_numbers(0.95, 13.0)
    [1.0, 1.2, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 7.0, 10.0]
    """
    apart = math.log(high / low) / _LABELS
    kept: list[float] = []
    for numbers in _ROUND:
        for number in numbers:
            if low <= number <= high and all(abs(math.log(number / other)) >= apart for other in kept):
                kept.append(number)
    return sorted(kept)
