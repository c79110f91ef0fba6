"""The controller's working copy of `State` while one event is dealt with, and its arithmetic of memory.

    held        what all seats hold, by `MemoryProfile`                       free   = budget - held - surge
    settled     what they hold once every iteration is over: a seat that is away what is parked, else what is idle
    can run     a seat, if its peak fits beside what stays of all others when they are parked
    calm        every iteration under way can be finished with the others where they are (`interleave`)

Nobody but `step` sees a desk: states that go in and out are never changed.
"""

from dataclasses import replace

from tensile_jax.exec.controller.orders import Order
from tensile_jax.exec.controller.state import Seat, State
from tensile_jax.plan.multi_job.admission import admits
from tensile_jax.plan.multi_job.memory_profile import LAUNCH, MemoryProfile
from tensile_jax.plan.multi_job.safety import finishes


class Desk:
    """What `State` knows, to be written on; `said` are the orders so far."""

    __slots__ = (
        "budget_bytes", "clock_us", "depth", "held_bytes", "host_budget_bytes", "in_flight", "next_budget_bytes", "parked_bytes",
        "queue", "said", "seats", "settled_bytes",
    )  # fmt: skip

    def __init__(self, state: State) -> None:
        self.budget_bytes = state.budget_bytes
        self.host_budget_bytes = state.host_budget_bytes
        self.depth = state.depth
        self.seats = list(state.seats)
        self.queue = state.queue
        self.in_flight = state.in_flight
        self.next_budget_bytes = state.next_budget_bytes
        self.clock_us = state.clock_us
        self.said: list[Order] = []
        self.held_bytes = state.seats_bytes
        self.settled_bytes = state.settled_bytes
        self.parked_bytes = state.parked_bytes

    def state(self) -> State:
        """What is on the desk, for good."""
        return State(
            self.budget_bytes, self.host_budget_bytes, self.depth, tuple(self.seats), self.queue, self.in_flight,
            self.next_budget_bytes, self.clock_us, self.held_bytes, self.settled_bytes, self.parked_bytes,
        )  # fmt: skip

    # -- changes ----------------------------------------------------------------------------------------------------------------

    def put(self, place: int, seat: Seat) -> None:
        """The seat as it is now."""
        before = self.seats[place]
        self.held_bytes += seat.held_bytes - before.held_bytes
        self.settled_bytes += seat.settled_bytes - before.settled_bytes
        self.parked_bytes += seat.demand.parked_bytes - before.demand.parked_bytes
        self.seats[place] = seat

    def add(self, seat: Seat) -> None:
        """One more seat."""
        self.held_bytes += seat.held_bytes
        self.settled_bytes += seat.settled_bytes
        self.parked_bytes += seat.demand.parked_bytes
        self.seats.append(seat)

    def remove(self, place: int) -> None:
        """The seat is free."""
        seat = self.seats.pop(place)
        self.held_bytes -= seat.held_bytes
        self.settled_bytes -= seat.settled_bytes
        self.parked_bytes -= seat.demand.parked_bytes

    def issue(self, place: int) -> bool:
        """The seat's next move, INSTANT or LAUNCH, is issued; unless that would overrun, or not leave the seats calm."""
        seat = self.seats[place]
        demand, position = seat.demand, seat.position
        other = self.held_bytes - demand.holds[position]
        need, held = demand.needs[position], demand.holds[position + 1]
        if other + need > self.budget_bytes:
            return False
        launched = demand.kinds[position] == LAUNCH
        if self.in_flight:  # what it needs itself, it needs after those: but beside them where it is over at once
            surge = self.in_flight[0][1] if len(self.in_flight) == 1 else self.surge_bytes
            if other + (held if launched else need) + surge > self.budget_bytes:
                return False
        after = position + 1
        if position == 0:
            # all of it can be done now: then the seats are as calm afterwards as they are now
            calm = other + demand.peak_bytes <= self.budget_bytes
        else:
            # to where it holds no more than now, likewise
            low = demand.lower[position]
            calm = low == after or (low != -1 and other + demand.hill[position] <= self.budget_bytes)
        busy = launched and self.depth == 1
        if after == len(demand.kinds):
            left = seat.steps_left - 1
            self.seats[place] = replace(seat, position=0, busy=busy, batches=seat.batches - 1, steps_left=left)
        else:
            self.seats[place] = seat.at(after, busy=busy)
        if not calm and not self.calm(other + held):
            self.seats[place] = seat
            return False
        self.held_bytes = other + held
        if launched:
            self.in_flight = (*self.in_flight, (seat.job, need - held))
        return True

    # -- arithmetic -------------------------------------------------------------------------------------------------------------

    @property
    def surge_bytes(self) -> int:
        """The most that a launch in flight needs beyond what its seat holds."""
        return max([surge for _, surge in self.in_flight]) if self.in_flight else 0

    @property
    def at_rest(self) -> bool:
        """No iteration, launch or copy is under way."""
        return not self.in_flight and not any([s.position or s.busy for s in self.seats])

    def calm(self, held_bytes: int) -> bool:
        """Whether every iteration under way can be finished from here, where so much is held in all."""
        under_way = [(s.demand, s.position, s.demand.idle_bytes) for s in self.seats if s.position]
        return finishes(self.budget_bytes - held_bytes, under_way)

    def has_room(self, more_bytes: int) -> bool:
        """Whether so many bytes more can be held from now on."""
        held_bytes = self.held_bytes + more_bytes
        return held_bytes + self.surge_bytes <= self.budget_bytes and self.calm(held_bytes)

    @property
    def spare_bytes(self) -> int:
        """What a seat may rise above what stays of it when it is parked, while all others are parked."""
        return self._limit_bytes - self.parked_bytes

    @property
    def _limit_bytes(self) -> int:
        """The budget, or the lower one that waits for iterations to end."""
        return self.budget_bytes if self.next_budget_bytes is None else min(self.budget_bytes, self.next_budget_bytes)

    def admits(self, demand: MemoryProfile, beside: list[Seat]) -> bool:
        """Whether a job of that demand could run beside those, and all of them that can, with it."""
        others = [s.demand for s in beside]
        return admits(demand, others, budget_bytes=self._limit_bytes, host_budget_bytes=self.host_budget_bytes)

    def next_in_queue(self) -> int:
        """Who is to be admitted as soon as there is room; -1: nobody.

        The heaviest that could ever run comes first, and nobody goes by; unless it waits for jobs that do not run themselves.
        """
        if not self.queue or self.next_budget_bytes is not None:
            return -1
        spare = self.spare_bytes
        for k in sorted(range(len(self.queue)), key=lambda k: -self.queue[k].weight):
            seat = self.queue[k]
            if seat.wish == "pause":
                continue
            if self.admits(seat.demand, self.seats):
                return k
            idle = [s for s in self.seats if s.wish == "pause" or s.demand.rise_bytes > spare]
            if self.admits(seat.demand, idle):
                return -1
        return -1

    def can_renew(self, place: int) -> bool:
        """Whether all that can run still could, and the host hold them, if the seat's renewed demand held."""
        seat = self.seats[place]
        assert seat.renewal is not None
        return admits(
            seat.renewal,
            [s.demand for s in self.seats if s is not seat],
            budget_bytes=self._limit_bytes,
            host_budget_bytes=self.host_budget_bytes,
            replaces=seat.demand,
        )
