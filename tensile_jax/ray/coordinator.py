"""Defines `Coordinator`, the Ray actor that knows all devices and jobs of a cluster, and carries out what the scheduler decides.

A "device" is what one `DeviceActor` holds: one device of a node, or a group of its devices, for jobs that are divided among
devices. The coordinator makes the groups when jobs are submitted while no other jobs run. The groups stay as they are until all
jobs have ended. The "shared place" is a folder or a URL for checkpoints, which every node must be able to read and write.

These messages are sent:

    submitter   -> coordinator    submit: jobs, budget, shared place             one submission at a time
    coordinator -> device         open: start a runtime on the device            after a check that the shared place is shared
    coordinator -> device         outline: trace a job, and plan it              answered by an `Outline`: what the job needs
    coordinator -> device         run: a job, with the number of the attempt     a Ray task that lasts while the job is there
    coordinator -> device         poll, again and again                          answered by news of the jobs; renews the lease
    coordinator <- Ray            the call of `poll` fails: the actor died       the device's jobs go on elsewhere
    terminal    -> coordinator    status; wish: pause, resume, cancel            passed on to the job's device
    submitter   -> coordinator    follow, again and again                        answered by events, in their order

The lease is the time for which a device's actor may live without a poll. The jobs' states are not sent: they are in checkpoints
in the shared place (`shared/`). `scheduler.py` makes all decisions. The coordinator turns each message into an event for the
scheduler, one at a time, and carries out the instructions that the scheduler returns. All of this happens in the actor's event
loop, so there is no lock.

There is one coordinator in a cluster. The coordinator is a detached actor on the head node, so it outlives the submitter. It
looks for nodes every few seconds. It uses a node that joins later. If a device's actor died but the node still lives, the
coordinator replaces the actor. When the last job has ended, the actors of the devices end. The coordinator stays, so that
`tensile status` can tell how the jobs have ended.
"""

import asyncio
import time
import uuid
from collections import deque
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from tensile_jax.ray.device_actor import ANSWER, DeviceActor, NotShared
from tensile_jax.ray.placement import divide_node, refuse_devices
from tensile_jax.ray.records import (
    AskOutline,
    ClusterEvent,
    ClusterStatus,
    Device,
    DeviceId,
    DeviceJoined,
    DeviceLost,
    DeviceSettings,
    DeviceStatus,
    Due,
    Event,
    Instruction,
    JobNews,
    NewJob,
    Outlined,
    Release,
    Report,
    Start,
    Steer,
    Submitted,
    Wish,
    Wished,
    Work,
)
from tensile_jax.ray.scheduler import ClusterState, JobRecord, refuse_wish, step
from tensile_jax.ray.shared.opened import open_place
from tensile_jax.ray.shared.place import SharedPlace
from tensile_jax.runtime_records import JobState, JobStatus, Status

NAMESPACE = "tensile"
NAME = "tensile:coordinator"
RESOURCE = "tensile_device"
"""The custom resource of Ray that counts the devices of a node without GPUs."""

_SCAN_S = 2.0  # between two looks at the nodes of the cluster
_OPEN_S = 120.0  # that the first device may take to start
_NEXT_S = 30.0  # that the next device may take to start after another one; it may be used by another program
_SILENT_S = 60.0  # after which an actor that does not answer is ended; a device that has lost the coordinator ends before
_STATUS_S = 5.0
_FOLLOW_S = 2.0  # that a submitter waits for events in one call
_ANSWER_S = 5.0  # that a file may take to be seen through a network file system
_MOST_FAILURES = 3  # of a device to start, after which it is left alone
_KEPT_EVENTS = 100_000

Handle = Any
"""Ray's handle of a `DeviceActor`. Each method of it has a method `remote`, which type checkers do not know."""

_SlotKey = tuple[str, int]
"""The id of a node in Ray, and the number of a device there, which is the first of a group."""


@dataclass(frozen=True, slots=True)
class _Slot:
    """What one actor holds, as Ray's resources say: a device of a node, or a group of `devices`.

    Attributes:
        name: `NODE/device-N`, or `NODE/devices-0-3`.
        of: how many devices of this sort the node has.
    """

    key: _SlotKey
    name: str
    gpu: bool
    devices: int
    of: int


@dataclass(frozen=True, slots=True)
class Followed:
    """The answer to `follow`: events, how many there were in all, and how many of the jobs that were named have not ended."""

    events: tuple[ClusterEvent, ...]
    seen: int
    going: int


class Coordinator:
    """The coordinator. Every method is called through Ray, and raises ValueError for a mistake of the caller."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._state = ClusterState()
        self._settings: DeviceSettings | None = None
        self._place: SharedPlace | None = None
        self._works: dict[str, Work] = {}
        self._sources: dict[str, Work] = {}
        self._losses: dict[str, float] = {}
        self._peaks: dict[str, int] = {}
        self._handles: dict[DeviceId, Handle] = {}
        self._opening: dict[_SlotKey, asyncio.Task[None]] = {}
        self._holders: dict[_SlotKey, DeviceId] = {}  # of the devices that are open
        self._born: dict[_SlotKey, int] = {}  # how many actors a device has had
        self._failures: dict[_SlotKey, list[str]] = {}
        self._unshared: dict[_SlotKey, str] = {}
        self._joined: list[Device] | None = None  # while the first devices are opened: those that are open
        self._tasks: set[asyncio.Task[None]] = set()
        self._session: set[asyncio.Task[None]] = set()
        self._events: deque[ClusterEvent] = deque(maxlen=_KEPT_EVENTS)
        self._reported = 0
        self._changed = asyncio.Event()
        self._one_at_a_time = asyncio.Lock()

    # -- what submitters and terminals ask --------------------------------------------------------------------------------------

    async def submit(
        self, settings: DeviceSettings, jobs: Sequence[NewJob], works: Mapping[str, Work], *, resume: bool
    ) -> int:  # fmt: skip
        """Take jobs, all or none. Returns the number of events so far.

        Raises:
            ValueError: a name is taken; a folder has checkpoints, and `resume` is false; other jobs run now with other settings;
                there is no device; no node has as many devices as are asked for; or the folder is not shared by all nodes.
        """
        async with self._one_at_a_time:
            place = await asyncio.to_thread(open_place, settings.shared)
            self._refuse_names(jobs)
            needed = {job.name: job.devices for job in jobs}
            self._refuse_settings(settings, needed)
            await asyncio.to_thread(_refuse_place, place, jobs, resume=resume)
            devices: Sequence[Device] = ()
            if self._settings is None:
                per_actor = settings.devices_per_actor or max(needed.values())
                self._settings, self._place = replace(settings, devices_per_actor=per_actor), place
                try:
                    devices = await self._open_all(needed, settings.devices_per_actor)
                except BaseException:
                    self._release()
                    raise
            found = await asyncio.to_thread(_with_past, place, jobs, resume=resume)
            self._works.update(works)
            self._sources.update({job.source: works[job.name] for job in jobs})
            began = self._reported
            self._step(Submitted(found, tuple(devices)))
            await self._keep_neighbours(place, {job.name for job in jobs})
            for job in jobs:
                if isinstance(job.start, float):
                    self._start_session(self._wait_for(job.name, job.start))
            return began

    async def follow(self, seen: int, names: Sequence[str]) -> Followed:
        """The events after the first `seen`; if there are none, this waits for some for two seconds."""
        if self._reported <= seen and self._going(names):
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), _FOLLOW_S)
        fresh = max(0, self._reported - seen)
        events = tuple(self._events)[-fresh:] if fresh else ()
        return Followed(events, self._reported, self._going(names))

    async def wish(self, job: str, wish: Wish) -> None:
        """Let a job run, pause, or stop. Raises ValueError: there is no such job, or it has ended."""
        refuse_wish(self._state, job, wish)
        self._step(Wished(job, wish))

    async def status(self) -> ClusterStatus:
        """How the devices and the jobs stand."""
        known = await asyncio.gather(*(self._status_of(device) for device in self._state.devices))
        on_devices = {job.name: job for status in known if status is not None for job in status.jobs}
        devices = tuple(
            DeviceStatus(
                name=device.id,
                kind=device.kind,
                budget_bytes=device.budget_bytes,
                device_bytes=0 if status is None else status.device_bytes,
                peak_bytes=0 if status is None else status.peak_bytes,
                host_bytes=0 if status is None else status.host_bytes,
                jobs=tuple(job.name for job in self._state.jobs if job.device == device.id),
                devices=device.devices,
            )
            for device, status in zip(self._state.devices, known, strict=True)
        )
        jobs = tuple(self._job_status(job, on_devices.get(job.name)) for job in self._state.jobs)
        return ClusterStatus(time.monotonic() - self._began, devices, jobs)

    # -- refusals ---------------------------------------------------------------------------------------------------------------

    def _refuse_names(self, jobs: Sequence[NewJob]) -> None:
        for job in jobs:
            known = self._state.job(job.name)
            if known is not None and not known.has_ended:
                at = f" on {known.device}" if known.device else ""
                raise ValueError(
                    f"name={job.name!r} is taken: a job of this name is {known.phase}{at}, at step {known.step} of "
                    f"{known.asked.steps}. Give this job another name, or cancel the other one."
                )

    def _refuse_settings(self, settings: DeviceSettings, needed: Mapping[str, int]) -> None:
        """Refuse a submission that wants other settings of devices on which jobs run now."""
        mine = self._settings
        if mine is None:
            return
        for argument, now, wanted in (
            ("checkpoints", mine.shared, settings.shared),
            ("budget", mine.budget, settings.budget),
            ("host_budget", mine.host_budget, settings.host_budget),
            ("device_profile", mine.device_profile, settings.device_profile),
            ("devices_per_actor", mine.devices_per_actor, settings.devices_per_actor),
        ):
            if now != wanted and not (argument == "devices_per_actor" and wanted is None):
                raise ValueError(
                    f"{argument}={wanted!r}: jobs run on this cluster now, with {argument}={now!r}. Pass the same, or wait until "
                    "they have ended."
                )
        held = mine.devices_per_actor or 1
        refuse_devices(
            needed, None, held,
            f"jobs run on this cluster now, and its actors hold {held} each. Wait until these jobs have ended",
        )  # fmt: skip

    # -- devices ----------------------------------------------------------------------------------------------------------------

    async def _open_all(self, needed: Mapping[str, int], per_actor: int | None) -> list[Device]:
        """Open all devices of the cluster, and go on to look for new ones. Returns those that are open, in the order of nodes.

        Raises:
            ValueError: the cluster has no devices; no node has enough of them; none of them could be opened; or the folder is not
                shared.
        """
        self._born.clear()
        self._failures.clear()
        self._unshared.clear()
        self._joined = []
        slots = await self._find_slots()
        if not slots:
            raise ValueError(
                "address: this cluster has no devices: its nodes have neither GPUs nor the resource "
                f"{RESOURCE}. Start the nodes with GPUs; or, to compute on CPUs, with: ray start --resources="
                f"'{{\"{RESOURCE}\": 2}}' ..."
            )
        most = max(slot.of for slot in slots)
        refuse_devices(needed, per_actor, most, f"no node of this cluster has more than {most}. Ask for at most {most}")
        until = time.monotonic() + _OPEN_S
        known = 0
        while time.monotonic() < until:
            self._open_missing(await self._find_slots())
            if not self._opening:
                break
            if len(self._joined) > known:
                known, until = len(self._joined), time.monotonic() + _NEXT_S
            await asyncio.wait(self._opening.values(), timeout=min(_SCAN_S, max(0.0, until - time.monotonic())))
        shared = "" if self._place is None else self._place.name
        if self._unshared:
            names = {slot.key: slot.name for slot in slots}
            node, why = next((names.get(key, key[0]), why) for key, why in self._unshared.items())
            raise ValueError(
                f"checkpoints={shared!r} is not shared by all nodes: {node}: {why}. Name a folder that is mounted at the same "
                'path on all nodes, or a URL that all nodes can open, such as "gs://bucket/runs".'
            )
        if not self._joined:
            reasons = [why for failures in self._failures.values() for why in failures[-1:]]
            why = reasons[0] if reasons else "other programs of this cluster use all of them"
            devices = sum(slot.devices for slot in slots)
            raise ValueError(
                f"address: none of the {devices} devices of this cluster could be used within {_OPEN_S:.0f} s: {why}. Look at "
                "`ray status`, and at Ray's dashboard."
            )
        joined, self._joined = sorted(self._joined, key=lambda device: device.id), None
        self._start_session(self._scan())
        return joined

    async def _scan(self) -> None:
        while True:
            await asyncio.sleep(_SCAN_S)
            with suppress(RayError):  # it may be that the head node does not answer for a moment
                self._open_missing(await self._find_slots())

    async def _find_slots(self) -> list[_Slot]:
        assert self._settings is not None  # it is set while devices are opened
        return await asyncio.to_thread(_find_slots, self._settings.devices_per_actor or 1)

    def _open_missing(self, slots: Sequence[_Slot]) -> None:
        for slot in slots:
            if slot.key in self._opening or slot.key in self._holders or slot.key in self._unshared:
                continue
            if len(self._failures.get(slot.key, ())) < _MOST_FAILURES:
                self._opening[slot.key] = self._start_session(self._open(slot))

    async def _open(self, slot: _Slot) -> None:
        """Start the actor of a device, and let it join. What goes wrong is noted."""
        assert self._settings is not None  # it is set while devices are opened
        born = self._born[slot.key] = self._born.get(slot.key, 0) + 1
        id = DeviceId(slot.name if born == 1 else f"{slot.name}.{born}")
        handle = None
        try:
            handle = self._make_actor(id, slot)
            device = await self._greet(handle)
        except NotShared as error:
            self._unshared[slot.key] = _story(error)
            self._report(Report("device_lost", device=id, note=self._unshared[slot.key]))
        except (RayError, OSError, ValueError) as error:
            self._failures.setdefault(slot.key, []).append(_story(error))
        else:
            self._handles[id], self._holders[slot.key] = handle, id
            self._start_session(self._poll(slot.key, id, handle))
            self._failures.pop(slot.key, None)
            if self._joined is None:
                self._step(DeviceJoined(device))
            else:
                self._joined.append(device)
            handle = None
        finally:
            self._opening.pop(slot.key, None)
            if handle is not None:
                _kill(handle)

    def _make_actor(self, id: DeviceId, slot: _Slot) -> Handle:
        name = f"tensile:{id}"
        with suppress(ValueError):  # the actor of a coordinator that has died, and that has not noticed it yet
            _kill(ray.get_actor(name, namespace=NAMESPACE))
        made = ray.remote(DeviceActor).options(
            name=name,
            namespace=NAMESPACE,
            num_cpus=0,
            num_gpus=slot.devices if slot.gpu else 0,
            resources=None if slot.gpu else {RESOURCE: slot.devices},
            scheduling_strategy=NodeAffinitySchedulingStrategy(slot.key[0], soft=False),
        )
        return made.remote(id, self._settings, devices=slot.devices, neighbours=slot.of, accelerator=slot.gpu)

    async def _greet(self, handle: Handle) -> Device:
        """Open the device, after it has shown that it reads and writes the place for checkpoints that this actor sees.

        Raises:
            NotShared: it does not.
            RayError: it has died, or JAX cannot use the device.
            OSError: this actor cannot write there.
        """
        assert self._place is not None  # it is set while devices are opened
        place, token, content = self._place, f".tensile-token-{uuid.uuid4().hex}", uuid.uuid4().hex
        answer = token + ANSWER
        await asyncio.to_thread(place.write, token, content.encode())
        try:
            device = await handle.open.remote(token, content)
            until = time.monotonic() + _ANSWER_S
            while not await asyncio.to_thread(_is_there, place, answer):
                if time.monotonic() > until:
                    raise NotShared(f"it has written {place.name}/{answer}, which cannot be seen on the head node")
                await asyncio.sleep(0.1)
            return device
        finally:
            await asyncio.to_thread(place.remove, token, answer)

    async def _poll(self, key: _SlotKey, id: DeviceId, handle: Handle) -> None:
        """Hear the news of a device until it dies. This is how its death is noticed, too."""
        try:
            while True:
                for news in await asyncio.wait_for(handle.poll.remote(), _SILENT_S):
                    self._step(news)
        except (RayError, TimeoutError) as error:
            why = f"it did not answer for {_SILENT_S:.0f} s" if isinstance(error, TimeoutError) else _death(error)
        _kill(handle)
        if self._handles.get(id) is not handle:
            return  # the devices were released, or it was lost with its node
        del self._handles[id], self._holders[key]
        others = await self._lose_neighbours(key[0])
        self._step(DeviceLost(id, why, others))

    async def _lose_neighbours(self, node: str) -> tuple[DeviceId, ...]:
        """Drop the other devices of a node that do not answer either, so that no job goes from one to the next of a dead node."""
        near = {key: id for key, id in self._holders.items() if key[0] == node}
        answers = await asyncio.gather(
            *(asyncio.wait_for(self._handles[id].status.remote(), _STATUS_S) for id in near.values()), return_exceptions=True
        )
        lost: list[DeviceId] = []
        for (key, id), answer in zip(near.items(), answers, strict=True):
            if isinstance(answer, RayError) and self._holders.get(key) == id:
                _kill(self._handles[id])
                del self._handles[id], self._holders[key]
                lost.append(id)
        return tuple(lost)

    # -- carrying out -----------------------------------------------------------------------------------------------------------

    def _step(self, event: Event) -> None:
        """Let the scheduler decide about an event, and carry out what it decides."""
        if isinstance(event, JobNews) and "loss" in event.values:
            self._losses[event.job] = event.values["loss"]
        if isinstance(event, JobNews) and "peak_bytes" in event.values:
            self._peaks[event.job] = int(event.values["peak_bytes"])
        self._state, instructions = step(self._state, event)
        for one in instructions:
            self._perform(one)

    async def _keep_neighbours(self, place: SharedPlace, names: set[str]) -> None:
        neighbours = {job.name: job.neighbours for job in self._state.jobs if job.name in names}
        try:
            await asyncio.to_thread(place.write_neighbours, neighbours)
        except OSError as error:  # the jobs can run all the same
            self._report(Report("checkpoint_failed", note=f"the limits of the jobs' plans could not be written: {error}"))

    def _perform(self, instruction: Instruction) -> None:
        match instruction:
            case Report():
                self._report(instruction)
            case AskOutline():
                self._start_session(self._outline(instruction))
            case Start():
                self._start_session(self._run(instruction))
            case Steer():
                self._start_session(self._steer(instruction))
            case Release():
                self._release()

    async def _outline(self, asked: AskOutline) -> None:
        handle = self._handles.get(asked.device)
        if handle is None:
            return
        work = self._sources[asked.source]
        try:
            outline = await handle.outline.options(name=f"plan {work.name}").remote(work, asked.neighbours)
        except RayTaskError as error:
            outline = _story(error)
        except RayError:
            return  # the device has died, and another one will be asked
        self._step(Outlined(asked.source, asked.neighbours, asked.kind, outline))

    async def _run(self, start: Start) -> None:
        """Let a device run a job. How the job ends is in the device's news, unless the device cannot even begin."""
        handle = self._handles.get(start.device)
        if handle is None:
            return  # its death will be heard of in a moment
        try:
            await handle.run.options(name=f"tensile:{start.job}").remote(self._works[start.job], start.attempt, start.limit_bytes)
        except RayTaskError as error:
            self._step(JobNews(start.device, start.job, start.attempt, "failed", 0, _story(error)))
        except RayError:
            return

    async def _steer(self, steer: Steer) -> None:
        handle, job = self._handles.get(steer.device), self._state.job(steer.job)
        if handle is not None and job is not None:
            with suppress(RayError):  # if the device has died, the scheduler knows what the user wants
                await handle.steer.options(name=f"{steer.wish} {steer.job}").remote(steer.job, job.attempt, steer.wish)

    async def _wait_for(self, job: str, seconds: float) -> None:
        await asyncio.sleep(seconds)
        self._step(Due(job))

    def _release(self) -> None:
        """End the actors of all devices."""
        handles = list(self._handles.values())
        self._settings, self._joined = None, None
        for task in self._session - {asyncio.current_task()}:
            task.cancel()
        self._session.clear()
        self._opening.clear()
        self._handles.clear()
        self._holders.clear()
        for handle in handles:
            _kill(handle)

    def _report(self, report: Report) -> None:
        time_s = time.monotonic() - self._began
        self._events.append(ClusterEvent(time_s, report.kind, report.job, report.step, report.note, report.values, report.device))
        self._reported += 1
        self._changed.set()
        self._changed = asyncio.Event()

    # -- status -----------------------------------------------------------------------------------------------------------------

    async def _status_of(self, device: Device) -> Status | None:
        handle = self._handles.get(device.id)
        if handle is None:
            return None
        try:
            return await asyncio.wait_for(handle.status.remote(), _STATUS_S)
        except (RayError, TimeoutError):
            return None

    def _job_status(self, job: JobRecord, there: JobStatus | None) -> JobStatus:
        if there is not None and job.phase == "placed":
            note = f"on {job.device}" + (f": {there.note}" if there.note else "")
            return replace(there, note=note)
        state: JobState
        match job.phase:
            case "finished" | "failed" | "cancelled" | "preparing":
                state = job.phase
            case "placed":
                state = "paused" if job.paused else "running" if job.step else "preparing"
            case "waiting":
                state = "paused" if job.wish == "pause" else "queued"
        return JobStatus(
            name=job.name,
            state=state,
            priority=job.asked.priority,
            step=job.step,
            steps=job.asked.steps,
            loss=self._losses.get(job.name),
            steps_per_s=None,
            device_bytes=0,
            peak_bytes=self._peaks.get(job.name, 0),
            planned_bytes=0,
            host_bytes=0,
            stall_us=0.0,
            swapped_bytes=0,
            note=f"on {job.device}" if job.device else job.note,
        )

    def _going(self, names: Sequence[str]) -> int:
        return sum(not job.has_ended for job in self._state.jobs if job.name in names)

    # -- tasks ------------------------------------------------------------------------------------------------------------------

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)  # the loop itself holds tasks weakly
        task.add_done_callback(self._tasks.discard)
        return task

    def _start_session(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Spawn a task that ends when the devices are released."""
        task = self._spawn(work)
        self._session.add(task)
        task.add_done_callback(self._session.discard)
        return task


def _refuse_place(place: SharedPlace, jobs: Sequence[NewJob], *, resume: bool) -> None:
    """Raises ValueError if the place cannot be made or read, or has checkpoints that are not to be resumed from."""
    try:
        place.prepare()
        taken = [] if resume else [job.name for job in jobs if place.has_checkpoints(job.name)]
    except OSError as error:
        raise ValueError(f"checkpoints={place.name!r} cannot be used on the head node: {error.strerror}.") from error
    for name in taken:
        raise ValueError(
            f"checkpoints={place.name!r} has checkpoints of a job {name!r}. Pass resume=True to go on from them, or name another "
            "folder or job."
        )


def _with_past(place: SharedPlace, jobs: Sequence[NewJob], *, resume: bool) -> tuple[NewJob, ...]:
    """The jobs, with what the place for checkpoints tells of earlier submissions. Raises ValueError if it cannot be read."""
    try:
        neighbours = place.read_neighbours() if resume else {}
        return tuple(replace(job, attempt=place.latest_attempt(job.name), neighbours=neighbours.get(job.name)) for job in jobs)
    except OSError as error:
        raise ValueError(f"checkpoints={place.name!r} cannot be read on the head node: {error.strerror}.") from error


def _is_there(place: SharedPlace, name: str) -> bool:
    try:
        place.read(name)
    except FileNotFoundError:
        return False
    return True


def _find_slots(per_actor: int) -> list[_Slot]:
    """The groups and single devices of all nodes that are alive.

    The groups come first, so that no actor of a single device takes a device without which a group has to wait; then by name.
    """
    nodes = [node for node in ray.nodes() if node["Alive"]]
    hosts = [str(node["NodeManagerHostname"]) for node in nodes]
    found: list[_Slot] = []
    for node, host in zip(nodes, hosts, strict=True):
        id = str(node["NodeID"])
        name = host if hosts.count(host) == 1 else f"{host}-{id[:6]}"
        gpus, others = (int(node["Resources"].get(resource, 0)) for resource in ("GPU", RESOURCE))
        for gpu, first, count in ((True, 0, gpus), (False, gpus, others)):
            for held in divide_node(count, per_actor):
                begin, last = first + held.start, first + held.stop - 1
                part = f"device-{begin}" if begin == last else f"devices-{begin}-{last}"
                found.append(_Slot((id, begin), f"{name}/{part}", gpu, len(held), count))
    return sorted(found, key=lambda slot: (-slot.devices, slot.name))


def _kill(handle: Handle) -> None:
    with suppress(RayError, ValueError):
        ray.kill(handle)


def _death(error: RayError) -> str:
    """Why an actor does not answer any more. Ray says it in the middle of several lines."""
    story = str(error)
    if "node has died" in story or isinstance(error, ActorUnavailableError):
        return "its node has died, or cannot be reached"
    return "its process was ended by ray.kill" if "ray.kill" in story else "its process has died"


def _story(error: BaseException) -> str:
    """What an exception says, without the traceback of the process from which Ray has brought it."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, BaseException):
        error = cause
    lines = str(error).strip().splitlines() or [""]
    return lines[0] if isinstance(error, RayError | NotShared) else f"{type(error).__name__}: {lines[0]}"
