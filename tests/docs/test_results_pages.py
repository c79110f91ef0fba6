"""The pages of figures are what their commands write from the JSON files in `benchmarks/results`."""

from pathlib import Path

import pytest

from benchmarks.paper import draw
from benchmarks.results_pages import steps_on_cpu
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
        "| what, and its command | on, when | result |\n|---|---|---|\n"
        "| [XLA's own](#xlas-own)<br>`make one` | simulated H200<br>2026-11-26 | 0.5 |\n\n"
        "## Group\n\nAbout.\n\n"
        "### XLA's own\n\n"
        "*Simulated H200, 2026-11-26, `make one`, [`one.json`](../benchmarks/results/paper/one.json).*\n\n"
        "Peaks.\n\n| a |\n|---|\n| 1 |\n\n- One.\n"
    )


def test_ways_by_hand_stand_beside_the_highest_budget_that_keeps_their_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    equal = {"loss_difference": 0.0, "gradient_difference": 1e-6}
    cases = [
        {"how": "plain jit", "peak_bytes": 100, "peak_ratio": 1.0, "time_ratio": 1.0, "first_call_s": 1.0, **equal},
        {"how": "scan, one", "peak_bytes": 61, "peak_ratio": 0.61, "time_ratio": 1.2, "first_call_s": 2.0, **equal},
        {"how": "scan, two", "peak_bytes": 40, "peak_ratio": 0.4, "time_ratio": 1.3, "first_call_s": 2.0, **equal},
        {
            "how": "budget",
            "budget_bytes": 60,
            "peak_bytes": 60,
            "peak_ratio": 0.6,
            "time_ratio": 0.9,
            "first_call_s": 6.0,
            **equal,
        },
        {"how": "nothing_saveable", "peak_bytes": 100, "peak_ratio": 1.0, "flops_ratio": 1.25, "first_call_s": 1.0, **equal},
        {"how": "budget", "budget_bytes": 40, "floor_bytes": 50},
        {"how": "the least budget", "floor_bytes": 50},
    ]
    document = {"made": "2026-11-29T08:00:00", "note": "nothing else ran", "networks": {"decoder": cases}}
    monkeypatch.setattr(steps_on_cpu, "read", lambda file: document)
    made = steps_on_cpu.beside_checkpoint()
    assert made.table.splitlines()[2:] == [
        "| decoder | scan, one | 0.61 | 1.20 | 0.90 | 2.0 s | 6.0 s |",
        "|  | scan, two | 0.40 | 1.30 | too small | 2.0 s |  |",
        "|  | other ways | 1.00 to 1.00 | - | - |  |  |",
    ]
    assert made.headline == "with the same bytes, a budget is faster in 1 of 1 cases: 0.75 to 0.75 of the time by hand"
    assert "decoder 0.50 (0.40)" in made.conclusions[1] and made.reading.endswith("Note: nothing else ran.")


def test_a_section_with_more_than_three_conclusions_is_refused() -> None:
    with pytest.raises(ValueError, match="At most three"):
        section(("1", "2", "3", "4"))
