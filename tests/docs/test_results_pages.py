"""The pages of figures are what their commands write from the JSON files in `benchmarks/results`."""

from pathlib import Path

import pytest

from benchmarks.paper import draw
from benchmarks.results_pages.__main__ import pages
from benchmarks.results_pages.section import Group, Section, page

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", ["results.md", "predicted.md"])
def test_a_page_of_results_is_what_make_results_writes(name: str) -> None:
    assert (ROOT / "docs" / name).read_text() == pages()[name], "run `make results`"


def test_the_page_of_the_papers_experiments_is_what_its_command_writes() -> None:
    written = draw.text(draw.read(ROOT / "benchmarks" / "results" / "paper"))
    assert (ROOT / "benchmarks" / "README.md").read_text() == written, "run `python -m benchmarks.paper draw`"


def section(conclusions: tuple[str, ...] = ()) -> Section:
    return Section(
        title="XLA's own",
        on="simulated H200",
        when="2026-11-26",
        command="make one",
        file="paper/one.json",
        headline="0.5",
        reading="Peaks.",
        table="| a |\n|---|\n| 1 |\n",
        conclusions=conclusions,
    )


def test_a_page_begins_with_a_summary_that_links_to_its_sections() -> None:
    assert page("Title", "Intro.", [Group("Group", "About.", [lambda: section(("One.",))])]) == (
        "# Title\n\nIntro.\n\n"
        "| what | on | when | command | result |\n|---|---|---|---|---|\n"
        "| [XLA's own](#xlas-own) | simulated H200 | 2026-11-26 | `make one` | 0.5 |\n\n"
        "## Group\n\nAbout.\n\n"
        "### XLA's own\n\n"
        "*Simulated H200, 2026-11-26, `make one`, [`one.json`](../benchmarks/results/paper/one.json).*\n\n"
        "Peaks.\n\n| a |\n|---|\n| 1 |\n\n- One.\n"
    )


def test_a_section_with_more_than_three_conclusions_is_refused() -> None:
    with pytest.raises(ValueError, match="At most three"):
        section(("1", "2", "3", "4"))
