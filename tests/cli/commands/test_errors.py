"""`tensile errors`: the page on errors, where only the package is installed."""

from click.testing import CliRunner

from tensile_jax.cli.main import main


def printed(*arguments: str) -> str:
    result = CliRunner().invoke(main, ["errors", *arguments], catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


def test_a_section_is_found_by_a_part_of_its_title() -> None:
    text = printed("toosmall")
    assert text.startswith("BudgetTooSmall") and "TraceError" not in text
    assert "donate_argnums=0" in text and "are results the same?" in text


def test_without_a_name_the_whole_page_is_printed_without_links_and_html() -> None:
    text = printed()
    assert all(title in text for title in ("BudgetTooSmall", "TraceError", "OutOfMemory", "Array has been deleted"))
    assert ".md)" not in text and "<!--" not in text


def test_a_name_that_no_title_has_is_refused_with_the_titles() -> None:
    result = CliRunner().invoke(main, ["errors", "elephant"])
    assert result.exit_code == 2 and "got 'elephant'" in result.stderr
    assert "BudgetTooSmall, TraceError, OutOfMemory, RESOURCE_EXHAUSTED, Array has been deleted" in result.stderr
