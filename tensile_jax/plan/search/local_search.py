"""A choice made faster in place: copies that its limit does not ask for are not made, or not waited for.

A rung swaps a family of tensors, whatever the limit. Where it is cut, some of them could have stayed, and some could be
back sooner or gone later. With what is dropped and where it is cut left as they are, a segment runs for as long as before, so
that a plan's time is a matter of the copies alone:

    remove     a tensor stays where it was absent
    back       it is brought in by the earliest segment that has room for it
    leave      what runs next does not wait for it to be gone, as long as there is room
    widen      many tensors at once get windows in which nothing waits for their copies (`copy_windows.py`)

Each puts `nbytes` into the segments in which the tensor was away, and takes nothing from any. Moves are tried by what they save
for a byte, and made if the plan's time on the clocks of `simulate.py` falls; ties by tensor. The room is
raised in steps from the choice's own peak P,

    P, P * step, P * step ** 2, ...   as far as the limit

and at each no move is left untried before the next, up to a number of trials in all. So the limit only says where on its way the
search ends, and no move lowers a peak: of two limits with the same choice, the lower ends earlier and holds no more. Of two
with different choices, the lower is below the peak of the higher one's (`choice.cheapest`), which is where that starts. A
lower limit never gives a higher peak.

What a segment needs beyond what it holds does not depend on what is away beside it, so measured workspaces stay true.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count, pairwise

import numpy as np

from tensile_jax.ir import TensorId
from tensile_jax.plan.analysis.latency import DeviceProfile
from tensile_jax.plan.analysis.residency import Absence
from tensile_jax.plan.analysis.retention import emit
from tensile_jax.plan.search.candidates import Ladder
from tensile_jax.plan.search.choice import WHOLE, Choice, segment_peaks
from tensile_jax.plan.search.copy_windows import Need, windows_without_waiting
from tensile_jax.plan.search.workspace import Measured

_STEP = 1.01
_WIDEN_EVERY = 5  # steps
_MOST_WORK = 16_000_000  # copies times moves, in all: about 0.15 s
_EACH_COPY = 500  # moves that take as long as the copy itself
_MOST_TRIPS = 100  # that may change one by one: the largest
_MOST_TRIALS = 10  # moves tried one by one, each time
_LEAST_GAIN = 1e-6  # of the step
_WORTH_ANOTHER = 5e-4  # of the step: gained by one pass, for the next to be made in the same room
_PARTS = (1.0, 0.5, 0.25)  # of the tensors, the smallest first: those whose windows are widened together


@dataclass(frozen=True, slots=True)
class _Trip:
    """One absence by segments: out as soon as `issued`, away from `gone` on and below `back`, where it comes in for `used`.

    A tensor is copied out for the first of its trips only. `issued` is -1 for what is on the host when the iteration begins;
    `fixed` trips stay as they are.
    """

    tensor: TensorId
    nbytes: int
    issued: int
    gone: int
    back: int
    used: int
    absence: Absence
    fixed: bool


def improve(ladder: Ladder, choice: Choice, limit: float, measured: Measured) -> Choice:
    """The choice with fewer or longer copies, no slower and under the limit; itself where it swaps nothing."""
    if choice.rung == WHOLE or not ladder.rung(choice.rung).absences:
        return choice
    search = _Search(ladder, choice, measured)
    search.run(limit)
    return search.choice()


class _Search:
    """Trips, the room that is taken in each segment, and the step's time."""

    def __init__(self, ladder: Ladder, choice: Choice, measured: Measured) -> None:
        rung = ladder.rung(choice.rung)
        self._choice = choice
        self._bounds = choice.boundaries
        self._profile = ladder.profile
        self._peaks = segment_peaks(ladder, choice, measured)
        self._trips = [trip for several in rung.absences.values() for trip in self._trips_of(ladder, several)]
        movable = sorted((t for t in self._trips if not t.fixed), key=lambda t: (-t.nbytes, t.tensor, t.issued))
        self._small = {(trip.tensor, trip.issued) for trip in movable[_MOST_TRIPS:]}
        self._runs: list[float] = []
        for a, b in pairwise(self._bounds):
            again_us = sum(ladder.rerun_us[p] for p in emit(rung.retention, a, b).again)
            self._runs.append(ladder.profile.launch_us + float(ladder.elapsed_us[b] - ladder.elapsed_us[a]) + again_us)
        self._step_us = _step_us(self._trips, self._runs, ladder.profile)
        self._work_left = _MOST_WORK

    def _trips_of(self, ladder: Ladder, several: Sequence[Absence]) -> list[_Trip]:
        """The trips of one tensor; an absence in which there is no boundary is none."""
        bounds, count = self._bounds, len(ladder.graph.operators)
        retention = ladder.rung(self._choice.rung).retention
        trips: list[_Trip] = []
        for absence in several:
            t, leave, back = absence.tensor, absence.leave, absence.back
            if bisect_right(bounds, back) <= bisect_right(bounds, leave):
                continue
            issued = bisect_right(bounds, retention.last_need(t, leave))
            trips.append(
                _Trip(
                    tensor=t,
                    nbytes=ladder.graph.tensors[t].nbytes,
                    issued=issued if leave >= 0 else -1,
                    gone=max(bisect_right(bounds, leave), issued),
                    back=bisect_right(bounds, back) - 1 if back < count else len(bounds),
                    used=bisect_right(bounds, retention.next_need(t, leave)) - 1,
                    absence=absence,
                    fixed=leave < 0 or back >= count,
                )
            )
        return trips

    def choice(self) -> Choice:
        """The choice as it is by now."""
        absences: dict[TensorId, tuple[Absence, ...]] = {}
        for trip in self._trips:
            absences[trip.tensor] = (*absences.get(trip.tensor, ()), trip.absence)
        return replace(self._choice, absences=dict(sorted(absences.items())))

    def run(self, limit: float) -> None:
        """Raise the room step by step, as far as the limit."""
        room = int(self._peaks.max())
        for step in count():
            if room > limit or self._work_left <= 0:
                break
            if step < 4 or step % _WIDEN_EVERY == 0:
                self._widen(room)
            while self._pass(room) and self._work_left > 0:
                pass
            room = max(int(room * _STEP), room + 1)

    def _pass(self, room: int) -> bool:
        """Try every move at once, and then one by one in the order of what they save, making those that still do."""
        large = (trip for trip in self._trips if (trip.tensor, trip.issued) not in self._small)
        moves = [(trip, *move) for trip in large for move in self._moves(trip, room)]
        if not moves:
            return False
        self._work_left -= 2 * len(self._trips) * (len(moves) + _EACH_COPY)
        steps = _steps_us(self._trips, [(trip, changed) for trip, changed, _ in moves], self._runs, self._profile)
        saved = [(us - self._step_us) / max(more, 1) for us, (_, _, more) in zip(steps, moves, strict=True)]
        before = self._step_us
        for i in sorted(range(len(moves)), key=lambda i: (saved[i], i))[:_MOST_TRIALS]:
            trip, changed, _ = moves[i]
            if steps[i] >= self._step_us * (1 - _LEAST_GAIN):
                continue
            if trip not in self._trips or not self._has_room(self._change(trip, changed), room):
                continue
            us = _step_us(self._with(trip, changed), self._runs, self._profile)
            if us < self._step_us * (1 - _LEAST_GAIN):
                self._peaks += self._change(trip, changed)
                self._trips = self._with(trip, changed)
                self._step_us = us
        return self._step_us < before * (1 - _WORTH_ANOTHER)

    def _widen(self, room: int) -> None:
        """Take the best of several ways to widen windows together, if there is room for one and it pays."""
        movable = [trip for trip in self._trips if not trip.fixed]
        first = {trip.tensor: trip for trip in reversed(self._trips)}  # the one that copies its tensor to the host
        wide = windows_without_waiting(
            [Need(t.tensor, t.nbytes, t.issued, t.used, t is first[t.tensor] and t.issued >= 0) for t in movable],
            self._runs,
            self._profile,
        )
        by_size = sorted(wide, key=lambda i: (movable[i].nbytes, movable[i].tensor, movable[i].issued))
        best = self._trips, self._step_us * (1 - _LEAST_GAIN), np.zeros(len(self._runs))
        for leaves, backs in ((True, True), (False, True), (True, False)):
            for part in _PARTS:
                changed: dict[_Trip, _Trip] = {}
                for i in by_size[: int(part * len(by_size))]:
                    gone = max(movable[i].gone, wide[i].gone) if leaves else movable[i].gone
                    back = min(movable[i].back, wide[i].back) if backs else movable[i].back
                    if gone < back:
                        changed[movable[i]] = self._moved(movable[i], gone, back)
                more = sum((self._change(trip, new) for trip, new in changed.items()), np.zeros(len(self._runs)))
                if not self._has_room(more, room):
                    continue
                trips = [changed.get(trip, trip) for trip in self._trips]
                us = _step_us(trips, self._runs, self._profile)
                self._work_left -= len(trips) * _EACH_COPY
                if us < best[1]:
                    best = trips, us, more
        if best[0] is not self._trips:
            self._trips, self._step_us, more = best
            self._peaks = self._peaks + more

    def _moved(self, trip: _Trip, gone: int, back: int) -> _Trip:
        absence = trip.absence
        if gone != trip.gone:
            absence = replace(absence, leave=self._bounds[gone] - 1)
        if back != trip.back:
            absence = replace(absence, back=self._bounds[back])
        return replace(trip, gone=gone, back=back, absence=absence)

    def _moves(self, trip: _Trip, room: int) -> list[tuple[_Trip | None, int]]:
        """What may be done about a trip within the room, and the bytes that each puts into segments, all in all."""
        if trip.fixed:
            return []
        found: list[tuple[_Trip | None, int]] = []
        free = self._peaks + trip.nbytes <= room
        if free[trip.gone : trip.back].all():
            found.append((None, trip.nbytes * (trip.back - trip.gone)))
        back = trip.back
        while back - 1 > trip.gone and free[back - 1]:
            back -= 1
        gone = trip.gone
        while gone + 1 < trip.back and free[gone]:
            gone += 1
        for at in dict.fromkeys((trip.back - 1, back)):
            if back <= at < trip.back:
                found.append((self._moved(trip, trip.gone, at), trip.nbytes * (trip.back - at)))
        for at in dict.fromkeys((trip.gone + 1, gone)):
            if trip.gone < at <= gone:
                found.append((self._moved(trip, at, trip.back), trip.nbytes * (at - trip.gone)))
        return found

    def _change(self, trip: _Trip, changed: _Trip | None) -> np.ndarray:
        """Bytes that the move puts into each segment."""
        more = np.zeros(len(self._runs))
        more[trip.gone : trip.back] += trip.nbytes
        if changed is not None:
            more[changed.gone : changed.back] -= trip.nbytes
        return more

    def _has_room(self, more: np.ndarray, room: int) -> bool:
        """Whether so many bytes more in each segment stay within the room, where it is more."""
        return bool((self._peaks + more <= room)[more > 0].all())

    def _with(self, trip: _Trip, changed: _Trip | None) -> list[_Trip]:
        return [new for t in self._trips if (new := changed if t is trip else t) is not None]


def _step_us(trips: Sequence[_Trip], runs: Sequence[float], profile: DeviceProfile) -> float:
    """The time of a step on the three lanes of `simulate.py`, from the trips and how long each segment runs."""
    count = len(runs)
    out: dict[int, list[tuple[int, TensorId, int]]] = {}
    into: dict[int, list[tuple[int, TensorId, int]]] = {}
    seen: set[TensorId] = set()
    for trip in trips:
        if trip.issued >= 0 and trip.tensor not in seen:
            out.setdefault(trip.issued, []).append((trip.gone, trip.tensor, trip.nbytes))
        seen.add(trip.tensor)
        if trip.back <= count:
            into.setdefault(trip.back, []).append((trip.used, trip.tensor, trip.nbytes))
    clock = lane_out = lane_in = owed = 0.0
    left, come = [0.0] * (count + 1), [0.0] * (count + 1)
    for index in range(count + 1):
        for until, _, nbytes in sorted(out.get(index, ())):
            length = nbytes / profile.device_to_host_bytes_per_us
            lane_out = left[until] = max(lane_out, clock) + length
            owed += profile.copy_share * length
        clock = max(clock, left[index])
        for until, _, nbytes in sorted(into.get(index, ())):
            length = nbytes / profile.host_to_device_bytes_per_us
            lane_in = come[until] = max(lane_in, clock) + length
            owed += profile.copy_share * length
        if index < count:
            clock = max(clock, come[index]) + runs[index] + owed
            owed = 0.0
    return max(clock, lane_out, lane_in)


def _steps_us(
    trips: Sequence[_Trip], moves: Sequence[tuple[_Trip, _Trip | None]], runs: Sequence[float], profile: DeviceProfile
) -> np.ndarray:
    """The time of a step after each of the moves alone, all on the same clocks: a copy that is not made takes no time."""
    count, many = len(runs), len(moves)
    rates = profile.device_to_host_bytes_per_us, profile.host_to_device_bytes_per_us
    copies: dict[tuple[int, int, int, TensorId], np.ndarray] = {}  # lengths, by (issued, direction, awaited, tensor)

    def outward(trip: _Trip) -> tuple[int, int, int, TensorId] | None:
        return (trip.issued, 0, trip.gone, trip.tensor) if trip.issued >= 0 else None

    def inward(trip: _Trip) -> tuple[int, int, int, TensorId] | None:
        return (trip.back, 1, trip.used, trip.tensor) if trip.back <= count else None

    def put(copy: tuple[int, int, int, TensorId] | None, which: int | slice, nbytes: int) -> None:
        if copy is not None:
            copies.setdefault(copy, np.zeros(many))[which] = nbytes / rates[copy[1]]

    first: dict[TensorId, _Trip] = {}
    second: dict[TensorId, _Trip] = {}
    for trip in trips:
        if trip.tensor not in first:
            first[trip.tensor] = trip
            put(outward(trip), slice(None), trip.nbytes)
        else:
            second.setdefault(trip.tensor, trip)
        put(inward(trip), slice(None), trip.nbytes)
    for which, (trip, changed) in enumerate(moves):
        heads = [t for t in (first[trip.tensor], second.get(trip.tensor)) if t is not None and t is not trip]
        if first[trip.tensor] is trip:
            put(outward(trip), which, 0)
            head = changed if changed is not None else heads[0] if heads else None
            if head is not None:
                put(outward(head), which, head.nbytes)
        put(inward(trip), which, 0)
        if changed is not None:
            put(inward(changed), which, changed.nbytes)

    clock, owed, lanes = np.zeros(many), np.zeros(many), [np.zeros(many), np.zeros(many)]
    awaited = np.zeros((2, count + 1, many))  # by direction
    ordered = sorted(copies)  # at each boundary, out before in
    at = 0
    for index in range(count + 1):
        for direction in (0, 1):
            while at < len(ordered) and ordered[at][:2] == (index, direction):
                length = copies[ordered[at]]
                lanes[direction] = np.where(length > 0, np.maximum(lanes[direction], clock) + length, lanes[direction])
                until = ordered[at][2]
                awaited[direction, until] = np.where(length > 0, lanes[direction], awaited[direction, until])
                owed = owed + profile.copy_share * length
                at += 1
            if direction == 0 or index < count:
                clock = np.maximum(clock, awaited[direction, index])
        if index < count:
            clock, owed = clock + runs[index] + owed, np.zeros(many)
    return np.maximum(clock, np.maximum(*lanes))
