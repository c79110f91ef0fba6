"""Remembers the latest result of each of several computations, so that asking again with equal arguments computes nothing.

Only the latest result of each computation is kept: plans are large, and a planner makes many of them under many limits.
"""

from collections.abc import Callable
from typing import Any, TypeVar

Result = TypeVar("Result")


class LatestResults:
    """For each computation, its latest arguments and their result. The arguments need not be hashable."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[object, Any]] = {}

    def of(self, computation: str, arguments: object, compute: Callable[[], Result]) -> Result:
        """The result for these arguments. `compute` is called unless the latest arguments were equal."""
        known = self._known.get(computation)
        if known is None or known[0] != arguments:
            self._known[computation] = known = arguments, compute()
        return known[1]

    def put(self, computation: str, arguments: object, result: object) -> None:
        """Take over a result that was computed elsewhere."""
        self._known[computation] = arguments, result

    def latest(self, computation: str) -> tuple[Any, Any] | None:
        """The latest arguments and their result; None if there are none."""
        return self._known.get(computation)
