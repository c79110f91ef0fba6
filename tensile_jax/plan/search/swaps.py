"""Plans swaps: which tensors leave the device while nothing needs them, and when their copies run.

This is TENSILE, section IV-C and Algorithm 2, reduced to what a planner with recomputation needs. The paper's own algorithm is
the policy `tensile`. A tensor can leave in a *gap*: the time between two operators that need it. The link has one lane for each
direction, and each copy occupies its lane alone. The swap-out runs as early as possible after the first need, and the swap-in as
late as possible before the second one ("a Swap-Out Event will start as early as possible, and a Swap-In Event as late as
possible"). State also has a gap that wraps around the end of the iteration. With `state_memory="any"`, the state may be on the
host when the iteration begins and ends (the paper's across-iteration scheduling).

Swaps are planned for one boundary between operators at a time, the *turn*, where much is stored. The tensors stored at the turn
are tried in this order: state of the optimizer first, then by size, ties by id. A swap for which both copies find a free window
within the gap is *hidden*. Other swaps are made only if the caller allows exposed copies.

Times in microseconds since the step began, on the clock of the operators' own latencies. A *place* is the position of an operator
in the order of execution.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice

import numpy as np

from tensile_jax.ir import Tensor, TensorId
from tensile_jax.plan.analysis.copy_time import copy_in_us, copy_out_us
from tensile_jax.plan.analysis.device_profile import DeviceProfile
from tensile_jax.plan.analysis.absence import Absence, Absences
from tensile_jax.plan.analysis.retention import Retention

SMALLEST = 2**16  # bytes; below that a copy costs more in calls than it frees
_TOUCHING = 1e-6  # microseconds; no copy is as short


@dataclass(frozen=True, slots=True)
class Gap:
    """`tensor` is not needed between the places `after` and `before`.

    -1 is the beginning of the iteration, and the number of operators is its end.
    """

    tensor: TensorId
    after: int
    before: int


class Lane:
    """One direction of the link, as the windows in which it is busy: disjoint, ascending, merged where they touch."""

    def __init__(self) -> None:
        self._busy: list[tuple[float, float]] = []

    def earliest(self, start: float, length: float) -> float:
        """The earliest begin >= start of a free window of that length."""
        place = bisect_left(self._busy, (start, float("-inf")))
        if place and self._busy[place - 1][1] > start:
            start = self._busy[place - 1][1]
        for begin, end in islice(self._busy, place, None):
            if begin - start >= length:
                break
            start = max(start, end)
        return start

    def latest(self, end: float, length: float, *, enough: float = float("-inf")) -> float:
        """The latest begin of a free window of that length that ends by `end`.

        If that begin is before `enough`, the result is just some time before `enough`, and the window may be busy.
        """
        for place in range(bisect_left(self._busy, (end, float("-inf"))) - 1, -1, -1):
            begin, until = self._busy[place]
            if until <= end - length or end - length < enough:
                break
            if begin < end:
                end = begin
        return end - length

    def take(self, begin: float, end: float) -> None:
        first = last = bisect_left(self._busy, (begin, end))
        if first and self._busy[first - 1][1] >= begin - _TOUCHING:
            first -= 1
        if last < len(self._busy) and self._busy[last][0] <= end + _TOUCHING:
            last += 1
        one = [*self._busy[first:last], (begin, end)]
        self._busy[first:last] = [(min(b for b, _ in one), max(e for _, e in one))]


class Link:
    """The two lanes of the link between device and host."""

    def __init__(self) -> None:
        self.out = Lane()
        self.into = Lane()


def find_gaps(retention: Retention, *, turn: int, state_may_stay_out: bool) -> tuple[Gap, ...]:
    """The gaps across boundary `turn` in which a tensor may leave, in the order in which to try them.

    Results of the step must be on the device when it ends, except state that may be on the host then.
    """
    liveness, graph = retention.liveness, retention.liveness.graph
    aliases = retention.aliases
    stay_out = {pair.output for pair in graph.carried} if state_may_stay_out else set[TensorId]()
    gaps: list[Gap] = []
    large = (liveness.nbytes >= SMALLEST) & (liveness.begins < turn) & (turn <= retention.ends)
    for tensor in (graph.tensors[t] for t in np.flatnonzero(large).tolist()):
        t = tensor.id
        if not may_leave(retention, t) or t in stay_out:
            continue
        made, end = liveness.begin[t], retention.end[t]
        needs = retention.needs[t]
        later = bisect_left(needs, turn)
        before = needs[later] if later < len(needs) else end
        after = needs[later - 1] if later else made
        taken_over = t in aliases and later == len(needs)  # its alias has the memory by then
        if after < turn <= end and before - after > 1 and not taken_over:
            gaps.append(Gap(t, after, before))

    def rank(gap: Gap) -> tuple[int, int, int]:
        tensor = graph.tensors[gap.tensor]
        return (0 if tensor.role == "optimizer_state" else 1, -tensor.nbytes, tensor.id)

    return tuple(sorted(gaps, key=rank))


def may_leave(retention: Retention, tensor: TensorId) -> bool:
    """Whether the tensor may be swapped: it is stored, does not belong to the caller, and is neither a PRNG key nor tiny."""
    liveness = retention.liveness
    found = liveness.graph.tensors[tensor]
    ours = tensor not in liveness.kept_by_caller and tensor not in retention.dropped
    return ours and found.nbytes >= SMALLEST and not found.dtype.startswith("key<")


def plan_swaps(
    retention: Retention,
    gaps: Sequence[Gap],
    link: Link,
    *,
    taken: Absences,
    latencies: Sequence[float],
    profile: DeviceProfile,
    exposed: bool,
    late: bool,
    enough: float = float("inf"),
) -> list[Absence]:
    """Absences for as many gaps as fit the link, which they then occupy; with `exposed`, for all of them.

    It stops when the new absences come to `enough` bytes. With `late`, each tensor leaves at once and returns right before it is
    needed, and no time of its copies is counted as hidden. `taken` are the absences found before. A tensor that was absent before
    the gap still has its copy on the host, so it is not copied out again.
    """
    found: list[Absence] = []
    clock = _Clock(retention, latencies, profile)
    away_bytes = 0
    for gap in gaps:
        t = gap.tensor
        if away_bytes >= enough:
            break
        before = taken.get(t, ())
        if any(a.leave < gap.before and gap.after < a.back for a in before):
            continue
        absence: Absence | None = None
        copied = any(a.leave < gap.after for a in before)
        if not late:
            away, out_begin, out_end = clock.leave(t, gap.after, link, copied=copied)
            back, in_begin, in_end = clock.come_back(t, gap.before, link, enough=out_end)
            if out_end <= in_begin and away < back:
                link.out.take(out_begin, out_end)
                link.into.take(in_begin, in_end)
                absence = Absence(t, away, back, (out_end - out_begin) + (in_end - in_begin))
        if absence is None and (late or exposed) and gap.after + 1 < gap.before - 1:
            absence = Absence(t, max(gap.after, 0), gap.before - 1, 0.0)
        if absence is not None:
            found.append(absence)
            away_bytes += 0 if late else retention.liveness.graph.tensors[t].nbytes
    return found


def state_that_may_stay_out(retention: Retention) -> list[tuple[Tensor, Tensor]]:
    """The pairs (old, new) of donated state that could be on the host from its last use to its first use in the next iteration.

    The step itself must compute the new tensor. A step may also return an argument in the place of another one; that argument may
    belong to the caller, or be the old tensor of another pair.
    """
    graph = retention.liveness.graph
    pairs = [(graph.tensors[pair.input], graph.tensors[pair.output]) for pair in graph.carried]
    return [
        (old, new) for old, new in pairs
        if old.id in graph.donated and new.producer is not None and old.nbytes >= SMALLEST and retention.needs[old.id]
        and not old.dtype.startswith("key<")
    ]  # fmt: skip


def keep_state_out(
    retention: Retention,
    link: Link,
    *,
    latencies: Sequence[float],
    profile: DeviceProfile,
    late: bool,
    only: Collection[TensorId] | None = None,
) -> dict[TensorId, tuple[Absence, ...]]:
    """Absences of donated state across the iteration boundary: copied in before its first need, copied out after its update.

    With `late`, a tensor is copied in right before its first need and out right after its last one, and nothing hides the copies.
    With `only`, these tensors alone are absent.
    """
    count = len(retention.liveness.graph.operators)
    clock = _Clock(retention, latencies, profile)
    absences: dict[TensorId, tuple[Absence, ...]] = {}
    for old, new in state_that_may_stay_out(retention):
        if only is not None and old.id not in only:
            continue
        first = retention.needs[old.id][0]
        made = max([retention.liveness.begin[new.id], *retention.needs[new.id]])
        if late:
            absences[old.id] = (Absence(old.id, -1, max(first - 1, -1), 0.0),)
            absences[new.id] = (Absence(new.id, min(max(made, 0), count - 1), count, 0.0),)
            continue
        back, in_begin, in_end = clock.come_back(old.id, first, link)
        if in_begin >= 0:
            link.into.take(in_begin, in_end)
        away, out_begin, out_end = clock.leave(new.id, made, link)
        link.out.take(out_begin, out_end)
        absences[old.id] = (Absence(old.id, -1, back, in_end - in_begin if in_begin >= 0 else 0.0),)
        absences[new.id] = (Absence(new.id, min(away, count - 1), count, out_end - out_begin),)
    return absences


class _Clock:
    """Converts places to times and back, and finds windows for copies."""

    def __init__(self, retention: Retention, latencies: Sequence[float], profile: DeviceProfile) -> None:
        self._tensors = retention.liveness.graph.tensors
        self._profile = profile
        self._ends = [0.0, *accumulate(latencies)]  # _ends[p + 1]: when place p ends

    def _place(self, time: float) -> int:
        return min(max(bisect_right(self._ends, time) - 1, 0), len(self._ends) - 2)

    def leave(self, tensor: TensorId, after: int, link: Link, *, copied: bool = False) -> tuple[int, float, float]:
        """(place during which the copy ends, begin, end) of the earliest swap-out after a place.

        If the tensor is `copied` to the host already, the swap-out takes no time.
        """
        if copied:
            return after, self._ends[after + 1], self._ends[after + 1]
        length = copy_out_us(self._tensors[tensor].nbytes, self._profile)
        begin = link.out.earliest(self._ends[after + 1], length)
        return self._place(begin + length), begin, begin + length

    def come_back(self, tensor: TensorId, before: int, link: Link, *, enough: float = float("-inf")) -> tuple[int, float, float]:
        """(place during which the copy begins, begin, end) of the latest swap-in before the place; -1 before the iteration.

        If it would begin before `enough`, the result begins before `enough` too, but its window may be busy.
        """
        length = copy_in_us(self._tensors[tensor].nbytes, self._profile)
        begin = link.into.latest(self._ends[before], length, enough=enough)
        return (self._place(begin) if begin >= 0 else -1), begin, begin + length
