"""Fewer levels than were recorded, for a picture that is so many columns wide, without the loss of a peak.

A level holds from its time until the next one's. Time is cut into columns; of a column with several levels the highest stays, and
where the next column has none of its own also the last, which holds on there. So the curve of what stays reaches, in
every column, as high as the curve of all; where there are many levels to a column it is their upper envelope.
"""

from collections.abc import Callable, Sequence
from itertools import groupby

from tensile_jax.runtime_records import Level


def thin(
    levels: Sequence[Level], *, columns: int, begin_us: float, end_us: float, height: Callable[[Level], int]
) -> tuple[Level, ...]:
    """At most two of `levels` for each column of `[begin_us, end_us)`, in order of time, and the one that holds at its beginning.

    Of equally high levels in a column the earliest stays.

    >>> levels = [Level(float(t), 9, {"a": t % 5}) for t in range(10)]
    >>> [level.time_us for level in thin(levels, columns=2, begin_us=0, end_us=10, height=lambda level: level.planned_bytes)]
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
