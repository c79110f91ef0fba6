"""Makes the page of a `MemoryReport`: the memory over the operators of a step, and the life of each large tensor."""

from collections.abc import Sequence
from os import PathLike

import numpy as np

from tensile_jax.memory_report.alike import shortened_code
from tensile_jax.memory_report.records import WORDS, Held, Tensor
from tensile_jax.memory_report.report import MemoryReport, by_role
from tensile_jax.pages.offsets import offsets
from tensile_jax.pages.page import Cell, Column, Page, Plot, Table, refuse_without_plotly, write_page
from tensile_jax.pages.traces import COLOURS, GRAY, Band, Trace, Unit, area, bands, line, marked, unit_of
from tensile_jax.units import format_bytes

MOST_BANDS = 1500
"""Tensors that are drawn and listed, the largest first: more make the page slower to open (`make bench-memory`)."""
_COLUMNS = 1500  # points of a curve: about as many as a wide screen has pixels across the plot
_ROLES = ("parameter", "optimizer_state", "activation", "gradient", "batch", "output", "workspace")
COLOUR_OF = {
    **dict(zip(_ROLES, COLOURS, strict=True)), "argument": COLOURS[0], "state": "#7f6ab0", "constant": "#b08968",
}  # fmt: skip
"""The colours of roles, on every page."""


def save_report(report: MemoryReport, path: str | PathLike[str]) -> None:
    """Write the page of a report to a file.

    Raises:
        ModuleNotFoundError: plotly is not installed.
        OSError: the file cannot be written.
    """
    refuse_without_plotly()
    write_page(page_of(report), path)


def page_of(report: MemoryReport) -> Page:
    """The page of a report."""
    unit = unit_of(report.peak_bytes)
    count = max(len(report.operators), 1)
    shown = report.tensors[:MOST_BANDS]
    at = 0 if report.peak is None else report.peak.operator
    levels = [("predicted peak", report.predicted_peak_bytes), ("XLA's peak", report.compiled_peak_bytes)]
    levels.append(("memory of the device", report.device_bytes))
    lines = [
        line(f"{name}, {format_bytes(nbytes)}", [0, count], [nbytes / unit.nbytes] * 2, colour, dash=dash)
        for (name, nbytes), colour, dash in zip(levels, ("#d55e00", "#cc79a7", GRAY), ("dash", "dot", "dashdot"), strict=True)
        if nbytes is not None and nbytes <= 4 * report.peak_bytes
    ]
    in_use = sum(curve.nbytes[at] for curve in report.curves)
    point = marked("peak", at, in_use, unit, "most in use:")
    return Page(
        title=f"Memory of {report.program} under jax.jit",
        subtitle=_subtitle(report),
        figures=_figures(report),
        description=_description(report),
        plots=(Plot(f"in use [{unit.name}]", 330), Plot(f"each tensor [{unit.name}]", 430)),
        traces=(*curves_of(report, unit), *lines, point, *_bands_of(shown, unit)),
        x_title="operator, in the order in which they run",
        x_range=(0, count),
        table=Table("Tensors", _COLUMNS_OF_TENSORS, tuple(_row(tensor, at) for tensor in shown)),
        above=(("On the device at the peak", tuple(_at_peak(report.held))),),
        below=tuple(_below(report)),
    )


def curves_of(report: MemoryReport, unit: Unit) -> list[Trace]:
    """The stacked areas of the roles. Each point is the highest of the operators that share it."""
    count = max(len(report.operators), 1)
    edges = np.unique(np.linspace(0, count, min(count, _COLUMNS) + 1).astype(int))
    used = np.sum([curve.nbytes for curve in report.curves], axis=0) if report.curves else np.zeros(count, dtype=int)
    highest = [int(a + used[a:b].argmax()) for a, b in zip(edges[:-1], edges[1:], strict=True)]
    x = [*edges[:-1].tolist(), count]
    ordered = sorted(report.curves, key=lambda curve: list(WORDS).index(curve.role))
    made: list[Trace] = []
    for curve in ordered:
        values = [curve.nbytes[place] for place in highest]
        made.append(area(WORDS[curve.role], x, [*values, values[-1]], unit, COLOUR_OF.get(curve.role, GRAY)))
    return made


def _bands_of(shown: Sequence[Tensor], unit: Unit) -> list[Trace]:
    """The lives of the tensors, one trace for each role."""
    found = offsets([(tensor.begin, tensor.end, tensor.nbytes) for tensor in shown])
    by_role: dict[str, list[Band]] = {}
    for number, (tensor, offset) in enumerate(zip(shown, found, strict=True)):
        band = Band(tensor.begin, tensor.end, offset, tensor.nbytes, _hover(tensor), number)
        by_role.setdefault(tensor.role, []).append(band)
    return [bands(WORDS[role], several, unit, COLOUR_OF.get(role, GRAY)) for role, several in by_role.items()]


def _hover(tensor: Tensor) -> str:
    """What hovering says; plotly reads some HTML in it, so what users named is escaped."""
    lines = [f"<b>{_escaped(tensor.name)}</b>", f"{WORDS[tensor.role]}, {tensor.form}, {format_bytes(tensor.nbytes)}"]
    if tensor.made_by:
        lines.append(f"made by {tensor.made_by} {tensor.made_at}".rstrip())
        lines += [f"<i>{_escaped(shortened_code(tensor.code))}</i>"] if tensor.code else []
        lines += [f"stacked by the loop at {tensor.stacked_at}"] if tensor.stacked_at else []
        lines += [f"called from {tensor.called_from}"] if tensor.called_from else []
    if tensor.last_used_by:
        lines.append(f"last used by {tensor.last_used_by} {tensor.last_used_at}".rstrip())
    return "<br>".join(lines)


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;")


_COLUMNS_OF_TENSORS = (
    Column("name"), Column("size", number=True), Column("role"), Column("form"), Column("made at"), Column("last used at"),
    Column("from", number=True), Column("to", number=True), Column("at the peak"),
)  # fmt: skip


def _row(tensor: Tensor, at: int) -> tuple[Cell, ...]:
    return (
        tensor.name, (tensor.nbytes, format_bytes(tensor.nbytes)), WORDS[tensor.role], tensor.form,
        tensor.made_at or ("" if tensor.made_by else "an argument"), tensor.last_used_at,
        (tensor.begin, str(tensor.begin)), (tensor.end, str(tensor.end)), "yes" if tensor.begin <= at < tensor.end else "",
    )  # fmt: skip


def _subtitle(report: MemoryReport) -> str:
    on = f"Sizes are those of one of {report.devices} devices. " if report.devices > 1 else ""
    return (
        f"{on}Predicted with profile {report.device_profile}: each tensor's life follows the planner's order of operators, and "
        "XLA's own order and offsets may differ."
    )


def _figures(report: MemoryReport) -> tuple[tuple[str, str], ...]:
    found = [("predicted peak", format_bytes(report.predicted_peak_bytes))]
    if report.compiled_peak_bytes is not None:
        found.append(("peak as XLA compiles it", format_bytes(report.compiled_peak_bytes)))
    if report.peak is not None:
        found.append(("reached in", f"{report.peak.name} {report.peak.source}".rstrip()))
    if report.device_bytes is not None:
        fits = "fits" if report.fits else "does not fit"
        found.append(("device", f"{report.device}, {format_bytes(report.device_bytes)}: {fits}"))
    if report.smallest_budget_bytes is not None:
        found.append(("smallest budget", format_bytes(report.smallest_budget_bytes)))
    found.append(("operators", f"{len(report.operators):,}"))
    return tuple(found)


def _description(report: MemoryReport) -> str:
    where = "" if report.peak is None else f", reached in {report.peak.name} {report.peak.source}".rstrip()
    largest = ", ".join(f"{tensor.name} ({format_bytes(tensor.nbytes)})" for tensor in report.tensors[:3])
    return (
        f"Above, the memory in use over the {len(report.operators)} operators, stacked by role; the predicted peak is "
        f"{format_bytes(report.predicted_peak_bytes)}{where}. Below, the life of each large tensor. The largest are {largest}. "
        "The table has the same."
    )


def _at_peak(held: Sequence[Held]) -> list[str]:
    whole = max(sum(part.nbytes for part in held), 1)
    return [f"{WORDS[role]}: {format_bytes(nbytes)} ({nbytes / whole:.1%})" for role, nbytes in by_role(held).items()]


def _below(report: MemoryReport) -> list[tuple[str, tuple[str, ...]]]:
    found: list[tuple[str, tuple[str, ...]]] = []
    if report.missed_donations:
        missed = (f"{format_bytes(m.nbytes)}: {m.name}: {m.reason}. {m.remedy}" for m in report.missed_donations[:50])
        found.append(("Donations missed", tuple(missed)))
    if report.unused_arguments:
        found.append(("Not used", tuple(f"{a.name}: {format_bytes(a.nbytes)}" for a in report.unused_arguments[:50])))
    if report.budgets:
        costs = (
            f"{b.share:.0%} ({format_bytes(b.budget_bytes)}): {b.time_ratio:.2f} times plain jit's step, predicted"
            for b in report.budgets
        )
        found.append(("Under a budget", tuple(costs)))
    return found
