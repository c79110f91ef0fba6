"""Chooses the places at which a segment (executable) may begin, so that the search need not consider every operator.

XLA runs a *heavy* operator, such as a matrix product, as a kernel of its own, and fuses the *light* ones. A tensor is *stored* at
a place if it is made before the place and needed after it. From one heavy operator to the next, one place is chosen: the first
one at which the fewest bytes are stored. If the light operators in between make many bytes, as those of an optimizer do, they
are divided into several parts, and one place is chosen in each part. An operator that must be an executable of its own has a
place on each side. If more than `_MOST` places are chosen, neighbouring ones are grouped, and each group keeps only the place at
which the fewest bytes are stored.
"""

from itertools import pairwise

import numpy as np

from tensile_jax.plan.analysis.retention import Retention

_MOST = 192  # possible boundaries: more find faster plans, and take longer to search (`make bench-constants`)


def possible_boundaries(retention: Retention, stored: np.ndarray) -> tuple[int, ...]:
    """Places before which a segment may begin, with 0 and the number of operators.

    An operator that is alone has a boundary on each side. Between two heavy operators, the boundary is the earliest place at
    which least is stored; a later place would split what XLA fuses, which costs traffic. If light operators in between make much,
    as an optimizer does, there are several boundaries.

    Args:
        stored: bytes stored at each boundary, by place.
    """
    liveness = retention.liveness
    count = len(liveness.graph.operators)
    heavy: list[int] = np.flatnonzero(liveness.kinds == "heavy").tolist()
    made: list[int] = [0, *np.cumsum(liveness.makes.sums(liveness.nbytes)).tolist()]
    free = stored.astype(float)
    free[_after_folded_transpose(retention)] = np.inf
    must = {0, count, *(place + side for place, op in enumerate(liveness.graph.operators) if op.alone for side in (0, 1))}
    chosen = set(must)
    bucket_bytes = max(float(stored.max()) / 48, 1.0)
    for first, last in zip([0, *heavy], [*heavy, count], strict=True):
        if last <= first:
            continue
        # The light operators after one heavy operator are divided by the bytes that they make (an optimizer makes many).
        pieces = max(1, min(32, int((made[last] - made[first + 1]) // bucket_bytes)))
        edges = (
            sorted({int(edge) for edge in np.linspace(first + 1, last + 1, pieces + 1)}) if pieces > 1 else (first + 1, last + 1)
        )
        for low, high in pairwise(edges):
            narrowest = low + int(free[low:high].argmin())
            if free[narrowest] < np.inf:
                chosen.add(narrowest)
    ordered = sorted(chosen)
    if len(ordered) > _MOST:
        rest = [b for b in ordered if b not in must]
        stretches = np.array_split(np.array(rest), max(1, _MOST - len(must)))
        ordered = sorted(
            must | {int(s[np.argmin(stored[s])]) for s in stretches if s.size}
        )  # of each stretch, the boundary at which least is stored
    return tuple(ordered)


def _after_folded_transpose(retention: Retention) -> list[int]:
    """Boundaries at which XLA would have folded a transposition into the heavy operator before it."""
    begin, operators = retention.liveness.begin, retention.liveness.graph.operators
    return [
        place
        for place, op in enumerate(operators)
        if op.primitive == "transpose" and begin[op.inputs[0]] == place - 1 and operators[place - 1].kind == "heavy"
    ]
