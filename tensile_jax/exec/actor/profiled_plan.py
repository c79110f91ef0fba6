"""Defines `ProfiledPlan`: a plan of a job's step, compiled or only predicted, with its memory profile.

The memory profile has, for each move of an iteration (a launch, a copy, a wait), the bytes that the job needs on the device
during the move, and the bytes that it holds afterwards.

`make_plan` makes the plan that a `PlanRequest` (`plans.py`) asks for. No other code turns such requests into plans.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from tensile_jax.budget import Budget
from tensile_jax.exec.actor.plan_memory import memory_profile_of, metrics_bytes, unused_bytes
from tensile_jax.exec.actor.plans import OffloadState, PlanId, PlanRequest, PlanSummary, PlanWithin, RenewPlan
from tensile_jax.exec.compiling.step import CompiledPlan, Step
from tensile_jax.exec.fitting.find_plan import offload_state
from tensile_jax.exec.fitting.forms import fit_fastest, predict_fastest
from tensile_jax.exec.fitting.renewal import renew
from tensile_jax.ir import TensorId
from tensile_jax.plan.multi_job.admission import plan_job
from tensile_jax.plan.multi_job.memory_profile import MemoryProfile
from tensile_jax.plan.result.instructions import StartSwapIn, StartSwapOut, decode
from tensile_jax.plan_format import Plan


@dataclass(frozen=True, slots=True, eq=False)
class ProfiledPlan:
    """A plan and its memory profile.

    Attributes:
        offloaded: the state tensors that `offload_state` keeps on the host between their uses.
    """

    compiled: CompiledPlan
    memory: MemoryProfile
    offloaded: frozenset[TensorId] = frozenset()

    @property
    def plan(self) -> Plan:
        """The plan."""
        return self.compiled.plan

    @property
    def step(self) -> Step:
        """The step of which the plan was made."""
        return self.compiled.step

    def offload_state(self, tensors: frozenset[TensorId]) -> "ProfiledPlan":
        """The same segments with these state tensors on the host between their uses."""
        return _profiled(offload_state(self.compiled, tensors), offloaded=tensors)

    def may_be_offloaded(self) -> tuple[tuple[TensorId, int], ...]:
        """(tensor, bytes) of each state tensor that `offload_state` could keep on the host and that is not kept there yet."""
        choice = self.compiled.choice
        assert choice is not None  # the planner has made the plan
        return self.step.planner.may_be_offloaded(choice)

    def summary(self, id: PlanId) -> PlanSummary:
        """What others need to know of the plan."""
        code = decode(self.plan, self.step.graph)
        return PlanSummary(
            id,
            self.plan,
            self.memory,
            self.step.swapping_accesses(),
            self.step.options.agreed_swaps,
            self.offloaded,
            self.may_be_offloaded(),
            frozenset(i for i, one in enumerate(code, start=1) if isinstance(one, StartSwapOut | StartSwapIn)),
        )


def make_plan(request: PlanRequest, traced: Step, made: Mapping[PlanId, ProfiledPlan]) -> ProfiledPlan:
    """The plan that is asked for, of a step as it was traced, and of plans that were made of it before.

    Raises:
        BudgetTooSmall: there is no plan within the limits.
        TensileError: planning has failed.
    """
    match request:
        case PlanWithin(limits, based_on, agreed_swaps, host_limit, compiled):
            step = traced if based_on is None else made[based_on].step
            if agreed_swaps is not None:
                step = step.with_swaps(agreed_swaps)
            if host_limit is not None:
                step = step.with_host_limit(host_limit)
            return plan_job(lambda step, nbytes: plan_under(step, nbytes, compiled=compiled), step, limits)
        case OffloadState(based_on, tensors):
            return made[based_on].offload_state(tensors)
        case RenewPlan(based_on, tracked, reason):
            return _profiled(renew(made[based_on].compiled, tracked, reason))


def plan_under(step: Step, budget_bytes: int, *, compiled: bool) -> ProfiledPlan:
    """The plan of the step, or of its fastest variant, under a budget. It is `compiled`, or only predicted.

    The budget includes the memory of the metrics.

    Raises:
        BudgetTooSmall: there is no plan under that budget.
    """
    metrics = metrics_bytes(step.graph)
    most = max(budget_bytes - metrics, 1)
    if step.options.max_slowdown is not None:  # first try the plan that needs the least memory and is fast enough
        fast_enough = _fastest_under(step, None, compiled)
        if fast_enough.plan.peak_bytes <= most:
            return fast_enough
    found = _fastest_under(step, Budget(most, None, beside=metrics), compiled)
    if found.memory.peak_bytes > budget_bytes:  # the step runs whole, and plain jit's peak does not count unused arguments
        unused = unused_bytes(step.graph)
        found = _fastest_under(step, Budget(max(most - unused, 1), None, beside=metrics + unused), compiled)
    return found


def _fastest_under(step: Step, budget: Budget | None, compiled: bool) -> ProfiledPlan:
    return _profiled((fit_fastest if compiled else predict_fastest)(step, budget, drive_loops=False))


def _profiled(compiled: CompiledPlan, *, offloaded: frozenset[TensorId] = frozenset()) -> ProfiledPlan:
    step = compiled.step
    return ProfiledPlan(compiled, memory_profile_of(compiled.plan, step.graph, step.options.profile), offloaded)
