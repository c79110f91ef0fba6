"""Makes the snapshots that a user asks for: `Status` of a runtime, `JobStatus` and `JobReport` of a job.

The jobs are read from the runtime's store, which has a record of each job (`store.py`). The caller must hold the store's lock.
"""

import statistics
from itertools import islice

from tensile_jax.exec.controller.state import StatePlace
from tensile_jax.exec.runtime.dispatcher import Dispatcher
from tensile_jax.exec.runtime.job_measurements import JobMeasurements
from tensile_jax.exec.runtime.share_of_peaks import ShareOfPeaks
from tensile_jax.exec.runtime.store import Store, StoredJob
from tensile_jax.runtime_records import NO_LIMIT, JobReport, JobStatus, LaneName, Status

_RECENT_US = 3e6  # the shares of time in which the link is busy are those of this last interval
_MOST_SPANS = 2000


def status(store: Store, dispatcher: Dispatcher, share: ShareOfPeaks | None) -> Status:
    """The status of the runtime and of all its jobs. `share` is what the budget is made of, if it is no number of bytes."""
    state, now = dispatcher.state, dispatcher.now()
    jobs = tuple(job_status(job, dispatcher) for job in store.jobs.values())
    busy: dict[LaneName, float] = {"out": 0.0, "into": 0.0, "compute": 0.0}
    since = now - _RECENT_US
    for span in islice(reversed(dispatcher.recorder.spans.copy()), _MOST_SPANS):
        if span.end_us < since:
            break
        busy[span.lane] += span.end_us - max(span.begin_us, since)
    window = max(min(now, _RECENT_US), 1.0)
    return Status(
        time_s=now / 1e6,
        budget_bytes=state.budget_bytes,
        host_budget_bytes=int(min(state.host_budget_bytes, NO_LIMIT)),
        device_bytes=state.held_bytes,
        peak_bytes=dispatcher.peak_bytes,
        host_bytes=sum(job.host_bytes for job in jobs),
        out_share=min(1.0, busy["out"] / window),
        into_share=min(1.0, busy["into"] / window),
        jobs=jobs,
        budget_of="" if share is None else str(share),
    )


def job_status(job: StoredJob, dispatcher: Dispatcher) -> JobStatus:
    """The status of one job."""
    life, in_use = job.life, job.in_use
    record = dispatcher.state.record(job.number)
    measured = dispatcher.measured.get(job.number) or JobMeasurements()
    memory, plan = (None, None) if in_use is None else (in_use.memory, in_use.plan)
    host_bytes = 0
    if not life.has_ended:
        if record is None or record.place is StatePlace.ON_HOST:
            host_bytes = job.actor.state_bytes
        elif memory is not None:  # the part of the state that the plan keeps on the host between iterations
            host_bytes = max(0, memory.state_bytes - memory.idle_bytes)
    return JobStatus(
        name=job.name,
        state=life.state,
        priority=life.priority,
        step=life.done,
        steps=life.steps,
        loss=measured.loss,
        steps_per_s=measured.steps_per_s,
        device_bytes=0 if record is None else record.held_bytes,
        peak_bytes=measured.peak_bytes,
        planned_bytes=0 if memory is None else memory.peak_bytes,
        host_bytes=host_bytes,
        stall_us=measured.stall_us / max(life.done - life.first, 1),
        swapped_bytes=0 if plan is None else plan.swapped_out_bytes + plan.swapped_in_bytes,
        note=life.shown_note,
    )


def job_report(job: StoredJob, dispatcher: Dispatcher) -> JobReport:
    """What was measured of one job, and what its plan predicted.

    Raises:
        RuntimeError: it has no plan yet.
    """
    now = job_status(job, dispatcher)
    if job.in_use is None:
        raise RuntimeError(f"There is nothing to report of {job.name} before it has a plan; it is {now.state}.")
    plan, measured = job.in_use.plan, dispatcher.measured.get(job.number) or JobMeasurements()
    passive_swap_ins, out_of_memory = job.actor.counts()
    return JobReport(
        name=now.name,
        step=now.step,
        peak_bytes=now.peak_bytes,
        predicted_peak_bytes=plan.peak_bytes,
        step_us=statistics.median(measured.step_us.copy()) if measured.step_us else None,
        predicted_step_us=plan.step_us,
        predicted_jit_step_us=plan.jit_step_us,
        swapped_bytes=now.swapped_bytes,
        stall_us=now.stall_us,
        passive_swap_ins=passive_swap_ins,
        out_of_memory=out_of_memory,
        segments=len(plan.segments),
        plans=len(job.plans),
    )
