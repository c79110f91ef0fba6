"""Says how each policy looks: the same colour and the same mark in every picture and on every page.

The colours are those of Okabe and Ito, which colour-blind people can tell apart, and grays. No two policies share a mark, so they
also differ where there is no colour.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from tensile_jax.pages.traces import COLOURS, GRAY
from tensile_jax.plan import POLICIES

PLAIN_JIT = "plain jit"
BOUND = "no plan without chunks is faster"


@dataclass(frozen=True, slots=True)
class Look:
    """A colour, and the same mark as matplotlib and as plotly name it."""

    colour: str
    marker: str
    symbol: str


# Of the policies, in the order of `POLICIES`. There is one more than there are policies, for the next one.
_LOOKS = (
    Look(COLOURS[0], "o", "circle"),
    Look(COLOURS[5], "s", "square"),
    Look(COLOURS[2], "D", "diamond"),
    Look(COLOURS[3], "v", "triangle-down"),
    Look(COLOURS[1], "^", "triangle-up"),
    Look(COLOURS[4], "P", "cross"),
    Look(COLOURS[6], "X", "x"),
)
LOOKS: Mapping[str, Look] = {**dict(zip(POLICIES, _LOOKS, strict=False)), PLAIN_JIT: Look(GRAY, "*", "star")}
"""By the name of the policy. `auto` is also a line. The bound is a dotted gray line without marks."""
