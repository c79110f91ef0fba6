"""The line on a terminal, the bar in a notebook, and the lines of a log."""

import logging
import sys
import types
from typing import Any

import pytest

from tensile_jax.progress import screens
from tensile_jax.progress.phases import CallPhases
from tensile_jax.progress.screens import NotebookBar, PlainLines, TerminalLine, is_shown_by_default, kind_of_screen
from tests.progress.terminals import terminal, visible

CALL = CallPhases("train_step", 0.0).told("planning", 1, 3, 4.0)
LINE = "tensile: train_step: planning 2 of about 3, 5 s so far"


def test_the_line_appears_on_a_terminal_is_rewritten_and_vanishes(monkeypatch: pytest.MonkeyPatch) -> None:
    with terminal(monkeypatch) as there:
        assert kind_of_screen() == "terminal"
        line = TerminalLine()
        line.show([CALL], 5.0)
        seen = there.read()
        assert visible(seen) == [LINE]
        line.show([CALL], 5.2)
        assert there.read() == ""
        line.show([CALL.told("compiling segments", 0, 4, 6.0)], 6.0)
        seen += there.read()
        assert visible(seen) == ["tensile: train_step: compiling 1 of 4 segments, 6 s so far"]
        line.clear()
        assert visible(seen + there.read()) == [""]


def test_what_the_program_prints_comes_above_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with terminal(monkeypatch) as there:
        line = TerminalLine()
        line.show([CALL], 5.0)
        print("one")
        logging.StreamHandler().handle(logging.makeLogRecord({"msg": "two"}))
        print("thr", end="")
        line.show([CALL], 5.0)
        print("ee")
        sys.stderr.writelines(["four\n", "five\n"])
        line.show([CALL], 5.0)
        assert visible(seen := there.read()) == ["one", "two", "three", "four", "five", LINE]
        line.clear()
        print("six")
        assert visible(seen + there.read()) == ["one", "two", "three", "four", "five", "six", ""]


def test_the_streams_of_the_program_are_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    with terminal(monkeypatch) as there:
        before = sys.stdout, sys.stderr
        line = TerminalLine()
        kept = sys.stdout
        line.clear()
        assert (sys.stdout, sys.stderr) == before
        print("through the stream that was kept", file=kept)
        assert there.read() == "through the stream that was kept\n"
        line = TerminalLine()
        sys.stdout = before[0]  # the program itself replaces it
        line.clear()
        assert (sys.stdout, sys.stderr) == before


def test_output_that_goes_to_a_file_is_left_alone(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    captured = sys.stdout
    with terminal(monkeypatch) as there:
        monkeypatch.setattr(sys, "stdout", captured)
        line = TerminalLine()
        line.show([CALL], 5.0)
        print("into the file")
        assert sys.stdout is captured and visible(there.read()) == [LINE]
        line.clear()
    assert capsys.readouterr().out == "into the file\n"


def test_a_line_is_never_longer_than_the_terminal_is_wide(monkeypatch: pytest.MonkeyPatch) -> None:
    with terminal(monkeypatch) as there:
        line = TerminalLine()
        line.show([CallPhases("n" * 200, 0.0), CALL], 5.0)
        (shown,) = visible(there.read())
        assert len(shown) == 79 and shown.startswith("tensile: nnn")
        line.clear()


def test_several_calls_share_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with terminal(monkeypatch) as there:
        line = TerminalLine()
        line.show([CALL, CallPhases("eval_step", 1.0)], 5.0)
        assert visible(there.read()) == [f"{LINE} (and 1 more)"]
        line.clear()


def test_a_terminal_that_is_gone_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with terminal(monkeypatch) as there:
        line = TerminalLine()
        line.show([CALL], 5.0)
        there.read()
        sys.stderr.close()
        line.show([CALL], 9.0)
        line.clear()
        assert kind_of_screen() == "plain"


def test_in_a_log_each_phase_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    lines = PlainLines()
    lines.show([CALL], 5.0)
    lines.show([CALL.told("planning", 2, 3, 6.0), CallPhases("eval_step", 1.0)], 6.0)
    lines.show([CALL.told("compiling segments", 0, 4, 7.0)], 7.0)
    lines.clear()
    assert capsys.readouterr().err.splitlines() == [
        "tensile: train_step: planning",
        "tensile: eval_step: starting",
        "tensile: train_step: compiling 4 segments",
    ]


def test_in_a_notebook_a_bar_is_displayed_updated_and_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[tuple[str, Any, str]] = []
    notebook: Any = types.ModuleType("IPython.display")
    notebook.display = lambda what, display_id: done.append(("display", what, display_id))
    notebook.update_display = lambda what, display_id, raw=False: done.append(("update", what, display_id))
    monkeypatch.setitem(sys.modules, "IPython", types.ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", notebook)
    bar = NotebookBar()
    bar.show([CALL], 5.0)
    bar.show([CALL], 6.0)
    bar.clear()
    assert [what for what, _, _ in done] == ["display", "update", "update"]
    assert len({id for _, _, id in done}) == 1
    assert "planning 2 of about 3" in done[0][1]._repr_mimebundle_((), ())["text/plain"]
    assert done[-1][1] == {"text/plain": "", "text/html": ""}


def test_calls_are_shown_by_default_on_a_terminal_and_in_a_notebook_but_not_in_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind, shown in (("terminal", True), ("notebook", True), ("plain", False), ("none", False)):
        monkeypatch.setattr(screens, "kind_of_screen", lambda kind=kind: kind)
        monkeypatch.delenv("PYTEST_CURRENT_TEST")
        assert is_shown_by_default() == shown
        monkeypatch.setenv("PYTEST_CURRENT_TEST", "this one")
        assert not is_shown_by_default()


def test_a_process_without_standard_error_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    assert kind_of_screen() == "none"
    lines = PlainLines()
    lines.show([CALL], 5.0)
