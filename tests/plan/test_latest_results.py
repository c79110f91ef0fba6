"""The latest result of a computation is remembered, and no other."""

from tensile_jax.plan.latest_results import LatestResults


def test_equal_arguments_are_computed_once_and_other_arguments_replace_them() -> None:
    results, computed = LatestResults(), list[int]()

    def square(x: int) -> int:
        def compute() -> int:
            computed.append(x)
            return x * x

        return results.of("square", [x], compute)

    assert [square(2), square(2), square(3), square(3), square(2)] == [4, 4, 9, 9, 4]
    assert computed == [2, 3, 2]


def test_computations_do_not_share_results() -> None:
    results = LatestResults()
    assert results.of("sum", (1, 2), lambda: 3) == 3
    assert results.of("product", (1, 2), lambda: 2) == 2
    assert results.latest("sum") == ((1, 2), 3) and results.latest("quotient") is None


def test_none_is_a_result_and_a_result_may_come_from_elsewhere() -> None:
    results = LatestResults()
    results.put("choice", 5, None)
    assert results.of("choice", 5, lambda: 1 / 0) is None
