"""Replaces the mutable references that a step makes by the values that they hold, as `jax.jit` does when it lowers a step.

A reference (`jax.new_ref`) that a step makes does not exist outside the step, so the program needs only the value that the
reference holds at each moment. While `flatten.py` walks over the equations, it keeps for each reference the atom (a variable or
an immediate value) that the reference holds. Reading the whole reference gives that atom, and writing replaces the atom:

    r = new_ref(x)      r holds x
    y = r[...]          y is the atom that r holds
    r[...] = z          r holds z
    any other use       (results, atoms held afterwards) = Discharged(primitive)(atoms held before, other operands)

`Discharged` makes references inside one equation, runs the primitive on them, and reads the references afterwards. So an indexed
access, or a loop that accumulates into a reference, is one ordinary operator without effects, which may be recomputed.

A reference from outside the step (an argument, or a reference that the function captures) is refused. Under plain `jax.jit`,
the step is one executable, so all that the step writes to such a reference changes at once. A step that runs as several
executables would write one part after another.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.ref import AbstractRef

from tensile_jax.errors import TraceError
from tensile_jax.trace.program import WrappedPrimitive, results_of


def is_reference(aval: Any) -> bool:
    """Whether an abstract value is that of a mutable reference."""
    return isinstance(aval, AbstractRef)


@dataclass(slots=True, eq=False)
class Reference:
    """A reference while the program is flattened: the abstract value of what it holds, and the atom that it holds now."""

    aval: Any
    holds: Any

    def write(self, atom: Any) -> None:
        """The reference holds this atom from now on."""
        self.holds = atom


@dataclass(frozen=True, slots=True)
class Discharged(WrappedPrimitive):
    """A primitive on references, as a function of the values that the references hold.

    `cells[i]` is the number of the reference that is operand i, or -1 if operand i is no reference. The results are those of the
    primitive, and then, if the primitive `writes`, the values that the references hold, in the order of their numbers.
    """

    cells: tuple[int, ...]
    writes: bool

    def bind(self, *values: Any, **params: Any) -> list[Any]:
        """The results for these operands, of which those for references are the values that the references hold."""
        references: dict[int, Any] = {}
        operands = list(values)
        for place, cell in enumerate(self.cells):
            if cell >= 0:
                if cell not in references:
                    references[cell] = jax.new_ref(values[place])
                operands[place] = references[cell]
        results = results_of(self.primitive, operands, params)
        return [*results, *(references[cell][...] for cell in sorted(references) if self.writes)]


def writes(effects: Any) -> bool:
    """Whether one of the effects of an equation is that it writes to a reference."""
    return any(type(effect).__name__ in ("WriteEffect", "AccumEffect") for effect in effects)


def touches_all(equation: Any) -> bool:
    """Whether an equation is a `get` or a `swap` of a whole reference, not of a part or a view of it."""
    return equation.primitive.name in ("get", "swap") and equation.params.get("tree") == _NO_TRANSFORMS


_NO_TRANSFORMS = jax.tree.structure(())


def refuse_outer_references(avals: Sequence[Any], names: Sequence[str], step: str) -> None:
    """Refuse a step to which references are given.

    Raises:
        TraceError: one of the avals is that of a reference; the message names it.
    """
    for aval, name in zip(avals, names, strict=True):
        if is_reference(aval):
            raise TraceError(
                f"{name} of the step {step!r} is a mutable reference ({aval}) that was made outside of the step. A step that is "
                "cut into pieces could not write to it all at once: pass what it holds (reference[...]), return the new value "
                "and write that back after the call, or run this step with jax.jit. References that the step makes itself work."
            )
