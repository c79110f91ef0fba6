"""Gives each tensor an offset in memory, so that a page can draw tensors that live at the same time without overlap.

Tensors are placed in order of their size, the largest first. Each tensor gets the lowest offset at which it fits between those
tensors that were placed before and live at the same time (greedy by size; Pisarchyk and Lee, "Efficient Memory Management for
Deep Neural Net Inference", 2020, section 5.2). XLA's own offsets are not known. Sizes are in bytes.
"""

from collections.abc import Sequence

import numpy as np


def offsets(lives: Sequence[tuple[float, float, int]]) -> list[int]:
    """The offset of each `(begin, end, nbytes)`, where a tensor lives over `[begin, end)`.

    >>> offsets([(0, 2, 4), (1, 3, 8), (2, 4, 4)])
    [8, 0, 8]
    """
    begin, end, size = np.array(lives, dtype=float).reshape(-1, 3).T
    found = np.zeros(len(lives))
    placed: list[int] = []
    for i in sorted(range(len(lives)), key=lambda i: (-size[i], begin[i], i)):
        others = np.array(placed, dtype=np.int64)
        others = others[(begin[others] < end[i]) & (begin[i] < end[others])] if placed else others
        low = found[others]
        order = np.argsort(low, kind="stable")
        low, high = low[order], (low + size[others])[order]
        free = np.concatenate([[0.0], np.maximum.accumulate(high)]) if len(others) else np.zeros(1)
        fits = np.concatenate([low, [np.inf]]) - free >= size[i]
        found[i] = free[int(fits.argmax())]
        placed.append(i)
    return [int(offset) for offset in found]
