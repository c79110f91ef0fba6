"""The limit of the next plan follows from the peaks that compiling has shown. Sizes fit on paper: the budget is 100 or 1000."""

import pytest

from tensile_jax.exec.step.next_limit import Tried, next_limit


def test_a_peak_above_the_budget_lowers_the_limit_by_as_much_and_a_margin() -> None:
    assert next_limit([Tried(100, 110)], 100) == 100 - 10 - 1
    assert next_limit([Tried(100, 110), Tried(89, 102)], 100) == 89 - 2 - 1


def test_a_first_plan_that_needs_nearly_the_budget_is_the_last() -> None:
    assert next_limit([Tried(100, 100)], 100) is None
    assert next_limit([Tried(100, 95)], 100) is None


def test_a_first_plan_far_below_the_budget_raises_the_limit_by_what_is_missing() -> None:
    assert next_limit([Tried(1000, 700)], 1000) == 1000 + 295


def test_two_plans_far_below_it_raise_the_limit_along_a_straight_line() -> None:
    assert next_limit([Tried(1000, 700), Tried(1295, 900)], 1000) == pytest.approx(1295 + 295 / 200 * 95)


def test_peaks_that_are_close_or_in_the_wrong_order_say_little_of_the_line() -> None:
    assert next_limit([Tried(1000, 700), Tried(1100, 702)], 1000) == 1100 + 2 * 293  # at most 2 of limit for a byte of peak
    assert next_limit([Tried(1000, 700), Tried(1100, 690)], 1000) == 1000 + 0.5 * 295  # and at least 0.5
    assert next_limit([Tried(1000, 700), Tried(1100, 700)], 1000) == 1000 + 295


def test_a_peak_close_below_the_budget_is_good_enough() -> None:
    assert next_limit([Tried(100, 110), Tried(89, 98)], 100) is None


def test_a_peak_far_below_the_budget_raises_the_limit_to_where_a_straight_line_meets_the_budget() -> None:
    # From (890, 900) to (1000, 1100): 0.55 of limit for each byte of peak, and 95 bytes are missing to 995.
    assert next_limit([Tried(1000, 1100), Tried(890, 900)], 1000) == pytest.approx(890 + 0.55 * 95)


def test_the_line_begins_at_the_last_peak_above_the_budget() -> None:
    tried = [Tried(1000, 1300), Tried(690, 1100), Tried(590, 900)]
    assert next_limit(tried, 1000) == pytest.approx(590 + 100 / 200 * 95)
