"""What happens to the jobs of a cluster: events in, instructions out. Small cases are explored in all orders of events."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from tensile_jax.ray.records import (
    AskOutline,
    Device,
    DeviceId,
    DeviceJoined,
    DeviceLost,
    Due,
    Event,
    Instruction,
    JobNews,
    Kind,
    NewJob,
    Outlined,
    Release,
    Report,
    Start,
    StartAfter,
    Steer,
    Submitted,
    Wished,
)
from tensile_jax.ray.scheduler import MOST_DEATHS, ClusterState, refuse_wish, step
from tests.ray.profiles import CPU, device, outline

A, B = DeviceId("a"), DeviceId("b")


def after(*events: Event, state: ClusterState | None = None) -> tuple[ClusterState, list[Instruction]]:
    """The state after these events, and the instructions of the last of them, without reports."""
    state, instructions = state or ClusterState(), []
    for event in events:
        state, instructions = step(state, event)
    return state, [one for one in instructions if not isinstance(one, Report)]


def jobs(*names: str, on: tuple[str, ...] = (), **fields: Any) -> Submitted:
    return Submitted(tuple(replace(NewJob(name, "net", 10), **fields) for name in names), tuple(map(device, on)))


def news(job: str, kind: str, *, at: str = "a", attempt: int = 1, step: int = 0) -> JobNews:
    return JobNews(DeviceId(at), job, attempt, kind, step)  # pyright: ignore[reportArgumentType] # a name of an event


def outlined(source: str = "net", kind: Kind = CPU, *, neighbours: int = 1, **fields: Any) -> Outlined:
    return Outlined(source, neighbours, kind, outline(**{"peak": 20, **fields}))


OUTLINED = outlined()
BEGIN = (jobs("x", "y", on=(A, B)),)
RUNNING = (*BEGIN, OUTLINED)


def test_jobs_that_train_the_same_thing_are_outlined_once_for_each_kind_of_device() -> None:
    state, asked = after(jobs("x", "y", on=(A, B)))
    assert asked == [AskOutline("net", 1, CPU, A)]
    _, asked = after(DeviceJoined(device("c", kind=Kind("gpu"))), state=state)
    assert asked == [AskOutline("net", 1, Kind("gpu"), DeviceId("c"))]


def test_each_device_outlines_one_job_at_a_time() -> None:
    submitted = Submitted(tuple(NewJob(name, name, 10) for name in "wxyz"), (device("a"), device("b")))
    state, asked = after(submitted)
    assert asked == [AskOutline("w", 2, CPU, A), AskOutline("x", 2, CPU, B)]
    state, asked = after(outlined("x", neighbours=2), state=state)
    assert asked == [AskOutline("y", 2, CPU, B), Start("x", A, 1, 100)]


def test_an_outline_that_a_device_was_making_is_asked_of_another_one() -> None:
    _, asked = after(jobs("x", "y", on=(A, B)), DeviceLost(A, "killed"))
    assert asked == [AskOutline("net", 1, CPU, B)]


def test_jobs_are_spread_over_the_devices() -> None:
    state, started = after(*RUNNING)
    assert started == [Start("x", A, 1, 100), Start("y", B, 1, 100)]
    assert [job.phase for job in state.jobs] == ["placed", "placed"]


def test_how_many_jobs_share_a_device_depends_on_the_submission_and_not_on_who_is_there() -> None:
    state, _ = after(jobs("x", "y", "z", "w", "v", on=(A, B)))
    assert {job.neighbours for job in state.jobs} == {3}
    state, _ = after(*RUNNING, jobs("z"))
    assert [job.neighbours for job in state.jobs] == [1, 1, 1]
    state, _ = after(jobs("x", on=(A,), neighbours=7))
    assert [job.neighbours for job in state.jobs] == [7]  # as when it was first submitted


def test_a_job_whose_device_dies_goes_on_elsewhere() -> None:
    state, started = after(*RUNNING, news("x", "checkpointed", step=5), news("x", "step", step=7), DeviceLost(A, "killed"))
    assert started == [Start("x", B, 2, 100)]
    job = state.job("x")
    assert job is not None
    assert (job.step, job.saved, job.deaths) == (5, 5, 1)


def test_no_job_goes_from_one_device_of_a_dead_node_to_the_next() -> None:
    state, started = after(*RUNNING, DeviceJoined(device("c")), DeviceLost(A, "its node has died", (B,)))
    assert started == [Start("x", DeviceId("c"), 2, 100), Start("y", DeviceId("c"), 2, 100)]
    assert [job.deaths for job in state.jobs] == [1, 1]


def test_news_of_an_earlier_attempt_change_nothing() -> None:
    state, _ = after(*RUNNING, DeviceLost(A, "cut off"))
    for late in (news("x", "finished", at="a"), news("x", "finished", at="b", attempt=1)):
        assert step(state, late) == (state, [])


def test_a_job_waits_while_there_is_no_device() -> None:
    state, started = after(*RUNNING, DeviceLost(A, "killed"), DeviceLost(B, "killed"))
    assert started == []
    assert [job.phase for job in state.jobs] == ["waiting", "waiting"]
    _, started = after(DeviceJoined(device("c")), state=state)
    assert started == [Start("x", DeviceId("c"), 3, 100), Start("y", DeviceId("c"), 2, 100)]


def test_a_job_under_which_devices_die_again_and_again_fails() -> None:
    state, instructions = after(jobs("x", on=("0",)), OUTLINED)
    for number in range(1, MOST_DEATHS + 1):
        state, _ = step(state, DeviceLost(DeviceId(str(number - 1)), "out of memory"))
        state, instructions = step(state, DeviceJoined(device(str(number))))
    job = state.job("x")
    assert job is not None
    assert job.phase == "failed"
    assert "3 devices have died while it ran, the last one: out of memory" in job.note
    assert instructions[-1] == Release()


def test_a_job_that_makes_checkpoints_survives_any_number_of_deaths() -> None:
    state, _ = after(jobs("x", on=("0",)), OUTLINED)
    for number in range(1, 3 * MOST_DEATHS):
        state, _ = step(state, news("x", "checkpointed", at=str(number - 1), attempt=number, step=number))
        state, _ = step(state, DeviceLost(DeviceId(str(number - 1)), "killed"))
        state, _ = step(state, DeviceJoined(device(str(number))))
        assert state.jobs[0].phase == "placed"


def test_a_job_that_fits_nowhere_is_refused_and_the_devices_are_released() -> None:
    state, instructions = after(jobs("x", on=(A,)), outlined(peak=None, floor=300))
    assert state.jobs[0].phase == "failed"
    assert "The smallest that works is about 300 B" in state.jobs[0].note
    assert instructions == [Release()]


def test_a_job_that_cannot_be_made_fails() -> None:
    state, _ = after(jobs("x", on=(A,)), Outlined("net", 1, CPU, "no module"))
    assert (state.jobs[0].phase, state.jobs[0].note) == ("failed", "no module")


def test_a_job_that_fits_beside_nobody_waits_and_is_not_overtaken_for_ever() -> None:
    small, large = outlined("s", neighbours=10, host=4), outlined("l", neighbours=10, host=10)
    submitted = (NewJob("0", "s", 9), NewJob("large", "l", 9), *(NewJob(str(n), "s", 9) for n in range(1, 9)))
    state, started = after(Submitted(submitted, (device("a", host=10),)), small, large)
    assert [job.name for job in state.jobs if job.phase == "placed"] == ["0", "1"]
    for number in range(5):
        state, started = after(news(str(number), "finished"), state=state)
    assert started == []  # `large` was overtaken four times
    state, started = after(news("5", "finished"), state=state)
    assert started == [Start("large", A, 1, 100)]


def test_a_job_starts_after_another_or_when_it_is_due() -> None:
    submitted = Submitted(
        (NewJob("x", "net", 9), NewJob("y", "net", 9, start=StartAfter("x", 3)), NewJob("z", "net", 9, start=5.0)),
        (device("a"),),
    )
    state, started = after(submitted, outlined(neighbours=3, limit=50))
    assert [one.job for one in started if isinstance(one, Start)] == ["x"]
    state, started = after(news("x", "step", step=3), state=state)
    assert started == [Start("y", A, 1, 50)]
    _, started = after(Due("z"), state=state)
    assert started == [Start("z", A, 1, 50)]


def test_wishes_go_to_the_device_or_hold_a_job_back() -> None:
    state, steered = after(*RUNNING, Wished("x", "pause"))
    assert steered == [Steer("x", A, "pause")]
    state, started = after(*BEGIN, Wished("x", "pause"), OUTLINED)
    assert started == [Start("y", A, 1, 100)]
    _, started = after(Wished("x", "run"), state=state)
    assert started == [Start("x", B, 1, 100)]


def test_a_paused_job_whose_device_dies_stays_paused() -> None:
    state, started = after(*RUNNING, Wished("x", "pause"), news("x", "paused", step=4), DeviceLost(A, "killed"))
    assert started == []
    _, started = after(Wished("x", "run"), state=state)
    assert started == [Start("x", B, 2, 100)]


def test_a_job_that_is_to_stop_does_not_go_on_elsewhere() -> None:
    state, _ = after(*RUNNING, Wished("x", "stop"), DeviceLost(A, "killed"))
    assert state.jobs[0].phase == "cancelled"


def test_wishes_for_jobs_that_are_unknown_or_have_ended_are_refused() -> None:
    state, _ = after(*RUNNING, news("x", "finished", step=10))
    with pytest.raises(ValueError, match="'q' is not known on this cluster. There are: x, y."):
        refuse_wish(state, "q", "pause")
    with pytest.raises(ValueError, match="x is finished; it cannot be paused."):
        refuse_wish(state, "x", "pause")
    refuse_wish(state, "y", "stop")


GROUP = Kind("cpu x 4")
GROUP_OF_4 = device("group", kind=GROUP, devices=4)


def test_a_sharded_job_is_outlined_and_placed_on_groups_only() -> None:
    submitted = Submitted((NewJob("large", "l", 9, devices=4), NewJob("small", "s", 9)), (device("a"), GROUP_OF_4))
    state, asked = after(submitted)
    assert asked == [AskOutline("l", 1, GROUP, DeviceId("group")), AskOutline("s", 1, CPU, A)]
    state, started = after(outlined("s"), state=state)
    assert started == []  # what it needs in a group is not known yet
    state, started = after(outlined("l", GROUP), state=state)
    assert started == [AskOutline("s", 1, GROUP, DeviceId("group")), Start("large", DeviceId("group"), 1, 100)]
    _, started = after(outlined("s", GROUP), state=state)
    assert started == [Start("small", A, 1, 100)]


def test_a_small_job_runs_beside_a_sharded_one_if_the_runtime_admits_it() -> None:
    submitted = Submitted((NewJob("large", "l", 9, devices=4), NewJob("small", "s", 9)), (GROUP_OF_4,))
    state, _ = after(submitted, *(outlined(source, GROUP, neighbours=2) for source in "ls"))
    assert [(job.phase, job.device) for job in state.jobs] == [("placed", "group"), ("placed", "group")]
    tight = Submitted(submitted.jobs, (replace(GROUP_OF_4, host_budget_bytes=5.0),))
    state, _ = after(tight, *(outlined(source, GROUP, neighbours=2, host=4) for source in "ls"))
    assert [(job.phase, job.device) for job in state.jobs] == [("placed", "group"), ("waiting", None)]


def test_a_sharded_job_whose_group_dies_goes_on_in_another_group() -> None:
    other = device("other", kind=GROUP, devices=4)
    running = (jobs("x", devices=4), DeviceJoined(device("a")), DeviceJoined(GROUP_OF_4), DeviceJoined(other))
    state, started = after(*running, outlined(kind=GROUP))
    assert started == [Start("x", DeviceId("group"), 1, 100)]
    _, started = after(news("x", "checkpointed", at="group", step=5), DeviceLost(DeviceId("group"), "killed"), state=state)
    assert started == [Start("x", DeviceId("other"), 2, 100)]


def test_a_sharded_job_waits_for_a_group_and_does_not_hold_up_the_jobs_behind_it() -> None:
    small = tuple(NewJob(str(number), "s", 9) for number in range(8))
    state, _ = after(Submitted((NewJob("large", "l", 9, devices=4), *small), (device("a"),)), outlined("s", neighbours=9))
    assert [job.phase for job in state.jobs] == ["waiting", *["placed"] * 8]
    assert state.jobs[0].note == "waits: there is no group of 4 devices for it now"
    state, asked = after(DeviceJoined(GROUP_OF_4), state=state)
    assert asked == [AskOutline("l", 9, GROUP, DeviceId("group"))]
    state, started = after(outlined("l", GROUP, neighbours=9), state=state)
    assert Start("large", DeviceId("group"), 1, 100) in started


def test_a_sharded_job_that_fits_in_no_group_is_refused_though_single_devices_are_there() -> None:
    state, _ = after(jobs("x", devices=4), DeviceJoined(device("a")), DeviceJoined(GROUP_OF_4), outlined(kind=GROUP, peak=None))
    assert state.jobs[0].phase == "failed"
    assert "x fits on no device: no plan keeps the budget of 100 B a device" in state.jobs[0].note


def test_a_name_may_be_used_again_when_its_job_has_ended() -> None:
    state, _ = after(jobs("x", on=(A,)), OUTLINED, news("x", "finished", step=10))
    state, _ = after(jobs("x", attempt=1), state=state)
    assert [(job.name, job.phase, job.attempt) for job in state.jobs] == [("x", "preparing", 1)]


# -- all orders of events -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class World:
    """The scheduler's state, what its instructions have begun, and how often what may happen still happens."""

    state: ClusterState = ClusterState()
    asked: frozenset[tuple[str, int, Kind, DeviceId]] = frozenset()
    running: frozenset[tuple[str, int, DeviceId]] = frozenset()
    devices: frozenset[DeviceId] = frozenset()
    attempts: tuple[tuple[str, int], ...] = ()
    ended: frozenset[str] = frozenset()
    released: bool = False
    late: Device = field(default_factory=lambda: device("late"))  # the device that joins later
    losses: int = 2
    joins: int = 1
    wishes: int = 2

    def on(self, event: Event, **fields: int) -> "World":
        """What follows from an event; checks what must always hold."""
        state, instructions = step(self.state, event)
        new = replace(self, state=state, **fields)
        if isinstance(event, DeviceJoined):
            new = replace(new, devices=new.devices | {event.device.id})
        if isinstance(event, Submitted):
            new = replace(new, devices=frozenset(device.id for device in event.devices))
        for one in instructions:
            match one:
                case AskOutline(source, neighbours, kind, at):
                    assert at in new.devices
                    new = replace(new, asked=new.asked | {(source, neighbours, kind, at)})
                case Start(job, at, attempt):
                    assert at in new.devices
                    held, record = state.device(at), state.job(job)
                    assert held is not None and record is not None
                    assert held.devices >= record.asked.devices
                    assert job not in new.ended
                    assert all(name != job for name, _, _ in new.running), "it runs twice"
                    assert all(other < attempt for name, other in new.attempts if name == job), "the attempt is not new"
                    new = replace(new, running=new.running | {(job, attempt, at)}, attempts=(*new.attempts, (job, attempt)))
                case Steer(job, at):
                    assert any((name, where) == (job, at) for name, _, where in new.running)
                case Report(kind, job) if kind in ("finished", "failed", "cancelled"):
                    assert job not in new.ended, "it ended twice"
                    new = replace(new, ended=new.ended | {job})
                case Release():
                    assert not new.released
                    assert new.ended == {job.name for job in state.jobs}
                    assert not new.running
                    new = replace(new, released=True, devices=frozenset())
                case _:
                    pass
        return new

    def next(self) -> Iterator["World"]:
        """What may happen now."""
        for source, neighbours, kind, at in self.asked:
            left = replace(self, asked=self.asked - {(source, neighbours, kind, at)})
            yield left.on(Outlined(source, neighbours, kind, NEEDS))
        for job, attempt, at in self.running:
            record = self.state.job(job)
            assert record is not None
            ended = "cancelled" if record.wish == "stop" else "finished"
            yield replace(self, running=self.running - {(job, attempt, at)}).on(news(job, ended, at=at, attempt=attempt))
            if record.step == 0:
                yield self.on(news(job, "checkpointed", at=at, attempt=attempt, step=1))
            if record.wish == "pause" and not record.paused:
                yield self.on(news(job, "paused", at=at, attempt=attempt, step=record.step))
        if self.losses:
            for at in self.devices:
                left = replace(
                    self,
                    devices=self.devices - {at},
                    asked=frozenset(one for one in self.asked if one[3] != at),
                    running=frozenset(one for one in self.running if one[2] != at),
                )
                yield left.on(DeviceLost(at, "killed"), losses=self.losses - 1)
        if self.joins and not self.released:
            yield self.on(DeviceJoined(self.late), joins=self.joins - 1)
        if self.wishes:
            for wish in ("pause", "run", "stop"):
                yield self.on(Wished("x", wish), wishes=self.wishes - 1)


NEEDS = outline(50)


@pytest.mark.parametrize(
    ("needed", "devices", "late"),
    [(1, (device("a"), device("b")), device("late")), (4, (device("a"), GROUP_OF_4), device("late", kind=GROUP, devices=4))],
    ids=["two devices", "a device and a group"],
)
def test_in_every_order_of_events_each_job_ends_once_and_runs_at_most_once_at_a_time(
    needed: int, devices: tuple[Device, ...], late: Device
) -> None:
    submitted = (NewJob("x", "net", 10, devices=needed), NewJob("y", "small" if needed > 1 else "net", 10, start=StartAfter("x")))
    first = World(late=late, wishes=2 if needed == 1 else 1).on(Submitted(submitted, devices))
    seen: set[str] = {repr(first)}
    left = [first]
    ends = 0
    while left:
        world = left.pop()
        choices = list(world.next())
        for choice in choices:
            if (key := repr(choice)) not in seen:
                seen.add(key)
                left.append(choice)
        busy = world.running or world.asked
        if not busy and not world.released:  # nothing is under way: then only the user, or a device, can be waited for
            most = max((one.devices for one in world.state.devices), default=0)
            assert any(job.wish == "pause" or job.asked.devices > most for job in world.state.jobs if not job.has_ended)
        ends += world.released
    assert ends > 10
