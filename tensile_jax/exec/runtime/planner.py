"""The planner of a runtime: plans and compiles for all jobs, one at a time, in a thread of its own (TENSILE section III-D).

The paper calls it the Memory Scheduler. It does five things:

    - It makes the first plan of a new job.
    - Whenever a new job of policy `tensile` comes, it chooses the swaps of all jobs of this policy together, and plans those jobs
      again whose swaps have changed.
    - It plans again for a job whose plan needs more memory than a lowered budget.
    - It plans again for a job whose latencies have drifted, if the user wants that (`plan/update.py`).
    - Whenever a job starts, pauses, resumes or ends, or the budget changes, it chooses again which parts of all jobs' states are
      in host memory while other jobs run.

The rules for these choices are in `plan/multi_job`.

A new job is first planned for the memory that is left while every other job holds what it holds between iterations. If there is
no such plan, the new job is planned for the whole budget, and the jobs are then parked and unparked in turns.

Tracing runs the user's step, which may hang. So each step is traced in a thread of its own, and the planner's thread runs no user
code.
"""

import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from tensile_jax.budget import too_small_for_parked_job
from tensile_jax.errors import BudgetTooSmall, ProcessDied, TensileError
from tensile_jax.exec.actor.actor import Program, Traced
from tensile_jax.exec.compiling.compiler import Compiler
from tensile_jax.exec.compiling.step import Options
from tensile_jax.exec.controller.messages import Prepared
from tensile_jax.exec.controller.state import JobRecord
from tensile_jax.exec.runtime.dispatcher import DispatchedJob, Dispatcher
from tensile_jax.exec.runtime.messages import BudgetSuffices, CannotRunNow, Pending, Planned, PreparationFailed
from tensile_jax.exec.runtime.store import Post, Store, StoredJob
from tensile_jax.plan import DeviceProfile
from tensile_jax.plan.multi_job.admission import JobLimits, most_swapped_bytes, plan_job, smallest_budgets
from tensile_jax.plan.multi_job.joint_swaps import agreed_swaps
from tensile_jax.plan.multi_job.memory_profile import MemoryProfile
from tensile_jax.plan.multi_job.state_offload import offload_state
from tensile_jax.plan.policies.tensile.swap_scheduling import SwappedOut
from tensile_jax.plan.update import Copied, Tracked, reason_for
from tensile_jax.plan_format import Plan
from tensile_jax.units import format_bytes

Task = Callable[[], None]


class PlannerThread(threading.Thread):
    """A thread that runs tasks one at a time. Tasks for running jobs come before the preparation of new jobs, which takes long.

    The thread refers to nothing but its tasks, so that a runtime to which nobody else refers can be freed.
    """

    def __init__(self) -> None:
        super().__init__(name="tensile-planner", daemon=True)
        self._soon: deque[Task] = deque()
        self._later: deque[Task] = deque()
        self._ready: queue.SimpleQueue[bool] = queue.SimpleQueue()  # True for each task, False to end. A `put` waits for no lock
        self.start()

    def call(self, task: Task, *, soon: bool = False) -> None:
        """Queue `task` behind the tasks that were queued before. Tasks with `soon` come before all tasks without."""
        (self._soon if soon else self._later).append(task)
        self._ready.put(True)

    def end(self) -> None:
        """Let the thread end once all tasks are done. Takes no lock, so a finalizer may call it in any thread."""
        self._ready.put(False)

    def close(self) -> None:
        """End the thread, once all tasks are done."""
        self.end()
        self.join()

    def run(self) -> None:
        """Run the tasks until `end` is called."""
        while self._ready.get():
            task = (self._soon or self._later).popleft()
            try:
                task()
            except Exception:  # an error of this project: Python reports it, and all jobs go on as they are
                threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), self)))
            del task  # drop what it refers to before the next task comes


class Planner:
    """Makes and renews the plans of a runtime's jobs. Two jobs with the same computation share what is compiled for it."""

    def __init__(
        self, store: Store, dispatcher: Dispatcher, post: Post, profile: DeviceProfile, compiler: Compiler
    ) -> None:  # fmt: skip
        self.thread = PlannerThread()
        self._store = store
        self._dispatcher = dispatcher
        self._post = post
        self._profile = profile
        self._compiler = compiler

    # -- new jobs ---------------------------------------------------------------------------------------------------------------

    def start(self, job: StoredJob) -> None:
        """Start to trace, plan and compile a new job, which has its first batch. The store's lock must be held."""
        job.first_batch = job.feed.take()
        job.tracing = threading.Thread(target=self._trace, args=(job,), name=f"tensile-{job.name}-trace", daemon=True)
        try:
            job.tracing.start()
        except RuntimeError as error:  # the system starts no more threads
            self._post(job.number, PreparationFailed(error))

    def _trace(self, job: StoredJob) -> None:
        """Trace the job's step, in a thread for this job alone."""
        if job.life.is_given_up:
            return
        try:
            options = Options(job.asked.policy, self._profile, "any", max_slowdown=job.asked.max_slowdown)
            traced = job.actor.trace(job.first_batch, options, self._compiler)
        except BaseException as error:
            self._post(job.number, PreparationFailed(error))
        else:
            self.thread.call(lambda: self._prepare(job, traced))

    def _prepare(self, job: StoredJob, traced: Traced) -> None:
        """Make the first plan of a job that was traced, and compile it. In the planner's thread."""
        if job.life.is_given_up:
            return
        began = time.perf_counter()
        try:
            others = self._others_with_plans(job)
            accesses = [traced.swapping_accesses(), *(program.prepared.swapping_accesses() for _, program in others)]
            rates = [job.asked.max_swap_rate, *(other.asked.max_swap_rate for other, _ in others)]
            own_swaps, *agreed = agreed_swaps(accesses, rates, self._profile)
            if own_swaps is not None:
                traced = traced.with_swaps(own_swaps)
            if job.asked.plan_for_bytes is not None:
                limit = min(job.asked.plan_for_bytes, self._ceiling(job))
                limits = JobLimits(beside_bytes=limit, alone_bytes=self._ceiling(job))
            else:
                limit = self._limit_for(job)
                limits = JobLimits(
                    beside_bytes=limit,
                    alone_bytes=self._ceiling(job),
                    most_swapped_bytes=most_swapped_bytes(job.asked.max_swap_rate, self._plans_of_others(job)),
                    most_host_bytes=self._host_left(job),
                )
            program = self._within_host_budget(job, traced, plan_job(job.actor.prepare, traced, limits))
            memory = self._with_snapshot(job, program)
        except BaseException as error:
            self._post(job.number, PreparationFailed(error))
            return
        plan = program.plan
        with self._store.changed:
            if job.life.is_given_up:
                return
            job.program = job.own_program = program
            job.plans.append((job.life.done, plan))
            job.preparing_s, job.plan_since = time.perf_counter() - began, time.perf_counter()
            job.actor.use(program)
            note = f"{len(plan.segments)} segments, peak {format_bytes(plan.peak_bytes)}"
            values = {
                "peak_bytes": plan.peak_bytes, "floor_bytes": plan.floor_bytes, "step_us": plan.step_us, "limit_bytes": limit,
            }  # fmt: skip
            self._post(job.number, Planned(memory, note, values))
        for (other, _), swaps in zip(others, agreed, strict=True):
            if own_swaps is not None and swaps is not None:
                self.thread.call(lambda other=other, swaps=swaps: self._use_agreed_swaps(other, swaps), soon=True)

    def join_controller(self, job: StoredJob, record: JobRecord) -> None:
        """Give a prepared job to the dispatcher and the controller. In the dispatcher's thread."""
        entry = DispatchedJob(
            job.name, job.actor, job.take_batch, record.memory, job.asked.checkpoint_every, job.life.first,
            renew_above=job.asked.renew_above,
        )  # fmt: skip
        self._dispatcher.join(job.number, entry)
        self._dispatcher.handle(Prepared(record))
        self.explain_wait(job)

    def explain_wait(self, job: StoredJob) -> None:
        """If the job is pending, post the budgets that it needs beside the admitted jobs. In the dispatcher's thread."""
        state = self._dispatcher.state
        record = next((one for one in state.pending if one.job == job.number), None)
        if record is None:
            return
        device, host = smallest_budgets([record.memory, *(one.memory for one in state.records)])
        note = f"waits: beside the others it needs a budget of {format_bytes(device)}, {format_bytes(host)} on the host"
        self._post(job.number, Pending(note, {"device_bytes": device, "host_bytes": host}))

    # -- what a job may need ----------------------------------------------------------------------------------------------------

    def _with_snapshot(self, job: StoredJob, program: Program) -> MemoryProfile:
        """The program's memory profile, plus host memory for a copy of the state from which a checkpoint is written."""
        return replace(program.memory, host_bytes=program.memory.host_bytes + self._snapshot_bytes(job))

    def _snapshot_bytes(self, job: StoredJob) -> int:
        return job.actor.state_bytes if job.checkpoints is not None else 0

    def _host_left(self, job: StoredJob) -> float:
        """The bytes that the job's program may need in host memory beside the admitted jobs."""
        state = self._dispatcher.state
        others = sum(record.memory.host_bytes for record in state.records if record.job != job.number)
        return state.host_budget_bytes - others - self._snapshot_bytes(job)

    def _within_host_budget(self, job: StoredJob, traced: Traced, program: Program) -> Program:
        """The program, or another one of the traced step that needs no more host memory than the whole host budget.

        Raises:
            BudgetTooSmall: there is none.
        """
        host_budget, memory = self._dispatcher.state.host_budget_bytes, self._with_snapshot(job, program)
        if memory.host_bytes <= host_budget:
            return program
        parked = memory.state_bytes + self._snapshot_bytes(job)
        if parked > host_budget:
            raise too_small_for_parked_job(job.name, host_budget, parked)
        return job.actor.prepare(traced.with_host_limit(host_budget - self._snapshot_bytes(job)), self._ceiling(job))

    def _ceiling(self, job: StoredJob) -> int:
        budget = self._dispatcher.state.next_budget_bytes or self._dispatcher.state.budget_bytes
        return budget if job.asked.cap_bytes is None else min(budget, job.asked.cap_bytes)

    def _limit_for(self, job: StoredJob) -> int:
        """The bytes that the job may need on the device while all other jobs are between iterations and not parked."""
        with self._store.changed:
            held = sum(
                one.actor.state_bytes if one.program is None else one.program.memory.idle_bytes for one in self._store.others(job)
            )
        return self._ceiling(job) - held

    def _plans_of_others(self, job: StoredJob) -> list[Plan]:
        return [program.plan for _, program in self._others_with_plans(job)]

    def _others_with_plans(self, job: StoredJob) -> list[tuple[StoredJob, Program]]:
        with self._store.changed:
            return [(one, one.program) for one in self._store.others(job) if one.program is not None]

    # -- jobs that have a plan --------------------------------------------------------------------------------------------------

    def share_state(self) -> None:
        """Queue the choice of which parts of all jobs' states are in host memory while other jobs run."""
        self.thread.call(self._share_state, soon=True)

    def _share_state(self) -> None:
        with self._store.changed:
            running = [job for job in self._store.jobs.values() if job.life.state == "running"]
            jobs = [(job, job.own_program) for job in running if job.own_program is not None]
        found = offload_state(
            [own for _, own in jobs],
            [job.asked.max_swap_rate for job, _ in jobs],
            self._dispatcher.state.budget_bytes,
            self._profile,
        )
        for (job, own), out in zip(jobs, found, strict=True):
            latest = job.renewed or job.program
            assert latest is not None
            if out != latest.offloaded:
                try:
                    renewed = own.offload_state(out)
                except Exception as error:  # the job's process has died
                    self._dispatcher.fail(job.number, error)
                    continue
                self._renew(job, renewed)

    def use_budget(self, nbytes: int) -> None:
        """Plan again for the jobs whose plans need more than the new budget of `nbytes`. The store's lock must be held."""
        for job in self._store.jobs.values():
            if job.program is None or job.life.has_ended:
                continue
            if job.program.memory.peak_bytes > nbytes:
                self.thread.call(lambda job=job: self._replan(job), soon=True)
            else:
                self._post(job.number, BudgetSuffices())
        self.share_state()

    def _replan(self, job: StoredJob) -> None:
        """Make a new plan for a job whose plan needs more than the budget, with other segments."""

        def make(program: Program) -> Program:
            parked = sum(r.memory.parked_bytes for r in self._dispatcher.state.records if r.job != job.number)
            limits = JobLimits(self._limit_for(job), self._ceiling(job) - parked, most_host_bytes=self._host_left(job))
            return plan_job(job.actor.prepare, program.prepared, limits)

        try:
            self._plan_again(job, make)
        except BudgetTooSmall as error:
            note = f"waits: it needs a budget of at least {format_bytes(error.floor_bytes)}"
            self._post(job.number, CannotRunNow(note, {"device_bytes": error.floor_bytes}))

    def _use_agreed_swaps(self, job: StoredJob, swaps: tuple[SwappedOut, ...]) -> None:
        """Make a new plan for a job whose swaps a new job has changed. If there is none, the job keeps the plan that it has."""

        def make(program: Program) -> Program | None:
            prepared = program.prepared.with_swaps(swaps)
            if prepared is program.prepared:
                return None
            limits = JobLimits(self._limit_for(job), self._ceiling(job), most_host_bytes=self._host_left(job))
            return plan_job(job.actor.prepare, prepared, limits)

        with suppress(BudgetTooSmall):
            self._plan_again(job, make)

    def follow(self, job: StoredJob, segment_us: tuple[float, ...]) -> None:
        """Record the latencies of one iteration, and queue the planning of a new plan if they have drifted. The store's lock must
        be held."""
        threshold, program = job.asked.renew_above, job.program
        if threshold is None or program is None or program.plan.whole or job.renewing or job.renewed is not None:
            return
        copied = Copied()  # the times of copies are not measured here
        job.tracked = job.tracked.with_iteration(program.plan, segment_us, out=copied, into=copied, threshold=threshold)
        if job.tracked.is_due(run_s=time.perf_counter() - job.plan_since, planning_s=job.preparing_s):
            tracked, iterations, job.renewing = job.tracked, job.life.done - job.plans[-1][0], True
            reason = reason_for(program.plan, tracked, iterations=iterations, threshold=threshold)
            self.thread.call(lambda: self._renew_drifted(job, tracked, reason))

    def _renew_drifted(self, job: StoredJob, tracked: Tracked, reason: str) -> None:
        """Make a new plan for a job whose latencies have drifted. If that fails, the job keeps the plan that it has."""

        def make(program: Program) -> Program | None:
            own = job.own_program
            if own is None or len(own.plan.segments) != len(tracked.segment_us):  # it was planned again meanwhile
                return None
            try:
                return own.renewed(tracked, reason)
            except TensileError as error:
                if isinstance(error, ProcessDied):
                    raise
                with self._store.changed:
                    note = f"no new plan could be made after its latencies had drifted: {error}"
                    self._store.report("renewal_failed", job.name, job.life.done, note)
                return None

        self._plan_again(job, make)
        with self._store.changed:
            job.renewing, job.tracked = False, Tracked()

    def _plan_again(self, job: StoredJob, make: Callable[[Program], Program | None]) -> None:
        """Let a job run by the program that `make` returns for the one that it has; None if it is to keep this one.

        Raises:
            BudgetTooSmall: raised by `make`. The job keeps its program. Any other error of `make` fails the job.
        """
        program = job.program
        if program is None or job.life.has_ended:
            return
        try:
            renewed = make(program)
        except BudgetTooSmall:
            raise
        except Exception as error:
            self._dispatcher.fail(job.number, error)
            return
        if renewed is not None:
            job.own_program = renewed
            self._renew(job, renewed)
            self.share_state()

    def _renew(self, job: StoredJob, renewed: Program) -> None:
        def renew() -> None:
            """In the dispatcher's thread."""
            with self._store.changed:
                if job.life.has_ended:
                    return
                job.renewed = renewed
            job.actor.use(renewed)
            self._dispatcher.renew(job.number, self._with_snapshot(job, renewed))
            if any(record.job == job.number for record in self._dispatcher.state.pending):  # it uses the new plan already
                with self._store.changed:
                    job.program, job.renewed, job.plans = renewed, None, [(job.life.done, renewed.plan)]

        self._dispatcher.call(renew)

    def use_plan(self, job: StoredJob, steps: int) -> None:
        """Record that the job uses its new plan after `steps` steps. The store's lock must be held."""
        program, job.renewed, job.tracked, job.plan_since = job.renewed, None, Tracked(), time.perf_counter()
        assert program is not None  # the planner made it
        job.program, plan = program, program.plan
        job.plans.append((steps, plan))
        out = f", {len(program.offloaded)} tensors of its state out while others run" if program.offloaded else ""
        note = f"{len(plan.segments)} segments, peak {format_bytes(plan.peak_bytes)}{out}"
        if plan.reason:
            note += f". {plan.reason}"
        self._store.report("renewed", job.name, job.life.done, note)

    def drop_plan(self, job: StoredJob, memory: MemoryProfile) -> None:
        """Drop the job's new plan, with memory profile `memory`. In the dispatcher's thread, with the store's lock held."""
        job.renewed = None
        state = self._dispatcher.state
        if job.actor.program.memory.peak_bytes <= state.budget_bytes:
            return  # the job can go on with its old plan
        host = memory.host_bytes + sum(record.memory.host_bytes for record in state.records if record.job != job.number)
        note = f"waits: under this budget it needs {format_bytes(host)} on the host, beside the others"
        self._post(job.number, CannotRunNow(note, {"device_bytes": memory.peak_bytes, "host_bytes": host}))
