"""A cache of plans whose peak was confirmed by compiling them, by budget, so that a lower budget never gets a higher peak.

A plan is first made with estimated sizes, and is then corrected by the sizes that compiling it has shown. Two budgets can be
corrected by different attempts. Without this cache, the lower of two budgets could end with the higher peak, or the higher budget
could end without a plan although the lower one has a plan. Therefore

    - a lower budget takes the plan of the next higher budget, if that plan keeps the lower budget;
    - a higher budget takes the plan of the next lower budget, if its own search found no plan or one with a lower peak.

A budget for which a plan was made before is not searched for again. The cache holds the planner's choices, from which plans are
made, for each program, and lives as long as the process; beside JAX's persistent cache, it is also kept for later processes
(`kept_plans.py`). Only the policy `auto` uses it.
"""

from bisect import insort
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import NamedTuple

from tensile_jax.plan import Choice


class Entry(NamedTuple):
    """A choice that was compiled for a limit, and the peak of its plan."""

    limit: float
    peak_bytes: int
    choice: Choice


@dataclass(slots=True)
class Confirmed:
    """The choices that were compiled for one program, in the order of their budgets, which is also the order of their peaks.

    `variants` are the keys of the programs that its step was brought into (`variants.py`), if any plan of them is confirmed.
    `whole_bytes` is plain jit's peak, if it was compiled.
    """

    entries: list[Entry]
    variants: set[Hashable] = field(default_factory=set[Hashable])
    whole_bytes: int | None = None

    def above(self, limit: float) -> Choice | None:
        """The choice of the same or the next higher budget, if its plan keeps `limit`; otherwise None."""
        entry = next((e for e in self.entries if e.limit >= limit), None)
        return entry.choice if entry is not None and entry.peak_bytes <= limit else None

    def below(self, limit: float, peak_bytes: float) -> Choice | None:
        """The choice of the next lower budget, if its plan has a higher peak than `peak_bytes`; otherwise None."""
        entry = next((e for e in reversed(self.entries) if e.limit < limit), None)
        return entry.choice if entry is not None and entry.peak_bytes > peak_bytes else None

    def add(self, limit: float, peak_bytes: int, choice: Choice) -> bool:
        """Remember the choice for a budget, unless there is one already; whether there was none."""
        if any(e.limit == limit for e in self.entries):
            return False
        insort(self.entries, Entry(limit, peak_bytes, choice), key=lambda e: e.limit)
        return True


_OF_PROGRAM: dict[Hashable, Confirmed] = {}


def confirmed_for(program: Hashable) -> Confirmed:
    """The choices that were confirmed for a program in this process; `program` is a hashable key for it."""
    return _OF_PROGRAM.setdefault(program, Confirmed([]))
