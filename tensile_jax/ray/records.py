"""Defines the records that describe a cluster: the devices, the jobs, the events that can happen to them, and the instructions.

    Device        ::= one device of a node, or a group of them, held by one Ray actor with one `Runtime`
    Outline       ::= what a job needs on one kind of device: the memory of its plan there
    Event         ::= DeviceJoined   a device can take jobs from now on
                    | DeviceLost     the actor of a device has died
                    | Submitted      the user has submitted jobs
                    | Outlined       a device has answered `AskOutline`
                    | JobNews        the runtime of a device reports an event of a job
                    | Due            the delay after which a job was to start has passed
                    | Wished         the user wants a job to run, to pause or to stop
    Instruction   ::= AskOutline     ask a device for the outline of a job
                    | Start          start a job on a device
                    | Steer          tell the runtime of a job to run, pause or stop the job
                    | Report         report an event to the users
                    | Release        end the actors of all devices, since all jobs have ended

The scheduler (`scheduler.py`) maps events to instructions. The coordinator (`coordinator.py`) carries the instructions out. Sizes
are in bytes, and times in seconds unless the name says otherwise.
"""

from dataclasses import dataclass, field
from typing import Literal, NewType

from tensile_jax.plan.multi_job.memory_profile import MemoryProfile
from tensile_jax.runtime_records import NO_LIMIT, EventName, JobEvent, JobStatus, Status

DeviceId = NewType("DeviceId", str)
"""`NODE/device-N`, or `NODE/devices-0-3` for a group; with `.K` behind it for the K-th actor that holds these devices. No two
actors have the same."""

Kind = NewType("Kind", str)
"""Devices of one kind are equal: a job has the same plans on all of them, and the same results."""

Wish = Literal["run", "pause", "stop"]


# -- what the scheduler knows ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Device:
    """A device that has joined, or a group of them. `devices` is how many JAX devices its actor holds.

    The budgets are those of its `Runtime`: of each device of a group. Devices of one kind have as many devices.
    """

    id: DeviceId
    kind: Kind
    budget_bytes: int
    host_budget_bytes: float = float("inf")
    devices: int = 1


@dataclass(frozen=True, slots=True, eq=False)
class Outline:
    """What a job needs on one kind of device.

    Attributes:
        limit_bytes: the device memory for which it is planned there.
        floor_bytes: the least device memory for which there is a plan, as estimated; zero if that is not known.
        memory: what its plan needs, on the host including a copy for a checkpoint; None if no plan keeps the budget.
    """

    limit_bytes: int
    floor_bytes: int
    memory: MemoryProfile | None


@dataclass(frozen=True, slots=True)
class StartAfter:
    """A job starts when `job` has done `step` steps. If `step` is None, it starts when `job` has ended in any way."""

    job: str
    step: int | None = None


# -- events ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DeviceJoined:
    """A device can take jobs from now on."""

    device: Device


@dataclass(frozen=True, slots=True)
class DeviceLost:
    """The actor of a device has died, with all that it held; and those of `others`, which were on the same node."""

    device: DeviceId
    why: str
    others: tuple[DeviceId, ...] = ()


@dataclass(frozen=True, slots=True)
class NewJob:
    """A job that was submitted.

    Attributes:
        source: equal for jobs that train the same thing, and have the same outlines therefore.
        devices: how many devices the job needs. It goes to no actor that holds fewer.
        start: None: at once. A job with a number of seconds starts when `Due` comes.
        attempt: the highest number of an attempt of which there is a folder of checkpoints.
        neighbours: how many jobs shared a device on average when the job was first submitted; None: it is new.
    """

    name: str
    source: str
    steps: int
    priority: float = 1.0
    devices: int = 1
    start: StartAfter | float | None = None
    attempt: int = 0
    neighbours: int | None = None


@dataclass(frozen=True, slots=True)
class Submitted:
    """Jobs that were submitted together, with names that no other job has, and devices that join at the same time."""

    jobs: tuple[NewJob, ...]
    devices: tuple[Device, ...] = ()


@dataclass(frozen=True, slots=True)
class Outlined:
    """The answer to `AskOutline`: an outline, or why the job cannot be made."""

    source: str
    neighbours: int
    kind: Kind
    outline: Outline | str


@dataclass(frozen=True, slots=True)
class JobNews:
    """An event of a job, from the runtime of its device. Its checkpoints are in their final place if the event is final."""

    device: DeviceId
    job: str
    attempt: int
    kind: EventName
    step: int
    note: str = ""
    values: dict[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True, slots=True)
class Due:
    """The seconds after which a job starts have passed."""

    job: str


@dataclass(frozen=True, slots=True)
class Wished:
    """The user wants the job to run, to pause, or to stop."""

    job: str
    wish: Wish


Event = DeviceJoined | DeviceLost | Submitted | Outlined | JobNews | Due | Wished


# -- instructions ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AskOutline:
    """Let a device trace and plan the jobs of a source. `Outlined` answers, or `DeviceLost`."""

    source: str
    neighbours: int
    kind: Kind
    device: DeviceId


@dataclass(frozen=True, slots=True)
class Start:
    """Start a job on a device, from its latest checkpoint, with the plan for `limit_bytes`. `JobNews` answers."""

    job: str
    device: DeviceId
    attempt: int
    limit_bytes: int


@dataclass(frozen=True, slots=True)
class Steer:
    """Tell the runtime of a job's device what the user wants. `JobNews` answers."""

    job: str
    device: DeviceId
    wish: Wish


@dataclass(frozen=True, slots=True)
class Report:
    """Report an event to the users."""

    kind: EventName
    job: str = ""
    device: str = ""
    step: int = 0
    note: str = ""
    values: dict[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True, slots=True)
class Release:
    """All jobs have ended: end the actors of all devices, so that other programs can use the devices."""


Instruction = AskOutline | Start | Steer | Report | Release


# -- what is sent to devices ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DeviceSettings:
    """What is the same for all devices of a cluster.

    Attributes:
        budget: of each device: bytes, a size, or a share of what the device has.
        shared: the place for checkpoints: the path of a folder, or a URL.
        devices_per_actor: how many devices an actor holds, where a node has so many. None: it is not said.
        paths: folders in which modules are looked for beside the installed ones.
    """

    budget: int | str
    host_budget: int | str | None
    device_profile: str | None
    shared: str
    paths: tuple[str, ...] = ()
    devices_per_actor: int | None = None


@dataclass(frozen=True, slots=True)
class Work:
    """A job in the form in which it is sent to a device.

    `make` is a pickled `Entrypoint`, or a pickled function that returns (step, state, batches).
    """

    name: str
    make: bytes
    steps: int
    priority: float
    max_slowdown: float | None
    checkpoint_every: int | None
    isolation: Literal["thread", "process"]
    devices: int = 1


# -- what a user is given -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ClusterEvent(JobEvent):
    """A `JobEvent` on a cluster. `job` is empty if the event is about a device; `device` is empty if the job is on none.

    Times are seconds since the coordinator began. A job that goes on elsewhere does the steps after its checkpoint once more, and
    the events of these steps come again.
    """

    device: str = ""


@dataclass(frozen=True, slots=True)
class DeviceStatus:
    """A snapshot of one device, or of a group: the budget, the bytes that are there, and the names of the jobs.

    `devices` is how many there are in the group. The bytes are those of each of them.
    """

    name: str
    kind: str
    budget_bytes: int
    device_bytes: int
    peak_bytes: int
    host_bytes: int
    jobs: tuple[str, ...]
    devices: int = 1


@dataclass(frozen=True, slots=True)
class ClusterStatus:
    """A snapshot of a cluster. The note of a job that is on a device begins with the name of the device."""

    time_s: float
    devices: tuple[DeviceStatus, ...]
    jobs: tuple[JobStatus, ...]

    def merged(self) -> Status:
        """The status of all devices added up, as of one large device. A group counts as one device, with the bytes of each."""
        return Status(
            time_s=self.time_s,
            budget_bytes=sum(device.budget_bytes for device in self.devices),
            host_budget_bytes=NO_LIMIT,
            device_bytes=sum(device.device_bytes for device in self.devices),
            peak_bytes=sum(device.peak_bytes for device in self.devices),
            host_bytes=sum(device.host_bytes for device in self.devices),
            out_share=0.0,
            into_share=0.0,
            jobs=self.jobs,
        )
