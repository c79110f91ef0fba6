"""Which jobs may share a budget, by hand."""

from tensile_jax.plan.multi_job.admission import SmallestBudgets, admits, smallest_budgets
from tensile_jax.plan.multi_job.memory_profile import LAUNCH, MemoryProfile


def profile(peak: int, parked: int, host: int = 0) -> MemoryProfile:
    return MemoryProfile((LAUNCH,), (peak,), (parked, parked), parked, host, host)


def test_the_smallest_budgets_hold_the_job_that_rises_highest_and_what_remains_of_the_others() -> None:
    assert smallest_budgets([profile(10, 1, 4), profile(8, 3, 5)]) == SmallestBudgets(1 + 3 + 9, 9)
    assert smallest_budgets([]) == SmallestBudgets(0, 0)


def test_a_job_is_admitted_exactly_from_the_smallest_budgets_on() -> None:
    new, others = profile(8, 3, 5), [profile(10, 1, 4)]
    assert admits(new, others, budget_bytes=13, host_budget_bytes=9)
    assert not admits(new, others, budget_bytes=12, host_budget_bytes=9)  # the other could not run any more
    assert not admits(new, others, budget_bytes=13, host_budget_bytes=8)


def test_a_job_that_cannot_run_anyway_keeps_nobody_out() -> None:
    assert admits(profile(8, 3), [profile(20, 1)], budget_bytes=9, host_budget_bytes=0)


def test_a_new_profile_of_a_job_may_take_the_place_of_its_old_one_only() -> None:
    old, others = profile(8, 3), [profile(10, 1)]
    assert admits(profile(8, 3), others, budget_bytes=13, host_budget_bytes=0, replaces=old)
    assert not admits(profile(9, 4), others, budget_bytes=13, host_budget_bytes=0, replaces=old)  # the other needs 9 above 1 + 4
    assert admits(profile(20, 3), others, budget_bytes=8, host_budget_bytes=0, replaces=profile(9, 3))  # it could not run before
