"""A page is one file that names nothing outside of it, and what a user named does not become markup."""

import json
import re
from pathlib import Path

import pytest

from tensile_jax.memory_report.report import MemoryReport
from tensile_jax.pages import page as pages_page
from tensile_jax.pages.page import Page, html_of
from tensile_jax.plan_format import Plan
from tests.cli.plans import PLAN
from tests.memory_report.reports import report_of
from tests.pages.builders import comparison, pages

KINDS = ("memory", "plan", "run", "comparison")
_SCRIPT = re.compile(r"<script>.*?</script>", re.DOTALL)


def made(kind: str) -> Page:
    return pages()[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_a_page_loads_nothing(kind: str) -> None:
    text = _SCRIPT.sub("", html_of(made(kind)))
    assert re.findall(r'(?:src|href)="([^"]*)"', text) == ["data:,", "#rows"]
    assert "http" not in text and "$" not in text


@pytest.mark.parametrize("kind", KINDS)
def test_a_page_describes_its_plots_in_words_and_has_a_table(kind: str) -> None:
    page = made(kind)
    assert len(page.description) > 80 and "table" in page.description
    assert page.table.rows and all(len(row) == len(page.table.columns) for row in page.table.rows)


def test_names_are_text_and_never_markup() -> None:
    text = html_of(made("memory"))
    assert "<b>step" not in text and "step &lt;b&gt;" in text
    assert "Net/&lt;layer 3&gt;" in text
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text)
    assert "<" not in data and any(
        "&lt;layer 3>" in hover for trace in json.loads(data)["traces"] for hover in trace.get("text", ())
    )


def test_each_band_names_its_row_of_the_table() -> None:
    page = made("memory")
    for trace in page.traces:
        if trace.get("meta") == "bands":
            for row, begin, width in zip(trace["customdata"], trace["base"], trace["x"], strict=True):
                cells = page.table.rows[row]
                assert (cells[6], cells[7]) == ((begin, f"{begin:.0f}"), (begin + width, f"{begin + width:.0f}"))


def test_the_areas_add_up_to_what_is_in_use() -> None:
    report = report_of(40)
    stacked = [trace for trace in made("memory").traces if "stackgroup" in trace]
    used = [sum(at) for at in zip(*(curve.nbytes for curve in report.curves), strict=True)]
    drawn = [sum(at) for at in zip(*(trace["y"] for trace in stacked), strict=True)]
    assert drawn[:-1] == pytest.approx([nbytes / 1024 for nbytes in used])


def test_plans_reports_and_comparisons_save_themselves(tmp_path: Path) -> None:
    report_of(9).save(tmp_path / "memory.html")
    PLAN.save_html(tmp_path / "plan.html")
    comparison().save_html(tmp_path / "comparison.html")
    for name in ("memory", "plan", "comparison"):
        text = (tmp_path / f"{name}.html").read_text()
        assert text.startswith("<!doctype html>") and text.rstrip().endswith("</html>")


def test_without_plotly_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages_page, "find_spec", lambda name: None)
    for save in (MemoryReport.save, Plan.save_html):
        with pytest.raises(ModuleNotFoundError, match=r"pip install 'tensile_jax\[html\]'"):
            save(report_of(3) if save is MemoryReport.save else PLAN, tmp_path / "page.html")  # pyright: ignore[reportArgumentType]
    assert list(tmp_path.iterdir()) == []
