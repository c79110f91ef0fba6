"""Shows records as HTML tables, which a notebook prints below a cell (`_repr_html_`).

The name of a field says its unit: sizes end with `_bytes`, and times with `_us` or `_s`. A table shows the name without this
ending, and the unit beside the number.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from html import escape
from typing import Any

from tensile_jax.units import format_bytes


class ShownAsText:
    """A record that defines `__str__`: `repr` gives the same text, and so does a notebook."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return of_text(str(self))


def of_record(record: Any) -> str:
    """A table with one row for each field of a dataclass, without fields that hold several values."""
    shown = {field.name: getattr(record, field.name) for field in fields(record)}
    rows = [(_title(name), _shown(name, value)) for name, value in shown.items() if not isinstance(value, tuple | dict | list)]
    return _table((), rows)


def of_records(records: Iterable[Any]) -> str:
    """A table with one row for each dataclass of one kind, and one column for each of its fields."""
    return of_rows([{field.name: getattr(record, field.name) for field in fields(record)} for record in records])


def of_rows(rows: Sequence[Mapping[str, object]]) -> str:
    """A table with one row for each mapping. All of them have the same names, which are the columns."""
    if not rows:
        return ""
    return _table(tuple(map(_title, rows[0])), [tuple(_shown(name, value) for name, value in row.items()) for row in rows])


def of_text(text: str) -> str:
    """Text in a fixed-width font, with its lines as they are."""
    return f"<pre>{escape(text)}</pre>"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = f"<thead><tr>{''.join(f'<th>{escape(name)}</th>' for name in header)}</tr></thead>" if header else ""
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table>{head}<tbody>{body}</tbody></table>"


def _title(name: str) -> str:
    for ending in ("_bytes", "_us", "_s"):
        name = name.removesuffix(ending) if not name.endswith("_per_s") else name
    return name.replace("_per_s", " a second").replace("_", " ")


def _shown(name: str, value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if name.endswith("_bytes"):
        return format_bytes(value)
    if name.endswith("_us"):
        return f"{value / 1000:.4g} ms"
    if name.endswith("_s") and not name.endswith("_per_s"):
        return f"{value:.4g} s"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
