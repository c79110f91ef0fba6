"""How far two results are from each other, and what rounding explains."""

import ml_dtypes
import numpy as np
import pytest

from tensile_jax.checking import differences
from tensile_jax.checking.differences import FACTOR, FLOOR, Difference, difference_of, judge

FLOAT32 = np.dtype("float32")
EPS = float(np.finfo(FLOAT32).eps)
NAN, INF = float("nan"), float("inf")


def of(a: list[float], b: list[float], dtype: str = "float32") -> Difference:
    return difference_of(np.array(a, dtype), np.array(b, dtype))


def test_the_largest_difference_is_that_of_the_finite_elements() -> None:
    assert of([1, 2, 5], [1, 2.5, -4]) == Difference(differing=2, absolute=9.0, largest=4.0)
    assert of([], []) == Difference()


def test_nans_on_both_sides_are_equal_and_those_on_one_side_are_not() -> None:
    assert of([NAN, 1, NAN], [NAN, 1, 2]) == Difference(differing=1, largest=2.0, unlike=1, nans=1)


def test_infinities_are_equal_if_their_signs_are() -> None:
    assert of([INF, INF, 1], [INF, -INF, INF]) == Difference(differing=2, unlike=2)


def test_integers_booleans_and_packed_numbers_are_counted() -> None:
    assert of([1, 2, 3], [1, 0, 0], "int32") == Difference(differing=2)
    assert of([True, False], [True, True], "bool") == Difference(differing=1)
    assert difference_of(np.array([1, 2], ml_dtypes.int4), np.array([1, 3], ml_dtypes.int4)) == Difference(differing=1)


def test_narrow_and_complex_numbers_are_compared_as_wide_ones() -> None:
    assert difference_of(np.array([1, 2], ml_dtypes.bfloat16), np.array([1, 4], ml_dtypes.bfloat16)).absolute == 2.0
    assert difference_of(np.array([3 + 4j], "complex64"), np.array([0j], "complex64")) == Difference(1, 5.0, 0.0)


def test_differences_of_parts_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = np.random.default_rng(0).normal(size=(2, 7, 11)).astype("float32")
    a[0, 0] = b[0, 0] = NAN
    whole = difference_of(a, b)
    monkeypatch.setattr(differences, "_CHUNK", 5)
    assert difference_of(a, b) == whole
    finite = np.isfinite(a)
    assert whole.absolute == np.abs(a.astype(float) - b)[finite].max() and whole.differing == 76 and whole.nans == 1


def judged(*steps: tuple[int, Difference, Difference]) -> tuple[bool, int]:
    found = judge("result", FLOAT32, (3,), steps)
    return found.agrees, found.step


def test_an_output_agrees_as_far_as_rounding_explains_it() -> None:
    own = Difference(1, 1e-3, 1.0)
    assert judged((1, Difference(1, FACTOR * 1e-3, 1.0), own)) == (True, 1)
    assert judged((1, Difference(1, 1.01 * FACTOR * 1e-3, 1.0), own)) == (False, 1)


def test_some_units_in_the_last_place_of_the_largest_number_are_rounding() -> None:
    assert judged((1, Difference(1, FLOOR * EPS * 8.0, 8.0), Difference())) == (True, 1)
    assert judged((1, Difference(1, 1.01 * FLOOR * EPS * 8.0, 8.0), Difference())) == (False, 1)
    assert judged((1, Difference(1, 1e-30, 0.0), Difference())) == (False, 1)  # where all of the reference is zero


def test_the_first_step_at_which_an_output_differs_is_named() -> None:
    equal, far, further = Difference(largest=1.0), Difference(1, 0.1, 1.0), Difference(1, 0.5, 1.0)
    assert judged((1, equal, equal), (2, far, equal), (3, further, equal)) == (False, 2)
    assert judged((1, far, further), (3, further, further)) == (True, 3)


def test_rounding_of_earlier_steps_explains_differences_of_later_ones_and_not_the_reverse() -> None:
    equal, far = Difference(largest=1.0), Difference(1, 0.1, 1.0)
    assert judged((1, equal, far), (2, far, equal)) == (True, 2)
    assert judged((1, far, equal), (2, equal, far)) == (False, 1)


def test_a_nan_that_the_reference_has_under_no_rounding_differs() -> None:
    found = judge("result", FLOAT32, (3,), [(1, Difference(1, 0.0, 1.0, unlike=1), Difference())])
    assert not found.agrees and "on one side only" in found.reason
    assert judged((1, Difference(1, 0.0, 1.0, unlike=1), Difference(1, 0.0, 1.0, unlike=1))) == (True, 1)


def test_integers_must_be_equal_whatever_another_rounding_makes_of_them() -> None:
    found = judge("result", np.dtype("int32"), (2, 3), [(1, Difference(1), Difference(4))])
    assert (found.agrees, found.reason, found.absolute, found.own_differing) == (False, "1 of 6 elements are not equal", None, 4)
    assert judge("result", np.dtype("int32"), (2, 3), [(1, Difference(), Difference(4))]).agrees
