"""Plans all jobs of a jobs file for one budget, as a `Runtime` that runs them would, without running anything.

This module traces the jobs, and raises an error if no plan keeps the budget. Nothing is compiled, unless the budget is a share of
the sum of the jobs' peaks under plain `jax.jit`. `plan/multi_job/joint_plan.py` makes the plans.
"""

from collections.abc import Hashable, Sequence

import jax

from tensile_jax.budget_errors import host_too_small_for_states, too_small_for_jobs
from tensile_jax.cli.errors import BudgetRefused
from tensile_jax.cli.jobs_file import JobEntry, JobsFile
from tensile_jax.cli.progress import Phases
from tensile_jax.cli.run.job_source import Shapes, find_modules_here, resolve_budget, same_source, shapes_of
from tensile_jax.cli.run.report import JointPlan, PlannedJob
from tensile_jax.errors import BudgetTooSmall, JobsFileError, TraceError
from tensile_jax.exec.actor.local_actor import LocalActor
from tensile_jax.exec.actor.profiled_plan import ProfiledPlan, plan_under
from tensile_jax.exec.calibration.calibrate import profile_of
from tensile_jax.exec.call.host_memory import free_host_memory
from tensile_jax.exec.compiling.compiler import Compiler
from tensile_jax.exec.compiling.step import Options, Step
from tensile_jax.exec.transfer import Transfer
from tensile_jax.plan import CompiledSizes, DeviceProfile, known_policy
from tensile_jax.plan.multi_job.joint_plan import JobPlan, PlannableJob, offload_states, plan_jobs, smallest_budget
from tensile_jax.plan.multi_job.joint_swaps import agreed_swaps
from tensile_jax.plan.multi_job.safety import serial_peak
from tensile_jax.plan.policies.tensile.swap_scheduling import SwappedOut


class _Candidate:
    """A traced job that can be planned for any limit. Jobs that train the same thing under the same options share one."""

    def __init__(self, shapes: Shapes, entry: JobEntry, profile: DeviceProfile) -> None:
        device = jax.devices()[0]
        actor = LocalActor(shapes.step, shapes.state, Transfer(device))
        options = Options(known_policy(entry.policy), profile, "any", max_slowdown=entry.max_slowdown)
        self.state_bytes = actor.state_bytes
        try:
            actor.trace(shapes.batch, options, Compiler(device))
        except TraceError as error:
            raise JobsFileError(f"{entry.where}: {error}") from error
        self.traced = actor.traced
        self._known: dict[Hashable, ProfiledPlan | BudgetTooSmall] = {}
        self.floor_bytes = self._find_floor()

    def prepare(self, traced: Step, budget_bytes: int) -> ProfiledPlan:
        """The program under a budget, with estimated workspaces. Raises: BudgetTooSmall: no plan keeps the budget."""
        key = (traced.planner.model.host_limit, traced.options.agreed_swaps, budget_bytes)
        if key not in self._known:
            try:
                self._known[key] = plan_under(traced, budget_bytes, compiled=False)
            except BudgetTooSmall as error:
                self._known[key] = error
        known = self._known[key]
        if isinstance(known, BudgetTooSmall):
            raise known
        return known

    def plannable(self, entry: JobEntry, swaps: tuple[SwappedOut, ...] | None) -> PlannableJob[ProfiledPlan]:
        """The job in the form that `plan/multi_job/joint_plan.py` takes; `swaps` are those on which the jobs have agreed."""
        traced = self.traced if swaps is None else self.traced.with_swaps(swaps)
        return PlannableJob(traced, self.prepare, self.state_bytes, self.floor_bytes, entry.max_swap_rate)

    def _find_floor(self) -> int:
        try:
            self.prepare(self.traced, 0)
        except BudgetTooSmall as error:
            return error.floor_bytes
        return 1


def plan_jobs_file(jobs: JobsFile, phases: Phases) -> JointPlan:
    """The plan for all jobs.

    Raises:
        BudgetRefused: the jobs cannot all be planned for the budget; the message names about the smallest budget that works.
        Refusal: a job cannot be made.
    """
    find_modules_here()
    profile = profile_of(jax.devices()[0], jobs.device.device_profile, phases.update)
    candidates = _candidates(jobs.jobs, profile, phases)
    budget_bytes, peaks = resolve_budget(jobs, phases, _peaks_for_another_device(jobs, candidates, profile))
    phases.begin("planning all jobs for one budget")
    host_bytes = _host_budget_bytes(jobs, candidates[0].traced)
    _refuse_host(candidates, host_bytes)
    accesses = [candidate.traced.swapping_accesses() for candidate in candidates]
    agreed = agreed_swaps(accesses, [entry.max_swap_rate for entry in jobs.jobs], profile)
    plannable = [c.plannable(entry, swaps) for c, entry, swaps in zip(candidates, jobs.jobs, agreed, strict=True)]
    planned = plan_jobs(plannable, budget_bytes, host_bytes)
    if planned is None:
        phases.begin("looking for the smallest budget")
        smallest = smallest_budget(plannable, budget_bytes, host_bytes)
        least = max(zip(candidates, jobs.jobs, strict=True), key=lambda pair: pair[0].floor_bytes)
        why = too_small_for_jobs(budget_bytes, len(candidates), smallest, least[1].name, least[0].floor_bytes)
        raise BudgetRefused(f"{jobs.file}: {why}")
    return _joint(jobs, offload_states(planned, plannable, budget_bytes, profile), candidates, budget_bytes, peaks)


def _peaks_for_another_device(
    jobs: JobsFile, candidates: "Sequence[_Candidate]", profile: DeviceProfile
) -> dict[str, int] | None:
    """The peaks of plain jit as predicted, by job, if this machine's compiler cannot know them; otherwise None."""
    if jobs.device.budget.share is None or (profile.platform == "cpu") == (jax.devices()[0].platform == "cpu"):
        return None
    planners = {entry.name: c.traced.planner for entry, c in zip(jobs.jobs, candidates, strict=True)}
    return {name: planner.whole_peak_bytes(CompiledSizes()) for name, planner in planners.items()}


def _candidates(entries: Sequence[JobEntry], profile: DeviceProfile, phases: Phases) -> list[_Candidate]:
    made: dict[tuple[bytes, str, float | None], _Candidate] = {}
    found: list[_Candidate] = []
    what = "tracing"
    for done, entry in enumerate(entries):
        phases.update(what, done, len(entries), entry.name)
        key = (same_source(entry), entry.policy, entry.max_slowdown)
        if key not in made:
            made[key] = _Candidate(shapes_of(entry), entry, profile)
        found.append(made[key])
    phases.update(what, len(entries), len(entries))
    return found


def _host_budget_bytes(jobs: JobsFile, traced: Step) -> float:
    """What the file says; otherwise what is free on this machine, unless the jobs are planned for a device of another one."""
    if jobs.device.host_budget_bytes is not None:
        return jobs.device.host_budget_bytes
    free = free_host_memory(jax.devices()[:1]) if traced.compiles_for_profile else None
    return float("inf") if free is None else free.resolve(0)


def _refuse_host(candidates: Sequence[_Candidate], host_budget_bytes: float) -> None:
    """Raises: BudgetRefused: the host budget is less than two copies of all states: the states, and checkpoints of them."""
    states = sum(c.state_bytes for c in candidates)
    if 2 * states > host_budget_bytes:
        raise BudgetRefused(host_too_small_for_states(host_budget_bytes, states))


def _joint(
    jobs: JobsFile,
    planned: Sequence[JobPlan[ProfiledPlan]],
    candidates: Sequence[_Candidate],
    budget_bytes: int,
    peaks: dict[str, int],
) -> JointPlan:
    programs = [one.program for one in planned]
    serial = serial_peak((p.memory, p.memory.idle_bytes) for p in programs)
    found = [
        PlannedJob(
            name=entry.name,
            model=entry.model,
            entrypoint=entry.entrypoint,
            peak_bytes=program.memory.peak_bytes,
            idle_bytes=program.memory.idle_bytes,
            parked_bytes=program.memory.parked_bytes,
            host_bytes=one.host_bytes,
            floor_bytes=candidate.floor_bytes,
            jit_peak_bytes=peaks.get(entry.name),
            step_us=program.plan.step_us,
            switch_us=program.memory.switch_us,
            swapped_bytes=program.plan.swapped_out_bytes + program.plan.swapped_in_bytes,
            segments=len(program.plan.segments),
            kept_out_tensors=len(program.offloaded),
            beside_others=one.beside_others,
        )
        for entry, one, program, candidate in zip(jobs.jobs, planned, programs, candidates, strict=True)
    ]
    return JointPlan(
        file=jobs.file,
        device_profile=programs[0].plan.device_profile,
        budget_bytes=budget_bytes,
        host_budget_bytes=jobs.device.host_budget_bytes,
        host_bytes=sum(one.host_bytes for one in planned),
        serial_peak_bytes=serial,
        peak_sum_bytes=sum(p.memory.peak_bytes for p in programs),
        round_us=sum(p.plan.step_us for p in programs),
        take_turns=serial > budget_bytes,
        jobs=tuple(found),
    )
