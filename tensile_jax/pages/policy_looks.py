"""Says how each policy looks: the same colour and the same mark in every picture and on every page.

The colours are those of Okabe and Ito, which colour-blind people can tell apart, and grays. No two policies share a mark, so they
also differ where there is no colour.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from tensile_jax.pages.traces import COLOURS, GRAY

PLAIN_JIT = "plain jit"
BOUND = "no plan without chunks is faster"


@dataclass(frozen=True, slots=True)
class Look:
    """A colour, and the same mark as matplotlib and as plotly name it."""

    colour: str
    marker: str
    symbol: str


LOOKS: Mapping[str, Look] = {
    "auto": Look(COLOURS[0], "o", "circle"),
    "tensile": Look(COLOURS[5], "s", "square"),
    "capuchin": Look(COLOURS[2], "D", "diamond"),
    "vdnn": Look(COLOURS[3], "v", "triangle-down"),
    "checkpoint": Look(COLOURS[1], "^", "triangle-up"),
    "none": Look(COLOURS[4], "P", "cross"),
    PLAIN_JIT: Look(GRAY, "*", "star"),
}
"""By the name of the policy. `auto` is also a line. The bound is a dotted gray line without marks."""
