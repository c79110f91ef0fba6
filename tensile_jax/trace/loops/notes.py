"""Writes the notes that tell users which loops stay one operator because they are too long to be opened (`rules.py`).

A loop that is *opened* is replaced by the operators of all its iterations, so that each of them is planned by itself. A note says
how long the loop is, and up to which length loops are opened. Notes are shown with a plan and in a memory report. A note that is
shown with a plan also says how to open the loop anyway.
"""

from collections.abc import Iterable

from tensile_jax.trace.program import Equation, TooLong
from tensile_jax.trace.reading.source_lines import source_line
from tensile_jax.units import format_count


def notes_on_loops(equations: Iterable[Equation], *, of_plan: bool) -> list[str]:
    """One note for the loops of equal length that one line of the user's code makes.

    Args:
        of_plan: whether the note is one of a plan, so that it says how the loops are opened in another plan.
    """
    alike: dict[tuple[str, int, int], list[TooLong]] = {}
    for equation in equations:
        if equation.too_long is not None:
            key = source_line(equation.tracebacks), equation.too_long.iterations, equation.too_long.most
            alike.setdefault(key, []).append(equation.too_long)
    return [_note(line, several, of_plan=of_plan) for (line, _, _), several in alike.items()]


def _note(line: str, several: list[TooLong], *, of_plan: bool) -> str:
    one, lengths = several[0], sorted({loop.body for loop in several})
    where = f" at {line}" if line else ""
    body = format_count(lengths[0], "equation") if len(lengths) == 1 else f"{lengths[0]} to {lengths[-1]} equations"
    each = f"{one.iterations} iterations of {body}"
    limit = f"opened up to {one.most} iterations and {one.equations:,} equations in all."
    remedy = f" With open_loops=True, tensile_jax.jit opens {'it' if len(several) == 1 else 'them'}." if of_plan else ""
    if len(several) == 1:
        return f"The loop{where} ({each}) stays one operator: loops like it are {limit}{remedy}"
    return f"The {len(several)} loops{where} ({each} each) stay one operator each: loops like these are {limit}{remedy}"
