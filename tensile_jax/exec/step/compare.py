"""Plan one step with every policy, under many budgets, on one candidates. Compiles and runs nothing."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from tensile_jax.budget import Budget
from tensile_jax.errors import BudgetTooSmall
from tensile_jax.exec.step.compile import Compiler
from tensile_jax.exec.step.prepared_step import Options, PreparedStep
from tensile_jax.plan import POLICIES, passive_iteration
from tensile_jax.plan.result.comparison import AtBudget, Comparison, Entry, entry_of
from tensile_jax.plan_format import Plan, PolicyName
from tensile_jax.trace import TracedStep

SHARES = (0.9, 0.75, 0.6, 0.5, 0.4, 0.3)
"""Of vanilla's peak: the budgets that are compared."""

_CURVE_POINTS = 16
_LEAST = Budget(0, None)


def compare(step: TracedStep, options: Options, compiler: Compiler, *, shares: Sequence[float] = SHARES) -> Comparison:
    """All policies on the step; `options.policy` is not used."""
    unplanned = PreparedStep(step, None, replace(options, policy="none"), compiler)
    vanilla = unplanned.predict()
    others: list[PolicyName] = [p for p in POLICIES if p not in ("none", "auto")]
    rounds = len(others) + len(shares) + _CURVE_POINTS
    done = 0

    def planned(policy: PolicyName, budget: Budget | None) -> Plan:
        return PreparedStep(step, budget, replace(options, policy=policy), compiler, candidates=unplanned.candidates).predict()

    def told() -> None:
        nonlocal done
        done += 1
        if options.progress is not None:
            options.progress("planning with every policy", done, rounds)

    def under(policy: PolicyName, nbytes: int) -> Entry | None:
        try:
            return entry_of(planned(policy, Budget(nbytes, None)), policy, nbytes, vanilla)
        except BudgetTooSmall:
            return None

    least: list[tuple[Entry, Entry]] = []
    for policy in others:
        told()
        entry = entry_of(planned(policy, _LEAST), policy, 0, vanilla)
        beside = under("auto", entry.peak_bytes) or entry_of(planned("auto", _LEAST), "auto", 0, vanilla)
        least.append((entry, beside))
    budgets: list[AtBudget] = []
    for share in shares:
        told()
        nbytes = int(share * vanilla.peak_bytes)
        entries = tuple(e for policy in POLICIES if policy != "none" and (e := under(policy, nbytes)) is not None)
        bound = PreparedStep(step, Budget(nbytes, None), options, compiler, candidates=unplanned.candidates).bound_us()
        passive = passive_iteration(unplanned.candidates, nbytes)
        bound_eor = None if bound == float("inf") else bound / vanilla.step_us
        budgets.append(AtBudget(share, nbytes, entries, bound_eor, passive.step_us / vanilla.step_us))
    whole = planned("auto", None)
    return Comparison(
        program=step.graph.name,
        device_profile=options.profile.name,
        vanilla=entry_of(vanilla, "none", None, vanilla),
        whole=entry_of(whole, "auto", None, vanilla),
        least=tuple(least),
        budgets=tuple(budgets),
        curve=_curve(under, entry_of(planned("auto", _LEAST), "auto", 0, vanilla), whole.peak_bytes, told),
    )


def _curve(
    under: Callable[[PolicyName, int], Entry | None], least: Entry, highest: int, told: Callable[[], None]
) -> tuple[Entry, ...]:
    found: list[Entry] = []
    for point in range(_CURVE_POINTS):
        told()
        entry = under("auto", int(highest - (highest - least.peak_bytes) * point / (_CURVE_POINTS - 1)))
        if entry is not None:
            found.append(entry)
    return (*found, least)
