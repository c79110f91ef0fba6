"""A cache of the choices whose compiled peaks are known, by budget, for the rest of the process.

The plan for a budget is corrected by what compiling it has shown. Two budgets are corrected by different attempts, so the lower
one could end with the higher peak, or the higher one with no plan where the lower one has a plan. Therefore

    a lower budget takes over the choice of the next higher one, if the plan of that choice keeps the lower budget
    a higher budget takes over the choice of the next lower one, if its own search ended with a lower peak

so that, in one process, a lower budget never needs more memory. A budget that was planned for before is not searched for again.
"""

from bisect import insort
from collections.abc import Hashable
from dataclasses import dataclass
from typing import NamedTuple

from tensile_jax.plan import Choice


class _Entry(NamedTuple):
    limit: float
    peak_bytes: int
    choice: Choice


@dataclass(frozen=True, slots=True)
class Confirmed:
    """Plans that were compiled for one program, by budget; peaks ascend with budgets."""

    entries: list[_Entry]

    def above(self, limit: float) -> Choice | None:
        """The choice of the next higher (or the same) budget, if it keeps `limit`."""
        entry = next((e for e in self.entries if e.limit >= limit), None)
        return entry.choice if entry is not None and entry.peak_bytes <= limit else None

    def below(self, limit: float, peak_bytes: float) -> Choice | None:
        """The choice of the next lower budget, if it has a higher peak than `peak_bytes`."""
        entry = next((e for e in reversed(self.entries) if e.limit < limit), None)
        return entry.choice if entry is not None and entry.peak_bytes > peak_bytes else None

    def add(self, limit: float, peak_bytes: int, choice: Choice) -> None:
        """Remember the choice."""
        if all(e.limit != limit for e in self.entries):
            insort(self.entries, _Entry(limit, peak_bytes, choice), key=lambda e: e.limit)


_OF_PROGRAM: dict[Hashable, Confirmed] = {}


def confirmed_for(program: Hashable) -> Confirmed:
    """What has been confirmed for the program in this process."""
    return _OF_PROGRAM.setdefault(program, Confirmed([]))
