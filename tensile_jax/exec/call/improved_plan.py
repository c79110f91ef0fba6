"""Replaces the first plan of a step, found in a short search, by a better one (`improve="background"`).

The better plan is made while training goes on (`next_plan.py`, `exec/fitting/improvement.py`). That begins with the second call.
So the first one comes sooner, and nothing is sought for a step that is called once.
"""

from collections.abc import Callable
from functools import partial

from tensile_jax.exec.call.next_plan import NextPlan
from tensile_jax.exec.compiling.step import CompiledPlan
from tensile_jax.exec.fitting.improvement import improve


class ImprovedPlan:
    """The plan that is to replace `first`.

    Args:
        name: that of the step.
        same_settings: as in `NextPlan`.
    """

    def __init__(self, name: str, first: CompiledPlan, same_settings: Callable[[], bool]) -> None:
        self._first = first
        self._next = NextPlan(f"in the background for {name!r}", same_settings)
        self._calls = 0  # before which it was asked for the plan, two at most

    def is_sought(self, running: CompiledPlan) -> bool:
        """Whether the plan is still to be made, is being made, or waits for the next call."""
        return running is self._first and (self._calls < 2 or self._next.is_under_way)

    def next_plan(self, running: CompiledPlan) -> CompiledPlan | None:
        """The plan that replaces `running` from now on; None if `running` stays. Asked before each call.

        Warns if a plan could not be made.
        """
        if self._calls < 2:
            self._calls += 1
            if self._calls == 2 and running is self._first:
                self._next.begin(running, partial(improve, running))
        return self._next.taken(running)
