"""Decides by fair shares which job begins the next iteration, and which jobs are parked to make room for that iteration.

A job is *parked* while its whole state is in host memory. A job's *weight* is its priority: a job with twice the weight gets
twice the time on the device.

    virtual time of a job   grows by compute time / weight whenever the job computes. A virtual time that is behind the clock is
                            first raised to the clock
    clock                   the least virtual time of all jobs that contended for the device (see below) when an iteration last
                            began; the clock never goes back
    turn of a job           its virtual time; for a parked job, plus `COPY_TIMES` * (time to copy its state out and in) / weight

This is stride scheduling (Waldspurger and Weihl 1995). The job with the least turn goes first; of equal turns, the job that was
admitted first. A job that was paused or had no batch continues from the clock, so it does not catch up on the time that it
missed. The turn of a parked job is later because its state must be copied. Jobs therefore change places so rarely that copies
of states take only a small part of the time.

Several jobs may have iterations under way at once, so that one job computes while another waits for copies. The jobs are tried in
the order of their turns. An iteration may begin only if the controller's state is still *safe* afterwards: all iterations under
way can be finished while the other jobs keep the memory that they hold (`ledger.py`).

A job *contends* for the device if its iteration is under way or could begin now. While a contending job waits for memory, jobs
that need less may begin iterations: they overtake it, at most `MOST_OVERTAKINGS` times. Overtakings are counted for the job
that is first in turn, and for jobs that wait in the middle of an iteration. When a job begins an iteration, its count is set to
zero, except if the job is still behind all others, which means that every other contending job has a greater virtual time.

To make room for the job that is first in turn, other jobs are parked, one after another. Jobs that would not run now are parked
first: those that are paused, have no batch, or whose peak does not fit. If there is no such job, the job with the latest turn is
parked.

Times are in microseconds.
"""

from dataclasses import replace

from tensile_jax.exec.controller.ledger import Ledger
from tensile_jax.exec.controller.messages import Issue, Park, Unpark
from tensile_jax.exec.controller.state import JobRecord, StatePlace

MOST_OVERTAKINGS = 4
"""So many iterations of other jobs may begin while a job waits for memory. A cluster places jobs by the same number (`ray/`)."""

COPY_TIMES = 20.0
"""For how many times as long as its state is copied a job computes, before another job takes its place."""

_ON_HOST, _TO_DEVICE, _ON_DEVICE, _TO_HOST = StatePlace


def begin(ledger: Ledger) -> bool:
    """Begin an iteration. If that is not possible, order a job to be parked or unparked so that one can begin later. False if
    neither is possible now.
    """
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
            return False  # this job waits for room for its new plan, so no iteration begins
        elif r.batches and r.is_ready and r.place is not _TO_HOST and r.memory.rise_bytes <= spare:
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
            rise = max(rise, record.memory.rise_bytes)
        elif record.place is _ON_DEVICE and not record.busy and not full:
            if ledger.issue(index):
                _count_overtaking(ledger, blocked, index)
                ledger.instructions.append(Issue(record.job, 0, 1))
                return True
            short = ledger.settled_bytes - record.settled_bytes + record.memory.peak_bytes > ledger.budget_bytes
            if first and short and park_one(ledger, but=index):
                return True
        if first and not record.busy and not any([r.place is _TO_HOST for r in records]):
            if record.overtaken >= MOST_OVERTAKINGS:
                return False
            blocked.append(index)
        first = False
    return False


def _may_unpark(ledger: Ledger) -> bool:
    """Whether a parked job may find room, or have room made for it.

    This test is quick and not exact: False is certain, True is not.
    """
    parked = [r for r in ledger.records if r.place is _ON_HOST and r.batches]
    if not parked:
        return False
    free = ledger.budget_bytes - ledger.held_bytes
    settled, spare = ledger.budget_bytes - ledger.settled_bytes, ledger.spare_bytes
    rise = -1
    for r in parked:
        more = r.memory.idle_bytes - r.memory.parked_bytes
        if more <= free and r.memory.rise_bytes <= settled:
            rise = _highest_rise(ledger.records) if rise < 0 else rise
            if more + rise <= settled:
                return True
    turn = min([_turn(r, ledger.clock_us) for r in parked])
    if turn <= ledger.clock_us:
        return True
    for r in ledger.records:
        if r.virtual_us < turn and (r.position or (r.place is _ON_DEVICE and r.is_ready and r.memory.rise_bytes <= spare)):
            return False  # that job goes before the parked ones
    return True


def _highest_rise(records: list[JobRecord]) -> int:
    """The most that an iteration of a job on the device needs beyond what the job holds between iterations."""
    return max([r.memory.peak_bytes - r.memory.idle_bytes for r in records if r.place is not _ON_HOST], default=0)


def _count_overtaking(ledger: Ledger, blocked: list[int], index: int) -> None:
    """Count that the job at `index` has begun an iteration while the jobs at `blocked` waited for memory; advance the clock.

    The job's own count is set to zero if its virtual time is not less than that of every other contending job.
    """
    spare, launched = ledger.spare_bytes, [job for job, _ in ledger.in_flight]
    mine = contending = max(ledger.records[index].virtual_us, ledger.clock_us)
    others = float("inf")
    for k, r in enumerate(ledger.records):
        if k != index and (r.position or (r.is_ready and r.memory.rise_bytes <= spare)):
            others = min(others, r.virtual_us)
            if not r.busy or not r.position or r.job in launched:  # not the jobs that wait for their own copies
                contending = min(contending, r.virtual_us)
    if ledger.records[index].overtaken and (mine >= max(others, ledger.clock_us) or others == float("inf")):
        ledger.put(index, replace(ledger.records[index], overtaken=0))
    for k in blocked:
        ledger.put(k, replace(ledger.records[k], overtaken=ledger.records[k].overtaken + 1))
    ledger.advance_clock(contending)


def _unpark(ledger: Ledger, index: int, *, rise: int | None) -> bool:
    """Instruction the job's state to be copied to the device; False if there is no room for it now.

    Args:
        rise: None for the job that is first in turn: if its peak does not fit, another job is parked instead, and the result is
            True. For any other job, the most bytes that one iteration of a job on the device, or of a parked job of an earlier
            turn, needs on top of what is held between iterations. The state is copied only if those jobs can still run.
    """
    record = ledger.records[index]
    memory = record.memory
    more = memory.idle_bytes - memory.parked_bytes
    if rise is None:
        if ledger.settled_bytes + memory.rise_bytes > ledger.budget_bytes:
            return park_one(ledger, but=index)
    elif ledger.settled_bytes + max(more + rise, memory.rise_bytes) > ledger.budget_bytes:
        return False
    if not ledger.has_room(more):
        return False
    ledger.put(index, replace(record, place=_TO_DEVICE, busy=True))
    ledger.instructions.append(Unpark(record.job))
    return True


def _turn(record: JobRecord, clock_us: float) -> float:
    """The job's turn, in microseconds. The job with the least turn goes first."""
    turn = max(record.virtual_us, clock_us)
    return turn + COPY_TIMES * record.memory.switch_us / record.weight if record.place is _ON_HOST else turn


def park(ledger: Ledger, index: int) -> bool:
    """Give the instruction to copy the job's state to the host."""
    record = ledger.records[index]
    ledger.put(index, replace(record, place=_TO_HOST, busy=True))
    ledger.instructions.append(Park(record.job))
    return True


def park_one(ledger: Ledger, *, but: int = -1) -> bool:
    """Park one job: a job that would not run now, or, if there is no such job, the job with the latest turn.

    False if another job is being parked, or if the chosen job has an iteration or a copy under way. The caller then waits for
    that to end.

    Args:
        but: the index of a job that must not be parked; -1 for none.
    """
    spare, clock_us = ledger.spare_bytes, ledger.clock_us
    chosen: tuple[bool, float, int] | None = None
    for index, r in enumerate(ledger.records):
        if r.place is _TO_HOST:
            return False
        if index != but and r.place is _ON_DEVICE and r.memory.idle_bytes > r.memory.parked_bytes:
            runs = r.position > 0 or r.busy or (r.is_ready and r.memory.rise_bytes <= spare)
            rank = (not runs, _turn(r, clock_us), index)
            chosen = rank if chosen is None else max(chosen, rank)
    if chosen is None or ledger.records[chosen[2]].position or ledger.records[chosen[2]].busy:
        return False
    return park(ledger, chosen[2])
