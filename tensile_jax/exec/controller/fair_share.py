"""Fair share: which job begins the next iteration, and which jobs are parked to make room for it.

    turn of a job    its virtual time, which is its compute time over its weight (stride scheduling, Waldspurger and Weihl 1995);
                     for a parked job later by `_QUANTUM` times the time of its two copies over its weight

The job of the least turn goes first; of equal turns, the job that was admitted first. The *clock* is the least virtual time of
the jobs that contended for the device when an iteration last began; it never goes back. A virtual time below the clock counts as
the clock's. So a job that was paused, or had no batch, for a while continues where the other jobs are, and does not catch up.

In order of turn, every job may begin whose iteration leaves a safe state, so that one job computes while another waits for
copies. While a job waits for memory, at most `MOST_OVERTAKINGS` iterations of other jobs begin. That count starts anew when the
waiting job has begun an iteration and its turn is no longer behind the others'.

To make room for the job that is first in turn, other jobs are parked: first those that would not run now, then the job with the
latest turn. Times are microseconds.
"""

from dataclasses import replace

from tensile_jax.exec.controller.ledger import Ledger
from tensile_jax.exec.controller.messages import Issue, Park, Unpark
from tensile_jax.exec.controller.state import JobRecord, StatePlace

MOST_OVERTAKINGS = 4
_QUANTUM = 20.0
_ON_HOST, _TO_DEVICE, _ON_DEVICE, _TO_HOST = StatePlace


def begin(ledger: Ledger) -> bool:
    """Begin an iteration, or order what must happen before one can begin; False where there is nothing to do."""
    if ledger.next_budget_bytes is not None:
        return False
    records, clock_us, spare = ledger.records, ledger.clock_us, ledger.spare_bytes
    full = len(ledger.in_flight) >= ledger.depth
    if full and not _may_unpark(ledger):
        return False
    waiting: list[tuple[float, int]] = []
    blocked: list[int] = []  # iterations under way that wait for memory, if launches may be issued at all
    for index, r in enumerate(records):
        if r.position:
            if not r.busy:
                blocked.append(index)
        elif r.renewal is not None and r.place is _ON_HOST:
            return False  # the job waits for room for its new plan
        elif r.batches and r.is_ready and r.place is not _TO_HOST and r.demand.rise_bytes <= spare:
            waiting.append((_turn(r, clock_us), index))
    if not waiting or (ledger.pending and ledger.next_pending() >= 0):
        return False
    if not full and any([records[k].overtaken >= MOST_OVERTAKINGS for k in blocked]):
        return False
    waiting.sort()
    first, rise = True, -1
    for turn, index in waiting:
        record = records[index]
        if record.place is _ON_HOST:
            makes_room = first and turn <= min([_turn(r, clock_us) for r in records if r.position], default=turn)
            rise = _highest_rise(records) if rise < 0 else rise
            if _unpark(ledger, index, rise=None if makes_room else rise):
                return True
            rise = max(rise, record.demand.rise_bytes)
        elif record.place is _ON_DEVICE and not record.busy and not full:
            if ledger.issue(index):
                _count_overtaking(ledger, blocked, index)
                ledger.orders.append(Issue(record.job, 0))
                return True
            short = ledger.settled_bytes - record.settled_bytes + record.demand.peak_bytes > ledger.budget_bytes
            if first and short and park_one(ledger, but=index):
                return True
        if first and not record.busy and not any([r.place is _TO_HOST for r in records]):
            if record.overtaken >= MOST_OVERTAKINGS:
                return False
            blocked.append(index)
        first = False
    return False


def _may_unpark(ledger: Ledger) -> bool:
    """Whether a parked job may find room, or have room made for it. A quick test, which says no only where that is certain."""
    parked = [r for r in ledger.records if r.place is _ON_HOST and r.batches]
    if not parked:
        return False
    free = ledger.budget_bytes - ledger.held_bytes
    settled, spare = ledger.budget_bytes - ledger.settled_bytes, ledger.spare_bytes
    rise = -1
    for r in parked:
        more = r.demand.idle_bytes - r.demand.parked_bytes
        if more <= free and r.demand.rise_bytes <= settled:
            rise = _highest_rise(ledger.records) if rise < 0 else rise
            if more + rise <= settled:
                return True
    turn = min([_turn(r, ledger.clock_us) for r in parked])
    if turn <= ledger.clock_us:
        return True
    for r in ledger.records:
        if r.virtual_us < turn and (r.position or (r.place is _ON_DEVICE and r.is_ready and r.demand.rise_bytes <= spare)):
            return False  # that job goes before the parked ones
    return True


def _highest_rise(records: list[JobRecord]) -> int:
    """The most that an iteration of a job on the device needs beyond what the job holds between iterations."""
    return max([r.demand.peak_bytes - r.demand.idle_bytes for r in records if r.place is not _ON_HOST], default=0)


def _count_overtaking(ledger: Ledger, blocked: list[int], index: int) -> None:
    """The job at `index` has begun an iteration while the `blocked` ones could not: count that, and advance the clock.

    The job's own count begins anew once it is not behind all other jobs.
    """
    spare, launched = ledger.spare_bytes, [job for job, _ in ledger.in_flight]
    mine = contending = max(ledger.records[index].virtual_us, ledger.clock_us)
    others = float("inf")
    for k, r in enumerate(ledger.records):
        if k != index and (r.position or (r.is_ready and r.demand.rise_bytes <= spare)):
            others = min(others, r.virtual_us)
            if not r.busy or not r.position or r.job in launched:  # not the jobs that wait for their own copies
                contending = min(contending, r.virtual_us)
    if ledger.records[index].overtaken and (mine >= max(others, ledger.clock_us) or others == float("inf")):
        ledger.put(index, replace(ledger.records[index], overtaken=0))
    for k in blocked:
        ledger.put(k, replace(ledger.records[k], overtaken=ledger.records[k].overtaken + 1))
    ledger.clock_us = max(ledger.clock_us, contending)


def _unpark(ledger: Ledger, index: int, *, rise: int | None) -> bool:
    """Order the job's state to be brought to the device; False where there is no room.

    Without a `rise` the job is first in turn: jobs between iterations are parked until its peak fits. With a `rise`, its state
    comes only where all jobs on the device and all that go before it, of which none rises more, could still run.
    """
    record = ledger.records[index]
    demand = record.demand
    more = demand.idle_bytes - demand.parked_bytes
    if rise is None:
        if ledger.settled_bytes + demand.rise_bytes > ledger.budget_bytes:
            return park_one(ledger, but=index)
    elif ledger.settled_bytes + max(more + rise, demand.rise_bytes) > ledger.budget_bytes:
        return False
    if not ledger.has_room(more):
        return False
    ledger.put(index, replace(record, place=_TO_DEVICE, busy=True))
    ledger.orders.append(Unpark(record.job))
    return True


def _turn(record: JobRecord, clock_us: float) -> float:
    """The job's turn: the least goes first."""
    turn = max(record.virtual_us, clock_us)
    return turn + _QUANTUM * record.demand.switch_us / record.weight if record.place is _ON_HOST else turn


def park(ledger: Ledger, index: int) -> bool:
    """Order the job's state to be copied to the host."""
    record = ledger.records[index]
    ledger.put(index, replace(record, place=_TO_HOST, busy=True))
    ledger.orders.append(Park(record.job))
    return True


def park_one(ledger: Ledger, *, but: int = -1) -> bool:
    """Park one job that is between iterations: one that would not run now, or else the one of the latest turn.

    False while another job is being parked, and while the job to be parked has an iteration under way: both are waited for.
    """
    spare, clock_us = ledger.spare_bytes, ledger.clock_us
    chosen: tuple[bool, float, int] | None = None
    for index, r in enumerate(ledger.records):
        if r.place is _TO_HOST:
            return False
        if index != but and r.place is _ON_DEVICE and r.demand.idle_bytes > r.demand.parked_bytes:
            runs = r.position > 0 or r.busy or (r.is_ready and r.demand.rise_bytes <= spare)
            rank = (not runs, _turn(r, clock_us), index)
            chosen = rank if chosen is None else max(chosen, rank)
    if chosen is None or ledger.records[chosen[2]].position or ledger.records[chosen[2]].busy:
        return False
    return park(ledger, chosen[2])
