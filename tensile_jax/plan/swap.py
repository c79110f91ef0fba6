"""Which tensors leave the device while nothing needs them, and when their copies run.

TENSILE, section IV-C and Algorithm 2, reduced to what a planner with recomputation needs; the paper's own algorithm is a
policy of its own. A tensor can leave in the gap between two needs. Its two copies get exclusive windows, one link lane per
direction: the swap-out as early as possible after the first need, the swap-in as late as possible before the second ("a
Swap-Out Event will start as early as possible, and a Swap-In Event as late as possible"). Gaps that wrap around the end of the
iteration are those of state: with `state_memory="any"` it may be on the host when the iteration begins and ends
(across-iteration scheduling).

The candidates are the tensors stored at the turn, state of the optimizer first, then by size, ties by id. A swap whose two
windows fit is *hidden*; the others are taken only where asked for, with their copies exposed.

Times in microseconds since the step began, on the clock of the operators' own latencies.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence
from dataclasses import dataclass

from tensile_jax.ir import TensorId
from tensile_jax.plan.latency import DeviceProfile
from tensile_jax.plan.retention import Retention
from tensile_jax.plan.stays import Absence, inherited

_SMALLEST = 2**16  # bytes; below that a copy costs more in calls than it frees


@dataclass(frozen=True, slots=True)
class Gap:
    """`tensor` is not needed between the places `after` and `before`; -1 and the number of operators are the iteration's ends."""

    tensor: TensorId
    after: int
    before: int


class _Lane:
    """One direction of the link: busy windows, disjoint and ascending."""

    def __init__(self) -> None:
        self._busy: list[tuple[float, float]] = []

    def earliest(self, start: float, length: float) -> float:
        """The earliest begin >= start of a free window of that length."""
        place = bisect_left(self._busy, (start, float("-inf")))
        if place and self._busy[place - 1][1] > start:
            start = self._busy[place - 1][1]
        for begin, end in self._busy[place:]:
            if begin - start >= length:
                break
            start = max(start, end)
        return start

    def latest(self, end: float, length: float) -> float:
        """The latest begin of a free window of that length that ends by `end`."""
        for begin, until in reversed(self._busy):
            if until <= end - length:
                break
            end = min(end, begin) if until > end - length else end
        return end - length

    def take(self, begin: float, end: float) -> None:
        insort(self._busy, (begin, end))


def find_gaps(retention: Retention, *, turn: int, state_may_stay_out: bool) -> tuple[Gap, ...]:
    """The gaps across boundary `turn` in which a tensor may leave, in the order in which to try them."""
    activity, graph = retention.activity, retention.activity.graph
    count = len(graph.operators)
    heirs = inherited(retention)
    gaps: list[Gap] = []
    for tensor in graph.tensors:
        t = tensor.id
        if tensor.nbytes < _SMALLEST or t in activity.kept_by_caller or tensor.dtype.startswith("key<"):
            continue
        needs = list(retention.needs[t])
        made = activity.begin[t]
        if t in retention.dropped or t in heirs.values():
            continue
        end = retention.end[t]
        later = [p for p in needs if p >= turn]
        before = later[0] if later else end
        after = max([p for p in needs if p < turn], default=made)
        if not (after < turn <= end and before - after > 1):
            continue
        if before >= count and not (state_may_stay_out and _is_state_output(retention, t)):
            continue
        gaps.append(Gap(t, after, before))

    def rank(gap: Gap) -> tuple[int, int, int]:
        tensor = graph.tensors[gap.tensor]
        return (0 if tensor.role == "optimizer_state" else 1, -tensor.nbytes, tensor.id)

    return tuple(sorted(gaps, key=rank))


def _is_state_output(retention: Retention, tensor: TensorId) -> bool:
    return any(pair.output == tensor for pair in retention.activity.graph.carried)


def plan_swaps(
    retention: Retention,
    gaps: Sequence[Gap],
    *,
    latencies: Sequence[float],
    profile: DeviceProfile,
    exposed: bool,
    state_may_stay_out: bool,
) -> dict[TensorId, Absence]:
    """Absences for as many gaps as fit the link; with `exposed`, for all of them.

    With `state_may_stay_out`, donated state spends the time from its update to its first need of the next iteration on the host.
    """
    graph = retention.activity.graph
    count = len(graph.operators)
    ends = [0.0]
    for latency in latencies:
        ends.append(ends[-1] + latency)  # ends[p + 1]: when place p ends
    out_lane, in_lane = _Lane(), _Lane()
    absences: dict[TensorId, Absence] = {}

    def place_at(time: float) -> int:
        return min(max(bisect_right(ends, time) - 1, 0), count - 1)

    def leave(tensor: TensorId, after: int) -> tuple[int, float, float]:
        length = graph.tensors[tensor].nbytes / profile.device_to_host_bytes_per_us
        begin = out_lane.earliest(ends[after + 1], length)
        return place_at(begin + length), begin, begin + length

    def come_back(tensor: TensorId, before: int) -> tuple[int, float, float]:
        length = graph.tensors[tensor].nbytes / profile.host_to_device_bytes_per_us
        begin = in_lane.latest(ends[before], length)
        return (place_at(begin) if begin >= 0 else -1), begin, begin + length

    if state_may_stay_out:
        absences.update(_keep_state_out(retention, leave, come_back, out_lane, in_lane, count))
    heirs = inherited(retention)
    for gap in gaps:
        t = gap.tensor
        if t in absences or heirs.get(t) in absences:
            continue
        away, out_begin, out_end = leave(t, gap.after)
        back, in_begin, in_end = come_back(t, gap.before)
        if out_end <= in_begin and away < back:
            out_lane.take(out_begin, out_end)
            in_lane.take(in_begin, in_end)
            absences[t] = Absence(t, away, back, (out_end - out_begin) + (in_end - in_begin))
        elif exposed and gap.after + 1 < gap.before - 1:
            absences[t] = Absence(t, max(gap.after, 0), gap.before - 1, 0.0)
    return absences


def _keep_state_out(retention, leave, come_back, out_lane, in_lane, count):  # type: ignore[no-untyped-def]
    """Absences of donated state across the iteration boundary: in before its first need, out after its update."""
    graph = retention.activity.graph
    absences: dict[TensorId, Absence] = {}
    for pair in graph.carried:
        old, new = graph.tensors[pair.input], graph.tensors[pair.output]
        if old.id not in graph.donated or old.id == new.id or old.nbytes < _SMALLEST or not retention.needs[old.id]:
            continue
        if old.dtype.startswith("key<"):
            continue
        back, in_begin, in_end = come_back(old.id, retention.needs[old.id][0])
        if in_begin >= 0:
            in_lane.take(in_begin, in_end)
        made = max([retention.activity.begin[new.id], *retention.needs[new.id]])
        away, out_begin, out_end = leave(new.id, made)
        out_lane.take(out_begin, out_end)
        absences[old.id] = Absence(old.id, -1, max(back, -1), in_end - in_begin if in_begin >= 0 else 0.0)
        absences[new.id] = Absence(new.id, min(away, count - 1), count, out_end - out_begin)
    return absences
