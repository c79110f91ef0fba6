"""Makes the page of a run of several jobs: how much each job held over time, and when each was prepared, computed and copied.

The page shows the same as the picture of a run (`cli/pictures/memory.py`). Times are in seconds since the run began.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from os import PathLike

from tensile_jax.pages.levels import reduce_levels
from tensile_jax.pages.page import Cell, Column, Page, Plot, Table, refuse_without_plotly, write_page
from tensile_jax.pages.traces import COLOURS, GRAY, Span, Trace, Unit, area, lane_marks, line, spans, unit_of
from tensile_jax.runtime_records import Level, Record, Stage, StageName
from tensile_jax.runtime_records import Span as Recorded
from tensile_jax.units import format_bytes

_COLUMNS = 1500  # of a curve and of a lane: about as many as a wide screen has pixels across the plot
_LANES = {"compute": "computes", "out": "to the host", "into": "to the device"}
_BEFORE = "before it runs"
_STAGES: Mapping[StageName, tuple[str, str]] = {
    "preparing": ("#b0b0b0", ""), "compiling": (GRAY, "/"), "queued": ("#5f5f5f", "."),
}  # fmt: skip
"""The colour and the pattern of each stage before the first iteration."""
_ENDS = {"cancelled": "x", "failed": "triangle-down"}


def save_run(record: Record, path: str | PathLike[str], *, title: str, jit_peaks: Mapping[str, int] | None = None) -> None:
    """Write the page of a run to a file.

    Args:
        jit_peaks: the jobs' peaks under plain jit, by name.

    Raises:
        ValueError: the record is empty.
        ModuleNotFoundError: plotly is not installed.
        OSError: the file cannot be written.
    """
    refuse_without_plotly()
    write_page(page_of(record, title=title, jit_peaks=jit_peaks or {}), path)


def page_of(record: Record, *, title: str, jit_peaks: Mapping[str, int]) -> Page:
    """The page of a run.

    Raises:
        ValueError: the record is empty.
    """
    if not record.levels:
        raise ValueError("The record is empty: nothing ran on the device. Run the jobs for at least a step.")
    begin_us = min([record.levels[0].time_us, *(stage.begin_us for stage in record.stages)])
    end_us = max(record.levels[-1].time_us, begin_us + 1, *(one.end_us for one in (*record.spans, *record.stages)))
    shown = reduce_levels(record.levels, columns=_COLUMNS, begin_us=begin_us, end_us=end_us, height=_planned)
    ran = [*(job for level in record.levels for job in level.jobs), *(span.job for span in record.spans)]
    jobs = list(dict.fromkeys([*ran, *(stage.job for stage in record.stages)]))
    colours = {job: COLOURS[place % len(COLOURS)] for place, job in enumerate(jobs)}
    together = sum(jit_peaks[job] for job in set(ran)) if set(ran) <= jit_peaks.keys() else None
    highest = max(max(level.planned_bytes, level.budget_bytes) for level in record.levels)
    unit = unit_of(max(highest, together or 0))
    waited = {stage.job for stage in record.stages}
    lanes = tuple(
        lane
        for job in jobs
        for lane in (
            *((f"{job}: {_BEFORE}",) if job in waited else ()),
            *(f"{job}: {_LANES[lane]}" for lane in _LANES if _used(record, job, lane)),
        )
    )
    return Page(
        title=title,
        subtitle="The areas are what the controller's account says that each job holds; the dots are measured.",
        figures=_figures(record, together),
        description=(
            f"Above, the device memory of {len(jobs)} jobs over {end_us / 1e6:.4g} seconds, stacked; the highest is "
            f"{format_bytes(max(map(_planned, record.levels)))}. Below, when each job was prepared, waited, computed and copied. "
            "The table has the jobs."
        ),
        plots=(Plot(f"on the device [{unit.name}]", 360), Plot("", 40 + 22 * len(lanes), lanes=lanes)),
        traces=(
            *_areas(record, shown, jobs, colours, unit, end_us, together),
            *_stages(record.stages),
            *_lanes(record, colours, end_us - begin_us),
        ),
        x_title="time [s]",
        x_range=(begin_us / 1e6, end_us / 1e6),
        table=Table("Jobs", _OF_JOBS, tuple(_row(record, job, jit_peaks) for job in jobs)),
    )


def _planned(level: Level) -> int:
    return level.planned_bytes


def _used(record: Record, job: str, lane: str) -> bool:
    return any(span.job == job and span.lane == lane for span in record.spans)


def _areas(
    record: Record,
    shown: Sequence[Level],
    jobs: Sequence[str],
    colours: Mapping[str, str],
    unit: Unit,
    end_us: float,
    together: int | None,
) -> Iterator[Trace]:
    ends = [*shown, shown[-1]]
    x = [*(level.time_us / 1e6 for level in shown), end_us / 1e6]
    for job in jobs:
        yield area(job, x, [level.jobs.get(job, 0) for level in ends], unit, colours[job])
    yield line("budget", x, [level.budget_bytes / unit.nbytes for level in ends], "#d55e00", dash="dash")
    measured = [level for level in record.levels if level.measured_bytes is not None]
    dots = reduce_levels(
        measured, columns=_COLUMNS // 4, begin_us=x[0] * 1e6, end_us=end_us, height=lambda level: level.measured_bytes or 0
    )
    values = [(level.measured_bytes or 0) / unit.nbytes for level in dots]
    yield line("measured", [level.time_us / 1e6 for level in dots], values, GRAY, mode="markers")
    if together is not None:
        name = f"plain jit, all jobs at once: {format_bytes(together)}"
        yield line(name, [x[0], x[-1]], [together / unit.nbytes] * 2, GRAY, dash="dot")


def _stages(stages: Sequence[Stage]) -> Iterator[Trace]:
    """The stages before the first iteration, and the ends of jobs that never ran."""
    for name, (colour, pattern) in _STAGES.items():
        several = [_stage(stage) for stage in stages if stage.name == name and stage.end_us > stage.begin_us]
        if several:
            yield spans(name, several, colour, row=2, pattern=pattern, in_legend=True)
    for ended, symbol in _ENDS.items():
        several = [_stage(stage) for stage in stages if stage.ended == ended]
        if several:
            yield lane_marks(ended, [(s.lane, s.end, f"{ended} before it ran: {s.text}") for s in several], symbol, row=2)


def _stage(stage: Stage) -> Span:
    text = f"{stage.name}: {stage.note}" if stage.note else stage.name
    return Span(f"{stage.job}: {_BEFORE}", stage.begin_us / 1e6, stage.end_us / 1e6, text.replace("<", "&lt;"))


def _lanes(record: Record, colours: Mapping[str, str], whole_us: float) -> Iterator[Trace]:
    """The lanes of each job. Spans between which there is less than a column are drawn as one."""
    gap_us = whole_us / _COLUMNS
    by_lane: dict[tuple[str, str], list[Recorded]] = defaultdict(list)
    for span in record.spans:
        by_lane[span.job, span.lane].append(span)
    for (job, lane), several in by_lane.items():
        yield spans(job, list(_merged(several, f"{job}: {_LANES[lane]}", gap_us)), colours[job], row=2)


def _merged(several: Sequence[Recorded], lane: str, gap_us: float) -> Iterator[Span]:
    group: list[Recorded] = []
    for span in sorted(several, key=lambda s: s.begin_us):
        if group and span.begin_us - max(s.end_us for s in group[-1:]) > gap_us:
            yield _span_of(group, lane)
            group = []
        group.append(span)
    if group:
        yield _span_of(group, lane)


def _span_of(group: Sequence[Recorded], lane: str) -> Span:
    what = group[0].name if len(group) == 1 else f"{len(group)} of them, steps {group[0].step} to {group[-1].step}"
    copied = sum(span.nbytes for span in group)
    text = f"{what.replace('<', '&lt;')}" + (f", {format_bytes(copied)}" if copied else "")
    return Span(lane, group[0].begin_us / 1e6, max(span.end_us for span in group) / 1e6, text)


_OF_JOBS = (
    Column("job"), Column("most held", number=True), Column("plain jit's peak", number=True), Column("prepared [s]", number=True),
    Column("queued [s]", number=True), Column("computed [s]", number=True), Column("copied", number=True),
    Column("steps", number=True),
)  # fmt: skip


def _row(record: Record, job: str, jit_peaks: Mapping[str, int]) -> tuple[Cell, ...]:
    most = max(level.jobs.get(job, 0) for level in record.levels)
    own = [span for span in record.spans if span.job == job]
    computed = sum(span.end_us - span.begin_us for span in own if span.lane == "compute") / 1e6
    copied = sum(span.nbytes for span in own if span.lane != "compute")
    steps = len({span.step for span in own})
    plain = jit_peaks.get(job)
    waits = [stage for stage in record.stages if stage.job == job]
    queued = sum(stage.end_us - stage.begin_us for stage in waits if stage.name == "queued") / 1e6
    prepared = sum(stage.end_us - stage.begin_us for stage in waits) / 1e6 - queued
    return (
        job, (most, format_bytes(most)), (-1, "") if plain is None else (plain, format_bytes(plain)),
        *((seconds, f"{seconds:.4g}") for seconds in (prepared, queued, computed)),
        (copied, format_bytes(copied)), (steps, str(steps)),
    )  # fmt: skip


def _figures(record: Record, together: int | None) -> tuple[tuple[str, str], ...]:
    found = [("highest, planned", format_bytes(max(map(_planned, record.levels))))]
    measured = [level.measured_bytes for level in record.levels if level.measured_bytes is not None]
    if measured:
        found.append(("highest, measured", format_bytes(max(measured))))
    budgets = [level.budget_bytes for level in record.levels]
    lowest, highest = min(budgets), max(budgets)
    found.append(("budget", format_bytes(highest) if lowest == highest else f"{format_bytes(lowest)} to {format_bytes(highest)}"))
    if together is not None:
        found.append(("plain jit, all jobs at once", format_bytes(together)))
    return tuple(found)
