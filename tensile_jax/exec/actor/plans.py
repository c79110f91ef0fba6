"""Defines the requests for plans that a runtime sends to an actor, the object that runs one job, and the actor's answers. Both
are frozen values that can be sent to any process.

    PlanWithin     asks for a plan that keeps given limits of memory
    OffloadState   asks for a new plan that runs the segments of an earlier one, but keeps some of the state in host memory while
                   no segment uses it
    RenewPlan      asks for a new plan, from what was measured while an earlier plan ran
    PlanSummary    the answer to each of them: a plan that was made, with what others need to know of it

The compiled plan itself stays with the actor, which finds it by the id in the summary. Sizes are in bytes.
"""

from dataclasses import dataclass
from typing import NewType

from tensile_jax.ir import TensorId
from tensile_jax.plan.analysis.access import AccessSequence
from tensile_jax.plan.drift import Tracked
from tensile_jax.plan.multi_job.admission import JobLimits
from tensile_jax.plan.multi_job.memory_profile import MemoryProfile
from tensile_jax.plan.policies.tensile.swap_scheduling import SwappedOut
from tensile_jax.plan_format import Plan

PlanId = NewType("PlanId", int)
"""The number of a job's plan. A plan that is made later has a higher number."""


@dataclass(frozen=True, slots=True)
class PlanWithin:
    """Choose segments and copies that keep some limits.

    Attributes:
        based_on: the plan whose limit of host memory, agreed swaps and corrected latencies are kept; None: the step as traced.
        agreed_swaps: the swaps on which several jobs have agreed; None: those of `based_on`.
        host_limit: the most bytes that the plan may have in host memory; zero: without swaps; None: the limit of `based_on`.
        compiled: whether the plan is compiled. If not, it is only predicted, and cannot be put to use.
    """

    limits: JobLimits
    based_on: PlanId | None = None
    agreed_swaps: tuple[SwappedOut, ...] | None = None
    host_limit: float | None = None
    compiled: bool = True


@dataclass(frozen=True, slots=True)
class OffloadState:
    """Keep the segments of `based_on`, and keep these state tensors on the host between their uses."""

    based_on: PlanId
    tensors: frozenset[TensorId]


@dataclass(frozen=True, slots=True)
class RenewPlan:
    """Choose again, from what was measured of the segments of `based_on` (`exec/fitting/renewal.py`). The plan states why."""

    based_on: PlanId
    tracked: Tracked
    reason: str


PlanRequest = PlanWithin | OffloadState | RenewPlan


@dataclass(frozen=True, slots=True)
class PlanSummary:
    """A plan that an actor has made.

    Attributes:
        accesses: those from which swaps are chosen for several jobs together; None if the policy does not take part in that.
        agreed_swaps: the swaps on which several jobs have agreed, if the plan was made with such.
        offloaded: the state tensors that `OffloadState` keeps on the host between their uses.
        may_be_offloaded: (tensor, bytes) of each state tensor that could be kept on the host and is not kept there yet.
        copies: the numbers of the moves that start copies.
    """

    id: PlanId
    plan: Plan
    memory: MemoryProfile
    accesses: AccessSequence | None = None
    agreed_swaps: tuple[SwappedOut, ...] | None = None
    offloaded: frozenset[TensorId] = frozenset()
    may_be_offloaded: tuple[tuple[TensorId, int], ...] = ()
    copies: frozenset[int] = frozenset()
