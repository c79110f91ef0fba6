"""Policies side by side on one step and one device profile, in the paper's metrics (TENSILE, section V-A).

    MSR = (vanilla peak - peak) / vanilla peak        memory saving rate
    EOR = time of a step / vanilla time of a step     extra overhead rate
    CBR = MSR / EOR                                   cost-benefit rate

Vanilla is policy `none`: our own runtime without a schedule. Peaks in bytes, times in microseconds, all predicted.
"""

from dataclasses import dataclass

from tensile_jax.plan_format import Plan, PolicyName


@dataclass(frozen=True, slots=True)
class Entry:
    """One plan: its policy, the budget it was given (None: none; 0: as little as possible), and what it is predicted to take."""

    policy: PolicyName
    budget_bytes: int | None
    peak_bytes: int
    step_us: float
    recomputed_us: float
    stall_us: float
    swapped_bytes: int
    segments: int
    msr: float
    eor: float

    @property
    def cbr(self) -> float:
        """Memory saved for each unit of overhead."""
        return self.msr / self.eor


def entry_of(plan: Plan, policy: PolicyName, budget_bytes: int | None, vanilla: Plan) -> Entry:
    """The entry of a plan beside the vanilla plan."""
    return Entry(
        policy=policy,
        budget_bytes=budget_bytes,
        peak_bytes=plan.peak_bytes,
        step_us=plan.step_us,
        recomputed_us=plan.recomputed_us,
        stall_us=plan.stall_us,
        swapped_bytes=plan.swapped_out_bytes + plan.swapped_in_bytes,
        segments=len(plan.segments),
        msr=(vanilla.peak_bytes - plan.peak_bytes) / max(vanilla.peak_bytes, 1),
        eor=plan.step_us / vanilla.step_us,
    )


@dataclass(frozen=True, slots=True)
class AtBudget:
    """What every policy makes of one budget: entries of those that can keep it, and the bound that none can beat.

    There is no bound where there can be no plan. `passive_eor` is of Capuchin's first iteration, which evicts and fetches on
    demand in order to measure; the other policies need none.
    """

    share: float
    budget_bytes: int
    entries: tuple[Entry, ...]
    bound_eor: float | None
    passive_eor: float

    def of(self, policy: PolicyName) -> Entry | None:
        """The entry of the policy; None if it cannot keep the budget."""
        return next((e for e in self.entries if e.policy == policy), None)


@dataclass(frozen=True, slots=True)
class Comparison:
    """All policies on one step.

    Attributes:
        whole: plain `jax.jit`, as far as the planner can predict it.
        least: each policy with as little memory as it can do with, and beside it `auto` under a budget of the same peak.
        budgets: every policy under shares of vanilla's peak.
        curve: `auto` from the whole step's peak down to its floor.
    """

    program: str
    device_profile: str
    vanilla: Entry
    whole: Entry
    least: tuple[tuple[Entry, Entry], ...]
    budgets: tuple[AtBudget, ...]
    curve: tuple[Entry, ...]
