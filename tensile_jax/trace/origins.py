"""Finds the operator that makes a tensor, and the lines of the user's code from which this operator comes.

A loop (`lax.scan`) may stay one operator. Each iteration then makes a part of the loop's stacked results. To find the operator
in the loop's body that makes these parts, a search starts at the body's result. Its next step depends on what the value is:

    result of a call        on to what the called function returns; if that is one of its arguments, on to the argument
    result of a loop        on to what the body of that loop returns
    carried value           on to what an iteration returns as the next value
    result of a reshape,    on to the operand, since the line that computes the operand says more than that of an operator which
      a cast and such       only changes the form (`_FORMS`)
    any other result        found: the operator that makes it

The search does not leave the loop. If the search comes to an array that the iterations only read, no operator in the body makes
that array. The answer is then the first operator on the way that only changes the form or, if there is none, the loop itself.
The same holds if such an operator leads to a carried value. The loop itself is also the answer for its carried results, and for
all results of a loop on mutable references.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from jax.extend.core import Literal

from tensile_jax.ir import Origin
from tensile_jax.trace.graph import readable
from tensile_jax.trace.program import Equation
from tensile_jax.trace.reading.jaxprs import inner_jaxpr
from tensile_jax.trace.reading.mutable_references import Discharged
from tensile_jax.trace.reading.scans import Loop, loop_of, scan_of
from tensile_jax.trace.reading.source_lines import SourceLine, source_lines

_FORMS = frozenset("broadcast_in_dim convert_element_type copy copy_p reshape squeeze".split())


class _Maker(NamedTuple):
    """The operator in a loop's body that makes a result: its primitive, its scope in the body, and its tracebacks."""

    primitive: str
    scope: str
    tracebacks: tuple[Any, ...]


def origin_of(equation: Equation, avals: Sequence[Any], result: int | None) -> Origin:
    """Where the user's code makes a result of an equation.

    Args:
        avals: those of the program of the equation.
        result: its place among the results of the equation; None for the equation itself, which may be a loop.
    """
    lines = list(dict.fromkeys(source_lines(equation.tracebacks)))
    own, called_from = (lines[0] if lines else None), (lines[1].name if len(lines) > 1 else "")
    maker = None if result is None else _maker_in(equation, avals, result)
    if maker is None:
        return Origin(readable(equation.scope, equation.primitive.name, "/"), *_shown(own), "", called_from)
    scope = "/".join(part for part in (equation.scope, maker.scope) if part)
    made = next(source_lines((*maker.tracebacks, *equation.tracebacks)), None)
    return Origin(readable(scope, maker.primitive, "/"), *_shown(made), "" if own is None else own.name, called_from)


def _shown(line: SourceLine | None) -> tuple[str, str]:
    """The name of a line and its text."""
    return ("", "") if line is None else (line.name, line.code)


def _maker_in(equation: Equation, avals: Sequence[Any], result: int) -> _Maker | None:
    """The operator in the body of a loop that makes a stacked result; None for other results and operators."""
    if equation.primitive.name != "scan" or isinstance(equation.primitive, Discharged):
        return None
    operands = [avals[atom] if isinstance(atom, int) else atom.aval for atom in equation.inputs]
    loop = scan_of(equation.params, operands, [avals[v] for v in equation.outputs])
    return None if result < loop.carried else _in_loop(loop, result)


def _in_loop(loop: Loop, result: int, scope: str = "", tracebacks: tuple[Any, ...] = ()) -> _Maker | None:
    """The operator that makes this result of the body."""
    followed: set[int] = set()
    while result not in followed:
        followed.add(result)
        found = _producer(loop.body, loop.body.outvars[result], scope, tracebacks)
        if not isinstance(found, int):
            return found
        result = found - loop.constants  # what an iteration carries in is what the one before has returned
        if not 0 <= result < loop.carried:
            return None
    return None


def _producer(jaxpr: Any, atom: Any, scope: str, tracebacks: tuple[Any, ...]) -> _Maker | int | None:
    """What makes a value of the jaxpr: an operator, or (its position) an input of the jaxpr; None if neither does."""
    made = {v: (e, place) for e in jaxpr.eqns for place, v in enumerate(e.outvars)}
    inputs = {v: place for place, v in enumerate(jaxpr.invars)}
    changed: _Maker | None = None  # the change of form that was met first, which is the last in the step
    while not isinstance(atom, Literal) and atom in made:
        equation, place = made[atom]
        inside = "/".join(part for part in (scope, str(equation.source_info.name_stack)) if part)
        around = (equation.source_info.traceback, *tracebacks)
        inner, loop = inner_jaxpr(equation), loop_of(equation)
        if inner is not None and len(inner.jaxpr.invars) == len(equation.invars):
            found = _producer(inner.jaxpr, inner.jaxpr.outvars[place], inside, around)
            if not isinstance(found, int):
                return found or changed
            atom = equation.invars[found]
        elif loop is not None:
            return _in_loop(loop, place, inside, around) or _Maker(equation.primitive.name, inside, around)
        elif equation.primitive.name in _FORMS and equation.invars:
            changed = changed or _Maker(equation.primitive.name, inside, around)
            atom = equation.invars[0]
        else:
            return _Maker(equation.primitive.name, inside, around)
    if changed is not None:
        return changed
    return None if isinstance(atom, Literal) else inputs.get(atom)
