"""What the controller knows: `State`, with one `Seat` a job.

Plain frozen data, without JAX, a clock or a thread. Sizes in bytes, times in microseconds.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import Literal, NewType

from tensile_jax.plan.multi_job.memory_profile import MemoryProfile

JobId = NewType("JobId", int)
Wish = Literal["run", "pause", "stop"]


class Where(IntEnum):
    """Where a job's state is between iterations."""

    AWAY = 0
    COMING = 1
    HERE = 2
    GOING = 3


@dataclass(frozen=True, slots=True)
class Seat:
    """One admitted or queued job.

    Attributes:
        position: the next move of the iteration under way; 0 between iterations.
        busy: something of it is under way that must end before its next move.
        batches: how many are loaded, the one that is worked on included.
        renewal: what it will ask for once its state has been away.
        rested: it is paused, and that has been said.
        virtual_us: its compute time over its weight, from `State.clock_us` on where that is later.
        passed: how many iterations of others began while it was its turn, and since, while it waited for their memory.
    """

    job: JobId
    demand: MemoryProfile
    weight: float
    steps_left: int
    wish: Wish = "run"
    where: Where = Where.AWAY
    position: int = 0
    busy: bool = False
    batches: int = 0
    renewal: MemoryProfile | None = None
    rested: bool = False
    virtual_us: float = 0.0
    passed: int = 0

    @property
    def held_bytes(self) -> int:
        """On the device, but for the surge of a launch in flight."""
        if self.where is Where.HERE:
            return self.demand.holds[self.position]
        return self.demand.parked_bytes if self.where is Where.AWAY else self.demand.holds[0]

    @property
    def settled_bytes(self) -> int:
        """What it holds once its iteration is over."""
        return self.demand.parked_bytes if self.where is Where.AWAY else self.demand.idle_bytes

    def at(self, position: int, *, busy: bool) -> "Seat":
        """The same seat there. By hand, as `worked`: `dataclasses.replace` takes twice as long, and a launch needs three."""
        return Seat(
            self.job, self.demand, self.weight, self.steps_left, self.wish, self.where, position, busy, self.batches,
            self.renewal, self.rested, self.virtual_us, self.passed,
        )  # fmt: skip

    def worked(self, virtual_us: float, *, busy: bool) -> "Seat":
        """The same seat after a launch of it."""
        return Seat(
            self.job, self.demand, self.weight, self.steps_left, self.wish, self.where, self.position, busy, self.batches,
            self.renewal, self.rested, virtual_us, self.passed,
        )  # fmt: skip

    @property
    def wants(self) -> bool:
        """It would begin an iteration if it could."""
        ready = self.position == 0 and self.batches > 0 and self.steps_left > 0
        return ready and self.wish == "run" and self.renewal is None


@dataclass(frozen=True, slots=True)
class State:
    """Everything that the controller knows. A `State` begins without seats; `step` alone fills it.

    Attributes:
        depth: so many launches may be in flight; `in_flight` are (job, surge), in order.
        next_budget_bytes: a lower budget that waits for iterations to end.
        clock_us: the least virtual time of those that worked or wanted to at the last begin of an iteration.
        seats_bytes: the sum of what the seats hold; `settled_bytes`: of what they hold once their iterations are over;
            `parked_bytes`: of what they would hold if all were parked.
    """

    budget_bytes: int
    host_budget_bytes: float
    depth: int = 1
    seats: tuple[Seat, ...] = ()
    queue: tuple[Seat, ...] = ()
    in_flight: tuple[tuple[JobId, int], ...] = ()
    next_budget_bytes: int | None = None
    clock_us: float = 0.0
    seats_bytes: int = 0
    settled_bytes: int = 0
    parked_bytes: int = 0

    @property
    def held_bytes(self) -> int:
        """On the device by account, the running launch's surge included."""
        return self.seats_bytes + max([surge for _, surge in self.in_flight], default=0)

    def seat(self, job: JobId) -> Seat | None:
        """The seat of an admitted or queued job."""
        return next((s for s in (*self.seats, *self.queue) if s.job == job), None)
