"""How the next program of a step is made, from the peaks of the programs before."""

import pytest

from tensile_jax.exec.fitting.next_program import Tried, Try, first_try, next_try, try_after_exposed_copies
from tensile_jax.plan_format import Barriers


def tried(limit: float, peak_bytes: int, form: Barriers = "lag", expected_bytes: int = 0) -> Tried:
    return Tried(limit, form, expected_bytes or int(limit), peak_bytes)


def limit_after(*those: Tried, budget: float, devices: int = 8) -> float:
    """The limit of the next try, whose form is that of the last one."""
    found = next_try(those, budget, devices=devices)
    assert found is not None and found.form == those[-1].form
    return found.limit


def test_the_form_of_the_first_program_depends_on_the_number_of_devices() -> None:
    assert first_try(100, devices=1) == Try(100, "inputs")
    assert first_try(100, devices=2) == Try(100, "lag")


def test_a_peak_above_the_budget_lowers_the_limit_by_the_excess_and_a_margin() -> None:
    assert limit_after(tried(100, 105), budget=100) == 100 - 5 - 1


def test_a_second_peak_above_the_budget_lowers_the_limit_by_half_as_much_again_and_changes_the_form_on_several_devices() -> None:
    several = [tried(100, 105), tried(94, 102)]
    assert next_try(several, 100, devices=8) == Try(94 - 1.5 * 2 - 1, "live")


def test_a_first_peak_far_above_the_budget_changes_the_form_on_several_devices() -> None:
    assert next_try([tried(100, 110)], 100, devices=8) == Try(100 - 10 - 1, "live")
    later = [tried(100, 110), tried(89, 106, "live")]
    assert next_try(later, 100, devices=8) == Try(89 - 1.5 * 6 - 1, "live")


def test_on_one_device_no_program_follows_one_that_is_far_above_the_budget() -> None:
    assert next_try([tried(100, 110, "inputs")], 100, devices=1) is None


def test_a_program_with_copies_that_is_far_above_the_budget_is_made_for_less() -> None:
    assert first_try(100, devices=1, copies=True) == Try(100, "chain")
    assert next_try([tried(100, 110, "chain")], 100, devices=1) == Try(100 - 10 - 1, "chain", 100 - 10 - 1)


def test_a_program_with_copies_is_not_expected_to_be_as_wrong_as_one_that_was_wrong_by_far() -> None:
    # 1230 for 1000 expected: 230 too much, of which 100 count, so the next is to be expected to need 100 less than 990
    assert next_try([tried(1000, 1230, "chain", 1000)], 1000, devices=1) == Try(1000 - 110, "chain", 890)


def test_the_third_program_with_copies_is_expected_to_be_as_wrong_as_the_second() -> None:
    tried = [Tried(1000, "chain", 1000, 1170), Tried(890, "chain", 890, 1001)]
    assert next_try(tried, 1000, devices=1) == Try(879, "chain", 879)
    assert next_try([tried[0], Tried(890, "chain", 890, 1070)], 1000, devices=1) == Try(810, "chain", 810)


def test_after_copies_without_kernels_beside_them_a_program_is_made_for_a_little_less() -> None:
    assert try_after_exposed_copies(900, 880, 1000) == Try(870, "chain", 870)
    assert try_after_exposed_copies(900, 980, 1000) == Try(890, "chain", 970)


def test_on_one_device_the_next_program_is_to_be_wrong_by_as_much_as_the_latest() -> None:
    # 1030 for 1010 expected: 20 too much, so the next is to be expected to need 20 less than 990
    assert next_try([tried(1000, 1030, "inputs", 1010)], 1000, devices=1) == Try(1000 - 40, "inputs", 970)
    again = [tried(1000, 1030, "inputs", 1010), tried(960, 1005, "inputs", 965)]
    assert next_try(again, 1000, devices=1) == Try(960 - 15, "inputs", 950)


def test_on_one_device_a_peak_far_below_the_budget_lets_a_program_be_expected_to_need_more_than_it_once() -> None:
    # 900 for 1080 expected: 180 less, so the next may be expected to need 180 more than 995
    first = tried(1000, 900, "chain", 1080)
    assert next_try([first], 1000, devices=1) == Try(1000 + 95, "chain", 1175)
    for peak_bytes in (900, 1010):
        assert next_try([first, tried(1095, peak_bytes, "chain", 1175)], 1000, devices=1) is None


def test_a_first_peak_near_the_budget_is_the_last() -> None:
    assert next_try([tried(100, 100)], 100, devices=8) is None
    assert next_try([tried(100, 95)], 100, devices=1) is None


def test_a_first_peak_far_below_the_budget_raises_the_limit_by_what_is_missing() -> None:
    assert limit_after(tried(1000, 700), budget=1000) == 1000 + 295


def test_two_peaks_below_the_budget_raise_the_limit_along_their_line() -> None:
    assert limit_after(tried(1000, 700), tried(1295, 900), budget=1000) == pytest.approx(1295 + 295 / 200 * 95)


def test_peaks_that_are_close_to_each_other_say_little_of_how_far_the_limit_rises() -> None:
    assert limit_after(tried(1000, 700), tried(1100, 702), budget=1000) == 1100 + 2 * 293  # at most 2 of limit for a byte of peak
    assert limit_after(tried(1000, 700), tried(1100, 690), budget=1000) == 1000 + 0.5 * 295  # and at least 0.5
    assert limit_after(tried(1000, 700), tried(1100, 700), budget=1000) == 1000 + 295


def test_after_a_peak_above_the_budget_one_that_is_nearly_as_high_as_it_is_the_last() -> None:
    assert next_try([tried(100, 104), tried(95, 98)], 100, devices=8) is None


def test_after_a_peak_above_the_budget_one_far_below_it_raises_the_limit_between_the_two() -> None:
    # 1040 at 1000 and 900 at 950: 140 of peak for 50 of limit, so half of a byte for each
    assert limit_after(tried(1000, 1040), tried(950, 900), budget=1000) == pytest.approx(950 + 0.5 * 95)
    # 900 at 590 and 1100 at 690 (both of one form): half of a byte of limit for each byte of peak
    assert limit_after(tried(1000, 1400), tried(690, 1100), tried(590, 900), budget=1000) == pytest.approx(590 + 0.5 * 95)


def test_a_peak_of_another_form_says_whether_the_limit_rises_by_less_than_is_missing() -> None:
    one, other = tried(1000, 1200), tried(800, 900, "live")  # two thirds of a byte of limit for each byte of peak
    assert limit_after(one, other, budget=1000) == pytest.approx(800 + 95 * 2 / 3)
    assert limit_after(tried(1000, 1100), tried(940, 900, "live"), budget=1000) == 940 + 0.5 * 95  # at least half of a byte
    assert limit_after(tried(1000, 1010), tried(850, 940, "live"), budget=1000) == 850 + 55  # and at most one
