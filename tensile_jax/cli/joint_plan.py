"""Plan all jobs of a jobs file for one budget, as the runtime would, without running or (but for a share) compiling anything.

The runtime plans one job after another for what is left beside the others at rest: those that have a plan by that, the others
by the size of their state. If there is no such plan, for the whole budget. All jobs fit if each can run an iteration while
the states of all others are on the host, and the host can hold what they send there.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import jax

from tensile_jax.cli.job_source import Shapes, find_modules_here, same_source, shapes_of
from tensile_jax.cli.jobs_file import JobEntry, JobsFile
from tensile_jax.cli.jobs_plan import JointPlan, PlannedJob
from tensile_jax.cli.plain_jit import resolve_budget
from tensile_jax.cli.progress import Live
from tensile_jax.cli.refusal import DoesNotFit
from tensile_jax.errors import BudgetTooSmall, JobsFileError, TraceError
from tensile_jax.exec.budget import Budget
from tensile_jax.exec.compile import Compiler
from tensile_jax.exec.demands import demand_of, metrics_bytes
from tensile_jax.exec.instructions import instructions_of
from tensile_jax.exec.local import LocalActor
from tensile_jax.exec.prepare import Options, PreparedStep
from tensile_jax.exec.transfer import Transfer
from tensile_jax.plan import DeviceProfile
from tensile_jax.plan.demand import Demand
from tensile_jax.plan.interleave import serial_peak
from tensile_jax.profiles import load_profile
from tensile_jax.schedule import Plan, format_bytes

_CLOSE_ENOUGH = 1.005  # where the search for the smallest budget ends
_MOST_DOUBLINGS = 40


@dataclass(frozen=True, slots=True, eq=False)
class _Planned:
    """A job's plan, and whether the limit that left room for the others could be kept."""

    plan: Plan
    demand: Demand
    beside_others: bool

    @property
    def host_bytes(self) -> int:
        """In host memory at most, with a checkpoint that is written while the job goes on."""
        return self.demand.host_bytes + self.demand.state_bytes


class _Candidate:
    """A traced job, which can be planned for any limit. Copies of a job share one."""

    def __init__(self, shapes: Shapes, entry: JobEntry, profile: DeviceProfile) -> None:
        device = jax.devices()[0]
        actor = LocalActor(shapes.step, shapes.state, Transfer(device))
        options = Options(entry.policy, profile, "any", max_slowdown=entry.max_slowdown)
        self.state_bytes = actor.state_bytes
        try:
            self.prepared: PreparedStep = actor.trace(shapes.batch, options, Compiler(device))
        except TraceError as error:
            raise JobsFileError(f"{entry.where}: {error}") from error
        self.metrics_bytes = metrics_bytes(self.prepared.graph)
        self._known: dict[int, tuple[Plan, Demand] | None] = {}
        self.floor_bytes = self._find_floor() + self.metrics_bytes

    def plan(self, limit_bytes: int) -> tuple[Plan, Demand] | None:
        """Under the limit; None if there is none."""
        if limit_bytes not in self._known:
            try:
                self._known[limit_bytes] = self._plan(limit_bytes)
            except BudgetTooSmall:
                self._known[limit_bytes] = None
        return self._known[limit_bytes]

    def _plan(self, limit_bytes: int) -> tuple[Plan, Demand]:
        prepared = self.prepared
        prepared.budget = Budget(max(limit_bytes - self.metrics_bytes, 1), None)
        plan = prepared.predict()
        never_called = [_nothing] * len(plan.segments)
        instructions = None if plan.whole else instructions_of(plan, prepared.graph, never_called)
        return plan, demand_of(plan, prepared.graph, instructions, prepared.options.profile)

    def _find_floor(self) -> int:
        try:
            self._plan(0)
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
    planned = _plan_all(candidates, budget_bytes, host)
    if planned is None:
        live.wait_for("looking for the smallest budget")
        smallest = _smallest(candidates, budget_bytes, host)
        least = max(zip(candidates, jobs.jobs, strict=True), key=lambda pair: pair[0].floor_bytes)
        raise DoesNotFit(
            f"{jobs.file}: device.budget of {format_bytes(budget_bytes)} ({budget_bytes} bytes) is too small for these "
            f"{len(candidates)} jobs: the smallest that works is about {format_bytes(smallest)} ({smallest} bytes). "
            f"{least[1].name} alone needs about {format_bytes(least[0].floor_bytes)}."
        )
    return _joint(jobs, planned, candidates, budget_bytes, peaks)


def _nothing(*arguments: object) -> tuple[()]:
    """Stands where an executable would."""
    del arguments
    return ()


def _candidates(entries: Sequence[JobEntry], profile: DeviceProfile, live: Live) -> list[_Candidate]:
    made: dict[tuple[bytes, str], _Candidate] = {}
    found: list[_Candidate] = []
    what = "tracing"
    for done, entry in enumerate(entries):
        live.tell(what, done, len(entries), entry.name)
        key = (same_source(entry), entry.policy)
        if key not in made:
            made[key] = _Candidate(shapes_of(entry), entry, profile)
        found.append(made[key])
    live.tell(what, len(entries), len(entries))
    return found


def _plan_all(candidates: Sequence[_Candidate], budget_bytes: int, host_budget_bytes: int | None) -> list[_Planned] | None:
    """Every job's plan; None if one has none, or if they cannot all run."""
    planned: list[_Planned] = []
    for place, candidate in enumerate(candidates):
        resting = sum(one.demand.idle_bytes for one in planned) + sum(c.state_bytes for c in candidates[place + 1 :])
        limit = budget_bytes - resting
        found = candidate.plan(limit) if limit > 0 else None
        beside = found is not None
        if found is None:
            found = candidate.plan(budget_bytes)
        if found is None:
            return None
        planned.append(_Planned(*found, beside))
    demands = [one.demand for one in planned]
    if serial_peak((d, d.parked_bytes) for d in demands) > budget_bytes:
        return None
    if host_budget_bytes is not None and sum(one.host_bytes for one in planned) > host_budget_bytes:
        return None
    return planned


def _smallest(candidates: Sequence[_Candidate], budget_bytes: int, host_budget_bytes: int | None) -> int:
    """A budget under which all can be planned, at most half a per cent above one under which they cannot."""
    low, high = budget_bytes, max(budget_bytes + 1, *(c.floor_bytes for c in candidates))
    for _ in range(_MOST_DOUBLINGS):
        if _plan_all(candidates, high, host_budget_bytes) is not None:
            break
        low, high = high, high + max(high // 16, 1)
    while high > low * _CLOSE_ENOUGH and high - low > 1:
        middle = (low + high) // 2
        if _plan_all(candidates, middle, host_budget_bytes) is None:
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
    demands = [one.demand for one in planned]
    serial = serial_peak((d, d.idle_bytes) for d in demands)
    found = [
        PlannedJob(
            name=entry.name,
            model=entry.model,
            entrypoint=entry.entrypoint,
            peak_bytes=one.demand.peak_bytes,
            idle_bytes=one.demand.idle_bytes,
            parked_bytes=one.demand.parked_bytes,
            host_bytes=one.host_bytes,
            floor_bytes=candidate.floor_bytes,
            jit_peak_bytes=peaks.get(entry.name),
            step_us=one.plan.step_us,
            switch_us=one.demand.switch_us,
            swapped_bytes=one.plan.swapped_out_bytes + one.plan.swapped_in_bytes,
            segments=len(one.plan.segments),
            beside_others=one.beside_others,
        )
        for entry, one, candidate in zip(jobs.jobs, planned, candidates, strict=True)
    ]
    return JointPlan(
        file=jobs.file,
        device_profile=planned[0].plan.device_profile,
        budget_bytes=budget_bytes,
        host_budget_bytes=jobs.device.host_budget_bytes,
        host_bytes=sum(one.host_bytes for one in planned),
        serial_peak_bytes=serial,
        peak_sum_bytes=sum(d.peak_bytes for d in demands),
        round_us=sum(one.plan.step_us for one in planned),
        take_turns=serial > budget_bytes,
        jobs=tuple(found),
    )
