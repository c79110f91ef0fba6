"""What a job's events come to, and when a job of a file is due."""

from tensile_jax.cli.jobs_file import JobEntry
from tensile_jax.cli.lobby import Lobby
from tensile_jax.cli.start_after import AfterJob
from tensile_jax.cli.tally import Tally
from tensile_jax.runtime_records import EventName, JobEvent


def event(kind: EventName, time_s: float, step: int, **values: float) -> JobEvent:
    return JobEvent(time_s, kind, "cnn", step, f"{kind}!", values)


def entry(name: str, start_after: float | AfterJob) -> JobEntry:
    return JobEntry(f"jobs.toml, line 1: {name}", name, "mlp", None, {}, 10, 1.0, start_after, 1.0, None, None, "thread", "auto")


def test_a_tally_counts_the_earlier_parts_of_a_resumed_run() -> None:
    tally = Tally()
    for one in (
        event("submitted", 1.0, 0), event("step", 2.0, 1, loss=3.0), event("step", 3.0, 2, loss=2.0), event("cancelled", 4.0, 2),
        event("submitted", 0.5, 1), event("step", 1.5, 2, loss=2.5),
    ):  # fmt: skip
        tally.hear(one)
    assert (tally.step, tally.loss_first, tally.loss_last, tally.time_s, tally.state) == (2, 3.0, 2.5, 4.0, None)
    tally.hear(event("failed", 2.5, 2))
    assert (tally.time_s, tally.state, tally.note) == (5.0, "failed", "failed!")


def test_a_job_that_never_came_took_no_time() -> None:
    tally = Tally()
    tally.hear(event("cancelled", 60.0, 0))
    assert (tally.time_s, tally.state) == (0.0, "cancelled")


def test_jobs_are_due_by_the_clock_or_by_how_far_another_is() -> None:
    lobby = Lobby(
        [entry("now", 0.0), entry("later", 5.0), entry("third", AfterJob("now", 3)), entry("last", AfterJob("now", None))]
    )
    tallies = {name: Tally() for name in ("now", "later", "third", "last")}

    def due(time_s: float) -> list[str]:
        return [one.name for one in lobby.take_due(time_s, tallies)]

    assert [lobby.state_of(name) for name in tallies] == [
        ("queued", "starts at once"), ("queued", "starts 5 s after the run"),
        ("queued", "starts after step 3 of now"), ("queued", "starts after now"),
    ]  # fmt: skip
    assert (due(0.0), lobby.next_start_s()) == (["now"], 5.0)
    assert lobby.state_of("now") == ("preparing", "is being made")
    tallies["now"].step = 3
    assert (due(4.0), due(5.0), lobby.next_start_s()) == (["third"], ["later"], None)
    tallies["now"].state = "failed"
    assert due(6.0) == ["last"]


def test_a_job_for_which_another_ended_too_early_is_due_then() -> None:
    lobby, tallies = Lobby([entry("b", AfterJob("a", 9))]), {"a": Tally(step=4), "b": Tally()}
    assert lobby.take_due(1.0, tallies) == []
    tallies["a"].state = "cancelled"
    assert [one.name for one in lobby.take_due(1.0, tallies)] == ["b"]


def test_who_is_cancelled_while_being_made_is_found_out_afterwards() -> None:
    lobby = Lobby([entry("a", 0.0), entry("b", 9.0)])
    lobby.take_due(0.0, {})
    assert (lobby.cancel("a"), lobby.cancel("b"), lobby.cancel("b")) == ("when made", "at once", "not here")
    assert (lobby.leave("a"), lobby.state_of("a"), lobby.clear()) == (True, None, [])
