"""A record of bounded size that keeps every peak."""

from dataclasses import replace

from tensile_jax.exec.controller.state import JobId, State, StatePlace
from tensile_jax.exec.runtime.recorder import Recorder
from tensile_jax.runtime_records import Level, Span
from tests.exec.controller.world import memory, record

A = JobId(0)


def state(nbytes: int, *transients: int) -> State:
    """A job holds so many bytes, and has runs in flight with these transient bytes."""
    one = replace(record(0, memory("I", nbytes, nbytes, nbytes)), place=StatePlace.ON_DEVICE)
    return State(100, 100, records=(one,), in_flight=tuple((A, nbytes) for nbytes in transients))


def level(time: float, nbytes: int, measured: int | None = None) -> Level:
    return Level(time, 100, {"a": nbytes}, measured)


def recording(most: int = 1000) -> Recorder:
    recorder = Recorder(most=most)
    recorder.names[A] = "a"
    return recorder


def test_a_level_has_the_bytes_of_jobs_and_the_transient_bytes_of_the_oldest_run() -> None:
    recorder = recording()
    recorder.add(0, state(5))
    recorder.add(1, state(5, 3, 9))
    assert recorder.record().levels == (level(0, 5), level(1, 8))


def test_a_level_that_says_nothing_new_is_left_out() -> None:
    recorder = recording()
    for time, nbytes, measured in ((0, 5, None), (1, 5, None), (2, 5, 6), (3, 7, None)):
        recorder.add(time, state(nbytes), measured)
    assert recorder.record().levels == (level(0, 5), level(2, 5, 6), level(3, 7))


def test_the_peak_stays_however_much_is_thinned() -> None:
    recorder = recording(most=16)
    for time in range(1000):
        recorder.add(time, state(99 if time == 333 else time % 7), 120 if time == 500 else None)
    levels = recorder.record().levels
    assert len(levels) < 16
    assert max(one.planned_bytes for one in levels) == 99 and max(one.measured_bytes or 0 for one in levels) == 120
    assert [one.time_us for one in levels] == sorted(one.time_us for one in levels)


def test_states_that_wait_are_to_be_condensed_before_they_are_many() -> None:
    recorder = recording()
    asked = 0
    for time in range(5000):
        if recorder.add(time, state(time % 7)):
            asked += 1
            recorder.condense()
    assert asked == 5


def test_spans_are_sorted_and_the_latest_are_kept() -> None:
    recorder = Recorder(most=3)
    for begin in (5.0, 1.0, 4.0, 2.0):
        recorder.spans.append(Span("compute", "a", "s", 0, begin, begin + 1, 0))
    assert [span.begin_us for span in recorder.record().spans] == [1.0, 2.0, 4.0]
