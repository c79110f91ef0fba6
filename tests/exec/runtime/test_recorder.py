"""A record of bounded size that keeps every peak."""

from tensile_jax.exec.runtime.recorder import Recorder
from tensile_jax.runtime_records import Level, Span


def level(time: float, nbytes: int, measured: int | None = None) -> Level:
    return Level(time, 100, {"a": nbytes}, measured)


def test_a_level_that_says_nothing_new_is_left_out() -> None:
    recorder = Recorder()
    for one in (level(0, 5), level(1, 5), level(2, 5, 6), level(3, 7)):
        recorder.add_level(one)
    assert recorder.record().levels == (level(0, 5), level(2, 5, 6), level(3, 7))


def test_the_peak_stays_however_much_is_thinned() -> None:
    recorder = Recorder(most=16)
    for time in range(1000):
        recorder.add_level(level(time, 99 if time == 333 else time % 7, 120 if time == 500 else None))
    levels = recorder.record().levels
    assert len(levels) < 16
    assert max(one.planned_bytes for one in levels) == 99 and max(one.measured_bytes or 0 for one in levels) == 120
    assert [one.time_us for one in levels] == sorted(one.time_us for one in levels)


def test_spans_are_sorted_and_the_latest_are_kept() -> None:
    recorder = Recorder(most=3)
    for begin in (5.0, 1.0, 4.0, 2.0):
        recorder.spans.append(Span("compute", "a", "s", 0, begin, begin + 1, 0))
    assert [span.begin_us for span in recorder.record().spans] == [1.0, 2.0, 4.0]
