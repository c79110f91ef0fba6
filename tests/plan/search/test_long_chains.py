"""A chain of tensors that are all computed again may be longer than Python's stack."""

from types import SimpleNamespace
from typing import Any, cast

from tensile_jax.plan.search.condensed.condensed_step import Recipe
from tensile_jax.plan.search.cost.segment_account import PartialSegment

LENGTH = 3000


def segment(recipes: list[Recipe | None]) -> PartialSegment:
    step: Any = SimpleNamespace(derived_before=(0,), written=0, recipes=tuple(recipes), sources={}, derived_us=())
    return PartialSegment(cast(Any, step), 0, 1, 0)


def chain(length: int) -> list[Recipe | None]:
    """Tensor i is computed from tensor i - 1; tensor 0 is there."""
    return [None, *(Recipe(1 << i - 1, 1 << i, 0, 1.0, 0, 0) for i in range(1, length))]


def test_a_chain_of_thousands_of_tensors_is_computed_again() -> None:
    made = segment(chain(LENGTH))
    assert made.compute(1 << LENGTH - 1)
    assert made.again == (1 << LENGTH) - 2
    assert made.again_us == LENGTH - 1


def test_tensors_that_need_one_another_cannot_be_computed_again() -> None:
    assert not segment([None, Recipe(1 << 2, 1 << 1, 0, 1.0, 0, 0), Recipe(1 << 1, 1 << 2, 0, 1.0, 0, 0)]).compute(1 << 1)
