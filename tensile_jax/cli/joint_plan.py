"""Plan all jobs of a jobs file for one budget, as the runtime would, without running or (but for a share) compiling anything.

The runtime plans one job after another for what is left beside the others at rest: those that have a plan by that, the others
by the size of their state. If there is no such plan, for the whole budget. All jobs fit if each can run an iteration while
the states of all others are on the host, and the host can hold what they send there. Once all are there, some of their state
may be out while others run.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax

from tensile_jax.cli.job_source import Shapes, find_modules_here, same_source, shapes_of
from tensile_jax.cli.jobs_file import JobEntry, JobsFile
from tensile_jax.cli.jobs_plan import JointPlan, PlannedJob
from tensile_jax.cli.plain_jit import resolve_budget
from tensile_jax.cli.progress import Live
from tensile_jax.cli.refusal import DoesNotFit
from tensile_jax.errors import BudgetTooSmall, JobsFileError, TraceError
from tensile_jax.exec.actor.actor import Program
from tensile_jax.exec.actor.local_actor import LocalActor, program_under
from tensile_jax.exec.actor.memory_demand import metrics_bytes
from tensile_jax.exec.runtime.joint_plan import most_swapped, prepare_beside, share_state
from tensile_jax.exec.step.compile import Compiler
from tensile_jax.exec.step.prepared_step import Options, PreparedStep
from tensile_jax.exec.step.transfer import Transfer
from tensile_jax.plan import DeviceProfile
from tensile_jax.plan.multi_job.safety import serial_peak
from tensile_jax.plan_format import format_bytes
from tensile_jax.profiles import load_profile

_CLOSE_ENOUGH = 1.005  # where the search for the smallest budget ends
_MOST_DOUBLINGS = 40


@dataclass(frozen=True, slots=True, eq=False)
class _Planned:
    """A job's plan, and whether the limit that left room for the others could be kept."""

    program: Program
    beside_others: bool

    @property
    def host_bytes(self) -> int:
        """In host memory at most, with a checkpoint that is written while the job goes on."""
        return self.program.demand.host_bytes + self.program.demand.state_bytes


class _Candidate:
    """A traced job, which can be planned for any limit. Copies of a job share one."""

    def __init__(self, shapes: Shapes, entry: JobEntry, profile: DeviceProfile) -> None:
        device = jax.devices()[0]
        actor = LocalActor(shapes.step, shapes.state, Transfer(device))
        options = Options(entry.policy, profile, "any", max_slowdown=entry.max_slowdown)
        self.state_bytes = actor.state_bytes
        try:
            self.traced: PreparedStep = actor.trace(shapes.batch, options, Compiler(device))
        except TraceError as error:
            raise JobsFileError(f"{entry.where}: {error}") from error
        self._known: dict[tuple[bool, int], Program | BudgetTooSmall] = {}
        self.floor_bytes = self._find_floor() + metrics_bytes(self.traced.graph)

    def prepare(self, traced: PreparedStep, budget_bytes: int) -> Program:
        """The predicted program. Raises: BudgetTooSmall: there is none."""
        key = (traced.options.may_swap, budget_bytes)
        if key not in self._known:
            try:
                self._known[key] = program_under(traced, budget_bytes, traced.predicted)
            except BudgetTooSmall as error:
                self._known[key] = error
        known = self._known[key]
        if isinstance(known, BudgetTooSmall):
            raise known
        return known

    def _find_floor(self) -> int:
        try:
            self.prepare(self.traced, 0)
        except BudgetTooSmall as error:
            return error.floor_bytes
        return 1


def plan_jobs(jobs: JobsFile, live: Live) -> JointPlan:
    """The plan for all jobs.

    Raises:
        DoesNotFit: there is none under the budget; the message names about the smallest for which there is.
        Refusal: a job cannot be made.
    """
    find_modules_here()
    budget_bytes, peaks = resolve_budget(jobs, live)
    profile = load_profile(jobs.device.device_profile or ("cpu" if jax.devices()[0].platform == "cpu" else "h200"))
    candidates = _candidates(jobs.jobs, profile, live)
    live.wait_for("planning all jobs for one budget")
    host = jobs.device.host_budget_bytes
    _refuse_host(candidates, host)
    rates = [entry.max_swap_rate for entry in jobs.jobs]
    planned = _plan_all(candidates, rates, budget_bytes, host)
    if planned is None:
        live.wait_for("looking for the smallest budget")
        smallest = _smallest(candidates, rates, budget_bytes, host)
        least = max(zip(candidates, jobs.jobs, strict=True), key=lambda pair: pair[0].floor_bytes)
        raise DoesNotFit(
            f"{jobs.file}: device.budget of {format_bytes(budget_bytes)} ({budget_bytes} bytes) is too small for these "
            f"{len(candidates)} jobs: the smallest that works is about {format_bytes(smallest)} ({smallest} bytes). "
            f"{least[1].name} alone needs about {format_bytes(least[0].floor_bytes)}."
        )
    return _joint(jobs, _shared(planned, rates, budget_bytes, profile), candidates, budget_bytes, peaks)


def _candidates(entries: Sequence[JobEntry], profile: DeviceProfile, live: Live) -> list[_Candidate]:
    made: dict[tuple[bytes, str, float | None], _Candidate] = {}
    found: list[_Candidate] = []
    what = "tracing"
    for done, entry in enumerate(entries):
        live.tell(what, done, len(entries), entry.name)
        key = (same_source(entry), entry.policy, entry.max_slowdown)
        if key not in made:
            made[key] = _Candidate(shapes_of(entry), entry, profile)
        found.append(made[key])
    live.tell(what, len(entries), len(entries))
    return found


def _plan_all(
    candidates: Sequence[_Candidate], rates: Sequence[float], budget_bytes: int, host_budget_bytes: int | None
) -> list[_Planned] | None:
    """Every job's plan; None if one has none, or if they cannot all run."""
    planned: list[_Planned] = []
    host = float("inf") if host_budget_bytes is None else host_budget_bytes
    for place, (candidate, rate) in enumerate(zip(candidates, rates, strict=True)):
        earlier = [one.program for one in planned]
        limit = budget_bytes - sum(p.demand.idle_bytes for p in earlier) - sum(c.state_bytes for c in candidates[place + 1 :])
        try:
            program = prepare_beside(
                candidate.prepare,
                candidate.traced,
                limit,
                ceiling=budget_bytes,
                most_swapped=most_swapped(rate, [p.plan for p in earlier]),
                most_on_host=host - sum(one.host_bytes for one in planned) - candidate.state_bytes,
            )
        except BudgetTooSmall:
            return None
        planned.append(_Planned(program, program.demand.peak_bytes <= limit))
    if serial_peak((one.program.demand, one.program.demand.parked_bytes) for one in planned) > budget_bytes:
        return None
    return None if sum(one.host_bytes for one in planned) > host else planned


def _shared(planned: Sequence[_Planned], rates: Sequence[float], budget_bytes: int, profile: DeviceProfile) -> list[_Planned]:
    """The same with what of their state is out while the others run, once all are there."""
    out = share_state([one.program for one in planned], rates, budget_bytes, profile)
    return [replace(one, program=one.program.keep_out(tensors)) for one, tensors in zip(planned, out, strict=True)]


def _smallest(candidates: Sequence[_Candidate], rates: Sequence[float], budget_bytes: int, host_budget_bytes: int | None) -> int:
    """A budget under which all can be planned, at most half a per cent above one under which they cannot."""
    low, high = budget_bytes, max(budget_bytes + 1, *(c.floor_bytes for c in candidates))
    for _ in range(_MOST_DOUBLINGS):
        if _plan_all(candidates, rates, high, host_budget_bytes) is not None:
            break
        low, high = high, high + max(high // 16, 1)
    while high > low * _CLOSE_ENOUGH and high - low > 1:
        middle = (low + high) // 2
        if _plan_all(candidates, rates, middle, host_budget_bytes) is None:
            low = middle
        else:
            high = middle
    return high


def _refuse_host(candidates: Sequence[_Candidate], host_budget_bytes: int | None) -> None:
    """Raises: DoesNotFit: the jobs' states alone are more than the host may hold."""
    states = sum(c.state_bytes for c in candidates)
    if host_budget_bytes is not None and 2 * states > host_budget_bytes:
        raise DoesNotFit(
            f"device.host_budget of {format_bytes(host_budget_bytes)} is too small: the jobs' states come to "
            f"{format_bytes(states)}, and host memory must hold them and their checkpoints while these are written. Give at "
            f"least twice that ({2 * states} bytes)."
        )


def _joint(
    jobs: JobsFile, planned: Sequence[_Planned], candidates: Sequence[_Candidate], budget_bytes: int, peaks: dict[str, int]
) -> JointPlan:
    programs = [one.program for one in planned]
    serial = serial_peak((p.demand, p.demand.idle_bytes) for p in programs)
    found = [
        PlannedJob(
            name=entry.name,
            model=entry.model,
            entrypoint=entry.entrypoint,
            peak_bytes=program.demand.peak_bytes,
            idle_bytes=program.demand.idle_bytes,
            parked_bytes=program.demand.parked_bytes,
            host_bytes=one.host_bytes,
            floor_bytes=candidate.floor_bytes,
            jit_peak_bytes=peaks.get(entry.name),
            step_us=program.plan.step_us,
            switch_us=program.demand.switch_us,
            swapped_bytes=program.plan.swapped_out_bytes + program.plan.swapped_in_bytes,
            segments=len(program.plan.segments),
            kept_out_tensors=len(program.kept_out),
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
        peak_sum_bytes=sum(p.demand.peak_bytes for p in programs),
        round_us=sum(p.plan.step_us for p in programs),
        take_turns=serial > budget_bytes,
        jobs=tuple(found),
    )
