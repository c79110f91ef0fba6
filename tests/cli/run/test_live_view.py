"""The live view: on a terminal, and in a log."""

import dataclasses
import io
import math
import threading
from collections.abc import Callable, Sequence

import pytest
from rich.console import Console

from tensile_jax.cli.run.live_view import LiveView, StatusView, status_line
from tensile_jax.runtime_records import NO_LIMIT, JobEvent, Status
from tests.cli.records import MIB, STATUS

STARTED = JobEvent(1.0, "started", "gpt", 0)
STEP = JobEvent(2.0, "step", "gpt", 1)
FAILED = JobEvent(3.0, "failed", "gpt", 1, "ValueError: no batch")
_LONG_S = 30.0  # never waited for unless something is wrong


class _Ascii(Console):
    @property
    def encoding(self) -> str:
        return "ascii"


def lines(console: Console, status: Status, *, most_jobs: int | None = None) -> list[str]:
    with console.capture() as captured:
        console.print(StatusView(status, most_jobs=most_jobs))
    return [line.rstrip() for line in captured.get().splitlines()]


def counting(answers: Sequence[Status | Exception], enough: int) -> tuple[Callable[[], Status], threading.Event]:
    """A `status` that gives `answers`, the last one for ever, and an event that is set once it was asked `enough` times."""
    asked: list[None] = []
    seen = threading.Event()

    def status() -> Status:
        asked.append(None)
        if len(asked) >= enough:
            seen.set()
        answer = answers[min(len(asked), len(answers)) - 1]
        if isinstance(answer, Exception):
            raise answer
        return answer

    return status, seen


def test_a_job_that_is_prepared_shows_what_is_done() -> None:
    job = dataclasses.replace(STATUS.jobs[1], state="preparing", note="compiling 3 of 12 segments")
    status = dataclasses.replace(STATUS, jobs=(job,))
    assert status_line(status).endswith("| gpt preparing: compiling 3 of 12 segments")
    assert lines(_Ascii(width=80), status)[-1] == "gpt: preparing: compiling 3 of 12 segments"
    assert "preparing" in (wide := lines(_Ascii(width=140), status)[-1]) and wide.endswith("compiling 3 of 12 segments")


def test_a_status_in_ascii_and_80_columns() -> None:
    assert lines(_Ascii(width=80), STATUS) == [
        "12.3 s, 3 jobs: 1 queued, 1 running, 1 finished",
        "device  #######################........|..  812 MiB of 1.172 GiB, peak 1.074 GiB",
        "host    ##................................  300 MiB of 4 GiB",
        "link    out ###........  31%   in ##.........  22%",
        "job      state          step step/s  ETA   loss  now peak plan GiB  stall",
        "resnet   running      14/200    2.1 1m29  0.693 0.39 0.49     0.50 1.2 ms",
        "gpt      queued       0/1500                    0.00 0.00     0.30",
        "cnn[red] finished  2000/2000             0.0123 0.00 0.21     0.22  32 us",
        "gpt: needs 310 MiB",
    ]


@pytest.mark.parametrize("width", [40, 60, 76, 80, 120, 200])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    long = dataclasses.replace(STATUS.jobs[1], name="a name that is much too long", note="why it waits, at length " * 9)
    shown = lines(Console(width=width), dataclasses.replace(STATUS, jobs=(*STATUS.jobs, long)))
    assert max(map(len, shown)) <= width
    assert len([line for line in shown if line.startswith("resnet")]) == 1


def test_a_wide_terminal_has_the_notes_in_the_table() -> None:
    shown = lines(Console(width=130), STATUS)
    assert [line.split()[-1] for line in shown if line.startswith("job")] == ["note"]
    assert [line for line in shown if "needs 310 MiB" in line] == [line for line in shown if line.startswith("gpt ")]


def test_where_not_all_jobs_have_room_those_that_run_stay() -> None:
    jobs = tuple(reversed(STATUS.jobs))
    shown = lines(Console(width=80), dataclasses.replace(STATUS, jobs=jobs), most_jobs=2)
    assert [line.split()[0] for line in shown[5:7]] == ["gpt", "resnet"]
    assert "... 1 more job" in shown


def test_figures_that_are_not_numbers_are_shown_all_the_same() -> None:
    odd = dataclasses.replace(STATUS.jobs[0], loss=math.nan, steps_per_s=1e-320, stall_us=math.inf)
    status = dataclasses.replace(
        STATUS, jobs=(odd,), budget_bytes=0, host_budget_bytes=0, out_share=math.nan, device_bytes=3 * MIB
    )
    assert "nan" in [line for line in lines(Console(width=80), status) if line.startswith("resnet")][0]


def test_host_memory_without_a_limit_is_not_said_to_be_of_one() -> None:
    shown = lines(_Ascii(width=80), dataclasses.replace(STATUS, host_budget_bytes=NO_LIMIT))
    assert shown[2] == "host    " + "." * 34 + "  300 MiB, no limit"


def test_a_device_above_its_budget_has_a_full_bar() -> None:
    over = dataclasses.replace(STATUS, device_bytes=2400 * MIB, peak_bytes=2400 * MIB)
    assert lines(_Ascii(width=80), over)[1].startswith("device  " + "#" * 33 + "|  2.344 GiB of 1.172 GiB")


def test_no_jobs_are_a_header_without_a_table() -> None:
    assert lines(Console(width=80), dataclasses.replace(STATUS, jobs=()))[0] == "12.3 s, 0 jobs"


def test_a_status_in_one_line() -> None:
    assert status_line(STATUS) == (
        "12.3 s  device 812 MiB of 1.172 GiB | resnet 14/200 loss 0.693 2.1 step/s | gpt queued (needs 310 MiB) | 1 finished"
    )


def test_a_log_has_the_status_every_so_often_and_each_event_but_steps() -> None:
    status, seen = counting([STATUS], enough=3)
    text = io.StringIO()
    with LiveView(Console(file=text, width=80), status, every_s=0.01) as view:
        for event in (STARTED, STEP, FAILED):
            view.add_event(event)
        assert seen.wait(_LONG_S)
    written = text.getvalue().splitlines()
    assert [line for line in written if "gpt:" in line] == [
        "1.0 s  gpt: started after step 0",
        "3.0 s  gpt: failed after step 1 (ValueError: no batch)",
    ]
    assert written.count(status_line(STATUS)) >= 3
    assert "\x1b" not in text.getvalue()


def test_all_that_was_told_is_shown_before_the_end() -> None:
    text = io.StringIO()
    with LiveView(Console(file=text), lambda: STATUS, every_s=_LONG_S) as view:
        for step in range(50):
            view.add_event(dataclasses.replace(STARTED, step=step))
    written = text.getvalue().splitlines()
    assert len([line for line in written if "gpt: started" in line]) == 50
    assert written[-1] == status_line(STATUS)


@pytest.mark.parametrize("failure", [ValueError("not\nready"), OSError("not ready")])
def test_a_status_that_fails_is_said_and_the_view_goes_on(failure: Exception) -> None:
    status, seen = counting([failure, STATUS], enough=3)
    text = io.StringIO()
    with LiveView(Console(file=text), status, every_s=0.01):
        assert seen.wait(_LONG_S)
    assert text.getvalue().splitlines()[:2] == ["The status cannot be shown: not ready", status_line(STATUS)]


def test_a_terminal_shows_the_table_and_keeps_how_jobs_ended() -> None:
    status, seen = counting([STATUS], enough=2)
    text = io.StringIO()
    with LiveView(Console(file=text, force_terminal=True, width=80, height=24), status) as view:
        for event in (STARTED, STEP, FAILED):
            view.add_event(event)
        assert seen.wait(_LONG_S)
    assert "failed after step 1" in text.getvalue()
    assert "started after" not in text.getvalue()
    assert "12.3 s, 3 jobs" in text.getvalue()
    assert text.getvalue().count("\x1b[?25h") == 1  # the cursor is shown again
    *_, end = text.getvalue().split("cnn[red]")
    drawn = len(lines(Console(width=80, height=24), STATUS))
    assert end.count("\x1b[1A\x1b[2K") == drawn  # each line of the view is removed, since the final table follows


def test_a_terminal_keeps_the_last_status_beside_what_is_wrong() -> None:
    status, seen = counting([STATUS, RuntimeError("gone")], enough=3)
    text = io.StringIO()
    with LiveView(Console(file=text, force_terminal=True, width=80, height=24), status):
        assert seen.wait(_LONG_S)
    frames = text.getvalue().split("The status cannot be shown: gone")
    assert len(frames) >= 3
    assert all("12.3 s, 3 jobs" in frame for frame in frames[:-1])


def test_a_status_that_cannot_be_drawn_does_not_end_the_run() -> None:
    spoiled = dataclasses.replace(STATUS, out_share="much")  # pyright: ignore[reportArgumentType]  # the mistake
    status, seen = counting([spoiled], enough=2)
    text = io.StringIO()
    with LiveView(Console(file=text, force_terminal=True, width=80, height=24), status):
        assert seen.wait(_LONG_S)
    assert "The status cannot be shown" in text.getvalue()


def test_telling_never_waits_for_a_status_that_hangs() -> None:
    release, asked = threading.Event(), threading.Event()

    def hangs() -> Status:
        asked.set()
        assert release.wait(_LONG_S)
        return STATUS

    text = io.StringIO()
    with LiveView(Console(file=text), hangs, every_s=0.01) as view:
        assert asked.wait(_LONG_S)
        view.add_event(STARTED)  # returns although the view's thread is inside `hangs`
        assert text.getvalue() == ""
        release.set()
    assert "gpt: started after step 0" in text.getvalue()


class _Gone(io.StringIO):
    """A terminal that was closed."""

    def write(self, text: str, /) -> int:
        raise OSError(5, "Input/output error")


def test_a_console_that_is_gone_does_not_end_the_run() -> None:
    with LiveView(Console(file=_Gone()), lambda: STATUS, every_s=0.01) as view:
        view.add_event(STARTED)
        view._thread.join(_LONG_S)
        assert not view._thread.is_alive()
        view.add_event(FAILED)
