"""When copies would have to run so that no segment waits for them, given the segments of a finished cut.

`swaps.py` finds windows on the clock of single operators. Segments are coarser. A copy out can only start when the segment that
needed the tensor last has ended, and the next segment waits if the copy must have ended before it. Once the boundaries are known,
the times at which they are reached without any waiting are known too, and with these times

    out   starts as early as its lane allows after the last need; the tensor is gone at the first boundary after its end
    in    starts as late as its lane allows before the next need; it is issued at the last boundary before that

Longer windows hold more memory; `local_search.py` decides whether there is room for them.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from tensile_jax.ir import TensorId
from tensile_jax.plan.analysis.copy_time import copy_in_us, copy_out_us
from tensile_jax.plan.analysis.device_profile import DeviceProfile
from tensile_jax.plan.search.swaps import Lane


class Need(NamedTuple):
    """An absence by segments: `issued` when its copy out can begin, or -1 if there is none; `used`, where it must be back."""

    tensor: TensorId
    nbytes: int
    issued: int
    used: int
    copies_out: bool


class Window(NamedTuple):
    """The tensor is away from segment `gone` on, and below segment `back`, where its copy in is issued."""

    gone: int
    back: int


def windows_without_waiting(needs: Sequence[Need], segment_us: Sequence[float], profile: DeviceProfile) -> dict[int, Window]:
    """The window of every need for whose copies there is time, by its place in `needs`.

    Of copies for the same segment, the larger goes out first and comes in first; then by id.
    """
    reached = [0.0, *accumulate(segment_us)]
    out, into = Lane(), Lane()
    gone_us: list[float] = [reached[max(need.issued, 0)] for need in needs]
    outgoing = (i for i, need in enumerate(needs) if need.copies_out)
    for i in sorted(outgoing, key=lambda i: (needs[i].issued, -needs[i].nbytes, needs[i].tensor)):
        length = copy_out_us(needs[i].nbytes, profile)
        begin = out.earliest(gone_us[i], length)
        gone_us[i] = begin + length
        out.take(begin, gone_us[i])
    found: dict[int, Window] = {}
    for i in sorted(range(len(needs)), key=lambda i: (-needs[i].used, needs[i].nbytes, needs[i].tensor)):
        length = copy_in_us(needs[i].nbytes, profile)
        begin = into.latest(reached[needs[i].used], length)
        window = Window(bisect_left(reached, gone_us[i]), bisect_right(reached, begin) - 1)
        if begin >= gone_us[i] and window.gone < window.back:
            into.take(begin, begin + length)
            found[i] = window
    return found
