"""The picture of a run's memory."""

import dataclasses
import math
import struct
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner, Result
from matplotlib.figure import Figure

from tensile_jax.cli.main import main
from tensile_jax.cli.pictures.memory import _budgets, _busy, _draw_stages, _groups, _window, draw_memory
from tensile_jax.cli.run.folder import RunFolder
from tensile_jax.runtime_records import Level, Record, Span
from tests.cli.plans import PLAN
from tests.cli.records import MIB, RECORD, WITH_STAGES


def png_size(file: Path) -> tuple[int, int]:
    head = file.read_bytes()[:24]
    assert head.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", head[16:])
    return width, height


def test_the_picture_is_of_the_size_that_a_readme_shows(tmp_path: Path) -> None:
    file = draw_memory(RECORD, tmp_path / "new" / "memory.png", jit_peaks={"a": 9 * MIB, "b": 9 * MIB})
    width, height = png_size(file)
    assert width == 1350  # 900 points of a README at half again the resolution
    assert 600 <= height <= 900


def test_busy_parts_of_columns_are_exact() -> None:
    window = _window(Record((), (Level(0.0, 1, {}), Level(800.0, 1, {}))), None, None)
    spans = [Span("out", "a", "x", 0, 10.25, 12.75, 1), Span("out", "a", "x", 0, 799.5, 900.0, 1)]
    expected = np.zeros(800)
    expected[[10, 11, 12, 799]] = 0.75, 1.0, 0.75, 0.5
    np.testing.assert_allclose(_busy(spans, window), expected, atol=1e-9)


def test_from_the_eighth_job_on_the_smallest_share_gray() -> None:
    levels = [Level(0.0, 99, {f"job{i}": i for i in range(12)})]
    assert list(_groups(levels, Record((), ()))) == ["job6", "job7", "job8", "job9", "job10", "job11", "6 others"]
    assert list(_groups(levels[:0], RECORD)) == ["a", "b"]


def test_many_jobs_without_measurements_can_be_drawn(tmp_path: Path) -> None:
    levels = tuple(Level(t * 1e6, 200, {f"job{i}": t + i for i in range(12)}) for t in range(9))
    assert png_size(draw_memory(Record((), levels), tmp_path / "m.png"))[0] == 1350


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = RunFolder.create(tmp_path / "run")
    folder.write_config({})
    for job in ("a", "b"):
        folder.write_plan(job, dataclasses.replace(PLAN, jit_peak_bytes=12 * MIB))
    folder.write_record(RECORD)
    return folder.path


def picture(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, ["picture", *map(str, arguments)])


def test_the_command_draws_what_the_folder_recorded(run: Path, tmp_path: Path) -> None:
    drawn = picture(run, "-o", tmp_path / "m.png", "--from", "0.0001", "--to", "0.0002")
    assert (drawn.exit_code, drawn.stdout) == (0, f"Drawn: {tmp_path / 'm.png'}\n"), drawn.output
    assert png_size(tmp_path / "m.png")[0] == 1350


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--from", "2"], "Error: --from and --to leave nothing to draw: from 2 s to 0.0004 s of a run"),
        (
            ["--from", "0.0003", "--to", "0.0002"],
            "Error: --from and --to leave nothing to draw: from 0.0003 s to 0.0002 s of a run",
        ),
        (["--to", "-1"], "-1.0 is not in the range"),
    ],
)
def test_seconds_outside_the_run_are_refused(run: Path, tmp_path: Path, arguments: list[str], message: str) -> None:
    refused = picture(run, "-o", tmp_path / "m.png", *arguments)
    assert refused.exit_code == 2
    assert message in refused.stderr
    assert not (tmp_path / "m.png").exists()


def test_a_run_that_has_not_ended_is_refused(run: Path, tmp_path: Path) -> None:
    (run / "record.json").unlink()
    refused = picture(run, "-o", tmp_path / "m.png")
    assert (refused.exit_code, refused.stderr.count("\n")) == (2, 1)
    assert "record.json cannot be read" in refused.stderr


def test_the_command_writes_a_page_of_the_run(run: Path, tmp_path: Path) -> None:
    written = picture(run, "--html", tmp_path / "m.html")
    assert (written.exit_code, written.stdout) == (0, f"Written to {tmp_path / 'm.html'}\n"), written.output
    assert "Device memory of run" in (tmp_path / "m.html").read_text()
    refused = picture(run, "--html", tmp_path / "m.html", "--from", "0.0001")
    assert refused.exit_code == 2 and "A page zooms by itself" in refused.stderr


def test_an_empty_record_is_refused(run: Path, tmp_path: Path) -> None:
    RunFolder(run).write_record(Record((), ()))
    refused = picture(run, "-o", tmp_path / "m.png")
    assert (refused.exit_code, "The record is empty" in refused.stderr) == (2, True)


def test_without_matplotlib_the_extra_is_named(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr("tensile_jax.cli.commands.picture.find_spec", lambda name: None)
    refused = picture(run, "-o", tmp_path / "m.png")
    assert (refused.exit_code, refused.stderr) == (
        2, "Error: --output needs matplotlib: pip install 'tensile_jax[plot]'\n",
    )  # fmt: skip


def test_stages_and_ends_before_the_first_iteration_are_drawn_and_named() -> None:
    axes = Figure().add_subplot()
    groups = _groups(WITH_STAGES.levels, WITH_STAGES)
    assert list(groups) == ["a", "b", "c", "d"]
    shown = _draw_stages(axes, WITH_STAGES.stages, groups=groups, window=_window(WITH_STAGES, None, None))
    assert [one.get_label() for one in shown] == [
        "preparing", "compiling", "queued", "cancelled before it ran", "failed before it ran",
    ]  # fmt: skip
    assert len(axes.collections) == len(WITH_STAGES.stages)
    assert [tuple(np.asarray(line.get_xydata())[0]) for line in axes.lines] == [(0.45, 2.0), (0.34, 3.0)]


def test_a_stage_outside_of_the_window_is_cut_off_there(tmp_path: Path) -> None:
    axes = Figure().add_subplot()
    window = _window(WITH_STAGES, 0.00015, 0.0004)
    stages = [stage for stage in WITH_STAGES.stages if stage.job == "c"]
    shown = _draw_stages(axes, stages, groups=_groups(WITH_STAGES.levels, WITH_STAGES), window=window)
    assert [one.get_label() for one in shown] == ["preparing", "queued"]  # it was cancelled later
    ends = [float(np.asarray(path.vertices)[:, 0].max()) for bars in axes.collections for path in bars.get_paths()]
    assert ends == pytest.approx([0.22, 0.4])
    assert png_size(draw_memory(WITH_STAGES, tmp_path / "m.png", from_s=0.00015, to_s=0.0004))[0] == 1350


def test_a_run_begins_with_the_first_stage_and_its_budget_holds_from_then_on() -> None:
    window = _window(WITH_STAGES, None, None)
    assert (window.begin_us, window.end_us) == (20.0, 500.0)
    assert list(_budgets(WITH_STAGES.levels, window)) == [(20.0, 10 * MIB), (400.0, 8 * MIB)]


def test_a_record_of_an_older_version_has_no_stages() -> None:
    older = b'{"spans": [], "levels": [{"time_us": 0.0, "budget_bytes": 1, "jobs": {"a": 1}}]}'
    assert msgspec.json.decode(older, type=Record) == Record((), (Level(0.0, 1, {"a": 1}),))


def test_a_window_ends_where_the_last_span_does() -> None:
    window = _window(RECORD, None, None)
    assert (window.begin_us, window.end_us, window.time_unit) == (0.0, 400.0, "ms")
    assert math.isclose(window.at(400.0), 0.4)
