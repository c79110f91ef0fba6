"""Every link from one page to another, or to a section, leads somewhere. Links to other sites are not followed."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")))
LINK = re.compile(r"\]\(([^)\s]+)\)")
BLOCK = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def sections(text: str) -> set[str]:
    """The address of each section, as GitHub and MkDocs write it."""
    titles = re.findall(r"^#+ (.+)$", BLOCK.sub("", text), re.MULTILINE)
    return {re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", title.lower())) for title in titles}


def broken_links(page: Path, text: str) -> list[str]:
    broken: list[str] = []
    for link in LINK.findall(text):
        file, _, section = link.partition("#")
        target = page.parent / file if file else page
        if "://" in link or target.name == "api.md":  # the sections of api.md are made from docstrings
            continue
        known = sections(text if not file else target.read_text()) if section and target.exists() else set[str]()
        if not target.exists() or (section and section not in known):
            broken.append(link)
    return broken


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_link_of_the_page_leads_to_a_section_that_exists(page: Path) -> None:
    assert broken_links(page, page.read_text()) == []


def test_a_link_to_a_missing_section_or_page_is_found() -> None:
    page = ROOT / "docs" / "errors.md"
    text = "# One\n[a](#one) [b](#two) [c](errors.md#errors) [d](errors.md#none) [e](none.md) [f](https://example.org/#x)"
    assert broken_links(page, text) == ["#two", "errors.md#none", "none.md"]


def test_the_error_of_a_donated_array_has_a_section_that_getting_started_links() -> None:
    assert "## Array has been deleted\n" in (ROOT / "docs" / "errors.md").read_text()
    assert "(errors.md#array-has-been-deleted)" in (ROOT / "docs" / "getting-started.md").read_text()
