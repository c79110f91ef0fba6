"""Fit the windows of swaps to the segments of a finished cut, so that copies hide behind them.

`swap.py` finds windows on the clock of single operators. Segments are coarser: a copy out can only start when the segment that
needed the tensor last has ended, and one that must have ended in the middle of the next segment makes that one wait. Once the
boundaries are known, so are the times at which they are reached, and with these

    out   starts as early as its lane allows after the last need; the tensor leaves at the first boundary after its end
    in    starts as late as its lane allows before the next need; it is issued at the last boundary before that

which costs memory and no waiting. Where no window is left between the two, the swap stays as it was, exposed. Which of the
windows may be longer is a question of memory: `fitted` offers several answers, and the caller takes the fastest that fits.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate

from tensile_jax.plan.latency import DeviceProfile
from tensile_jax.plan.retention import Retention
from tensile_jax.plan.stays import Absence, Absences
from tensile_jax.plan.swap import Lane

_PARTS = (1.0, 0.5, 0.25)  # of the tensors, the smallest first: their windows cost least memory


def fitted(
    retention: Retention, absences: Absences, boundaries: tuple[int, ...], segment_us: Sequence[float], profile: DeviceProfile
) -> Iterator[Absences]:
    """Absences with longer windows, in several ways; `segment_us` are the segments' latencies, launches included."""
    tensors = retention.activity.graph.tensors
    by_size = sorted(absences, key=lambda t: (tensors[t].nbytes, t))
    windows = _Windows(retention, absences, boundaries, segment_us, profile)
    for leaves, backs in ((True, True), (False, True), (True, False)):
        for part in _PARTS:
            chosen = set(by_size[: int(part * len(by_size))])
            if chosen:
                yield windows.widened(lambda t, chosen=chosen: t in chosen, leaves=leaves, backs=backs)


class _Windows:
    """For each absence with room for its copies, by (tensor, `leave`): the boundaries to leave at and to be back at."""

    def __init__(
        self,
        retention: Retention,
        absences: Absences,
        boundaries: tuple[int, ...],
        segment_us: Sequence[float],
        profile: DeviceProfile,
    ) -> None:
        self._absences = absences
        self._boundaries = boundaries
        tensors = retention.activity.graph.tensors
        count = boundaries[-1]
        reached = [0.0, *accumulate(segment_us)]  # when each boundary is reached if nothing waits
        gone: dict[tuple[int, int], tuple[int, float]] = {}
        out, into = Lane(), Lane()
        outgoing: list[tuple[int, Absence]] = []
        incoming: list[tuple[int, Absence]] = []
        for t, several in absences.items():
            for away in several:
                needs = retention.needs[t]
                later = bisect_right(needs, away.leave)
                last = max(retention.activity.begin[t], needs[later - 1] if later else -1)
                issued = bisect_right(boundaries, last) if last >= 0 else 0
                if away is several[0] and away.leave >= 0:
                    outgoing.append((issued, away))
                else:
                    gone[t, away.leave] = issued, reached[issued] if away.leave >= 0 else 0.0
                if away.back < count:
                    need = needs[later] if later < len(needs) else count
                    incoming.append((bisect_right(boundaries, need) - 1 if need < count else len(segment_us), away))
        for issued, away in sorted(outgoing, key=lambda copy: (copy[0], -tensors[copy[1].tensor].nbytes, copy[1].tensor)):
            length = tensors[away.tensor].nbytes / profile.device_to_host_bytes_per_us
            begin = out.earliest(reached[issued], length)
            out.take(begin, begin + length)
            gone[away.tensor, away.leave] = bisect_left(reached, begin + length), begin + length
        self._found: dict[tuple[int, int], tuple[int, int]] = {}
        for needed, away in sorted(incoming, key=lambda copy: (-copy[0], tensors[copy[1].tensor].nbytes, copy[1].tensor)):
            length = tensors[away.tensor].nbytes / profile.host_to_device_bytes_per_us
            begin = into.latest(reached[needed], length)
            leaves, gone_us = gone[away.tensor, away.leave]
            returns = bisect_right(reached, begin) - 1
            if begin >= gone_us and leaves <= returns:
                into.take(begin, begin + length)
                self._found[away.tensor, away.leave] = leaves, returns
        for _, away in outgoing:
            leaves, _ = gone[away.tensor, away.leave]
            if away.back >= count and leaves < len(boundaries):
                self._found[away.tensor, away.leave] = leaves, len(boundaries) - 1

    def widened(self, chosen: Callable[[int], bool], *, leaves: bool, backs: bool) -> Absences:
        """The absences with the windows of the tensors that are chosen as found here."""
        count = self._boundaries[-1]

        def widen(away: Absence) -> Absence:
            found = self._found.get((away.tensor, away.leave))
            if found is None or not chosen(away.tensor):
                return away
            leave = max(away.leave, self._boundaries[found[0]] - 1) if leaves and away.leave >= 0 else away.leave
            back = min(away.back, self._boundaries[found[1]]) if backs and away.back < count else away.back
            return replace(away, leave=leave, back=back) if leave < back else away

        return {t: tuple(map(widen, several)) for t, several in self._absences.items()}
