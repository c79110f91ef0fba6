"""What a runtime asks of its Memory Scheduler, and what becomes of that: jobs prepared, planned again, renewed.

A new job is planned under what is left beside the others at rest; if that is too little, under the whole budget, and then it runs
in time slices. Methods that take time run in the scheduler's thread, as they say.
"""

import threading
from dataclasses import replace
from typing import TYPE_CHECKING

from tensile_jax.errors import BudgetTooSmall
from tensile_jax.exec.actor.actor import Program, Traced
from tensile_jax.exec.controller.events import Prepared
from tensile_jax.exec.controller.machine import smallest_need
from tensile_jax.exec.controller.state import Seat
from tensile_jax.exec.runtime.job import Job, is_leaving
from tensile_jax.exec.step.prepared_step import Options
from tensile_jax.plan.multi_job.admission import JobLimits, most_swapped_bytes, plan_job
from tensile_jax.plan.multi_job.memory_profile import MemoryProfile
from tensile_jax.plan.multi_job.state_offload import offload_state
from tensile_jax.plan_format import Plan, format_bytes
from tensile_jax.runtime_records import FINAL

if TYPE_CHECKING:  # they name each other
    from tensile_jax.exec.runtime.runtime import Runtime


class Planning:
    """The plans of a runtime's jobs."""

    def __init__(self, runtime: "Runtime") -> None:
        self._runtime = runtime

    def begin(self, job: Job) -> None:
        """Have a new job traced, planned and compiled, now that it has its first batch. The lock is held.

        Its step is traced in a thread of its own, since it is the user's and may hang: then it costs its own job only.
        """
        job._tracing = threading.Thread(target=self._trace, args=(job,), name=f"tensile-{job.name}-trace", daemon=True)
        try:
            job._tracing.start()
        except RuntimeError as error:  # there can be no more threads
            self._fail(job, error)

    def _trace(self, job: Job) -> None:
        if job._state in FINAL or is_leaving(job):
            return
        try:
            options = Options(job._asked.policy, self._runtime._profile, "any", max_slowdown=job._asked.max_slowdown)
            traced = job._actor.trace(job._first_batch, options, self._runtime._scheduler.compiler)
        except BaseException as error:
            self._fail(job, error)
        else:
            self._runtime._scheduler.call(lambda: self._prepare(job, traced))

    def _fail(self, job: Job, error: BaseException) -> None:
        with self._runtime._changed:
            if not is_leaving(job):
                self._runtime._keeping.leave_early(job, error)

    def _prepare(self, job: Job, prepared: Traced) -> None:
        """Plan and compile a job that was traced, and let the controller know of it; in the scheduler's thread."""
        if job._state in FINAL or is_leaving(job):
            return
        try:
            limit = self._limit_for(job)
            limits = JobLimits(
                beside_bytes=limit,
                alone_bytes=self._ceiling(job),
                most_swapped_bytes=most_swapped_bytes(job._asked.max_swap_rate, self._plans_of_others(job)),
                most_host_bytes=self._host_left(job),
            )
            program = plan_job(job._actor.prepare, prepared, limits)
            demand = self._with_snapshot(job, program)
            self._refuse_more_than_host(job, demand)
        except BaseException as error:
            self._fail(job, error)
            return
        with self._runtime._changed:
            if job._state in FINAL or is_leaving(job):
                return
            job._program = job._own_program = program
            job._plans.append((job._step, program.plan))
            job._actor.use(program)
            plan = program.plan
            self._runtime._tell(
                job, "planned", f"{len(plan.segments)} segments, peak {format_bytes(plan.peak_bytes)}",
                {"peak_bytes": plan.peak_bytes, "floor_bytes": plan.floor_bytes, "step_us": plan.step_us, "limit_bytes": limit},
            )  # fmt: skip
            seat = Seat(
                job._number,
                demand,
                job._asked.priority,
                job._asked.steps - job._asked.first,
                wish=job._wish,
                batches=job._loaded,
            )
            job._joined = True
            # under the lock: what is told of the job from now on comes after this
            self._runtime._dispatcher.call(lambda: self._join(job, seat))

    def _join(self, job: Job, seat: Seat) -> None:
        """In the dispatcher's thread."""
        self._runtime._dispatcher.join(
            job._number, job.name, job._actor, lambda: self._runtime._course.take_batch(job), seat.demand, steps=job._asked.first,
            rest_every=job._asked.checkpoint_every,
        )  # fmt: skip
        self._runtime._dispatcher.handle(Prepared(seat))
        self.look_at_queue(job)

    def look_at_queue(self, job: Job) -> None:
        """In the dispatcher's thread: if the job waits, say for what."""
        state = self._runtime._dispatcher.state
        seat = next((one for one in state.queue if one.job == job._number), None)
        if seat is None:
            return
        with self._runtime._changed:
            if job._wish == "pause":
                job._state = "paused"
                self._runtime._tell(job, "paused")
                return
            device, host = smallest_need(state, seat.demand)
            job._state = "queued"
            job._note = f"waits: beside the others it needs a budget of {format_bytes(device)}, {format_bytes(host)} on the host"
            self._runtime._tell(job, "queued", job._note, {"device_bytes": device, "host_bytes": host})

    def _with_snapshot(self, job: Job, program: Program) -> MemoryProfile:
        """What the job asks of memory, with the host memory of a checkpoint that is written while it goes on."""
        return replace(program.demand, host_bytes=program.demand.host_bytes + self._snapshot_bytes(job))

    def _snapshot_bytes(self, job: Job) -> int:
        return job._actor.state_bytes if job._checkpoints is not None else 0

    def _host_left(self, job: Job) -> float:
        """What the job's program may need on the host beside those that have a seat."""
        state = self._runtime._dispatcher.state
        others = sum(seat.demand.host_bytes for seat in state.seats if seat.job != job._number)
        return state.host_budget_bytes - others - self._snapshot_bytes(job)

    def _refuse_more_than_host(self, job: Job, demand: MemoryProfile) -> None:
        host_budget = self._runtime._dispatcher.state.host_budget_bytes
        if demand.host_bytes > host_budget:
            raise BudgetTooSmall(
                f"host_budget {format_bytes(host_budget)} is too small for {job.name!r}: while other jobs run its state is "
                f"parked in host memory, and it needs {format_bytes(demand.host_bytes)} ({demand.host_bytes} bytes) there.",
                budget_bytes=int(host_budget),
                floor_bytes=demand.host_bytes,
            )

    def _ceiling(self, job: Job) -> int:
        budget = self._runtime._dispatcher.state.next_budget_bytes or self._runtime._dispatcher.state.budget_bytes
        return budget if job._asked.cap_bytes is None else min(budget, job._asked.cap_bytes)

    def _parked_beside(self, job: Job) -> int:
        """What stays on the device of the others when all of their state has gone to the host."""
        return sum(seat.demand.parked_bytes for seat in self._runtime._dispatcher.state.seats if seat.job != job._number)

    def _limit_for(self, job: Job) -> int:
        """What the job may need beside the others at rest."""
        with self._runtime._changed:
            others = [one for one in self._runtime._jobs.values() if one is not job and one._state not in FINAL]
            resting = sum(
                one._program.demand.idle_bytes if one._program is not None else one._actor.state_bytes for one in others
            )
        return self._ceiling(job) - resting

    def _plans_of_others(self, job: Job) -> list[Plan]:
        with self._runtime._changed:
            plans = [one.plan for one in self._runtime._jobs.values() if one is not job and one._state not in FINAL]
        return [plan for plan in plans if plan is not None]

    def share_again(self) -> None:
        """Somebody has come or gone: look again at what of all jobs' states is to be out while others run."""
        self._runtime._scheduler.call(self._share, soon=True)

    def _share(self) -> None:
        """In the scheduler's thread."""
        with self._runtime._changed:
            jobs = [job for job in self._runtime._jobs.values() if job._state == "running" and job._own_program is not None]
            programs = [job._own_program for job in jobs]
        found = offload_state(
            [p for p in programs if p is not None],
            [job._asked.max_swap_rate for job in jobs],
            self._runtime._budget_bytes,
            self._runtime._profile,
        )
        for job, own, out in zip(jobs, programs, found, strict=True):
            assert own is not None and job._program is not None
            if out != (job._renewed or job._program).kept_out:
                try:
                    renewed = own.keep_out(out)
                except Exception as error:  # its process has died
                    self._runtime._dispatcher.fail(job._number, error)
                    continue
                self._runtime._dispatcher.call(lambda job=job, renewed=renewed: self._renew(job, renewed))

    def replan(self, job: Job) -> None:
        """The budget is below what the job needs: other segments, in the scheduler's thread."""
        program = job._program
        if program is None or job._state in FINAL:
            return
        try:
            ceiling = self._ceiling(job) - self._parked_beside(job)
            limits = JobLimits(self._limit_for(job), ceiling, most_host_bytes=self._host_left(job))
            renewed = plan_job(job._actor.prepare, program.prepared, limits)
        except BudgetTooSmall as error:
            with self._runtime._changed:
                job._state = "queued" if job._state == "running" else job._state
                job._note = f"waits: it needs a budget of at least {format_bytes(error.floor_bytes)}"
                self._runtime._tell(job, "queued", job._note, {"device_bytes": error.floor_bytes})
            return
        except Exception as error:
            self._runtime._dispatcher.fail(job._number, error)
            return
        job._own_program = renewed
        self._runtime._dispatcher.call(lambda: self._renew(job, renewed))
        self.share_again()

    def _renew(self, job: Job, renewed: Program) -> None:
        """In the dispatcher's thread."""
        with self._runtime._changed:
            if job._state in FINAL:
                return
            job._renewed = renewed
        job._actor.use(renewed)
        self._runtime._dispatcher.renew(job._number, self._with_snapshot(job, renewed))
        if not self._runtime._dispatcher.seated(job._number):  # it waits still
            with self._runtime._changed:
                job._program, job._renewed, job._plans = renewed, None, [(job._step, renewed.plan)]
