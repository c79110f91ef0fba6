"""The limit of the next plan follows from the peaks that compiling has shown. Sizes fit on paper: the budget is 100 or 1000."""

import pytest

from tensile_jax.exec.step.next_limit import Tried, next_limit


def test_a_peak_above_the_budget_lowers_the_limit_by_as_much_and_a_margin() -> None:
    assert next_limit([Tried(100, 110)], 100) == 100 - 10 - 1
    assert next_limit([Tried(100, 110), Tried(89, 102)], 100) == 89 - 2 - 1


def test_a_first_plan_that_keeps_the_budget_is_the_last() -> None:
    assert next_limit([Tried(100, 100)], 100) is None
    assert next_limit([Tried(100, 50)], 100) is None


def test_a_peak_close_below_the_budget_is_good_enough() -> None:
    assert next_limit([Tried(100, 110), Tried(89, 98)], 100) is None


def test_a_peak_far_below_the_budget_raises_the_limit_to_where_a_straight_line_meets_the_budget() -> None:
    # From (890, 900) to (1000, 1100): 0.55 of limit for each byte of peak, and 95 bytes are missing to 995.
    assert next_limit([Tried(1000, 1100), Tried(890, 900)], 1000) == pytest.approx(890 + 0.55 * 95)


def test_the_line_begins_at_the_last_peak_above_the_budget() -> None:
    tried = [Tried(1000, 1300), Tried(690, 1100), Tried(590, 900)]
    assert next_limit(tried, 1000) == pytest.approx(590 + 100 / 200 * 95)


@pytest.mark.parametrize("peak", [900, 990, 1010])
def test_the_limit_is_raised_once_only(peak: int) -> None:
    assert next_limit([Tried(1000, 1100), Tried(890, 900), Tried(940, peak)], 1000) is None
