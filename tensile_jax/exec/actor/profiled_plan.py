"""`ProfiledPlan`: a plan of a job's step, compiled or only predicted, with its memory profile; and how each request is answered.

`make_plan` makes the plan that a `PlanRequest` asks for (`plans.py`). It is the one place that turns these values into calls of a
`PreparedStep`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tensile_jax.budget import Budget
from tensile_jax.exec.actor.plan_memory import memory_profile_of, metrics_bytes, unused_bytes
from tensile_jax.exec.actor.plans import OffloadState, PlanId, PlanRequest, PlanSummary, PlanWithin, RenewPlan
from tensile_jax.exec.step.fitting_plan import choose_and_compile, predicted, try_whole
from tensile_jax.exec.step.instructions import Instructions, StartSwapIn, StartSwapOut, instructions_of
from tensile_jax.exec.step.prepared_step import Compiled, PreparedStep
from tensile_jax.exec.step.renewal import renew
from tensile_jax.exec.step.variants import fastest_variant
from tensile_jax.ir import TensorId
from tensile_jax.plan.multi_job.admission import plan_job
from tensile_jax.plan.multi_job.memory_profile import MemoryProfile
from tensile_jax.plan_format import Plan


@dataclass(frozen=True, slots=True, eq=False)
class ProfiledPlan:
    """A plan, the step of which it was made, its instructions, and its memory profile.

    Attributes:
        instructions: with the plan's executables if it is compiled; None if the step runs whole, as one executable.
        offloaded: the state tensors that `offload_state` keeps on the host between their uses.
    """

    prepared: PreparedStep
    compiled: Compiled
    instructions: Instructions | None
    memory: MemoryProfile
    offloaded: frozenset[TensorId] = frozenset()

    @property
    def plan(self) -> Plan:
        """The plan."""
        return self.compiled.plan

    def offload_state(self, tensors: frozenset[TensorId]) -> "ProfiledPlan":
        """The same segments with these state tensors on the host between their uses."""
        return _profiled(self.prepared, self.prepared.offload_state(self.compiled, tensors), offloaded=tensors)

    def may_be_offloaded(self) -> tuple[tuple[TensorId, int], ...]:
        """(tensor, bytes) of each state tensor that `offload_state` could keep on the host and that is not kept there yet."""
        return self.prepared.may_be_offloaded(self.compiled)

    def summary(self, id: PlanId) -> PlanSummary:
        """What others need to know of the plan."""
        code = () if self.instructions is None else self.instructions.code
        return PlanSummary(
            id,
            self.plan,
            self.memory,
            self.prepared.swapping_accesses(),
            self.prepared.options.agreed_swaps,
            self.offloaded,
            self.may_be_offloaded(),
            frozenset(i for i, one in enumerate(code, start=1) if isinstance(one, StartSwapOut | StartSwapIn)),
        )


def make_plan(request: PlanRequest, traced: PreparedStep, made: Mapping[PlanId, ProfiledPlan]) -> ProfiledPlan:
    """The plan that is asked for, of a step as it was traced, and of plans that were made of it before.

    Raises:
        BudgetTooSmall: there is no plan within the limits.
        TensileError: planning has failed.
    """
    match request:
        case PlanWithin(limits, based_on, agreed_swaps, host_limit, compiled):
            prepared = traced if based_on is None else made[based_on].prepared
            if agreed_swaps is not None:
                prepared = prepared.with_swaps(agreed_swaps)
            if host_limit is not None:
                prepared = prepared.with_host_limit(host_limit)
            return plan_job(lambda step, nbytes: plan_under(step, nbytes, compiled=compiled), prepared, limits)
        case OffloadState(based_on, tensors):
            return made[based_on].offload_state(tensors)
        case RenewPlan(based_on, tracked, reason):
            return _profiled(*renew(made[based_on].prepared, made[based_on].compiled, tracked, reason))


def plan_under(prepared: PreparedStep, budget_bytes: int, *, compiled: bool) -> ProfiledPlan:
    """The plan of the step, or of its fastest variant, under a budget. It is `compiled`, or only predicted.

    The budget includes the memory of the metrics.

    Raises:
        BudgetTooSmall: there is no plan under that budget.
    """
    metrics = metrics_bytes(prepared.graph)
    most = max(budget_bytes - metrics, 1)
    if prepared.options.max_slowdown is not None:  # first try the plan that needs the least memory and is fast enough
        fast_enough = _fastest_under(prepared, None, compiled)
        if fast_enough.plan.peak_bytes <= most:
            return fast_enough
    found = _fastest_under(prepared, Budget(most, None, beside=metrics), compiled)
    if found.memory.peak_bytes > budget_bytes:  # the step runs whole, and plain jit's peak does not count unused arguments
        unused = unused_bytes(prepared.graph)
        found = _fastest_under(prepared, Budget(max(most - unused, 1), None, beside=metrics + unused), compiled)
    return found


def _fastest_under(prepared: PreparedStep, budget: Budget | None, compiled: bool) -> ProfiledPlan:
    prepared.budget = budget
    if compiled:
        try_whole(prepared)
    chosen = fastest_variant(prepared, drive_loops=False)
    return _profiled(chosen, choose_and_compile(chosen) if compiled else predicted(chosen))


def _profiled(prepared: PreparedStep, compiled: Compiled, *, offloaded: frozenset[TensorId] = frozenset()) -> ProfiledPlan:
    plan, instructions = compiled.plan, None
    if not plan.whole:
        calls = [_nothing] * len(plan.segments) if compiled.executables is None else [e.call for e in compiled.executables]
        instructions = instructions_of(plan, prepared.graph, calls)
    memory = memory_profile_of(plan, prepared.graph, instructions, prepared.options.profile)
    return ProfiledPlan(prepared, compiled, instructions, memory, offloaded)


def _nothing(*arguments: Any) -> tuple[()]:
    """In the place of an executable, for a plan that is not compiled."""
    raise AssertionError("a plan that is only predicted was run")
