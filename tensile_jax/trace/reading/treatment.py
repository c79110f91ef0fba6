"""Defines the *treatments*: what can be done with a loop or a conditional of a step.

    Whole    the loop or conditional stays one operator
    Opened   the iterations of the loop, or all branches of the conditional, take its place
    Split    several shorter loops take its place
    Driven   the loop stays one operator, and each iteration runs under a plan of the loop's body

`loops/` chooses one of the first three, and `flatten.py` carries out the choice when it makes one list of equations of the step.
If there is a budget of memory, some of the loops that stayed whole are driven (`plannable_loops.py`). A plan has a note on each
driven loop, and on the loops that stay whole only because they have too many iterations or equations (`loops/notes.py`).
"""

from collections.abc import Mapping
from dataclasses import dataclass

from tensile_jax.ir import OperatorId
from tensile_jax.trace.program import TooLong

Bounds = tuple[tuple[int, int], ...]
"""Half-open intervals of the iterations of a loop, ascending, which together are all of them."""

Place = tuple[int, ...]
"""Where an equation stands in a jaxpr: the indices of the equations around it, from the outside inwards, and its own index.

The index of a conditional is followed by the number of the branch.
"""


@dataclass(frozen=True, slots=True)
class Whole:
    """It stays one operator; `too_long` says why, if it is a loop that is opened by the rules in other sizes."""

    too_long: TooLong | None = None


@dataclass(frozen=True, slots=True)
class Opened:
    """Its iterations or branches take its place."""


@dataclass(frozen=True, slots=True)
class Split:
    """Shorter loops take its place, one for each interval of its iterations."""

    bounds: Bounds

    def __post_init__(self) -> None:
        begins = [begin for begin, _ in self.bounds]
        ends = [end for _, end in self.bounds]
        if not self.bounds or begins != [0, *ends[:-1]] or any(begin >= end for begin, end in self.bounds):
            raise ValueError(f"The bounds of a split loop must follow one another from 0 on, got {self.bounds}.")


@dataclass(frozen=True, slots=True)
class Driven:
    """Its iterations run one after another, each under a plan of the body.

    The loop is `operator` of the graph. Beside its inputs and outputs it needs `nbytes`, and it takes `us` microseconds.
    """

    operator: OperatorId
    name: str
    iterations: int
    nbytes: int
    us: float

    @property
    def note(self) -> str:
        """The note that a plan shows."""
        return f"The {self.iterations} iterations of {self.name} run one after another, each under a plan of its own."


Treatment = Whole | Opened | Split | Driven
Treatments = Mapping[Place, Treatment]
"""What is done with the loops and conditionals of a jaxpr. Those that are not in it stay whole."""
