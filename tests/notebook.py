"""Runs cells in a real notebook: Jupyter's executor, with a kernel of its own."""

import re
from typing import Any

import pytest


def run_cells(*cells: str) -> list[list[Any]]:
    """The outputs of each cell, without colours in tracebacks. The kernel goes on after an error."""
    nbformat: Any = pytest.importorskip("nbformat")
    nbclient: Any = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    nbclient.NotebookClient(book, allow_errors=True, timeout=300).execute()
    return [cell.outputs for cell in book.cells]


def traceback_of(output: Any) -> str:
    """What the notebook shows of an error."""
    return re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(output.traceback))
