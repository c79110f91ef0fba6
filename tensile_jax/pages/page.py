"""Writes a page: one HTML file with a heading, key values, plots that share their horizontal axis, and a sortable table.

The file needs no network, because it contains plotly's script, which draws the plots. The page's own script (`page.js`) searches
and sorts the table, and follows the browser's light or dark theme. A click on a rectangle of a plot, or on a name in the table,
*pins* its row: a card below the plots shows the values of the row until it is unpinned.

For readers who cannot see the plots, the table lists the tensors, jobs or plans that the plots draw, with their values. No text
that comes from a user can become markup: it is escaped, and so is the JSON in the page.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from importlib.util import find_spec
from os import PathLike
from string import Template

from tensile_jax.atomic_file import write_whole
from tensile_jax.pages.traces import Trace

_GAP = 0.055  # of the height of all plots, between two of them
_LEGEND = 60  # pixels above the plots
_MARGIN = {"l": 70, "r": 20, "t": _LEGEND, "b": 50}


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the table. The cells of a `number` column have a number to sort by and a text to show."""

    title: str
    number: bool = False


Cell = str | tuple[float, str]
"""A text; or, in a column of numbers, the number and its text."""


@dataclass(frozen=True, slots=True)
class Table:
    """A table. The number of a row is its position here; a band of a plot names it (`traces.Band.table_row`)."""

    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]


@dataclass(frozen=True, slots=True)
class Plot:
    """One of the plots, which stand one above the other: the title of its vertical axis, and its height in pixels.

    `lanes` are the names on the vertical axis, from above, if it has no numbers; `logarithmic` says how the numbers are spaced.
    """

    title: str
    height: int
    lanes: tuple[str, ...] = ()
    logarithmic: bool = False


@dataclass(frozen=True, slots=True)
class Page:
    """What a page says. `figures` are pairs of a name and a value; `description` says in words what the plots show.

    `above` and `below` are lists of sentences with a title, which stand above the plots and below the table.
    """

    title: str
    subtitle: str
    figures: tuple[tuple[str, str], ...]
    description: str
    plots: tuple[Plot, ...]
    traces: tuple[Trace, ...]
    x_title: str
    table: Table
    x_range: tuple[float, float]
    above: tuple[tuple[str, tuple[str, ...]], ...] = ()
    below: tuple[tuple[str, tuple[str, ...]], ...] = ()


def write_page(page: Page, path: str | PathLike[str]) -> None:
    """Write the page to a file.

    Raises:
        ModuleNotFoundError: plotly is not installed.
        OSError: the file cannot be written.
    """
    write_whole(path, html_of(page).encode())


def refuse_without_plotly() -> None:
    """Raises: ModuleNotFoundError: plotly is not installed."""
    if find_spec("plotly") is None:
        raise ModuleNotFoundError("Pages are drawn by plotly, which is not installed: pip install 'tensile_jax[html]'")


def html_of(page: Page) -> str:
    """The page as the text of an HTML file."""
    refuse_without_plotly()
    from plotly.offline import get_plotlyjs  # an extra

    own = files("tensile_jax.pages")
    height = sum(plot.height for plot in page.plots) + _LEGEND + _MARGIN["b"]
    drawn = json.dumps({"traces": page.traces, "layout": _layout(page)}, separators=(",", ":"), allow_nan=False)
    return Template((own / "page.html").read_text("utf-8")).substitute(
        title=escape(page.title),
        subtitle=f"<p>{escape(page.subtitle)}</p>" if page.subtitle else "",
        figures="".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in page.figures),
        above="".join(_listed(title, some) for title, some in page.above),
        below="".join(_listed(title, some) for title, some in page.below),
        height=height,
        description=escape(page.description),
        table_title=escape(page.table.title),
        head="".join(_head(column) for column in page.table.columns),
        body="".join(_row(number, cells) for number, cells in enumerate(page.table.rows)),
        footer="Written by tensile_jax. Drag to zoom, double-click to see all, click a band or a name to pin it.",
        data=drawn.replace("<", "\\u003c"),
        plotly=get_plotlyjs(),
        script=(own / "page.js").read_text("utf-8"),
    )


def _listed(title: str, sentences: Sequence[str]) -> str:
    return f"<h2>{escape(title)}</h2><ul>{''.join(f'<li>{escape(one)}</li>' for one in sentences)}</ul>"


def _head(column: Column) -> str:
    kind = "number" if column.number else "text"
    return f'<th scope="col" data-kind="{kind}"><button type="button">{escape(column.title)}</button></th>'


def _row(number: int, cells: Sequence[Cell]) -> str:
    first, *others = cells
    name = first if isinstance(first, str) else first[1]
    shown = [f'<td><button type="button">{escape(name)}</button></td>']
    for cell in others:
        if isinstance(cell, str):
            shown.append(f"<td>{escape(cell)}</td>")
        else:
            shown.append(f'<td class="number" data-sort="{cell[0]:.12g}">{escape(cell[1])}</td>')
    return f'<tr data-row="{number}">{"".join(shown)}</tr>'


def _layout(page: Page) -> dict[str, object]:
    """plotly's layout: the plots one above the other, with one horizontal axis."""
    whole = sum(plot.height for plot in page.plots)
    free = 1 - _GAP * (len(page.plots) - 1)
    layout: dict[str, object] = {
        "margin": _MARGIN, "barmode": "overlay", "hovermode": "closest", "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)", "font": {"size": 13}, "dragmode": "zoom",
        "legend": {"orientation": "h", "y": 1.0, "yanchor": "bottom", "x": 0, "xanchor": "left", "traceorder": "normal"},
        "xaxis": {"title": {"text": page.x_title}, "range": list(page.x_range), "anchor": _name(len(page.plots), "y")},
    }  # fmt: skip
    top = 1.0
    for row, plot in enumerate(page.plots, start=1):
        bottom = max(top - free * plot.height / whole, 0.0)
        axis: dict[str, object] = {
            "title": {"text": plot.title}, "domain": [bottom, top], "rangemode": "tozero", "automargin": True,
        }  # fmt: skip
        if plot.lanes:
            axis |= {
                "type": "category",
                "categoryorder": "array",
                "categoryarray": list(reversed(plot.lanes)),
                "fixedrange": True,
            }
            axis |= {"range": [-0.5, len(plot.lanes) - 0.5]}
        if plot.logarithmic:
            axis |= {"type": "log", "rangemode": "normal"}
        layout[_name(row, "yaxis")] = axis
        top = bottom - _GAP
    return layout


def _name(row: int, stem: str) -> str:
    return stem if row == 1 else f"{stem}{row}"
