"""What a job goes through before its first iteration, from its events."""

from tensile_jax.exec.runtime.stages import Stages
from tensile_jax.runtime_records import EventName, JobEvent, Stage

US = 1e6


def after(*events: tuple[float, EventName, str, str]) -> Stages:
    stages = Stages()
    for time_s, kind, job, note in events:
        stages.add(JobEvent(time_s, kind, job, 0, note))
    return stages


def test_a_job_is_prepared_compiled_and_waits_until_it_starts() -> None:
    stages = after(
        (0, "submitted", "a", ""), (1, "preparing", "a", "tracing"), (2, "preparing", "a", "planning"),
        (4, "preparing", "a", "compiling 3 segments"), (7, "planned", "a", ""), (7, "queued", "a", "needs 2 GiB"),
        (9, "started", "a", ""), (10, "step", "a", ""), (11, "queued", "a", "a lower budget"), (12, "finished", "a", ""),
    )  # fmt: skip
    assert [(s.name, s.note, s.begin_us / US, s.end_us / US, s.ended) for s in stages.until(99 * US)] == [
        ("preparing", "its first batch", 0, 1, None), ("preparing", "tracing", 1, 2, None), ("preparing", "planning", 2, 4, None),
        ("compiling", "compiling 3 segments", 4, 7, None), ("queued", "", 7, 7, None), ("queued", "needs 2 GiB", 7, 9, None),
    ]  # fmt: skip


def test_a_job_that_is_cancelled_in_the_queue_or_fails_before_ends_its_stage() -> None:
    stages = after(
        (0, "submitted", "a", ""), (0, "submitted", "b", ""), (3, "failed", "b", "OSError"), (5, "planned", "a", ""),
        (5, "queued", "a", "needs 2 GiB"), (8, "cancelled", "a", ""), (9, "cancelled", "c", "before it was due"),
    )  # fmt: skip
    assert [(s.job, s.name, s.end_us / US, s.ended) for s in stages.until(99 * US) if s.ended] == [
        ("b", "preparing", 3, "failed"), ("a", "queued", 8, "cancelled"),
    ]  # fmt: skip


def test_a_stage_that_has_not_ended_lasts_until_now() -> None:
    stages = after((1, "submitted", "a", ""), (2, "preparing", "a", "compiling plain jit's step, to know its peak"))
    assert stages.until(5 * US)[-1] == Stage("compiling", "a", "compiling plain jit's step, to know its peak", 2 * US, 5 * US)


def test_a_job_of_the_same_name_begins_anew() -> None:
    stages = after(
        (0, "submitted", "a", ""), (1, "cancelled", "a", ""), (5, "submitted", "a", ""), (6, "started", "a", ""),
    )  # fmt: skip
    assert [(s.begin_us / US, s.end_us / US, s.ended) for s in stages.until(99 * US)] == [(0, 1, "cancelled"), (5, 6, None)]
