"""What a job's events come to, and when a job of a file is due."""

from tensile_jax.cli.jobs_file import AfterJob, JobEntry
from tensile_jax.cli.run.pending_jobs import JobProgress, PendingJobs
from tensile_jax.runtime_records import EventName, JobEvent


def event(kind: EventName, time_s: float, step: int, **values: float) -> JobEvent:
    return JobEvent(time_s, kind, "cnn", step, f"{kind}!", values)


def entry(name: str, start_after: float | AfterJob) -> JobEntry:
    return JobEntry(
        f"jobs.toml, line 1: {name}", name, "mlp", None, {}, 10, 1.0, start_after, 1.0, None, None, None, "thread", "auto"
    )


def test_progress_counts_the_earlier_parts_of_a_resumed_run() -> None:
    one = JobProgress()
    for each in (
        event("submitted", 1.0, 0), event("step", 2.0, 1, loss=3.0), event("step", 3.0, 2, loss=2.0), event("cancelled", 4.0, 2),
        event("submitted", 0.5, 1), event("step", 1.5, 2, loss=2.5),
    ):  # fmt: skip
        one.add(each)
    assert (one.step, one.loss_first, one.loss_last, one.time_s, one.state) == (2, 3.0, 2.5, 4.0, None)
    one.add(event("failed", 2.5, 2))
    assert (one.time_s, one.state, one.note) == (5.0, "failed", "failed!")


def test_a_job_that_never_came_took_no_time() -> None:
    one = JobProgress()
    one.add(event("cancelled", 60.0, 0))
    assert (one.time_s, one.state) == (0.0, "cancelled")


def test_jobs_are_due_by_the_clock_or_by_how_far_another_is() -> None:
    pending = PendingJobs(
        [entry("now", 0.0), entry("later", 5.0), entry("third", AfterJob("now", 3)), entry("last", AfterJob("now", None))]
    )
    progress = {name: JobProgress() for name in ("now", "later", "third", "last")}

    def due(time_s: float) -> list[str]:
        return [one.name for one in pending.take_due(time_s, progress)]

    assert [pending.state_of(name) for name in progress] == [
        ("queued", "starts at once"), ("queued", "starts 5 s after the run"),
        ("queued", "starts after step 3 of now"), ("queued", "starts after now"),
    ]  # fmt: skip
    assert (due(0.0), pending.next_start_s()) == (["now"], 5.0)
    assert pending.state_of("now") == ("preparing", "making its state and batches")
    progress["now"].step = 3
    assert (due(4.0), due(5.0), pending.next_start_s()) == (["third"], ["later"], None)
    progress["now"].state = "failed"
    assert due(6.0) == ["last"]


def test_a_job_for_which_another_ended_too_early_is_due_then() -> None:
    pending, progress = PendingJobs([entry("b", AfterJob("a", 9))]), {"a": JobProgress(step=4), "b": JobProgress()}
    assert pending.take_due(1.0, progress) == []
    progress["a"].state = "cancelled"
    assert [one.name for one in pending.take_due(1.0, progress)] == ["b"]


def test_who_is_cancelled_while_being_made_is_found_out_afterwards() -> None:
    pending = PendingJobs([entry("a", 0.0), entry("b", 9.0)])
    pending.take_due(0.0, {})
    assert (pending.cancel("a"), pending.cancel("b"), pending.cancel("b")) == ("when made", "at once", "not pending")
    assert (pending.made("a"), pending.state_of("a"), pending.clear()) == (True, None, [])
