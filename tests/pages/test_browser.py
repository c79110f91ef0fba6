"""Pages in a real browser, without a network: they open quickly, say nothing on the console, and search, pin and sort work."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tensile_jax.pages.page import html_of
from tests.memory_report.reports import report_of
from tests.pages.builders import pages

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine"),
    # Playwright's event loop closes its sockets when the interpreter ends
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"),
]
KINDS = ("memory", "plan", "run", "comparison")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    api: Any = pytest.importorskip("playwright.sync_api")
    with api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


class Opened:
    """A page in a tab without a network, and what it has said on the console."""

    def __init__(self, browser: Any, file: Path, scheme: str = "light") -> None:
        self.said: list[str] = []
        context = browser.new_context(color_scheme=scheme, offline=True, viewport={"width": 1300, "height": 1000})
        self.page = context.new_page()
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.goto(file.as_uri())
        self.page.wait_for_selector("body[data-ready]")


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    found: dict[str, Path] = {}
    for kind, page in pages().items():
        found[kind] = tmp_path / f"{kind}.html"
        found[kind].write_text(html_of(page))
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_page_opens_without_a_word_on_the_console(browser: Any, files: dict[str, Path], kind: str, scheme: str) -> None:
    opened = Opened(browser, files[kind], scheme)
    page = opened.page
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    font = page.evaluate("document.getElementById('plot').layout.font.color")
    assert (ground, font) == (("rgb(255, 255, 255)", "#1c1e21") if scheme == "light" else ("rgb(21, 23, 26)", "#e8eaed"))
    assert page.locator("#plot svg").count() > 0
    assert opened.said == []


def test_searching_hides_other_rows_and_fades_other_bands(browser: Any, files: dict[str, Path]) -> None:
    opened = Opened(browser, files["memory"])
    page = opened.page
    page.fill("#search", "<layer 3>")
    assert page.locator("#found").text_content() == "1 of 40 rows"
    assert page.locator("tbody tr:visible").count() == 1
    opacity = page.evaluate("document.getElementById('plot').data.filter(t => t.meta === 'bands').flatMap(t => t.marker.opacity)")
    assert sorted(set(opacity)) == [0.12, 1] and opacity.count(1) == 1
    page.fill("#search", "")
    assert page.locator("tbody tr:visible").count() == 40
    assert opened.said == []


def test_a_click_on_a_band_pins_it_and_another_click_lets_it_go(browser: Any, files: dict[str, Path]) -> None:
    opened = Opened(browser, files["memory"])
    page = opened.page
    page.evaluate("document.getElementById('plot').scrollIntoView({block: 'end'})")
    box = page.evaluate("""() => {
        const bar = document.querySelector('#plot .barlayer .point path').getBoundingClientRect();
        return [bar.x + bar.width / 2, bar.y + bar.height / 2];
    }""")
    page.mouse.move(*box)
    page.wait_for_selector("#plot .hoverlayer .hovertext")
    page.mouse.click(*box)
    page.wait_for_selector("#pinned section")
    assert page.locator("#pinned h3").text_content().startswith("Net/<layer ")
    assert "model.py:" in page.locator("#pinned").text_content()
    page.locator("#pinned button").click()
    assert page.locator("#pinned section").count() == 0
    assert opened.said == []


def test_the_keyboard_pins_a_row_sorts_and_zooms(browser: Any, files: dict[str, Path]) -> None:
    opened = Opened(browser, files["memory"])
    page = opened.page
    page.locator("tbody button").first.focus()
    page.keyboard.press("Enter")
    assert page.locator("#pinned section").count() == 1
    head = page.locator("thead th", has_text="size")
    head.locator("button").focus()
    sizes = "[...document.querySelectorAll('tbody tr')].map(row => Number(row.cells[1].dataset.sort))"
    page.keyboard.press("Enter")
    assert head.get_attribute("aria-sort") == "descending" and page.evaluate(sizes) == sorted(page.evaluate(sizes), reverse=True)
    page.keyboard.press("Enter")
    assert head.get_attribute("aria-sort") == "ascending" and page.evaluate(sizes) == sorted(page.evaluate(sizes))
    shown = "document.getElementById('plot').layout.xaxis.range"
    page.locator("#in").focus()
    page.keyboard.press("Enter")
    page.wait_for_function(f"{shown}[1] < 40")
    assert page.evaluate(shown) == [10, 30]
    assert opened.said == []


def test_2000_operators_open_from_less_than_8_mb(browser: Any, tmp_path: Path) -> None:
    file = tmp_path / "large.html"
    report_of(2000).save(file)
    assert file.stat().st_size < 8e6
    opened = Opened(browser, file)
    assert opened.said == []
