"""Plans and compiles for all jobs of a runtime, one job at a time, in a thread of its own (TENSILE section III-D).

The paper calls this planner the Memory Scheduler. The planner does five things:

    - It makes the first plan of a new job.
    - For a new job that is planned by the paper's own algorithms (policy `tensile`), it chooses the swaps (copies to the host and
      back) of all jobs of this policy together. It then makes new plans for the jobs whose swaps have changed.
    - If the budget is lowered, it plans again for each job whose plan needs more memory.
    - If the user wants that, it plans again for a job whose measured latencies have drifted from the predicted ones
      (`plan/drift.py`).
    - Whenever a job starts, pauses, resumes or ends, or the budget changes, it chooses again which parts of all jobs' states are
      in host memory while other jobs run.

`plan/multi_job` has the rules for these choices.

A new job is first planned for the budget, minus the bytes that all other jobs hold between their iterations. If no such plan
exists, the new job is planned for the whole budget. Jobs are then *parked* in turns: their state is copied to the host while
others run.

Tracing runs the user's step, which may hang. So each step is traced in a thread of its own, and the planner's thread never runs
user code.
"""

import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from tensile_jax.budget_errors import too_small_for_parked_job
from tensile_jax.errors import BudgetTooSmall, ProcessDied, TensileError
from tensile_jax.exec.actor.plans import OffloadState, PlanRequest, PlanSummary, PlanWithin, RenewPlan
from tensile_jax.exec.compiling.compiler import Compiler
from tensile_jax.exec.compiling.step import Options
from tensile_jax.exec.controller.messages import BudgetRequested, PlanRenewed, Prepared
from tensile_jax.exec.controller.state import JobId, JobRecord
from tensile_jax.exec.runtime.dispatched_job import DispatchedJob
from tensile_jax.exec.runtime.dispatcher import Dispatcher
from tensile_jax.exec.runtime.messages import BudgetSuffices, CannotRunNow, Pending, Planned, PreparationFailed, Preparing
from tensile_jax.exec.runtime.share_of_peaks import ShareOfPeaks
from tensile_jax.exec.runtime.store import Post, Store, StoredJob
from tensile_jax.plan import DeviceProfile
from tensile_jax.plan.analysis.access import AccessSequence
from tensile_jax.plan.drift import Follower, Tracked
from tensile_jax.plan.multi_job.admission import JobLimits, most_swapped_bytes, smallest_budgets
from tensile_jax.plan.multi_job.joint_swaps import agreed_swaps
from tensile_jax.plan.multi_job.state_offload import SharingJob, choose_offloaded
from tensile_jax.plan.policies.tensile.swap_scheduling import SwappedOut
from tensile_jax.plan_format import Plan
from tensile_jax.progress.phases import IN_LINE, TRACING
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


class JobPlanner:
    """Makes and renews the plans of a runtime's jobs. Two jobs with the same computation share what is compiled for it."""

    def __init__(
        self,
        store: Store,
        dispatcher: Dispatcher,
        post: Post,
        profile: DeviceProfile,
        compiler: Compiler,
        share: ShareOfPeaks | None,
    ) -> None:
        self.thread = PlannerThread()
        self._store = store
        self._dispatcher = dispatcher
        self._post = post
        self._profile = profile
        self._compiler = compiler
        self._share = share  # of which the budget is made, until the user sets a budget in bytes
        self._sharing = threading.Lock()  # so that a budget of the user's is not followed by one that was made before
        self._traced: dict[JobId, AccessSequence | None] = {}  # that wait until the peaks of earlier jobs are known
        self._counted: set[JobId] = set()  # whose peaks are known

    # -- new jobs ---------------------------------------------------------------------------------------------------------------

    def start(self, job: StoredJob) -> None:
        """Start to trace, plan and compile a new job, which has its first batch. The store's lock must be held."""
        try:
            job.begin_tracing(self._trace)
        except RuntimeError as error:  # the system starts no more threads
            self._post(job.number, PreparationFailed(error))

    def _trace(self, job: StoredJob) -> None:
        """Trace the job's step, in a thread for this job alone."""
        if job.life.is_given_up:
            return
        number, post = job.number, self._post

        def tell(what: str, done: int, of: int) -> None:  # the job's step keeps it, so it refers to nothing else
            post(number, Preparing(what, done, of))

        try:
            tell(TRACING, 0, 1)
            options = Options(job.asked.policy, self._profile, "any", tell, job.asked.max_slowdown)
            accesses = job.actor.trace(job.first_batch, options, self._compiler)
        except BaseException as error:
            self._post(job.number, PreparationFailed(error))
        else:
            tell(IN_LINE, 0, 1)
            self.thread.call(lambda: self._take(job, accesses))

    def _take(self, job: StoredJob, accesses: AccessSequence | None) -> None:
        """Prepare a job that was traced; if the budget is a share, after the jobs that were submitted before it."""
        self._traced[job.number] = accesses
        self._prepare_in_order()

    def _prepare_in_order(self) -> None:
        """Prepare the jobs that were traced. If the budget is a share, stop at the first job that is not traced yet.

        So the budget under which a job is planned depends on the order of submission only.
        """
        while self._traced:
            with self._store.changed:
                jobs = [job for job in self._store.jobs.values() if job.number not in self._counted and not job.life.is_given_up]
            traced = [job for job in jobs if job.number in self._traced]
            self._traced = {job.number: self._traced[job.number] for job in traced}  # without jobs that were given up
            if not traced or (self._share is not None and traced[0] is not jobs[0]):
                return
            job = traced[0]
            accesses = self._traced.pop(job.number)
            self._counted.add(job.number)
            if self._count_peak(job):
                self._prepare(job, accesses)

    def _count_peak(self, job: StoredJob) -> bool:
        """If the budget is a share, raise it by the share of the job's peak. Returns whether the job can be prepared."""
        if self._share is None:
            return True
        try:
            peak = job.actor.jit_peak_bytes()
        except BaseException as error:
            self._post(job.number, PreparationFailed(error))
            return False
        with self._sharing:
            if self._share is not None:
                self._share = self._share.with_peak(peak)
                self._dispatcher.tell(BudgetRequested(self._share.budget_bytes))
        return True

    @property
    def share(self) -> ShareOfPeaks | None:
        """The share of which the budget is made; None if it is a number of bytes."""
        return self._share

    def set_budget(self, nbytes: int) -> None:
        """The user sets a budget in bytes. If the budget was a share, it no longer grows."""
        with self._sharing:
            self._share = None
            self._dispatcher.tell(BudgetRequested(nbytes))
        self.thread.call(self._prepare_in_order)

    def forget_closed(self) -> None:
        """A job has ended. If the jobs that were submitted after it wait for its peak, they wait no longer."""
        if self._share is not None:
            self.thread.call(self._prepare_in_order)

    def _prepare(self, job: StoredJob, own_accesses: AccessSequence | None) -> None:
        """Make the first plan of a job that was traced, and compile it. Called in the planner's thread.

        Args:
            own_accesses: those from which swaps are chosen for several jobs together; None if the job does not take part in that.
        """
        if job.life.is_given_up:
            return
        began = time.perf_counter()
        try:
            others = self._others_with_plans(job)
            accesses = [own_accesses, *(plan.accesses for _, plan in others)]
            rates = [job.asked.max_swap_rate, *(other.asked.max_swap_rate for other, _ in others)]
            own_swaps, *agreed = agreed_swaps(accesses, rates, self._profile)
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
            found = self._within_host_budget(job, PlanWithin(limits, agreed_swaps=own_swaps))
        except BaseException as error:
            self._post(job.number, PreparationFailed(error))
            return
        plan = found.plan
        with self._store.changed:
            if job.life.is_given_up:
                return
            job.use_first(found, time.perf_counter() - began)
            note = f"{len(plan.segments)} segments, peak {format_bytes(plan.peak_bytes)}"
            values = {
                "peak_bytes": plan.peak_bytes, "floor_bytes": plan.floor_bytes, "step_us": plan.step_us, "limit_bytes": limit,
            }  # fmt: skip
            self._post(job.number, Planned(found, note, values))
        for (other, _), swaps in zip(others, agreed, strict=True):
            if own_swaps is not None and swaps is not None:
                self.thread.call(lambda other=other, swaps=swaps: self._use_agreed_swaps(other, swaps), soon=True)

    def join_controller(self, job: StoredJob, record: JobRecord) -> None:
        """Give a prepared job to the dispatcher and the controller. Called under the dispatcher's lock."""
        assert job.in_use is not None  # it was planned
        entry = DispatchedJob(
            job.name, job.actor, job.take_batch, record.memory, job.in_use.plan, job.life.first, job.preparing_s,
            Follower(0.0, job.asked.renew_above), saves_pauses=job.checkpoints is not None,
        )  # fmt: skip
        self._dispatcher.join(job.number, entry)
        self._dispatcher.handle(Prepared(record))
        self.explain_wait(job)

    def explain_wait(self, job: StoredJob) -> None:
        """If the job is pending, post the budgets that it needs beside the admitted jobs. Called under the dispatcher's lock."""
        state = self._dispatcher.state
        record = next((one for one in state.pending if one.job == job.number), None)
        if record is None:
            return
        device, host = smallest_budgets([record.memory, *(one.memory for one in state.records)])
        note = f"waits: beside the others it needs a budget of {format_bytes(device)}, {format_bytes(host)} on the host"
        self._post(job.number, Pending(note, {"device_bytes": device, "host_bytes": host}))

    # -- what a job may need ----------------------------------------------------------------------------------------------------

    def _plan(self, job: StoredJob, request: PlanRequest) -> PlanSummary:
        """The plan that the job's actor makes. It also counts host memory for a copy of the state, to write a checkpoint from."""
        plan = job.actor.plan(request)
        return replace(plan, memory=replace(plan.memory, host_bytes=plan.memory.host_bytes + self._snapshot_bytes(job)))

    def _snapshot_bytes(self, job: StoredJob) -> int:
        return job.actor.state_bytes if job.checkpoints is not None else 0

    def _host_left(self, job: StoredJob) -> float:
        """The bytes that the job's plan may need in host memory beside the admitted jobs."""
        state = self._dispatcher.state
        others = sum(record.memory.host_bytes for record in state.records if record.job != job.number)
        return state.host_budget_bytes - others - self._snapshot_bytes(job)

    def _within_host_budget(self, job: StoredJob, request: PlanWithin) -> PlanSummary:
        """The plan of the request; if it needs more host memory than the whole host budget, another one that does not.

        Raises:
            BudgetTooSmall: there is none.
        """
        host_budget, found = self._dispatcher.state.host_budget_bytes, self._plan(job, request)
        if found.memory.host_bytes <= host_budget:
            return found
        snapshot_bytes, alone = self._snapshot_bytes(job), request.limits.alone_bytes
        parked = found.memory.state_bytes + snapshot_bytes
        if parked > host_budget:
            raise too_small_for_parked_job(job.name, host_budget, parked)
        return self._plan(job, replace(request, limits=JobLimits(alone, alone), host_limit=host_budget - snapshot_bytes))

    def _ceiling(self, job: StoredJob) -> int:
        share, state = self._share, self._dispatcher.state  # what was told of a share may not have been heard yet
        budget = (state.next_budget_bytes or state.budget_bytes) if share is None else share.budget_bytes
        return budget if job.asked.cap_bytes is None else min(budget, job.asked.cap_bytes)

    def _limit_for(self, job: StoredJob) -> int:
        """The bytes that the job may need on the device while all other jobs are between iterations and not parked."""
        with self._store.changed:
            held = sum(
                one.actor.state_bytes if one.in_use is None else one.in_use.memory.idle_bytes for one in self._store.others(job)
            )
        return self._ceiling(job) - held

    def _plans_of_others(self, job: StoredJob) -> list[Plan]:
        return [found.plan for _, found in self._others_with_plans(job)]

    def _others_with_plans(self, job: StoredJob) -> list[tuple[StoredJob, PlanSummary]]:
        with self._store.changed:
            return [(one, one.in_use) for one in self._store.others(job) if one.in_use is not None]

    # -- jobs that have a plan --------------------------------------------------------------------------------------------------

    def share_state(self) -> None:
        """Queue the choice of which parts of all jobs' states are in host memory while other jobs run."""
        self.thread.call(self._share_state, soon=True)

    def _share_state(self) -> None:
        with self._store.changed:
            running = [job for job in self._store.jobs.values() if job.life.state == "running"]
            jobs = [(job, job.base) for job in running if job.base is not None]
        sharing = [
            SharingJob.of(base.plan, base.memory, base.may_be_offloaded, job.asked.max_swap_rate) for job, base in jobs
        ]  # fmt: skip
        found = choose_offloaded(sharing, self._dispatcher.state.budget_bytes, self._profile)
        for (job, base), out in zip(jobs, found, strict=True):
            if out != self._latest(job).offloaded:
                try:
                    renewed = self._plan(job, OffloadState(base.id, out))
                except Exception as error:  # the job's process has died
                    self._dispatcher.fail(job.number, error)
                    continue
                self._renew(job, renewed)

    def use_budget(self, nbytes: int) -> None:
        """Plan again for the jobs whose plans need more than the new budget of `nbytes`. The store's lock must be held."""
        for job in self._store.jobs.values():
            if job.in_use is None or job.life.has_ended:
                continue
            if job.in_use.memory.peak_bytes > nbytes:
                self.thread.call(lambda job=job: self._replan(job), soon=True)
            else:
                self._post(job.number, BudgetSuffices())
        self.share_state()

    def _replan(self, job: StoredJob) -> None:
        """Make a new plan for a job whose plan needs more than the budget, with other segments."""

        def request(base: PlanSummary) -> PlanRequest:
            parked = sum(r.memory.parked_bytes for r in self._dispatcher.state.records if r.job != job.number)
            limits = JobLimits(self._limit_for(job), self._ceiling(job) - parked, most_host_bytes=self._host_left(job))
            return PlanWithin(limits, base.id)

        try:
            self._plan_again(job, request)
        except BudgetTooSmall as error:
            note = f"waits: it needs a budget of at least {format_bytes(error.floor_bytes)}"
            self._post(job.number, CannotRunNow(note, {"device_bytes": error.floor_bytes}))

    def _use_agreed_swaps(self, job: StoredJob, swaps: tuple[SwappedOut, ...]) -> None:
        """Make a new plan for a job whose swaps a new job has changed. If there is none, the job keeps the plan that it has."""

        def request(base: PlanSummary) -> PlanRequest | None:
            if self._latest(job).agreed_swaps == swaps:
                return None
            limits = JobLimits(self._limit_for(job), self._ceiling(job), most_host_bytes=self._host_left(job))
            return PlanWithin(limits, base.id, swaps)

        with suppress(BudgetTooSmall):
            self._plan_again(job, request)

    def renew_drifted(self, job: StoredJob, tracked: Tracked, reason: str) -> None:
        """Queue the planning of a new plan, since the job's latencies have drifted."""
        self.thread.call(lambda: self._renew_drifted(job, tracked, reason))

    def _renew_drifted(self, job: StoredJob, tracked: Tracked, reason: str) -> None:
        """Make a new plan for a job whose latencies have drifted. If that fails, the job keeps the plan that it has."""

        def request(base: PlanSummary) -> PlanRequest | None:
            planned_again = len(base.plan.segments) != len(tracked.segment_us)  # meanwhile
            return None if planned_again else RenewPlan(base.id, tracked, reason)

        try:
            self._plan_again(job, request, harmless=TensileError)
        except TensileError as error:
            with self._store.changed:
                note = f"no new plan could be made after its latencies had drifted: {error}"
                self._store.report("renewal_failed", job.name, job.life.done, note)
        self._dispatcher.renewed(job.number)

    def _plan_again(
        self,
        job: StoredJob,
        request: Callable[[PlanSummary], PlanRequest | None],
        *,
        harmless: type[TensileError] = BudgetTooSmall,
    ) -> None:
        """Make the plan that `request` asks for, based on an earlier one, and offer it to the controller.

        If `request` returns None, or if there is a `harmless` error, the job keeps its plan.

        Raises:
            TensileError: the harmless error. Any other error fails the job.
        """
        base = job.base
        if base is None or job.life.has_ended:
            return
        try:
            asked = request(base)
            renewed = None if asked is None else self._plan(job, asked)
        except Exception as error:
            if isinstance(error, harmless) and not isinstance(error, ProcessDied):
                raise
            self._dispatcher.fail(job.number, error)
            return
        if renewed is not None:
            job.rest_on(renewed)
            self._renew(job, renewed)
            self.share_state()

    def _renew(self, job: StoredJob, renewed: PlanSummary) -> None:
        def renew() -> None:
            """Under the dispatcher's lock."""
            if job.life.has_ended:
                return
            if any(record.job == job.number for record in self._dispatcher.state.pending):  # it has the new plan at once
                with self._store.changed:
                    job.use_instead(renewed)
                self._dispatcher.use_instead(job.number, renewed.plan)
            self._dispatcher.handle(PlanRenewed(job.number, renewed))

        self._dispatcher.call(renew)

    def _latest(self, job: StoredJob) -> PlanSummary:
        """The plan that the job is to use next, or else the one in use."""
        record = self._dispatcher.state.record(job.number)
        latest = (None if record is None else record.renewal) or job.in_use
        assert latest is not None  # the job was planned
        return latest

    def use_plan(self, job: StoredJob, plan: PlanSummary, steps: int) -> None:
        """Record that the job uses its new plan after `steps` steps. The store's lock must be held."""
        job.use(plan, steps)
        out = f", {len(plan.offloaded)} tensors of its state out while others run" if plan.offloaded else ""
        note = f"{len(plan.plan.segments)} segments, peak {format_bytes(plan.plan.peak_bytes)}{out}"
        if plan.plan.reason:
            note += f". {plan.plan.reason}"
        self._store.report("renewed", job.name, job.life.done, note)

    def drop_plan(self, job: StoredJob, plan: PlanSummary) -> None:
        """Report if the job can run neither by its new plan, which was declined, nor by the old one.

        Called under the dispatcher's lock and the store's lock.
        """
        state, memory = self._dispatcher.state, plan.memory
        assert job.in_use is not None  # it was admitted
        if job.in_use.memory.peak_bytes <= state.budget_bytes:
            return  # the job can go on with its old plan
        host = memory.host_bytes + sum(record.memory.host_bytes for record in state.records if record.job != job.number)
        note = f"waits: under this budget it needs {format_bytes(host)} on the host, beside the others"
        self._post(job.number, CannotRunNow(note, {"device_bytes": memory.peak_bytes, "host_bytes": host}))
