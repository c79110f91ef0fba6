"""Numbers are numbers whatever their type, and none of them overflows."""

from fractions import Fraction
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import tensile_jax as tensile
from tensile_jax.arguments import MOST, read_count, read_number
from tensile_jax.budget import Budget, parse_budget
from tensile_jax.exec.runtime.submission import Submission, bytes_of

HUGE = 10**400
NO_NUMBERS = [
    True,
    np.bool_(True),
    np.array(True),
    jnp.array(True),
    "3",
    b"3",
    1j,
    np.complex64(1),
    None,
    [3],
    np.ones(1),
    object(),
]
KINDS = [np.int8, np.int32, np.int64, np.uint64, np.float16, np.float32, np.float64, np.array, jnp.array, jnp.bfloat16, Fraction]


@pytest.mark.parametrize("kind", KINDS)
def test_a_number_of_any_kind_is_read_as_pythons_own(kind: Any) -> None:
    found = read_number(kind(3))
    assert found == 3
    assert type(found) in (int, float)


@pytest.mark.parametrize("value", NO_NUMBERS)
def test_truth_values_texts_and_arrays_are_no_numbers(value: Any) -> None:
    assert read_number(value) is None
    assert read_count(value) is None


@pytest.mark.parametrize("value", [0, -1, 3.0, 2.5, np.float64(3), HUGE, MOST, float("inf"), float("nan")])
def test_a_count_is_a_whole_number_of_at_least_one(value: Any) -> None:
    assert read_count(value) is None


@pytest.mark.parametrize("value", [1, np.int64(1), np.array(1), jnp.uint8(1)])
def test_a_count_of_any_kind_is_pythons_own(value: Any) -> None:
    assert read_count(value) == 1
    assert type(read_count(value)) is int


@pytest.mark.parametrize("value", [np.int64(5000), np.float32(5000), np.array(5000), jnp.array(5000), Fraction(10_001, 2)])
def test_a_budget_may_be_a_number_of_any_kind(value: Any) -> None:
    assert parse_budget(value) == Budget(5000, None)
    assert bytes_of("budget", value) == 5000


@pytest.mark.parametrize("value", [v for v in NO_NUMBERS if not isinstance(v, str) and v is not None])
def test_a_budget_that_is_no_number_is_a_type_error(value: Any) -> None:
    with pytest.raises(TypeError, match="budget must be a number of bytes or a string"):
        parse_budget(value)


@pytest.mark.parametrize(
    "value",
    ["1" * 400, "1" * 5000, "1" * 400 + "%", "1" * 400 + "GiB", "9" * 19 + "TiB", HUGE, lambda: 10**5000, 1e300, Fraction(HUGE)],
)
def test_a_budget_beyond_any_device_is_refused_and_overflows_nothing(value: Any) -> None:
    with pytest.raises(tensile.BudgetError, match="budget") as caught:
        parse_budget(value() if callable(value) else value)  # pytest cannot name a test after 5000 digits
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("value", [float("inf"), np.float32("inf"), float("nan"), np.float32("nan"), -HUGE])
def test_a_budget_that_no_device_can_have_is_refused(value: Any) -> None:
    with pytest.raises(tensile.BudgetError, match=r"^budget (must be above zero|\S+ is more than any device has)"):
        parse_budget(value)


@pytest.mark.parametrize("value", [MOST, "4194304 TiB", "100000000%"])
def test_the_largest_budgets_are_planned_for(value: Any) -> None:
    assert tensile.jit(lambda x: x @ x, budget=value).plan(jnp.ones((4, 4))).whole


def test_a_share_of_nothing_is_one_byte() -> None:
    assert parse_budget("60%").resolve(0) == 1


@pytest.mark.parametrize("value", [np.float32(1.5), np.array(1.5), Fraction(3, 2)])
def test_a_slowdown_may_be_a_number_of_any_kind(value: Any) -> None:
    assert tensile.jit(lambda x: x @ x, max_slowdown=value).plan(jnp.ones((4, 4))).max_slowdown == 1.5


@pytest.mark.parametrize("value", [HUGE, 1e308])
def test_a_slowdown_without_bound_overflows_nothing(value: Any) -> None:
    assert submission(max_slowdown=value).max_slowdown == MOST
    assert tensile.jit(lambda x: x @ x, max_slowdown=value).plan(jnp.ones((4, 4))).step_us > 0


def submission(**changes: Any) -> Submission:
    arguments: dict[str, Any] = dict(
        step=lambda state, batch: (state, batch), steps=3, name="job", priority=1.0, cap_bytes=None, max_swap_rate=1.0,
        max_slowdown=None, policy="auto", checkpoint_every=None, isolation="thread",
    )  # fmt: skip
    return Submission(**{**arguments, **changes})


def test_a_job_may_be_asked_for_in_numbers_of_any_kind() -> None:
    asked = submission(
        steps=np.int64(3),
        priority=np.float32(2),
        max_swap_rate=np.array(0.5),
        max_slowdown=jnp.float32(1.5),
        checkpoint_every=np.uint8(2),
    )
    found = (asked.steps, asked.priority, asked.max_swap_rate, asked.max_slowdown, asked.checkpoint_every)
    assert found == (3, 2.0, 0.5, 1.5, 2)
    assert [type(value) for value in found] == [int, float, float, float, int]


@pytest.mark.parametrize(
    "changes",
    [{name: value} for name in ("steps", "priority", "max_swap_rate", "max_slowdown", "checkpoint_every")
     for value in (np.bool_(True), np.array([1, 1]), "1", float("nan"), -HUGE)]
    + [{"steps": HUGE}, {"steps": None}, {"steps": 2.0}, {"priority": HUGE}, {"priority": None}, {"max_swap_rate": HUGE}],
)  # fmt: skip
def test_a_job_that_is_asked_for_in_other_things_is_refused_by_the_arguments_name(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"\A{next(iter(changes))} must be"):
        submission(**changes)
