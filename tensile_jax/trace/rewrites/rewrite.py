"""Defines a rewrite, a change to a program so that its plans need less memory: what it does, and when it is worth trying."""

from collections.abc import Callable
from dataclasses import dataclass

from tensile_jax.trace.program import Program


@dataclass(frozen=True, slots=True)
class Part:
    """The part of a program that a rewrite changes: how many equations it has, and the bytes of its largest tensor."""

    equations: int
    nbytes: int


@dataclass(frozen=True, slots=True, eq=False)
class Rewrite:
    """A way to rewrite a program. It keeps the results, or changes how they are rounded.

    Attributes:
        name: what is rewritten.
        note: a sentence for the user of a plan.
        apply: gives the rewritten program; None if nothing in the program can be rewritten so.
        always: the rewrite costs nothing, so it is done wherever it can be done, and before all others.
        starts_anew: `apply` begins with what the program was flattened from, so rewrites that were done before do not count.
        part: finds the part of a program that `apply` changes; None if there is none. A rewrite that has `part` is tried only if
            that part is small and has a large tensor, or if nothing else keeps the budget.
        series: rewrites of one series do the same, each more than the one before. Once one of them gains little, those after it
            are not tried. Empty: it is in no series.
        slowdown: the rewrite is tried only if all plans without it take at least this many times the time of plain jit's step.
    """

    name: str
    note: str
    apply: Callable[[Program], Program | None]
    always: bool = False
    starts_anew: bool = False
    part: Callable[[Program], Part | None] | None = None
    series: str = ""
    slowdown: float = 0.0
