"""How a runtime and its jobs stand: `Status`, `JobStatus` and `JobReport`, taken while the runtime's lock is held."""

import statistics
from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING

from tensile_jax.exec.actor.actor import Program
from tensile_jax.exec.controller.state import Where
from tensile_jax.exec.runtime.dispatcher import Dispatcher, Tally
from tensile_jax.runtime_records import FINAL, JobReport, JobStatus, LaneName, Status

if TYPE_CHECKING:  # a job knows its status
    from tensile_jax.exec.runtime.job import Job

_RECENT_US = 3e6  # over which the use of the link is taken
_MOST_SPANS = 2000


def status(jobs: "Sequence[Job]", dispatcher: Dispatcher) -> Status:
    """All of it."""
    state, now = dispatcher.state, dispatcher.now()
    found = tuple(job_status(job, dispatcher) for job in jobs)
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
        host_budget_bytes=int(min(state.host_budget_bytes, 2**62)),
        device_bytes=state.held_bytes,
        peak_bytes=dispatcher.peak_bytes,
        host_bytes=sum(job.host_bytes for job in found),
        out_share=min(1.0, busy["out"] / window),
        into_share=min(1.0, busy["into"] / window),
        jobs=found,
    )


def job_status(job: "Job", dispatcher: Dispatcher) -> JobStatus:
    """One job."""
    seat = dispatcher.state.seat(job._number)
    program, ends = job._program, list(job._step_ends)
    plan = None if program is None else program.plan
    away = seat is None or seat.where is Where.AWAY
    tally = dispatcher.tallies.get(job._number) or Tally()
    return JobStatus(
        name=job.name,
        state=job._state,
        priority=job._asked.priority,
        step=job._step,
        steps=job._asked.steps,
        loss=job._loss,
        steps_per_s=(len(ends) - 1) / (ends[-1] - ends[0]) if len(ends) > 1 and ends[-1] > ends[0] else None,
        device_bytes=0 if seat is None else seat.held_bytes,
        peak_bytes=tally.peak_bytes,
        planned_bytes=0 if program is None else program.demand.peak_bytes,
        host_bytes=0 if job._state in FINAL else job._actor.state_bytes if away else _out_bytes(program),
        stall_us=tally.stall_us / max(job._step - job._asked.first, 1),
        swapped_bytes=0 if plan is None else plan.swapped_out_bytes + plan.swapped_in_bytes,
        note=job._note,
    )


def job_report(job: "Job", dispatcher: Dispatcher) -> JobReport:
    """What was measured of one job.

    Raises:
        RuntimeError: it has no plan yet.
    """
    now, plan = job_status(job, dispatcher), job.plan
    if plan is None:
        raise RuntimeError(f"There is nothing to report of {job.name} before it has a plan; it is {now.state}.")
    passive_swap_ins, out_of_memory = job._actor.counts()
    return JobReport(
        step=now.step,
        peak_bytes=now.peak_bytes,
        predicted_peak_bytes=plan.peak_bytes,
        step_us=statistics.median(job._step_us) if job._step_us else None,
        predicted_step_us=plan.step_us,
        swapped_bytes=now.swapped_bytes,
        stall_us=now.stall_us,
        passive_swap_ins=passive_swap_ins,
        out_of_memory=out_of_memory,
        segments=len(plan.segments),
        plans=len(job._plans),
    )


def _out_bytes(program: Program | None) -> int:
    """Of state that is out between iterations, by the plan."""
    return 0 if program is None else max(0, program.demand.state_bytes - program.demand.idle_bytes)
