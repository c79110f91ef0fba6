"""Defines `DeviceActor`, the Ray actor that holds a device or a group of devices, and passes requests of the coordinator to jobs.

The coordinator is the one actor of a cluster that knows all devices and jobs, and assigns the jobs to devices (`coordinator.py`).
It calls `poll` again and again. `poll` returns the news of the jobs, and also renews the device actor's *lease*, the time for
which that actor may live on. If the actor is not polled for `LEASE_S` seconds, the coordinator has died or cannot be reached,
and the actor ends its process at once. Ray takes more than `LEASE_S` seconds to declare an unreachable node dead. So when the
coordinator hears that a node is dead, and continues the node's jobs elsewhere, the actors on that node should have ended. If one
of them still lives, the new device takes the jobs' folders away from that actor (`ray/shared/`).

JAX is imported only when the device is opened, because processes without a device import this class, too.
"""

import asyncio
import os
import threading
import time
from typing import TYPE_CHECKING

from tensile_jax.ray.records import Device, DeviceId, DeviceSettings, JobNews, Outline, Wish, Work
from tensile_jax.ray.shared.opened import open_place
from tensile_jax.ray.shared.place import SharedPlace
from tensile_jax.runtime_records import FINAL, Status

if TYPE_CHECKING:
    from tensile_jax.ray.device_jobs import DeviceJobs

LEASE_S = 20.0
_POLL_S = 1.0  # how long `poll` waits for news
_WATCH_S = 1.0
_LOST_LEASE = 3  # exit code of the process
_MOST_NEWS = 1000  # that one poll returns
_TOKEN_S = 5.0  # that a file may take to be seen through a network file system
ANSWER = ".answer"


class NotShared(Exception):
    """The place for checkpoints is not the one that the coordinator sees. The message is for the user."""


class DeviceActor:
    """A device of a cluster, or a group, and the jobs there. Its methods run in one event loop, and wait for nothing else there.

    Args:
        devices: how many devices this process has.
        neighbours: how many devices this node has.
        accelerator: whether Ray has given the process GPUs; otherwise JAX uses the CPU, which stands in for the devices.
    """

    def __init__(
        self, id: DeviceId, settings: DeviceSettings, *, devices: int, neighbours: int, accelerator: bool
    ) -> None:  # fmt: skip
        self._id = id
        self._settings = settings
        self._devices = devices
        self._neighbours = neighbours
        self._jobs: DeviceJobs | None = None
        self._news: asyncio.Queue[JobNews] = asyncio.Queue()
        self._ends: dict[tuple[str, int], asyncio.Event] = {}
        self._polled = time.monotonic()
        if not accelerator:
            os.environ["JAX_PLATFORMS"] = "cpu"
            os.environ["JAX_NUM_CPU_DEVICES"] = str(devices)  # takes precedence over a number in XLA_FLAGS

    async def open(self, token: str, content: str) -> Device:
        """Find the device, and begin a runtime on it.

        Raises:
            NotShared: the file `token` of the shared place is not here, or has another content.
            ValueError: JAX has another number of devices than Ray has given to this actor.
        """
        loop = asyncio.get_running_loop()

        def tell(news: JobNews) -> None:
            loop.call_soon_threadsafe(self._hear, news)

        def begin() -> "DeviceJobs":
            place = open_place(self._settings.shared)
            _refuse_unshared(place, token, content)
            from tensile_jax.ray.device_jobs import DeviceJobs  # imports JAX

            return DeviceJobs(self._id, self._settings, place, tell, devices=self._devices, neighbours=self._neighbours)

        self._jobs = await asyncio.to_thread(begin)
        self._polled = time.monotonic()
        threading.Thread(target=self._watch, name="tensile-lease", daemon=True).start()
        return self._jobs.device

    async def poll(self) -> list[JobNews]:
        """The news since the last call. If there are none, this waits for some for a second."""
        self._polled = time.monotonic()
        news: list[JobNews] = []
        try:
            news.append(await asyncio.wait_for(self._news.get(), _POLL_S))
        except TimeoutError:
            pass
        while not self._news.empty() and len(news) < _MOST_NEWS:
            news.append(self._news.get_nowait())
        self._polled = time.monotonic()
        return news

    async def outline(self, work: Work, neighbours: int) -> Outline | str:
        """See `DeviceJobs.outline`."""
        return await asyncio.to_thread(self._opened.outline, work, neighbours)

    async def run(self, work: Work, attempt: int, limit_bytes: int) -> None:
        """Start a job, and return when it has ended, so that Ray's dashboard shows the job while it is here."""
        ended = self._ends[work.name, attempt] = asyncio.Event()
        self._opened.start(work, attempt, limit_bytes)
        await ended.wait()

    async def steer(self, job: str, attempt: int, wish: Wish) -> None:
        """See `DeviceJobs.steer`."""
        await asyncio.to_thread(self._opened.steer, job, attempt, wish)

    async def status(self) -> Status:
        """See `DeviceJobs.status`."""
        return await asyncio.to_thread(self._opened.status)

    @property
    def _opened(self) -> "DeviceJobs":
        assert self._jobs is not None  # the coordinator opens a device before it uses it
        return self._jobs

    def _hear(self, news: JobNews) -> None:
        self._news.put_nowait(news)
        if news.kind in FINAL:
            ended = self._ends.pop((news.job, news.attempt), None)
            if ended is not None:
                ended.set()

    def _watch(self) -> None:
        while time.monotonic() - self._polled < LEASE_S:
            time.sleep(_WATCH_S)
        os._exit(_LOST_LEASE)


def _refuse_unshared(place: SharedPlace, token: str, content: str) -> None:
    """Read the coordinator's file, and answer with one that the coordinator reads."""
    until = time.monotonic() + _TOKEN_S
    while True:
        try:
            found = place.read(token)
            break
        except OSError as error:
            if time.monotonic() > until:
                story = f"it cannot read {place.name}/{token}, which the head node has written: {error.strerror}"
                raise NotShared(story) from error
            time.sleep(_WATCH_S / 10)
    if found != content.encode():
        raise NotShared(f"{place.name}/{token} has another content than the head node has written")
    try:
        place.write(token + ANSWER, content.encode())
    except OSError as error:
        raise NotShared(f"it cannot write into {place.name}: {error.strerror}") from error
