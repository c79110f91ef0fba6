"""Every block of docs/frameworks.md is a program that runs, and whose second loss is below the first."""

import re
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parents[1] / "docs" / "frameworks.md"
BLOCKS = re.findall(r"^## (.+?)$|^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)


def programs() -> list[Any]:
    """The blocks, named after the sections in which they stand."""
    found: list[Any] = []
    section = ""
    for title, code in BLOCKS:
        section = title or section
        if code:
            found.append(pytest.param(code, id=f"{section}-{len(found)}"))
    return found


def test_the_page_has_a_program_for_each_framework() -> None:
    assert [title for title, _ in BLOCKS if title] == ["Flax Linen", "Flax NNX", "Equinox"]
    assert len(programs()) == 4


@pytest.mark.parametrize("code", programs())
def test_the_program_runs(code: str, capsys: pytest.CaptureFixture[str]) -> None:
    if "import equinox" in code:
        pytest.importorskip("equinox")
    names: dict[str, Any] = {}
    exec(compile(code, str(PAGE), "exec"), names)  # noqa: S102 # our own page
    if "job" in names:
        assert names["job"].status.state == "finished" and int(names["optimizer"].step[...]) == 5
    else:
        assert names["last_loss"] < names["first_loss"]
