# matplotlib's own types leave much unknown.
# pyright: reportUnknownMemberType=false
"""Draws the device memory of one run over time: how much each job held, and when each was prepared, computed and copied.

While the jobs run, the runtime keeps a *ledger*: how many bytes each job holds, by its plan. The upper part of the picture stacks
these bytes. Dots are measured bytes. One line is the budget, and another the sum of the jobs' peaks under plain `jax.jit`. The
lower part has a lane for each job, and one for each direction of the link between host and device. A lane is darker where it was
busy for more of the time. In a job's lane, gray bars show its stages before the first iteration (`_STAGES`): a full bar while it
was prepared, a hatched one while it was compiled, a thin one while it waited in the queue. A cross marks a job that was
cancelled, or failed, before it ran.

A *level* (`runtime_records.Level`) is one entry of the ledger; the entry is valid until the next one. `pages/levels.py` reduces
the levels of a long run.

The colours are the seven of Okabe and Ito, which colour-blind people can tell apart. If there are more than seven jobs, the
smallest jobs share gray.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from tensile_jax.atomic_file import write_whole
from tensile_jax.pages.levels import reduce_levels
from tensile_jax.runtime_records import Level, Record, Span, Stage, StageName
from tensile_jax.units import format_bytes

_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442")
_OTHERS = "#999999"
_STAGES: Mapping[StageName, tuple[float, dict[str, Any]]] = {  # height, and looks
    "preparing": (0.66, {"facecolor": "#d9d9d9", "edgecolor": "none"}),
    "compiling": (0.66, {"facecolor": "#f2f2f2", "edgecolor": "#7a7a7a", "hatch": "//////", "linewidth": 0.5}),
    "queued": (0.16, {"facecolor": "#7a7a7a", "edgecolor": "none"}),
}
_ENDS = {"cancelled": ("x", "black"), "failed": ("X", "#d55e00")}
_COLUMNS = 800  # about the pixels across the axes where the picture is 900 wide
_DOTS = 270  # so that neighbouring dots can be told apart
_FAINTEST = 0.25  # so that a lane that is hardly ever busy is still seen
_IDLE = 1e-4  # a column with a smaller busy part counts as idle: rounding errors of sums over a million spans are below this


@dataclass(frozen=True, slots=True)
class _Window:
    """What part of the run is drawn, and in which units."""

    begin_us: float
    end_us: float
    us_per_unit: float
    time_unit: str

    def at(self, time_us: float) -> float:
        return time_us / self.us_per_unit


def draw_memory(
    record: Record,
    file: Path,
    *,
    title: str = "Device memory",
    jit_peaks: Mapping[str, int] | None = None,
    from_s: float | None = None,
    to_s: float | None = None,
) -> Path:
    """Write the picture as PNG to `file`, and return `file`. `jit_peaks` are the jobs' peaks under plain jit, by name.

    Raises:
        ValueError: nothing was recorded between `from_s` and `to_s`.
    """
    window = _window(record, from_s, to_s)
    levels = [level for level in record.levels if level.time_us < window.end_us]
    shown = reduce_levels(levels, columns=_COLUMNS, begin_us=window.begin_us, end_us=window.end_us, height=_planned)
    if not shown:
        raise ValueError(f"--to={to_s}: no memory was held before that. Leave it out to see the whole run.")
    measured = reduce_levels(
        [level for level in levels if level.measured_bytes is not None and level.time_us >= window.begin_us],
        columns=_DOTS,
        begin_us=window.begin_us,
        end_us=window.end_us,
        height=_measured,
    )
    groups = _groups(levels, record)
    figure = Figure(figsize=(9.0, 4.6 + 0.17 * len(groups)), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(4.0, 0.25 * (len(groups) + 2)))
    together = sum(jit_peaks.values()) if jit_peaks else None
    budgets = tuple(_budgets(levels, window))
    _draw_levels(above, shown, measured=measured, budgets=budgets, groups=groups, together=together, window=window)
    _draw_lanes(below, record.spans, groups=groups, window=window)
    stages = [stage for stage in record.stages if stage.begin_us < window.end_us and stage.end_us >= window.begin_us]
    drawn_stages = _draw_stages(below, stages, groups=groups, window=window)
    above.set_title(title, loc="left", fontsize=12, fontweight="bold", pad=20)
    above.annotate(
        _summary(shown, measured, [nbytes for _, nbytes in budgets]),
        (0, 1),
        xytext=(0, 7),
        xycoords="axes fraction",
        textcoords="offset points",
    )
    handles = [*above.get_legend_handles_labels()[0], *drawn_stages]
    figure.legend(handles=handles, loc="outside lower center", ncols=5, fontsize=9, frameon=False)
    drawn = BytesIO()
    figure.savefig(drawn, dpi=150, format="png")
    file.parent.mkdir(parents=True, exist_ok=True)
    write_whole(file, drawn.getvalue())
    return file


def _planned(level: Level) -> int:
    return level.planned_bytes


def _measured(level: Level) -> int:
    return level.measured_bytes or 0


def _window(record: Record, from_s: float | None, to_s: float | None) -> _Window:
    ends = [*(level.time_us for level in record.levels[-1:]), *(one.end_us for one in (*record.spans, *record.stages))]
    if not record.levels or not ends:
        raise ValueError("The record is empty: nothing ran on the device. Run the jobs for at least a step.")
    end_us = max(ends)
    begins = (record.levels[0].time_us, *(stage.begin_us for stage in record.stages), end_us)
    begin_us = min(begins) if from_s is None else from_s * 1e6
    end_us = min(end_us, end_us if to_s is None else to_s * 1e6)
    if begin_us >= end_us and from_s is None and to_s is None:
        end_us = begin_us + 1.0
    if begin_us >= end_us:
        raise ValueError(
            f"--from and --to leave nothing to draw: from {begin_us / 1e6:g} s to {end_us / 1e6:g} s of a run that was recorded "
            f"until {max(ends) / 1e6:g} s. Name seconds within it."
        )
    in_seconds = end_us - begin_us >= 1e6
    return _Window(begin_us, end_us, *((1e6, "s") if in_seconds else (1e3, "ms")))


def _groups(levels: Sequence[Level], record: Record) -> dict[str, tuple[str, frozenset[str]]]:
    """From label to (colour, jobs), in order of arrival; if there are too many jobs, the smallest ones share one label."""
    most: dict[str, int] = {}
    for level in levels:
        for job, nbytes in level.jobs.items():
            most[job] = max(most.get(job, 0), nbytes)
    for one in (*record.spans, *record.stages):
        most.setdefault(one.job, 0)
    jobs = list(most)
    if len(jobs) <= len(_COLOURS):
        return {job: (colour, frozenset({job})) for job, colour in zip(jobs, _COLOURS, strict=False)}
    large = sorted(jobs, key=lambda job: -most[job])[: len(_COLOURS) - 1]
    groups = {job: (colour, frozenset({job})) for job, colour in zip((j for j in jobs if j in large), _COLOURS, strict=False)}
    others = frozenset(jobs) - frozenset(large)
    return {**groups, f"{len(others)} others": (_OTHERS, others)}


def _draw_levels(
    axes: Axes,
    shown: Sequence[Level],
    *,
    measured: Sequence[Level],
    budgets: Sequence[tuple[float, int]],
    groups: Mapping[str, tuple[str, frozenset[str]]],
    together: int | None,
    window: _Window,
) -> None:
    top = max([level.planned_bytes for level in shown] + [_measured(level) for level in measured] + [b for _, b in budgets])
    top = max(top, together or 0, 1)
    size, unit = next(((s, u) for s, u in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")) if top >= s), (1, "bytes"))
    times = [*(window.at(max(level.time_us, window.begin_us)) for level in shown), window.at(window.end_us)]
    ends = [*shown, shown[-1]]
    stacks = [[sum(level.jobs.get(job, 0) for job in jobs) / size for level in ends] for _, jobs in groups.values()]
    colours = [colour for colour, _ in groups.values()]
    axes.stackplot(times, stacks, labels=list(groups), colors=colours, step="post", alpha=0.85, linewidth=0)
    if measured:
        x = [window.at(level.time_us) for level in measured]
        axes.plot(x, [_measured(level) / size for level in measured], "k.", markersize=2.5, label="measured")
    x = [*(window.at(at) for at, _ in budgets), window.at(window.end_us)]
    y = [nbytes / size for _, nbytes in (*budgets, budgets[-1])]
    axes.step(x, y, "k--", where="post", linewidth=1.4, label="budget")
    if together is not None:
        axes.axhline(together / size, color="#aaaaaa", linewidth=1.2)
        label = f"plain jit, all jobs at once: {format_bytes(together)}"
        axes.annotate(
            label, (1, together / size), xytext=(0, -11), color="#666666", fontsize=9, ha="right",
            xycoords=("axes fraction", "data"), textcoords="offset points",
        )  # fmt: skip
    axes.set_ylim(0, 1.06 * top / size)
    axes.set_ylabel(f"on the device [{unit}]")
    axes.grid(visible=True, axis="y", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def _budgets(levels: Sequence[Level], window: _Window) -> Iterable[tuple[float, int]]:
    """(time, budget) at the beginning of the window, and at each change of the budget."""
    drawn: int | None = None
    before = [level for level in levels if level.time_us <= window.begin_us][-1:]
    for level in (*before, *(level for level in levels if level.time_us > window.begin_us)):
        if level.budget_bytes != drawn:
            yield window.begin_us if drawn is None else level.time_us, level.budget_bytes
            drawn = level.budget_bytes


def _draw_lanes(axes: Axes, spans: Sequence[Span], *, groups: Mapping[str, tuple[str, frozenset[str]]], window: _Window) -> None:
    rows = [(label, [(colour, [s for s in spans if s.lane == "compute" and s.job in jobs])])
            for label, (colour, jobs) in groups.items()]  # fmt: skip
    for lane, label in (("out", "copy to host"), ("into", "copy to device")):
        rows.append((label, [(c, [s for s in spans if s.lane == lane and s.job in jobs]) for c, jobs in groups.values()]))
    image = np.stack([_lane(parts, window) for _, parts in rows])
    extent = (window.at(window.begin_us), window.at(window.end_us), len(rows) - 0.5, -0.5)
    axes.imshow(image, extent=extent, aspect="auto", interpolation="nearest")
    axes.set(xlim=extent[:2], ylim=extent[2:])
    axes.set_yticks(range(len(rows)), [label for label, _ in rows], fontsize=8)
    axes.hlines([i + 0.5 for i in range(len(rows) - 1)], *extent[:2], colors="#dddddd", linewidth=0.6)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel(f"time [{window.time_unit}]")
    axes.spines[["top", "right"]].set_visible(False)


def _draw_stages(
    axes: Axes, stages: Sequence[Stage], *, groups: Mapping[str, tuple[str, frozenset[str]]], window: _Window
) -> list[Artist]:
    """Draw the stages in the lanes of their jobs; returns what the legend shows of them."""
    lane_of = {job: number for number, (_, jobs) in enumerate(groups.values()) for job in jobs}
    shown: list[Artist] = []
    for name, (height, look) in _STAGES.items():
        some = [stage for stage in stages if stage.name == name and stage.end_us > stage.begin_us]
        for stage in some:
            begin, end = (window.at(min(max(us, window.begin_us), window.end_us)) for us in (stage.begin_us, stage.end_us))
            axes.broken_barh([(begin, end - begin)], (lane_of[stage.job] - height / 2, height), zorder=-1, **look)
        if some:
            shown.append(Patch(label=name, **look))
    for ended, (marker, colour) in _ENDS.items():
        some = [stage for stage in stages if stage.ended == ended and stage.end_us <= window.end_us]
        x, y = [window.at(stage.end_us) for stage in some], [lane_of[stage.job] for stage in some]
        looks = {"color": colour, "marker": marker, "linestyle": "", "markersize": 6, "label": f"{ended} before it ran"}
        if some:
            axes.plot(x, y, clip_on=False, **looks)
            shown.append(Line2D([], [], **looks))
    return shown


def _lane(parts: Sequence[tuple[str, Sequence[Span]]], window: _Window) -> np.ndarray:
    """(red, green, blue, opacity) of each column: the jobs' colours, mixed by their parts of the busy time."""
    busy = np.stack([_busy(spans, window) for _, spans in parts])
    total = busy.sum(axis=0)
    colours = np.array([to_rgb(colour) for colour, _ in parts])
    mixed = (busy / np.maximum(total, 1e-12)).T @ colours
    opacity = np.where(total > _IDLE, _FAINTEST + (1 - _FAINTEST) * np.minimum(total, 1), 0)
    return np.clip(np.column_stack([mixed, opacity]), 0.0, 1.0)


def _busy(spans: Sequence[Span], window: _Window) -> np.ndarray:
    """The part of each column's time that `spans` cover. The spans must not overlap."""
    per_us = _COLUMNS / (window.end_us - window.begin_us)
    edges = np.array([(span.begin_us, span.end_us) for span in spans], dtype=float).reshape(-1, 2)
    begin, end = np.clip((edges - window.begin_us) * per_us, 0, _COLUMNS).T
    # The busy time up to x is the sum of max(0, x - begin) over all spans, less the sum of max(0, x - end). The busy time within
    # a column is the difference between its two edges.
    x = np.arange(_COLUMNS + 1, dtype=float)
    return np.diff(_covered_time(np.sort(begin), x) - _covered_time(np.sort(end), x))


def _covered_time(starts: np.ndarray, x: np.ndarray) -> np.ndarray:
    """The sum over `starts` of max(0, x - start)."""
    count = np.searchsorted(starts, x)
    sums = np.concatenate([[0.0], np.cumsum(starts)])
    return count * x - sums[count]


def _summary(shown: Sequence[Level], measured: Sequence[Level], budgets: Sequence[int]) -> str:
    lowest, highest = min(budgets), max(budgets)
    budget = format_bytes(highest) if lowest == highest else f"{format_bytes(lowest)} to {format_bytes(highest)}"
    peaks = [f"{format_bytes(max(level.planned_bytes for level in shown))} planned"]
    if measured:
        peaks.append(f"{format_bytes(max(map(_measured, measured)))} measured")
    return f"budget {budget}; highest: {', '.join(peaks)}"
