"""Rewrites a step so that its long loops run as several shorter ones (`loops/rules.py` says which loops, and how many).

A long loop is one operator, and everything that its iterations keep for the backward pass is on the device at once. Each shorter
loop is an operator of its own. So a plan can drop the values that a shorter loop keeps, and run that loop again before the
backward pass needs them.

This rewrite also turns some matrix products into equations that XLA fuses: those with a large result, each number of which is a
sum of few terms (`outer_products.py`).
"""

from tensile_jax.trace.loops.rules import treatments_of
from tensile_jax.trace.program import Program
from tensile_jax.trace.reading.flatten import flatten
from tensile_jax.trace.rewrites.outer_products import with_outer_products
from tensile_jax.trace.rewrites.rewrite import Rewrite

_SLOW = 1.2
"""Times plain jit's step: splitting is tried where all other plans are slower. It trades seconds of planning for faster steps
under low budgets (`make bench-first-call`, `make bench-loops`); not tuned."""


def with_split_loops(program: Program) -> Program | None:
    """The program with its long loops split; None if none is split."""
    nested = program.made_from
    if nested.open_loops is not None or all(e.primitive.name != "scan" for e in program.equations):
        return None
    split = flatten(nested, treatments_of(nested, splits=True))
    return None if split.opened == program.opened else with_outer_products(split) or split


SPLIT_LOOPS = Rewrite(
    name="long loops as shorter ones",
    note="Long loops run as several shorter ones, so that what some iterations leave for the backward pass can be dropped.",
    apply=with_split_loops,
    starts_anew=True,
    slowdown=_SLOW,
)
