"""Whose turn it is to begin an iteration, and who makes room for that.

    turn of a seat      its virtual time: its compute time over its weight (stride scheduling, Waldspurger and Weihl 1995);
                        while it is away, later by `_QUANTUM` times its two copies over its weight

The least goes first. Virtual times count from the clock on, which follows the least of those that contend for the device and
never goes back: who has not wanted to run, for want of a batch or because it was paused, begins again where the others are. Ties
go to the seat that was taken first.

Whoever leaves all seats calm may begin, in order of turn: a valley of one job takes another job's work while the first waits for
copies. But what waits for memory, the seat whose turn it is or an iteration under way, is passed by at most `PATIENCE` iterations
until it has caught up with the others.

For the seat whose turn it is, jobs are parked: those first that would not run now, then the one whose turn is furthest off.
"""

from dataclasses import replace

from tensile_jax.exec.controller.ledger import Desk
from tensile_jax.exec.controller.orders import Do, Park, Unpark
from tensile_jax.exec.controller.state import Seat, Where

PATIENCE = 4
_QUANTUM = 20.0
_AWAY, _COMING, _HERE, _GOING = Where


def begin(desk: Desk) -> bool:
    """A new iteration, or what must happen before it can begin."""
    if desk.next_budget_bytes is not None:
        return False
    seats, clock_us, spare = desk.seats, desk.clock_us, desk.spare_bytes
    full = len(desk.in_flight) >= desk.depth
    if full and not _may_come(desk):
        return False
    waiting: list[tuple[float, int]] = []
    blocked: list[int] = []  # what is under way and not busy waits for memory, if launches may be issued at all
    for place, s in enumerate(seats):
        if s.position:
            if not s.busy:
                blocked.append(place)
        elif s.renewal is not None and s.where is _AWAY:
            return False  # it waits for room
        elif s.batches and s.wants and s.where is not _GOING and s.demand.rise_bytes <= spare:
            waiting.append((_turn(s, clock_us), place))
    if not waiting or (desk.queue and desk.next_in_queue() >= 0):
        return False
    if not full and any([seats[p].passed >= PATIENCE for p in blocked]):
        return False
    waiting.sort()
    first, rise = True, -1
    for turn, place in waiting:
        seat = seats[place]
        if seat.where is _AWAY:
            makes_room = first and turn <= min([_turn(s, clock_us) for s in seats if s.position], default=turn)
            rise = _highest_rise(seats) if rise < 0 else rise
            if _bring(desk, place, rise=None if makes_room else rise):
                return True
            rise = max(rise, seat.demand.rise_bytes)
        elif seat.where is _HERE and not seat.busy and not full:
            if desk.issue(place):
                _pass(desk, blocked, place)
                desk.said.append(Do(seat.job, 0))
                return True
            short = desk.settled_bytes - seat.settled_bytes + seat.demand.peak_bytes > desk.budget_bytes
            if first and short and park_one(desk, but=place):
                return True
        if first and not seat.busy and not any([s.where is _GOING for s in seats]):
            if seat.passed >= PATIENCE:
                return False
            blocked.append(place)
        first = False
    return False


def _may_come(desk: Desk) -> bool:
    """Whether one that is away may find room, or have it made: quickly told, and no only where that is certain."""
    away = [s for s in desk.seats if s.where is _AWAY and s.batches]
    if not away:
        return False
    free, settled, spare = desk.budget_bytes - desk.held_bytes, desk.budget_bytes - desk.settled_bytes, desk.spare_bytes
    rise = -1
    for s in away:
        more = s.demand.idle_bytes - s.demand.parked_bytes
        if more <= free and s.demand.rise_bytes <= settled:
            rise = _highest_rise(desk.seats) if rise < 0 else rise
            if more + rise <= settled:
                return True
    turn = min([_turn(s, desk.clock_us) for s in away])
    if turn <= desk.clock_us:
        return True
    for s in desk.seats:
        if s.virtual_us < turn and (s.position or (s.where is _HERE and s.wants and s.demand.rise_bytes <= spare)):
            return False  # it goes before them
    return True


def _highest_rise(seats: list[Seat]) -> int:
    """Of those that are here: how much more than between iterations one needs at most."""
    return max([s.demand.peak_bytes - s.demand.idle_bytes for s in seats if s.where is not _AWAY], default=0)


def _pass(desk: Desk, blocked: list[int], place: int) -> None:
    """An iteration of the seat at `place` has begun, while others were `blocked`; the clock goes on.

    Its patience is whole again once it is not behind all others.
    """
    spare, launched = desk.spare_bytes, [job for job, _ in desk.in_flight]
    mine = contending = max(desk.seats[place].virtual_us, desk.clock_us)
    others = float("inf")
    for p, s in enumerate(desk.seats):
        if p != place and (s.position or (s.wants and s.demand.rise_bytes <= spare)):
            others = min(others, s.virtual_us)
            if not s.busy or not s.position or s.job in launched:  # not those that wait for their own copies
                contending = min(contending, s.virtual_us)
    if desk.seats[place].passed and (mine >= max(others, desk.clock_us) or others == float("inf")):
        desk.put(place, replace(desk.seats[place], passed=0))
    for p in blocked:
        desk.put(p, replace(desk.seats[p], passed=desk.seats[p].passed + 1))
    desk.clock_us = max(desk.clock_us, contending)


def _bring(desk: Desk, place: int, *, rise: int | None) -> bool:
    """The seat's state on its way to the device.

    Without a `rise` it is the seat's turn: jobs between iterations make room for its peak. With it, the seat comes only where all
    who are here, and all who go before it, could still run beside all others at rest: none rises more.
    """
    seat = desk.seats[place]
    demand = seat.demand
    more = demand.idle_bytes - demand.parked_bytes
    if rise is None:
        if desk.settled_bytes + demand.rise_bytes > desk.budget_bytes:
            return park_one(desk, but=place)
    elif desk.settled_bytes + max(more + rise, demand.rise_bytes) > desk.budget_bytes:
        return False
    if not desk.has_room(more):
        return False
    desk.put(place, replace(seat, where=_COMING, busy=True))
    desk.said.append(Unpark(seat.job))
    return True


def _turn(seat: Seat, clock_us: float) -> float:
    """When it is the seat's turn: the least goes first."""
    turn = max(seat.virtual_us, clock_us)
    return turn + _QUANTUM * seat.demand.switch_us / seat.weight if seat.where is _AWAY else turn


def park(desk: Desk, place: int) -> bool:
    """The seat's state on its way to the host."""
    seat = desk.seats[place]
    desk.put(place, replace(seat, where=_GOING, busy=True))
    desk.said.append(Park(seat.job))
    return True


def park_one(desk: Desk, *, but: int = -1) -> bool:
    """One job goes away between iterations: one that would not run now, or else the one whose turn is furthest off.

    False while another one is going, and while that one is under way: it is waited for.
    """
    spare, clock_us = desk.spare_bytes, desk.clock_us
    least: tuple[bool, float, int] | None = None
    for place, s in enumerate(desk.seats):
        if s.where is _GOING:
            return False
        if place != but and s.where is _HERE and s.demand.idle_bytes > s.demand.parked_bytes:
            runs = s.position > 0 or s.busy or (s.wants and s.demand.rise_bytes <= spare)
            rank = (not runs, _turn(s, clock_us), place)
            least = rank if least is None else max(least, rank)
    if least is None or desk.seats[least[2]].position or desk.seats[least[2]].busy:
        return False
    return park(desk, least[2])
