"""Plans one step with every policy under several budgets, and compares the plans in the paper's metrics.

    MSR = (vanilla peak - peak) / vanilla peak        memory saving rate      (TENSILE, section V-A)
    EOR = time of a step / vanilla time of a step     extra overhead rate
    CBR = MSR / EOR                                   cost-benefit rate

A *policy* is a way to plan: `auto`, TENSILE, Capuchin and others. *Vanilla* is the plan of policy `none`: this project's own
runtime without a schedule. Every policy plans with `state_memory="any"`: a state tensor may be in host memory from its update to
its first use in the next iteration, as in the paper. Capuchin, vDNN and checkpointing do not use this permission. Peaks in bytes,
times in microseconds, all predicted.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from itertools import pairwise
from os import PathLike
from typing import Literal

from tensile_jax import html_tables
from tensile_jax.plan.planner import CompiledSizes, Goal, Planner
from tensile_jax.plan.policies.capuchin.passive_mode import passive_iteration
from tensile_jax.plan.policies.registry import POLICIES, PolicyName
from tensile_jax.plan.search.choice import LEAST
from tensile_jax.plan_format import Plan
from tensile_jax.progress.phases import POLICIES as EVERY_POLICY
from tensile_jax.progress.phases import Progress
from tensile_jax.tracebacks import hides_frames

SHARES = (0.9, 0.75, 0.6, 0.5, 0.4, 0.3)
"""Of vanilla's peak: the budgets that are compared."""

_CURVE_POINTS = 10  # about how many budgets the curve has: more take longer (`tensile compare resnet50`)


@dataclass(frozen=True, slots=True)
class Entry:
    """The figures of one plan. A budget of None means no budget, and a budget of 0 means as little memory as possible."""

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
    """The entry of a plan, in comparison with the vanilla plan."""
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
    """All policies under one budget: the entries of those that have a plan, and the lower bound on the time of any plan.

    `bound_eor` is None if no plan can exist. `passive_eor` is the EOR of Capuchin's first iteration, which swaps on demand in
    order to measure. No other policy needs such an iteration.
    """

    share: float
    budget_bytes: int
    entries: tuple[Entry, ...]
    bound_eor: float | None
    passive_eor: float

    def of(self, policy: str) -> Entry | None:
        """The entry of the policy; None if it cannot keep the budget."""
        return next((e for e in self.entries if e.policy == policy), None)


@dataclass(frozen=True, slots=True)
class Comparison:
    """All policies on one step.

    Attributes:
        state_memory: where state may be between iterations, in every plan of the comparison.
        whole: plain `jax.jit`, as the planner predicts it.
        least: each policy with as little memory as it can manage with, and `auto` with that peak as its budget.
        budgets: every policy under shares of vanilla's peak.
        curve: `auto` under budgets from the peak of the whole step down to the floor: all of the above, and some between them.
    """

    program: str
    device_profile: str
    state_memory: Literal["device", "any"]
    vanilla: Entry
    whole: Entry
    least: tuple[tuple[Entry, Entry], ...]
    budgets: tuple[AtBudget, ...]
    curve: tuple[Entry, ...]

    @hides_frames
    def save_html(self, path: str | PathLike[str]) -> None:
        """Write the comparison as a page that a browser shows without a network: one HTML file.

        Raises:
            ModuleNotFoundError: plotly, which draws the page, is not installed (`pip install 'tensile_jax[html]'`).
            OSError: the file cannot be written.
        """
        # the page reads these records, so it is looked up when it is needed
        import_module("tensile_jax.pages.comparison_page").save_comparison(self, path)

    def _repr_html_(self) -> str:
        """Every policy under each share of vanilla's peak, and without a budget."""
        without = [{"budget": "none", **_figures(one)} for one in (self.vanilla, self.whole)]
        return html_tables.of_rows(
            [*without, *({"budget": f"{at.share:.0%}", **_figures(one)} for at in self.budgets for one in at.entries)]
        )


def _figures(entry: Entry) -> dict[str, object]:
    return {
        "policy": entry.policy, "peak_bytes": entry.peak_bytes, "step_us": entry.step_us, "MSR": entry.msr, "EOR": entry.eor,
        "CBR": entry.cbr, "swapped_bytes": entry.swapped_bytes, "recomputed_us": entry.recomputed_us, "segments": entry.segments,
    }  # fmt: skip


def compare_policies(
    planner: Planner,
    *,
    fastest: Callable[[float], Planner],
    bounded: Planner,
    progress: Progress | None = None,
    shares: Sequence[float] = SHARES,
) -> Comparison:
    """All policies on the planner's step, whatever its own policy and its own `state_memory`.

    Args:
        fastest: gives for a limit in bytes the planner of the variant of the step that `auto` plans under it.
        bounded: the planner of the variant that the bound is for.

    Raises:
        TensileError: no plan of a policy survives its replay, which is a mistake of this package.
    """
    nothing = CompiledSizes()
    planner = planner.across_iterations()
    planners = {policy: planner.with_policy(policy) for policy in POLICIES}  # each finds its floor once
    others: list[PolicyName] = [p for p in POLICIES if p not in ("none", "auto")]

    def tell(done: int, of: int) -> None:
        if progress is not None:
            progress(EVERY_POLICY, done, of)

    def planned(policy: PolicyName, limit: float) -> Plan | None:
        one = fastest(limit) if policy == "auto" else planners[policy]
        found = one.plan(Goal(limit), nothing)
        if found is None and one.has_choice(limit, nothing):
            raise one.no_verified_plan()
        return None if found is None else found.plan

    def unlimited(policy: PolicyName) -> Plan:
        plan = planned(policy, float("inf"))
        assert plan is not None  # every policy has a choice then
        return plan

    tell(0, 2 * len(shares) + _CURVE_POINTS)
    vanilla, whole = unlimited("none"), unlimited("auto")

    def under(policy: PolicyName, limit: int) -> Entry | None:
        plan = planned(policy, limit)
        return None if plan is None else entry_of(plan, policy, limit, vanilla)

    def with_least(policy: PolicyName) -> Entry:
        entry = under(policy, int(LEAST))
        assert entry is not None  # every policy has a choice then
        return entry

    least = [with_least(policy) for policy in others]
    lowest = with_least("auto")
    of_shares = [int(share * vanilla.peak_bytes) for share in shares]
    asked = {*of_shares, *(entry.peak_bytes for entry in least), whole.peak_bytes}
    limits = sorted(asked | _between(asked, lowest.peak_bytes, whole.peak_bytes), reverse=True)
    parts = len(limits) + len(shares)
    fast: dict[int, Entry | None] = {}  # `auto` under each limit
    for limit in limits:
        tell(len(fast), parts)
        fast[limit] = under("auto", limit)
    budgets: list[AtBudget] = []
    for share, nbytes in zip(shares, of_shares, strict=True):
        tell(len(limits) + len(budgets), parts)
        under_it = (fast[nbytes] if policy == "auto" else under(policy, nbytes) for policy in POLICIES if policy != "none")
        bound = bounded.bound_us(nbytes, nothing)
        passive = passive_iteration(planner.model, nbytes)
        bound_eor = None if bound == float("inf") else bound / vanilla.step_us
        entries = tuple(entry for entry in under_it if entry is not None)
        budgets.append(AtBudget(share, nbytes, entries, bound_eor, passive.step_us / vanilla.step_us))
    tell(parts, parts)
    curve = [entry for limit in limits if limit <= whole.peak_bytes and (entry := fast[limit]) is not None]
    return Comparison(
        program=planner.graph.name,
        device_profile=planner.profile.name,
        state_memory=planner.state_memory,
        vanilla=entry_of(vanilla, "none", None, vanilla),
        whole=entry_of(whole, "auto", None, vanilla),
        least=tuple((entry, fast[entry.peak_bytes] or lowest) for entry in least),
        budgets=tuple(budgets),
        curve=(*_fastest_under_each(curve), lowest),
    )


def _between(limits: Collection[int], lowest: int, highest: int) -> set[int]:
    """Limits that fill the gaps between `limits`. Together, they are about as dense as `_CURVE_POINTS` evenly spaced limits."""
    if highest <= lowest:
        return set()
    spacing = (highest - lowest) / (_CURVE_POINTS - 1)
    known = sorted({lowest, highest, *(limit for limit in limits if lowest < limit < highest)})
    found: set[int] = set()
    for low, high in pairwise(known):
        parts = round((high - low) / spacing)
        found.update(int(low + (high - low) * part / parts) for part in range(1, parts))
    return found


def _fastest_under_each(entries: Sequence[Entry]) -> list[Entry]:
    """For each budget, the fastest entry that keeps it. A search for a lower budget sometimes finds a faster plan."""

    def fastest(budget_bytes: int | None) -> Entry:
        fits = (entry for entry in entries if budget_bytes is None or entry.peak_bytes <= budget_bytes)
        return replace(min(fits, key=lambda entry: (entry.step_us, entry.peak_bytes)), budget_bytes=budget_bytes)

    return [fastest(entry.budget_bytes) for entry in entries]
