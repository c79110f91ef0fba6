"""Decides what each of several jobs on one device does next (the "Global Controller" of TENSILE section III-D).

The controller is a pure state machine, `step`: (state, event) -> (state, instructions). It has no JAX, no clock and no thread.
The dispatcher (`exec/runtime/dispatcher.py`) reports events to the controller and carries out its instructions one after another.
Each job has a `JobRecord`. A job's iteration is a sequence of moves, such as a launch or a wait for copies. A job between
iterations is at position 0. Its state is then on the device or in host memory. A job whose state is in host memory is *parked*.

The controller issues consecutive moves of an iteration together, as a *run*. A run is as long as possible: it ends before the
next wait for copies, before the last move of the iteration, or before the first move for which there is no memory. (On a CPU with
a single job, waits do not end a run, since no other job could compute meanwhile.) The dispatcher reports only the end of a run.

    held       the bytes that all jobs hold, by their memory profiles. For a job with a run in flight, these are the bytes that
               the job will hold after that run
    transient  the most bytes that any run in flight needs beyond what its job holds after that run. This is a maximum, not a
               sum, because the device carries out the runs one after another

The controller guarantees, for any order of events:

    no overrun      held + transient <= budget
    no deadlock     the state is always safe, as in the banker's algorithm: every iteration under way can be finished while the
                    other jobs keep what they hold. This is decided exactly (`plan/multi_job/safety.py`)
    no starvation   while the job that is first in turn, or an iteration under way, waits for memory, at most `MOST_OVERTAKINGS`
                    iterations of other jobs begin. Then no more begin until the waiting job goes on. Meanwhile, those that are
                    under way end, and jobs are parked to make room
    no livelock     jobs are not parked and unparked endlessly without a launch in between. A job is unparked before its turn
                    only if no job must be parked afterwards to make room for an iteration of a job on the device or of a
                    parked job with an earlier turn. These iterations need not fit side by side: it is enough if each one fits
                    while the other jobs are between iterations

Moves of iterations under way are issued before new iterations begin. `fair_share.py` decides whose iteration begins next.

Three requests can need memory that running iterations hold: admitting a pending job (its constants, the arrays that its step
captures, stay on the device), renewing a plan (its constants may be larger), and lowering the budget. The controller then starts
no new iteration until the running ones have ended, and parks jobs one by one. Times are in microseconds.
"""

from dataclasses import replace

from tensile_jax.exec.controller.fair_share import begin, park, park_one
from tensile_jax.exec.controller.ledger import Ledger
from tensile_jax.exec.controller.messages import (
    Admit,
    AdoptPlan,
    ApplyBudget,
    BatchLoaded,
    BudgetRequested,
    DeclinePlan,
    Event,
    Instruction,
    Issue,
    JobEvent,
    JobLost,
    PlanRenewed,
    Prepared,
    Release,
    ReportPaused,
    RunEnded,
    StateMoved,
    WaitEnded,
    Wished,
)
from tensile_jax.exec.controller.state import JobRecord, State, StatePlace
from tensile_jax.plan.multi_job.memory_profile import LAUNCH, WAIT


def step(state: State, event: Event) -> tuple[State, list[Instruction]]:
    """The state after `event`, and the instructions to carry out now, in their order. An error quotes the last events."""
    ledger, story = Ledger(state), state.story.with_event(event)
    try:
        _record(ledger, event)
        while (
            _settle(ledger) or _change_budget(ledger) or (ledger.pending and _admit(ledger)) or _proceed(ledger) or begin(ledger)
        ):
            pass
    except Exception as error:
        story.add_to(error)
        raise
    return ledger.state(story), ledger.instructions


# -- what has happened --------------------------------------------------------------------------------------------------------


def _record(ledger: Ledger, event: Event) -> None:
    """Enter `event` into the ledger, without deciding anything. A late event of a job that is no longer known is ignored."""
    if isinstance(event, BudgetRequested):
        ledger.request_budget(event.nbytes)
        return
    if isinstance(event, Prepared):
        job = event.record.job
        if any(r.job == job for r in (*ledger.records, *ledger.pending)) or any(one == job for one, _ in ledger.in_flight):
            raise ValueError(f"A job's number must never be used again: got a second job {job}.")
        ledger.queue(event.record)
        return
    job, records = event.job, ledger.records
    for index, record in enumerate(records):  # noqa: B007
        if record.job == job:
            break
    else:
        _record_of_others(ledger, event)
        return
    if isinstance(event, RunEnded):
        if ledger.end_run(job):
            virtual_us = max(record.virtual_us, ledger.clock_us) + event.us / record.weight
            busy = record.busy and ledger.depth > 1  # only at depth 1 does a run make its job busy
            records[index] = record.after_run(virtual_us, busy=busy)
    elif isinstance(event, WaitEnded):
        ledger.put(index, record.at(record.position + 1, busy=False))
    elif isinstance(event, StateMoved):
        arrived = StatePlace.ON_DEVICE if record.place is StatePlace.TO_DEVICE else StatePlace.ON_HOST
        ledger.put(index, replace(record, place=arrived, busy=False))
    elif isinstance(event, PlanRenewed):
        records[index] = replace(record, renewal=event.plan)
    elif isinstance(event, JobLost):
        ledger.remove(index)
        ledger.end_all_runs(job)
    else:
        records[index] = _with_batch_or_wish(record, event)


def _record_of_others(ledger: Ledger, event: JobEvent) -> None:
    """Enter an event of a job that is not admitted: a pending one, whose plan is replaced at once, or one that is not known."""
    job = event.job
    if isinstance(event, RunEnded):
        ledger.end_run(job)  # the job was released: its state was on the host before the end of this run was reported
    elif isinstance(event, JobLost):
        ledger.unqueue(job)
        ledger.end_all_runs(job)
    elif isinstance(event, PlanRenewed):
        plan = event.plan
        ledger.requeue(job, lambda r: replace(r, memory=plan.memory, plan=plan.id))
    elif isinstance(event, BatchLoaded | Wished):
        ledger.requeue(job, lambda r: _with_batch_or_wish(r, event))


def _with_batch_or_wish(record: JobRecord, event: BatchLoaded | Wished) -> JobRecord:
    if isinstance(event, BatchLoaded):
        return replace(record, batches=record.batches + 1)
    return record if record.wish == "stop" else replace(record, wish=event.wish, pause_reported=False)  # a stop is final


# -- between iterations -------------------------------------------------------------------------------------------------------


def _settle(ledger: Ledger) -> bool:
    """Park a job that is to stop, to pause or to change its plan. If the job is parked already, carry out what it is to do.

    A job also pauses for a checkpoint. Until that pause is reported, a request to run changes nothing: the job's lifecycle
    repeats the request afterwards.
    """
    leaving = [
        index for index, r in enumerate(ledger.records)
        if not r.position and not r.busy
        and (r.wish != "run" or not r.steps_left or r.renewal is not None or r.checkpoint_due)
    ]  # fmt: skip
    for index in leaving:
        record = ledger.records[index]
        if record.place is StatePlace.ON_DEVICE:
            return park(ledger, index)
        if record.wish == "stop" or not record.steps_left:
            ledger.remove(index)
            ledger.instructions.append(Release(record.job))
            return True
        if record.renewal is not None and _renew(ledger, index):
            return True
        if record.renewal is None and not record.pause_reported:
            ledger.put(index, record.with_pause_reported())
            ledger.instructions.append(ReportPaused(record.job))
            return True
    return False


def _renew(ledger: Ledger, index: int) -> bool:
    """Adopt the job's new plan; decline it if this or another job could not run then; False while the job waits for room."""
    record = ledger.records[index]
    assert record.renewal is not None
    plan = record.renewal
    more = plan.memory.parked_bytes - record.memory.parked_bytes
    if ledger.can_renew(index):
        if ledger.has_room(more):
            ledger.put(index, replace(record, memory=plan.memory, plan=plan.id, renewal=None))
            ledger.instructions.append(AdoptPlan(record.job, plan))
            return True
        if not ledger.is_idle:
            return False
        if park_one(ledger):
            return True
    ledger.put(index, replace(record, renewal=None))
    ledger.instructions.append(DeclinePlan(record.job, plan))
    return True


# -- budget and admission, which can wait for all iterations to end -----------------------------------------------------------


def _change_budget(ledger: Ledger) -> bool:
    """Apply the requested budget; keep the old one if the jobs hold more than the requested budget even when all are parked."""
    nbytes = ledger.next_budget_bytes
    if nbytes is None:
        return False
    if nbytes < ledger.budget_bytes:
        if not ledger.is_idle:
            return False
        if ledger.held_bytes > nbytes:
            if park_one(ledger):
                return True
            nbytes = ledger.budget_bytes
    ledger.use_budget(nbytes)
    ledger.instructions.append(ApplyBudget(nbytes))
    return True


def _admit(ledger: Ledger) -> bool:
    """Admit the next pending job, if there is room for it. But first, a pending job that is to stop is released, and one that is
    to pause is reported.
    """
    for record in ledger.pending:
        if record.wish == "stop" or not record.steps_left:
            ledger.unqueue(record.job)
            ledger.instructions.append(Release(record.job))
            return True
        if record.wish == "pause" and not record.pause_reported:
            ledger.requeue(record.job, JobRecord.with_pause_reported)
            ledger.instructions.append(ReportPaused(record.job))
            return True
    k = ledger.next_pending()
    if k < 0:
        return False
    record = ledger.pending[k]
    if not ledger.has_room(record.memory.parked_bytes):
        return ledger.is_idle and park_one(ledger)
    ledger.unqueue(record.job)
    ledger.add(record)
    ledger.instructions.append(Admit(record.job))
    return True


# -- iterations under way -----------------------------------------------------------------------------------------------------


def _proceed(ledger: Ledger) -> bool:
    """Issue runs of iterations under way, in order of virtual time; True if every decision must be looked at again."""
    records, instructions = ledger.records, ledger.instructions
    full, clock_us = len(ledger.in_flight) >= ledger.depth, ledger.clock_us
    ready = [
        (r.virtual_us if r.virtual_us > clock_us else clock_us, index) for index, r in enumerate(records)
        if r.position and not r.busy and not (full and r.memory.kinds[r.position] == LAUNCH)
    ]  # fmt: skip
    if len(ready) > 1:
        ready.sort()
    blocked = False
    for _, index in ready:
        while True:
            record = records[index]
            position = record.position
            kind = record.memory.kinds[position]
            if kind == WAIT:
                records[index] = record.at(position, busy=True)
                instructions.append(Issue(record.job, position, position + 1))
                break
            if kind == LAUNCH and full:
                break
            in_flight = ledger.in_flight
            end = ledger.issue(index)
            if not end:
                blocked = True
                break
            instructions.append(Issue(record.job, position, end))
            record = records[index]
            if not record.position or (blocked and ledger.in_flight is in_flight):
                return True  # an earlier job may wait for the memory that this run freed; what a launch frees is free at its end
            full = len(ledger.in_flight) >= ledger.depth
            if record.busy:
                break
    return False
