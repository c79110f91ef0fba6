"""What `tensile show` makes of a saved plan."""

import dataclasses
import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from rich.console import Console

from tensile_jax.cli.commands.show import memory_curve
from tensile_jax.cli.main import main
from tensile_jax.ir import OperatorId
from tensile_jax.plan_format import Plan, PlannedLoop
from tests.cli.plans import PLAN


@pytest.fixture
def plan_file(tmp_path: Path) -> Path:
    PLAN.save(tmp_path / "plan.json")
    return tmp_path / "plan.json"


def show(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, ["show", *map(str, arguments)])


class _Ascii(Console):
    @property
    def encoding(self) -> str:
        return "ascii"


def test_the_curve_has_a_bar_for_each_segment_and_marks_budget_and_peak() -> None:
    # 20 KiB in 20 characters: a character is a KiB.
    assert memory_curve(PLAN, _Ascii(width=20 + len("segment 0 || 10 KiB  <- peak"))) == [
        "Memory on the device by segment, scale 0 to 20 KiB",
        "# resident  : workspace  ! budget",
        "segment 0 |######      !       |  6 KiB",
        "segment 1 |######::::  !       | 10 KiB  <- peak",
    ]


@pytest.mark.parametrize("width", [20, 40, 80, 200])
def test_no_bar_is_wider_than_the_terminal_while_there_is_room_for_one(width: int) -> None:
    bars = memory_curve(PLAN, _Ascii(width=width))[2:]
    assert max(map(len, bars)) <= max(width, 40)


def test_many_segments_share_rows_and_the_peak_is_never_hidden() -> None:
    many = dataclasses.replace(PLAN, segments=PLAN.segments * 100)
    bars = memory_curve(many, _Ascii(width=80))[2:]
    assert len(bars) <= 60
    assert [line for line in bars if line.endswith("<- peak")] == [bars[0]]
    assert bars[0].startswith("segment 0-3")


def test_a_peak_above_the_budget_shows_the_budget_inside_the_bar() -> None:
    over = dataclasses.replace(PLAN, budget_bytes=5 * 1024)
    bar = memory_curve(over, _Ascii(width=20 + len("segment 0 || 10 KiB  <- peak")))[3]
    assert bar == "segment 1 |#####!::::          | 10 KiB  <- peak"


@pytest.mark.smoke
def test_show_names_what_is_swapped_recomputed_and_released(plan_file: Path) -> None:
    shown = show(plan_file)
    assert shown.exit_code == 0
    for text in (
        "Net/Block_0:dot", "0.1 - 0.1 ms", "why swap_out", "Net/Block_0 ", "1 KiB", "why recompute", "12 KiB", "<- peak",
        "swapped out, swapped in, released", "Released after their last use: 1 tensors, 4 KiB",
    ):  # fmt: skip
        assert text in shown.stdout


def test_no_line_is_wider_than_110_where_there_is_no_terminal(plan_file: Path) -> None:
    assert max(map(len, show(plan_file).stdout.splitlines())) <= 110


def test_one_segment_says_what_it_reads_and_which_events_it_waits_for(plan_file: Path) -> None:
    shown = show(plan_file, "--segment", "1")
    assert shown.exit_code == 0
    assert "Segment 1 of 2 (s1)" in shown.stdout
    assert "6 KiB resident, 4 KiB workspace <- the plan's peak" in shown.stdout
    assert "Reads: 2 tensors, 6 KiB" in shown.stdout
    assert "copied in from the host, until 130 us" in shown.stdout
    assert "On the device, by role" in shown.stdout and "together" in shown.stdout


def test_what_is_on_the_device_at_the_peak_adds_up_to_the_peak(plan_file: Path) -> None:
    shown = show(plan_file).stdout
    assert "On the device at the peak, in s1: 10 KiB" in shown
    rows = {
        line.split("│")[1].strip(): line.split("│")[2].strip() for line in shown.split("Segments")[0].splitlines() if "│" in line
    }
    assert {name: rows[name] for name in ("activation", "workspace", "parameter", "together")} == {
        "together": "10 KiB", "activation": "4 KiB", "workspace": "4 KiB", "parameter": "2 KiB",
    }  # fmt: skip
    assert (rows["Net/Block_0"], rows["state.w"]) == ("4 KiB", "2 KiB")


def test_a_plan_becomes_a_page_or_a_picture(plan_file: Path, tmp_path: Path) -> None:
    assert show(plan_file, "--html", tmp_path / "plan.html").stdout == f"Written to {tmp_path / 'plan.html'}\n"
    drawn = CliRunner().invoke(
        main, ["picture", str(plan_file), "-o", str(tmp_path / "plan.png"), "--html", str(tmp_path / "again.html")]
    )
    assert drawn.exit_code == 0, drawn.stderr
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "again.html").read_text() == (tmp_path / "plan.html").read_text()
    refused = CliRunner().invoke(main, ["picture", str(plan_file), "-o", str(tmp_path / "p.png"), "--from", "1"])
    assert refused.exit_code == 2 and "is for a run" in refused.stderr
    assert "Name the file to write" in CliRunner().invoke(main, ["picture", str(plan_file)]).stderr


def test_the_life_of_a_tensor_is_told_in_order(plan_file: Path) -> None:
    assert show(plan_file, "--tensor", "BLOCK_0:dot").stdout.splitlines() == [
        "Net/Block_0:dot  4 KiB, float32 1024, activation",
        "        100 us  written by segment 0",
        "        100 us  copied out to the host, until 110 us: why swap_out",
        "        100 us  leaves the device when segment 0 ends",
        "        120 us  copied in from the host, until 130 us: why swap_in",
        "        150 us  read by segment 1",
        "        250 us  leaves the device when segment 1 ends",
    ]


def test_a_parameter_is_on_the_device_from_the_beginning(plan_file: Path) -> None:
    assert "0 us  on the device when the iteration begins" in show(plan_file, "--tensor", "state.w").stdout


def test_the_plan_of_a_loop_is_shown_like_any_other(tmp_path: Path) -> None:
    loop = PlannedLoop(OperatorId(PLAN.segments[0].operators[0][0]), "update", 1000, dataclasses.replace(PLAN, program="body"))
    first = dataclasses.replace(PLAN.segments[0], operators=((loop.operator, loop.operator + 1),), recomputes=())
    plan = dataclasses.replace(PLAN, loops=(loop,), segments=(first, *PLAN.segments[1:]))
    plan.save(tmp_path / "plan.json")
    whole = show(tmp_path / "plan.json").stdout
    assert "1000 iterations of update, each under this plan" in whole and "--loop N" in whole
    assert show(tmp_path / "plan.json", "--loop", "0").stdout.startswith("Plan of 'body'")
    assert "loops 0 to 0" in show(tmp_path / "plan.json", "--loop", "1").stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--segment", "2"], "Error: --segment=2: the plan has segments 0 to 1. Name one of these."),
        (["--tensor", "no such"], "Error: --tensor=no such: no tensor's name contains it. The largest is Net/Block_0:dot."),
        (["--loop", "0"], "Error: --loop=0: no loop of the plan has a plan of its own. Leave it out."),
        (["--segment", "0", "--tensor", "w"], "Error: --segment and --tensor exclude each other. Leave one of them out."),
    ],
)
def test_what_is_not_in_the_plan_is_refused(plan_file: Path, arguments: list[str], message: str) -> None:
    shown = show(plan_file, *arguments)
    assert (shown.exit_code, shown.stdout, shown.stderr.strip()) == (2, "", message)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda text: text[: len(text) // 2], "is not JSON, or was cut short"),
        (lambda text: text.replace('"schema_version": 1', '"schema_version": 99'), "has schema_version 99"),
        (lambda text: text.replace('"peak_bytes": 10240', '"peak_bytes": "much"'), "is not a plan"),
    ],
)
def test_a_spoiled_file_is_one_line_and_exit_code_2(plan_file: Path, spoil, message: str) -> None:
    plan_file.write_text(spoil(plan_file.read_text()))
    shown = show(plan_file)
    assert (shown.exit_code, shown.stdout, shown.stderr.count("\n")) == (2, "", 1)
    assert message in shown.stderr


def test_a_plan_without_events_can_be_shown(tmp_path: Path) -> None:
    segment = dataclasses.replace(PLAN.segments[0], inputs=(), outputs=(), frees=())
    whole = dataclasses.replace(
        PLAN, whole=True, segments=(segment,), tensors=(), events=(), peak_segment=0, peak_bytes=segment.device_bytes
    )
    whole.save(tmp_path / "plan.json")
    shown = show(tmp_path / "plan.json")
    assert shown.exit_code == 0
    assert "one executable" in shown.stdout
    refused = show(tmp_path / "plan.json", "--tensor", "x")
    assert (refused.exit_code, "none: the step runs whole" in refused.stderr) == (2, True)


def test_the_plan_is_read_back_as_it_was_written(plan_file: Path) -> None:
    assert Plan.load(plan_file) == PLAN
    assert json.loads(plan_file.read_text())["events"][0]["trigger"] == 0
