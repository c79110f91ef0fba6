"""Decides what happens to the jobs of a cluster, as a pure state machine: `step` maps (state, event) to (state, instructions).

    preparing -> waiting -> placed -> finished | failed | cancelled
                    ^          |
                    +----------+   the job's device was lost: the job goes on elsewhere from its latest checkpoint

A job can fail or be cancelled in each of the first three phases. While it is *preparing*, one device of each kind (such as one
model of GPU) plans the job, and answers how much memory the plan needs on that kind of device. A *waiting* job is not yet due,
or was paused by the user while no device had it, or fits on no device. Waiting jobs are tried in the order in which they were
submitted. While a job fits on no device, at most `MOST_OVERTAKINGS` later jobs are placed before it. `placement.py` decides on
which device a job is *placed*. A placed job that the user pauses stays placed, and its device pauses it.

A "device" is one device or a group of them. A job that needs several devices goes only to a group with at least as many. While
there is no such group, the job waits, without delaying the jobs behind it.

This module uses no Ray, JAX, clock or thread. Whatever the order of the events, the following holds:

    - A job ends exactly once, and is on at most one device.
    - Each start of a job has a higher attempt number than the ones before. News of an earlier attempt changes nothing.
    - A job fails when its device has died `MOST_DEATHS` times without a new checkpoint in between, since the job may be what
      kills the devices.
    - The instruction `Release`, which ends the devices' actors, comes exactly when the last job has ended.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from tensile_jax.exec.controller.fair_share import MOST_OVERTAKINGS
from tensile_jax.plan.multi_job.memory_profile import MemoryProfile
from tensile_jax.ray.placement import Place, Resident, choose_place, neighbours_of, refusal
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
    Outline,
    Outlined,
    Release,
    Report,
    Start,
    StartAfter,
    Steer,
    Submitted,
    Wish,
    Wished,
)
from tensile_jax.story import Story

Phase = Literal["preparing", "waiting", "placed", "finished", "failed", "cancelled"]
ENDED: frozenset[Phase] = frozenset({"finished", "failed", "cancelled"})

MOST_DEATHS = 3


_Key = tuple[str, int, Kind]
"""What an outline depends on: what is trained, how many neighbours it has, and the kind of device."""


@dataclass(frozen=True, slots=True)
class JobRecord:
    """Where a job stands.

    Attributes:
        neighbours: how many jobs share a device on average, which decides for which limit the job is planned.
        due: whether its time has come, if it starts after some seconds.
        attempt: the number of its latest start.
        paused: whether its device has paused it.
        saved: the step of its latest checkpoint, as far as that is known.
        deaths: how many of its devices have died since that checkpoint.
        overtaken: how many jobs were placed while it waited for a place.
    """

    asked: NewJob
    neighbours: int
    phase: Phase = "preparing"
    wish: Wish = "run"
    due: bool = True
    device: DeviceId | None = None
    attempt: int = 0
    paused: bool = False
    step: int = 0
    saved: int = 0
    deaths: int = 0
    overtaken: int = 0
    note: str = ""

    @property
    def name(self) -> str:
        """The job's name."""
        return self.asked.name

    @property
    def has_ended(self) -> bool:
        """Whether nothing more happens to the job."""
        return self.phase in ENDED


@dataclass(frozen=True, slots=True)
class ClusterState:
    """All that the scheduler knows. `asked` are the outlines that a device is making, and `story` are the last events."""

    devices: tuple[Device, ...] = ()
    jobs: tuple[JobRecord, ...] = ()
    outlines: Mapping[_Key, Outline | str] = field(default_factory=dict[_Key, Outline | str])
    asked: Mapping[_Key, DeviceId] = field(default_factory=dict[_Key, DeviceId])
    story: Story = field(default=Story(), compare=False, repr=False)

    def job(self, name: str) -> JobRecord | None:
        """The job of that name."""
        return next((job for job in self.jobs if job.name == name), None)

    def outline(self, job: JobRecord, kind: Kind) -> Outline | str | None:
        """What a job needs on a kind of device, or why it cannot be made; None if that is not known yet."""
        return self.outlines.get((job.asked.source, job.neighbours, kind))

    def memory(self, job: JobRecord, kind: Kind) -> MemoryProfile | None:
        """The memory of a job's plan on a kind of device; None if there is no plan, or it is not known."""
        outline = self.outline(job, kind)
        return outline.memory if isinstance(outline, Outline) else None

    def device(self, id: DeviceId) -> Device | None:
        """The device of that name, if it has joined and was not lost."""
        return next((device for device in self.devices if device.id == id), None)


def refuse_wish(state: ClusterState, name: str, wish: Wish) -> None:
    """Raises ValueError if there is no such job, or it has ended."""
    job = state.job(name)
    if job is None:
        known = ", ".join(one.name for one in state.jobs) or "none"
        raise ValueError(f"job {name!r} is not known on this cluster. There are: {known}.")
    if job.has_ended:
        done = {"run": "resumed", "pause": "paused", "stop": "cancelled"}[wish]
        raise ValueError(f"{name} is {job.phase}; it cannot be {done}.")


def step(state: ClusterState, event: Event) -> tuple[ClusterState, list[Instruction]]:
    """The state after `event`, and the instructions to carry out now, in their order. An error quotes the last events."""
    change = _Change(replace(state, story=state.story.with_event(event)))
    try:
        change.receive(event)
        change.settle()
    except Exception as error:
        change.state.story.add_to(error)
        raise
    return change.state, change.instructions


class _Change:
    """The state while one event is handled, and the instructions so far."""

    __slots__ = ("instructions", "state")

    def __init__(self, state: ClusterState) -> None:
        self.state = state
        self.instructions: list[Instruction] = []

    # -- events -----------------------------------------------------------------------------------------------------------------

    def receive(self, event: Event) -> None:
        state = self.state
        match event:
            case DeviceJoined(device):
                self.state = replace(state, devices=(*state.devices, device))
                self.report("device_joined", device=device.id)
            case DeviceLost(id, why, others):
                self.lose((id, *others), why)
            case Submitted(jobs, devices):
                self.state = replace(state, devices=(*state.devices, *devices))
                self.take(jobs)
                for device in devices:
                    self.report("device_joined", device=device.id)
            case Outlined(source, neighbours, kind, outline):
                new = (source, neighbours, kind)
                asked = {key: device for key, device in state.asked.items() if key != new}
                self.state = replace(state, asked=asked, outlines={**state.outlines, new: outline})
            case JobNews():
                self.hear(event)
            case Due(name):
                if state.job(name) is not None:
                    self.put(name, due=True)
            case Wished(name, wish):
                self.wish(name, wish)

    def take(self, jobs: tuple[NewJob, ...]) -> None:
        names = {job.name for job in jobs}
        going = any(
            not job.has_ended for job in self.state.jobs
        )  # otherwise these jobs begin anew, and the earlier ones are over
        kept = tuple(job for job in self.state.jobs if going and job.name not in names)  # jobs of these names have ended
        asked, held = [job.devices for job in jobs], [device.devices for device in self.state.devices]
        new = tuple(
            JobRecord(
                job,
                job.neighbours or neighbours_of(job.devices, asked, held),
                attempt=job.attempt,
                due=not isinstance(job.start, float),
            )
            for job in jobs
        )
        self.state = replace(self.state, jobs=(*kept, *new))
        for job in new:
            self.report("submitted", job)

    def lose(self, ids: tuple[DeviceId, ...], why: str) -> None:
        gone = [device.id for device in self.state.devices if device.id in ids]
        asked = {key: device for key, device in self.state.asked.items() if device not in gone}
        devices = tuple(device for device in self.state.devices if device.id not in gone)
        self.state = replace(self.state, devices=devices, asked=asked)
        for id in gone:
            self.report("device_lost", device=id, note=why)
        for job in self.state.jobs:
            if job.phase != "placed" or job.device is None or job.device not in gone:
                continue
            deaths = job.deaths + 1
            lost = self.put(job.name, phase="waiting", device=None, paused=False, step=job.saved, deaths=deaths)
            if job.wish == "stop":
                self.end(lost, "cancelled", f"its device was lost: {why}")
            elif deaths >= MOST_DEATHS:
                story = f"{deaths} devices have died while it ran, the last one: {why}"
                self.end(lost, "failed", f"{story}. Its latest checkpoint has {job.saved} steps; look at the log of the node")
            else:
                self.report("lost", lost, note=f"goes on elsewhere: {why}", device=job.device)

    def hear(self, news: JobNews) -> None:
        job = self.state.job(news.job)
        if job is None or job.phase != "placed" or (job.device, job.attempt) != (news.device, news.attempt):
            return
        match news.kind:
            case "finished" | "failed" | "cancelled":
                self.end(self.put(job.name, step=news.step), news.kind, news.note, news.values)
                return
            case "checkpointed":
                job = self.put(job.name, saved=max(job.saved, news.step), deaths=0 if news.step > job.saved else job.deaths)
            case "paused" | "resumed":
                job = self.put(job.name, paused=news.kind == "paused")
            case _:
                pass
        job = self.put(job.name, step=news.step, note=news.note if news.kind != "step" else job.note)
        if news.kind != "submitted":  # the coordinator has said so already
            self.report(news.kind, job, note=news.note, values=news.values)

    def wish(self, name: str, wish: Wish) -> None:
        job = self.state.job(name)
        if job is None or job.has_ended or job.wish == "stop" or (job.wish == wish and job.phase != "placed"):
            return
        job = self.put(name, wish=wish)
        if job.device is not None:
            self.instructions.append(Steer(name, job.device, wish))
        elif wish == "stop":
            self.end(job, "cancelled", "before it was placed")
        else:
            self.report("paused" if wish == "pause" else "resumed", job)

    # -- what follows -----------------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Ask for outlines, place or refuse jobs, and release the devices, wherever that is possible now."""
        self.ask_outlines()
        while self.place_jobs():  # a job that was refused may be the one after which another job starts
            pass
        if self.state.jobs and all(job.has_ended for job in self.state.jobs) and self.state.devices:
            self.state = replace(self.state, devices=(), outlines={}, asked={})
            self.instructions.append(Release())

    def ask_outlines(self) -> None:
        """Ask for the outlines that are missing, each device for one at a time. A job may be placed once all of its are there."""
        for job in self.state.jobs:
            if job.has_ended:
                continue
            kinds = dict.fromkeys(device.kind for device in self.devices_for(job))
            for kind in kinds:
                key = (job.asked.source, job.neighbours, kind)
                if key in self.state.outlines or key in self.state.asked:
                    continue
                busy = set(self.state.asked.values())
                free = next((one.id for one in self.state.devices if one.kind == kind and one.id not in busy), None)
                if free is not None:
                    self.state = replace(self.state, asked={**self.state.asked, key: free})
                    self.instructions.append(AskOutline(*key, free))
            known = all(self.state.outline(job, kind) is not None for kind in kinds)
            if self.state.devices and job.phase == "preparing" and known:
                self.put(job.name, phase="waiting")

    def place_jobs(self) -> bool:
        """Place the jobs that fit somewhere, and end those that never will. Returns whether a job has ended."""
        overtaken: list[str] = []  # jobs that fit nowhere now
        ended = False
        for job in self.state.jobs:
            if job.phase != "waiting" or job.wish != "run" or not self.may_start(job):
                continue
            if why := self.why_never(job):
                self.end(job, "failed", why)
                ended = True
                continue
            if any(one.overtaken >= MOST_OVERTAKINGS for name in overtaken if (one := self.state.job(name)) is not None):
                break
            places = [
                Place(device, self.residents(device), memory)
                for device in self.devices_for(job)
                if (memory := self.state.memory(job, device.kind)) is not None
            ]
            chosen = choose_place(places, job.asked.priority)
            if chosen is None:
                if places:
                    overtaken.append(job.name)
                where = "device" if job.asked.devices == 1 else f"group of {job.asked.devices} devices"
                note = f"waits: it fits beside the jobs of no {where}" if places else f"waits: there is no {where} for it now"
                if job.note != note:
                    self.report("queued", self.put(job.name, note=note), note=note)
                continue
            for name in overtaken:
                one = self.state.job(name)
                assert one is not None  # it was among the jobs a moment ago
                self.put(name, overtaken=one.overtaken + 1)
            outline = self.state.outline(job, next(place.device.kind for place in places if place.device.id == chosen))
            assert isinstance(outline, Outline)  # it has the memory by which the place was chosen
            placed = self.put(
                job.name, phase="placed", device=chosen, attempt=job.attempt + 1, overtaken=0, note="", paused=False
            )
            self.report("placed", placed, values={"limit_bytes": outline.limit_bytes})
            self.instructions.append(Start(job.name, chosen, placed.attempt, outline.limit_bytes))
        return ended

    def why_never(self, job: JobRecord) -> str:
        """Why a waiting job fits on none of the present devices even alone, or cannot be made.

        Empty if it fits on one, if that is not known, or if there is no device for it now.
        """
        needs: list[tuple[Device, Outline]] = []
        why = ""
        for device in self.devices_for(job):
            outline = self.state.outline(job, device.kind)
            if isinstance(outline, Outline):
                needs.append((device, outline))
            elif outline is None:
                return ""
            else:
                why = outline
        return refusal(job.name, needs) if needs else why

    def may_start(self, job: JobRecord) -> bool:
        """Whether the job's time has come, or that of the job after which it starts."""
        start = job.asked.start
        if not isinstance(start, StartAfter) or job.attempt > job.asked.attempt:
            return job.due
        other = self.state.job(start.job)
        return other is None or other.has_ended or (start.step is not None and other.step >= start.step)

    def devices_for(self, job: JobRecord) -> tuple[Device, ...]:
        """The devices that hold as many as the job needs."""
        return tuple(device for device in self.state.devices if device.devices >= job.asked.devices)

    def residents(self, device: Device) -> tuple[Resident, ...]:
        """The jobs that are on a device."""
        return tuple(
            Resident(memory, 0.0 if job.paused else job.asked.priority)
            for job in self.state.jobs
            if job.device == device.id and (memory := self.state.memory(job, device.kind)) is not None
        )

    # -- changes ----------------------------------------------------------------------------------------------------------------

    def put(self, name: str, **fields: Any) -> JobRecord:
        """Change the fields of a job."""
        jobs = tuple(replace(job, **fields) if job.name == name else job for job in self.state.jobs)
        self.state = replace(self.state, jobs=jobs)
        return next(job for job in jobs if job.name == name)

    def end(self, job: JobRecord, phase: Phase, note: str, values: dict[str, float] | None = None) -> None:
        ended = self.put(job.name, phase=phase, note=note)
        assert phase in ("finished", "failed", "cancelled")  # the phases in which a job ends
        self.report(phase, ended, note=note, values=values)
        self.put(job.name, device=None)

    def report(
        self,
        kind: Any,
        job: JobRecord | None = None,
        *,
        device: str = "",
        note: str = "",
        values: dict[str, float] | None = None,
    ) -> None:
        name, at, done = ("", "", 0) if job is None else (job.name, job.device or "", job.step)
        self.instructions.append(Report(kind, name, device or at, done, note, values or {}))
