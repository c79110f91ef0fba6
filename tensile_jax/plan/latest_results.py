"""Remembers the latest result of each of several computations, so that asking again with equal arguments computes nothing.

Only the latest result of each computation is kept. A planner is asked for plans under many limits, one after another, and a plan
is large, so to keep all plans would take too much memory.
"""

from collections.abc import Callable
from typing import Any, TypeVar

Result = TypeVar("Result")


class LatestResults:
    """By computation: its latest arguments, which need not be hashable, and their result."""

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
