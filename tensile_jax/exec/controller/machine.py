"""The Global Controller (TENSILE section III-D) as a pure state machine: (state, event) -> (state, orders), for all jobs.

It knows no JAX, no clock and no thread. What acts (`dispatcher.py`) tells it what has happened and does what it says, in that
order. A job sits on a `Seat`; between iterations it is at position 0, with its state *here* on the device or *away* on the host.

    held      sum over seats of what they hold, by `MemoryProfile`;   a launch holds its outputs from the moment it is issued
    surge     the most that a launch in flight needs beyond what its seat holds once it is over

What it guarantees, whatever happens in whatever order:

    held + surge <= budget                     no overrun
    calm: every iteration under way can be     no deadlock: nobody waits for memory that only the waiting can give back;
    finished with the others where they are    decided exactly (`plan/multi_job/safety.py`)
    while the seat whose turn it is waits      no starvation: others may fill what it cannot use; then iterations under way
    for memory, or an iteration under way,     end, and room is made for it, by parking jobs between iterations
    at most `PATIENCE` others begin
    between two launches, no job goes and      no thrashing: who comes though it is not its turn leaves room for all who are
    comes for ever                             here and for whoever goes before it

Who goes next: iterations under way before new ones, then the seat whose turn it is (`fair_share.py`).

What more is to stay on the device, a queued job's constants or a renewed one's, and a lower budget, may have to wait for room:
then no iteration begins until those under way have ended, and jobs are parked, one by one. Times in microseconds.
"""

from dataclasses import replace

from tensile_jax.exec.controller.events import (
    BatchReady,
    Budgeted,
    Died,
    Ended,
    Event,
    JobEvent,
    Moved,
    Prepared,
    Renewed,
    Waited,
    Wished,
)
from tensile_jax.exec.controller.fair_share import begin, park, park_one
from tensile_jax.exec.controller.ledger import Desk
from tensile_jax.exec.controller.orders import Admit, Adopt, Apply, Decline, Dismiss, Do, Order, Rest
from tensile_jax.exec.controller.state import JobId, Seat, State, Where
from tensile_jax.plan.multi_job.admission import smallest_budgets
from tensile_jax.plan.multi_job.memory_profile import LAUNCH, WAIT, MemoryProfile

_AWAY, _COMING, _HERE, _GOING = Where


def step(state: State, event: Event) -> tuple[State, list[Order]]:
    """The state after `event`, and what is to be done now, in that order."""
    desk = Desk(state)
    _tell(desk, event)
    while _leave(desk) or _budget(desk) or (desk.queue and _admit(desk)) or _continue(desk) or begin(desk):
        pass
    return desk.state(), desk.said


def smallest_need(state: State, demand: MemoryProfile) -> tuple[int, int]:
    """(device, host) bytes of budget with which a job of that demand could be admitted beside the seats that there are."""
    return smallest_budgets([demand, *(s.demand for s in state.seats)])


def _tell(desk: Desk, event: Event) -> None:
    """Write down what has happened; nothing is decided yet. What is said of a job that is gone is late."""
    if isinstance(event, Budgeted):
        desk.next_budget_bytes = event.nbytes
        return
    if isinstance(event, Prepared):
        job = event.seat.job
        if any(s.job == job for s in (*desk.seats, *desk.queue)) or any(one == job for one, _ in desk.in_flight):
            raise ValueError(f"A job's number must never be used again: got a second job {job}.")
        desk.queue = (*desk.queue, event.seat)
        return
    job, seats = event.job, desk.seats
    for place, seat in enumerate(seats):  # noqa: B007
        if seat.job == job:
            break
    else:
        _tell_others(desk, event)
        return
    if isinstance(event, Ended):
        if _land(desk, job):
            virtual_us = max(seat.virtual_us, desk.clock_us) + event.us / seat.weight
            busy = seat.busy and desk.depth > 1  # then it waits for something else
            seats[place] = seat.worked(virtual_us, busy=busy)
    elif isinstance(event, Waited):
        desk.put(place, seat.at(seat.position + 1, busy=False))
    elif isinstance(event, Moved):
        desk.put(place, replace(seat, where=_HERE if seat.where is _COMING else _AWAY, busy=False))
    elif isinstance(event, BatchReady):
        seats[place] = replace(seat, batches=seat.batches + 1)
    elif isinstance(event, Renewed):
        seats[place] = replace(seat, renewal=event.demand)
    elif isinstance(event, Died):
        desk.remove(place)
        _land_all(desk, job)
    elif seat.wish != "stop":  # from there is no way back
        seats[place] = replace(seat, wish=event.wish, rested=False)


def _tell_others(desk: Desk, event: JobEvent) -> None:
    """The job has no seat. In the queue, a renewed demand holds at once."""
    job = event.job
    if isinstance(event, Ended):
        _land(desk, job)  # of a job that was dismissed: its copies to the host were told of first
    elif isinstance(event, Died):
        desk.queue = tuple([s for s in desk.queue if s.job != job])
        _land_all(desk, job)
    else:
        desk.queue = tuple([_told(s, event) if s.job == job else s for s in desk.queue])


def _told(seat: Seat, event: JobEvent) -> Seat:
    if isinstance(event, BatchReady):
        return replace(seat, batches=seat.batches + 1)
    if isinstance(event, Wished) and seat.wish != "stop":
        return replace(seat, wish=event.wish, rested=False)
    return replace(seat, demand=event.demand) if isinstance(event, Renewed) else seat


def _land(desk: Desk, job: JobId) -> bool:
    """The job's oldest launch is in flight no more; False if there is none, of a job that died."""
    in_flight = desk.in_flight
    for k, (one, _) in enumerate(in_flight):
        if one == job:
            desk.in_flight = in_flight[:k] + in_flight[k + 1 :]
            return True
    return False


def _land_all(desk: Desk, job: JobId) -> None:
    desk.in_flight = tuple([one for one in desk.in_flight if one[0] != job])


# -- between iterations -------------------------------------------------------------------------------------------------------


def _leave(desk: Desk) -> bool:
    """Who has nothing to do between iterations goes away; who is away is dismissed, renewed, or rests."""
    leaving = [
        place for place, s in enumerate(desk.seats)
        if not s.position and not s.busy and (s.wish != "run" or not s.steps_left or s.renewal is not None)
    ]  # fmt: skip
    for place in leaving:
        seat = desk.seats[place]
        if seat.where is _HERE:
            return park(desk, place)
        if seat.wish == "stop" or not seat.steps_left:
            desk.remove(place)
            desk.said.append(Dismiss(seat.job))
            return True
        if seat.renewal is not None and _renew(desk, place):
            return True
        if seat.renewal is None and not seat.rested:
            desk.put(place, replace(seat, rested=True))
            desk.said.append(Rest(seat.job))
            return True
    return False


def _renew(desk: Desk, place: int) -> bool:
    """The seat's renewed demand holds, if no other is the worse for it; False while it waits for room."""
    seat = desk.seats[place]
    assert seat.renewal is not None
    more = seat.renewal.parked_bytes - seat.demand.parked_bytes
    if desk.can_renew(place):
        if desk.has_room(more):
            desk.put(place, replace(seat, demand=seat.renewal, renewal=None))
            desk.said.append(Adopt(seat.job))
            return True
        if not desk.at_rest:
            return False
        if park_one(desk):
            return True
    desk.put(place, replace(seat, renewal=None))
    desk.said.append(Decline(seat.job))
    return True


# -- what waits for all iterations to end -------------------------------------------------------------------------------------


def _budget(desk: Desk) -> bool:
    """The new budget holds, or, where jobs that cannot be parked hold more, the old one."""
    nbytes = desk.next_budget_bytes
    if nbytes is None:
        return False
    if nbytes < desk.budget_bytes:
        if not desk.at_rest:
            return False
        if desk.held_bytes > nbytes:
            if park_one(desk):
                return True
            nbytes = desk.budget_bytes
    desk.budget_bytes, desk.next_budget_bytes = nbytes, None
    desk.said.append(Apply(nbytes))
    return True


def _admit(desk: Desk) -> bool:
    for k, seat in enumerate(desk.queue):
        if seat.wish == "stop" or not seat.steps_left:
            desk.queue = desk.queue[:k] + desk.queue[k + 1 :]
            desk.said.append(Dismiss(seat.job))
            return True
        if seat.wish == "pause" and not seat.rested:
            desk.queue = (*desk.queue[:k], replace(seat, rested=True), *desk.queue[k + 1 :])
            desk.said.append(Rest(seat.job))
            return True
    k = desk.next_in_queue()
    if k < 0:
        return False
    seat = desk.queue[k]
    if not desk.has_room(seat.demand.parked_bytes):
        return desk.at_rest and park_one(desk)
    desk.queue = desk.queue[:k] + desk.queue[k + 1 :]
    desk.add(seat)
    desk.said.append(Admit(seat.job))
    return True


# -- iterations under way -----------------------------------------------------------------------------------------------------


def _continue(desk: Desk) -> bool:
    """Moves of iterations under way, until one of these iterations is over."""
    seats, said = desk.seats, desk.said
    full, clock_us = len(desk.in_flight) >= desk.depth, desk.clock_us
    ready = [
        (s.virtual_us if s.virtual_us > clock_us else clock_us, place) for place, s in enumerate(seats)
        if s.position and not s.busy and not (full and s.demand.kinds[s.position] == LAUNCH)
    ]  # fmt: skip
    if len(ready) > 1:
        ready.sort()
    blocked = False
    for _, place in ready:
        while True:
            seat = seats[place]
            position = seat.position
            kind = seat.demand.kinds[position]
            if kind == WAIT:
                seats[place] = seat.at(position, busy=True)
                said.append(Do(seat.job, position))
                break
            if kind == LAUNCH and full:
                break
            if not desk.issue(place):
                blocked = True
                break
            said.append(Do(seat.job, position))
            seat = seats[place]
            if not seat.position or (blocked and kind != LAUNCH):
                return True  # one whose turn is earlier may have waited for that; after a launch it is asked when that ends
            full = len(desk.in_flight) >= desk.depth
            if seat.busy:
                break
    return False
