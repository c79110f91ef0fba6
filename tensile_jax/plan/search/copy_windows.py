"""Computes when copies would have to run so that no segment waits for them, once the boundaries of all segments are known.

`swaps.py` plans copies on the clock of single operators. Segments are coarser: a copy to the host can only start when the segment
that needed the tensor last has ended, and a segment waits if it begins before the copies that must precede it have ended. This
module computes when each boundary is reached if nothing waits, and places the copies on that clock:

    out   starts as early as its lane allows after the last need; the tensor is gone at the first boundary after the copy's end
    in    starts as late as its lane allows before the next need; it is issued at the last boundary before the copy's start

A copy out that ends later, or a copy in that starts earlier, keeps the tensor on the device for longer. `local_search.py` decides
whether there is room for them. Times in microseconds since the step began.
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
    """A tensor that is absent between two segments: it may leave when segment `issued` begins, and segment `used` needs it.

    `issued` is -1 for state that is on the host when the iteration begins. Without `copies_out`, the host has a copy already.
    """

    tensor: TensorId
    nbytes: int
    issued: int
    used: int
    copies_out: bool


class Window(NamedTuple):
    """The tensor is absent during the segments `[gone, back)`; its copy to the device is issued right before segment `back`."""

    gone: int
    back: int


def windows_without_waiting(needs: Sequence[Need], segment_us: Sequence[float], profile: DeviceProfile) -> dict[int, Window]:
    """The window of every need for whose copies there is time, by its position in `needs`.

    Copies out of the same `issued` go in the order of falling size, then of id. Windows of copies in are found from the last
    `used` back to the first, and for the same `used` from the smallest tensor to the largest.
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
