"""Makes the traces of plotly from which the pages are drawn. A trace is a dictionary, as plotly's JSON has it.

The colours are the seven of Okabe and Ito, which colour-blind people can tell apart, and grays. They are readable on a light and
on a dark background. All plots of a page share the horizontal axis; `row` is the number of a plot, counted from above.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tensile_jax.units import format_bytes

COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#c9b800")
GRAY = "#8f8f8f"
_EDGE = {"width": 0.4, "color": "rgba(127,127,127,0.35)"}
Trace = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Unit:
    """The unit of a vertical axis of bytes."""

    name: str
    nbytes: int


def unit_of(largest: int) -> Unit:
    """The unit in which sizes up to `largest` bytes are best written.

    >>> unit_of(3 * 2**20)
    Unit(name='MiB', nbytes=1048576)
    """
    units = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))
    return next((Unit(name, size) for name, size in units if largest >= size), Unit("bytes", 1))


@dataclass(frozen=True, slots=True)
class Band:
    """A rectangle: `nbytes` at `offset` over `[begin, end)`. `table_row` is its row in the page's table; `text` is its hover."""

    begin: float
    end: float
    offset: int
    nbytes: int
    text: str
    table_row: int


@dataclass(frozen=True, slots=True)
class Span:
    """Something that takes the time `[begin, end)` in the lane of this name."""

    lane: str
    begin: float
    end: float
    text: str


def area(name: str, x: Sequence[float], nbytes: Sequence[float], unit: Unit, colour: str, *, row: int = 1) -> Trace:
    """An area that is stacked on the areas before it; each value holds until the next `x`."""
    return {
        "type": "scatter", "mode": "lines", "name": name, "x": list(x), "y": [_rounded(b / unit.nbytes) for b in nbytes],
        "stackgroup": "held", "line": {"shape": "hv", "width": 0, "color": colour}, "fillcolor": colour,
        "hovertemplate": f"{name}: %{{y:.4~g}} {unit.name}<extra></extra>", "yaxis": _axis(row),
    }  # fmt: skip


def line(
    name: str, x: Sequence[float], values: Sequence[float], colour: str, *, row: int = 1, dash: str = "solid", step: bool = True,
    hover: str = "%{y:.4~g}", mode: str = "lines", texts: Sequence[str] = (), symbol: str = "circle",
) -> Trace:  # fmt: skip
    """A line, or points (`mode="markers"`) with a symbol."""
    made: Trace = {
        "type": "scatter", "mode": mode, "name": name, "x": list(x), "y": [_rounded(v) for v in values],
        "line": {"color": colour, "dash": dash, "width": 1.8, "shape": "hv" if step else "linear"},
        "marker": {"color": colour, "size": 8, "symbol": symbol},
        "hovertemplate": f"{name}: {hover}<extra></extra>", "yaxis": _axis(row),
    }  # fmt: skip
    return {**made, "text": list(texts), "hovertemplate": "%{text}<extra></extra>"} if texts else made


def bands(name: str, several: Sequence[Band], unit: Unit, colour: str, *, row: int = 2) -> Trace:
    """Rectangles in one colour. The page finds the row of its table in `customdata`."""
    return {
        "type": "bar", "orientation": "h", "name": name, "showlegend": False,
        "base": [_rounded(b.begin) for b in several], "x": [_rounded(b.end - b.begin) for b in several],
        "y": [_rounded((b.offset + b.nbytes / 2) / unit.nbytes) for b in several],
        "width": [_rounded(b.nbytes / unit.nbytes) for b in several],
        "customdata": [b.table_row for b in several], "text": [b.text for b in several], "textposition": "none",
        "hovertemplate": "%{text}<extra></extra>", "marker": {"color": colour, "line": dict(_EDGE)},
        "yaxis": _axis(row), "meta": "bands",
    }  # fmt: skip


def spans(
    name: str, several: Sequence[Span], colour: str, *, row: int, pattern: str = "", in_legend: bool = False
) -> Trace:  # fmt: skip
    """Spans in lanes, in one colour and with one pattern, as plotly names it."""
    return {
        "type": "bar", "orientation": "h", "name": name, "showlegend": in_legend, "base": [_rounded(s.begin) for s in several],
        "x": [_rounded(s.end - s.begin) for s in several], "y": [s.lane for s in several], "width": 0.8,
        "text": [s.text for s in several], "textposition": "none", "hovertemplate": "%{text}<extra></extra>",
        "marker": {"color": colour, "line": dict(_EDGE), "pattern": {"shape": pattern}}, "yaxis": _axis(row),
    }  # fmt: skip


def lane_marks(name: str, several: Sequence[tuple[str, float, str]], symbol: str, *, row: int) -> Trace:
    """Marks in lanes: (lane, x, hover) of each."""
    return {
        "type": "scatter", "mode": "markers", "name": name, "x": [_rounded(x) for _, x, _ in several],
        "y": [lane for lane, _, _ in several], "text": [text for _, _, text in several], "cliponaxis": False,
        "marker": {"symbol": symbol, "size": 10, "color": "#d55e00"}, "hovertemplate": "%{text}<extra></extra>",
        "yaxis": _axis(row),
    }  # fmt: skip


def marked(name: str, x: float, nbytes: int, unit: Unit, text: str) -> Trace:
    """A point that is marked by a diamond and a text, such as the peak."""
    return {
        "type": "scatter", "mode": "markers+text", "name": name, "x": [x], "y": [_rounded(nbytes / unit.nbytes)],
        "text": [f"{text} {format_bytes(nbytes)}"], "textposition": "top center", "cliponaxis": False, "showlegend": False,
        "marker": {"symbol": "diamond", "size": 11, "color": "#d55e00"}, "hovertemplate": "%{text}<extra></extra>", "yaxis": "y",
    }  # fmt: skip


def _axis(row: int) -> str:
    return "y" if row == 1 else f"y{row}"


def _rounded(value: float) -> float:
    """The value with six digits: pages are smaller, and a screen shows fewer."""
    return float(f"{value:.6g}")
