"""Reduces the recorded levels of a run to as many as a picture has columns of pixels.

While jobs run, a ledger says how many bytes of device memory each of them holds. A *level* (`runtime_records.Level`) is one
entry of this ledger; the entry is valid until the next one. A long run has more levels than a picture has columns. Then each
column keeps the level with the most bytes of all jobs together, so that no peak is lost. If no level begins in the next column,
a column also keeps its last level, because that level is still valid in the next column.
"""

from collections.abc import Callable, Sequence
from itertools import groupby

from tensile_jax.runtime_records import Level


def reduce_levels(
    levels: Sequence[Level], *, columns: int, begin_us: float, end_us: float, height: Callable[[Level], int]
) -> tuple[Level, ...]:
    """At most two of `levels` for each column of `[begin_us, end_us)`, in order of time.

    The level that is valid at `begin_us` counts for the first column. Of equally high levels in a column the earliest is kept.

    >>> levels = [Level(float(t), 9, {"a": t % 5}) for t in range(10)]
    >>> reduced = reduce_levels(levels, columns=2, begin_us=0, end_us=10, height=lambda level: level.planned_bytes)
    >>> [level.time_us for level in reduced]
    [4.0, 9.0]
    """
    before = [level for level in levels if level.time_us <= begin_us][-1:]
    inside = [level for level in levels if begin_us < level.time_us < end_us]
    width = (end_us - begin_us) / columns

    def column(level: Level) -> int:
        return max(0, min(columns - 1, int((level.time_us - begin_us) / width)))

    groups = {number: list(group) for number, group in groupby([*before, *inside], key=column)}
    kept: list[Level] = []
    for number, group in groups.items():
        highest = max(group, key=height)
        kept.append(highest)
        if number + 1 not in groups and group[-1] is not highest:
            kept.append(group[-1])
    return tuple(kept)
