"""Makes a choice faster by removing or lengthening swaps, as far as the memory limit leaves room for that.

A candidate swaps the same tensors whatever the limit. Once the candidate is cut into segments, some of these tensors could remain
on the device, some could come back sooner, and some could leave later. Boundaries and dropped tensors are left as they are. Each
segment therefore runs for as long as before, and only the copies change the plan's time. There are four moves:

    remove     a tensor remains on the device where it was absent
    back       an earlier segment that has room brings the tensor in
    leave      the copy to the host may end later, as long as there is room
    widen      many tensors at once get windows in which nothing waits for their copies (`copy_windows.py`)

A move adds the tensor's bytes to segments in which the tensor was absent, and takes none from any segment. Moves are tried in the
order of the time that they save for each byte. A move is made if it lowers the time of the plan, which is computed as in
`result/simulate.py`. Ties go to the swap that the candidate lists first. The room for moves grows in steps, from the choice's own
peak P to the limit:

    P, P * step, P * step ** 2, ...            step = 1.01 (`_STEP`)

At each step the search makes moves until they gain too little, and the work of the whole search is bounded.

A lower limit never gives a higher peak, because no move lowers a peak. If two limits have the same choice, the search for the
lower limit makes the same moves and ends earlier. If they have different choices, the peak of the higher limit's choice is above
the lower limit (`choice.cheapest`). The search for the higher limit starts from that peak, and the search for the lower one ends
below it.

What a segment needs beyond what it holds does not depend on which tensors are absent, so measured workspaces hold for every move.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count, pairwise

import numpy as np

from tensile_jax.ir import TensorId
from tensile_jax.plan.analysis.copy_time import copy_in_us, copy_out_us
from tensile_jax.plan.analysis.device_profile import DeviceProfile
from tensile_jax.plan.analysis.absence import Absence
from tensile_jax.plan.analysis.retention import segment_contents
from tensile_jax.plan.search.candidates import Candidates
from tensile_jax.plan.search.choice import Choice, segment_peaks
from tensile_jax.plan.search.copy_windows import Need, windows_without_waiting
from tensile_jax.plan.search.workspace import Measured

_STEP = 1.01  # by which the room grows
_WIDEN_EVERY = 5  # steps; the move `widen` is tried at these and at the first four
_MOST_WORK = 16_000_000  # the bound on copies times moves, summed over the search: about 0.15 s
_EACH_COPY = 500  # what simulating one copy costs regardless of the moves, counted in moves
_MOST_SWAPS = 100  # the largest swaps: only these change one by one
_MOST_TRIALS = 10  # moves that one pass tries to make, the best first
_LEAST_GAIN = 1e-6  # of the step's time: a move must gain more
_WORTH_ANOTHER = 5e-4  # of the step's time: if a pass gains more, another one is made in the same room
_PARTS = (1.0, 0.5, 0.25)  # of the tensors, the smallest first: those whose windows are widened together


@dataclass(frozen=True, slots=True)
class _Swap:
    """One absence, in numbers of segments.

    The copy out is issued right before segment `issued`. The tensor is absent during the segments `[gone, back)`. Its copy in is
    issued right before segment `back`, and segment `used` is the next that needs the tensor. A tensor is copied out for the first
    of its swaps only. `issued` is -1 if the tensor is on the host when the iteration begins. Swaps that are `fixed` never change.
    """

    tensor: TensorId
    nbytes: int
    issued: int
    gone: int
    back: int
    used: int
    absence: Absence
    fixed: bool


def improve(candidates: Candidates, choice: Choice, limit: float, measured: Measured) -> Choice:
    """The choice with fewer swaps or longer windows, no slower and under the limit; the same choice if it swaps nothing."""
    if choice.runs_whole or not candidates[choice.candidate].absences:
        return choice
    search = _Search(candidates, choice, measured)
    search.run(limit)
    return search.choice()


class _Search:
    """The swaps, the peak of each segment, and the step's time, as far as moves have been made."""

    def __init__(self, candidates: Candidates, choice: Choice, measured: Measured) -> None:
        candidate = candidates[choice.candidate]
        self._choice = choice
        self._bounds = choice.boundaries
        self._profile = candidates.profile
        self._peaks = segment_peaks(candidates, choice, measured)
        self._swaps = [swap for several in candidate.absences.values() for swap in self._swaps_of(candidates, several)]
        movable = sorted((t for t in self._swaps if not t.fixed), key=lambda t: (-t.nbytes, t.tensor, t.issued))
        self._small = {(swap.tensor, swap.issued) for swap in movable[_MOST_SWAPS:]}
        self._runs: list[float] = []
        for a, b in pairwise(self._bounds):
            again_us = sum(candidates.rerun_us[p] for p in segment_contents(candidate.retention, a, b).again)
            self._runs.append(
                candidates.profile.launch_us + float(candidates.elapsed_us[b] - candidates.elapsed_us[a]) + again_us
            )
        self._step_us = _step_us(self._swaps, self._runs, candidates.profile)
        self._work_left = _MOST_WORK

    def _swaps_of(self, candidates: Candidates, several: Sequence[Absence]) -> list[_Swap]:
        """The swaps of one tensor: its absences, without those that contain no boundary."""
        bounds, count = self._bounds, len(candidates.graph.operators)
        retention = candidates[self._choice.candidate].retention
        swaps: list[_Swap] = []
        for absence in several:
            t, leave, back = absence.tensor, absence.leave, absence.back
            if bisect_right(bounds, back) <= bisect_right(bounds, leave):
                continue
            issued = bisect_right(bounds, retention.last_need(t, leave))
            swaps.append(
                _Swap(
                    tensor=t,
                    nbytes=candidates.graph.tensors[t].nbytes,
                    issued=issued if leave >= 0 else -1,
                    gone=max(bisect_right(bounds, leave), issued),
                    back=bisect_right(bounds, back) - 1 if back < count else len(bounds),
                    used=bisect_right(bounds, retention.next_need(t, leave)) - 1,
                    absence=absence,
                    fixed=leave < 0 or back >= count,
                )
            )
        return swaps

    def choice(self) -> Choice:
        """The choice with the moves that have been made."""
        absences: dict[TensorId, tuple[Absence, ...]] = {}
        for swap in self._swaps:
            absences[swap.tensor] = (*absences.get(swap.tensor, ()), swap.absence)
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
        """Compute what each move alone would save, then make the best ones that still save time.

        The result is whether another pass in the same room is worth it.
        """
        large = (swap for swap in self._swaps if (swap.tensor, swap.issued) not in self._small)
        moves = [(swap, *move) for swap in large for move in self._moves(swap, room)]
        if not moves:
            return False
        self._work_left -= 2 * len(self._swaps) * (len(moves) + _EACH_COPY)
        steps = _steps_us(self._swaps, [(swap, changed) for swap, changed, _ in moves], self._runs, self._profile)
        saved = [(us - self._step_us) / max(more, 1) for us, (_, _, more) in zip(steps, moves, strict=True)]
        before = self._step_us
        for i in sorted(range(len(moves)), key=lambda i: (saved[i], i))[:_MOST_TRIALS]:
            swap, changed, _ = moves[i]
            if steps[i] >= self._step_us * (1 - _LEAST_GAIN):
                continue
            if swap not in self._swaps or not self._has_room(self._change(swap, changed), room):
                continue
            us = _step_us(self._with(swap, changed), self._runs, self._profile)
            if us < self._step_us * (1 - _LEAST_GAIN):
                self._peaks += self._change(swap, changed)
                self._swaps = self._with(swap, changed)
                self._step_us = us
        return self._step_us < before * (1 - _WORTH_ANOTHER)

    def _widen(self, room: int) -> None:
        """Of several ways to widen many windows together, make the one that saves most time, if there is room for it."""
        movable = [swap for swap in self._swaps if not swap.fixed]
        first = {swap.tensor: swap for swap in reversed(self._swaps)}  # the one that copies its tensor to the host
        wide = windows_without_waiting(
            [Need(t.tensor, t.nbytes, t.issued, t.used, t is first[t.tensor] and t.issued >= 0) for t in movable],
            self._runs,
            self._profile,
        )
        by_size = sorted(wide, key=lambda i: (movable[i].nbytes, movable[i].tensor, movable[i].issued))
        best = self._swaps, self._step_us * (1 - _LEAST_GAIN), np.zeros(len(self._runs))
        for leaves, backs in ((True, True), (False, True), (True, False)):
            for part in _PARTS:
                changed: dict[_Swap, _Swap] = {}
                for i in by_size[: int(part * len(by_size))]:
                    gone = max(movable[i].gone, wide[i].gone) if leaves else movable[i].gone
                    back = min(movable[i].back, wide[i].back) if backs else movable[i].back
                    if gone < back:
                        changed[movable[i]] = self._moved(movable[i], gone, back)
                more = sum((self._change(swap, new) for swap, new in changed.items()), np.zeros(len(self._runs)))
                if not self._has_room(more, room):
                    continue
                swaps = [changed.get(swap, swap) for swap in self._swaps]
                us = _step_us(swaps, self._runs, self._profile)
                self._work_left -= len(swaps) * _EACH_COPY
                if us < best[1]:
                    best = swaps, us, more
        if best[0] is not self._swaps:
            self._swaps, self._step_us, more = best
            self._peaks = self._peaks + more

    def _moved(self, swap: _Swap, gone: int, back: int) -> _Swap:
        absence = swap.absence
        if gone != swap.gone:
            absence = replace(absence, leave=self._bounds[gone] - 1)
        if back != swap.back:
            absence = replace(absence, back=self._bounds[back])
        return replace(swap, gone=gone, back=back, absence=absence)

    def _moves(self, swap: _Swap, room: int) -> list[tuple[_Swap | None, int]]:
        """The moves of one swap for which there is room, each with the bytes that it adds in all; None removes the swap."""
        if swap.fixed:
            return []
        found: list[tuple[_Swap | None, int]] = []
        free = self._peaks + swap.nbytes <= room
        if free[swap.gone : swap.back].all():
            found.append((None, swap.nbytes * (swap.back - swap.gone)))
        back = swap.back
        while back - 1 > swap.gone and free[back - 1]:
            back -= 1
        gone = swap.gone
        while gone + 1 < swap.back and free[gone]:
            gone += 1
        for at in dict.fromkeys((swap.back - 1, back)):
            if back <= at < swap.back:
                found.append((self._moved(swap, swap.gone, at), swap.nbytes * (swap.back - at)))
        for at in dict.fromkeys((swap.gone + 1, gone)):
            if swap.gone < at <= gone:
                found.append((self._moved(swap, at, swap.back), swap.nbytes * (at - swap.gone)))
        return found

    def _change(self, swap: _Swap, changed: _Swap | None) -> np.ndarray:
        """The bytes that the move adds to each segment."""
        more = np.zeros(len(self._runs))
        more[swap.gone : swap.back] += swap.nbytes
        if changed is not None:
            more[changed.gone : changed.back] -= swap.nbytes
        return more

    def _has_room(self, more: np.ndarray, room: int) -> bool:
        """Whether all segments to which `more` adds bytes stay within the room."""
        return bool((self._peaks + more <= room)[more > 0].all())

    def _with(self, swap: _Swap, changed: _Swap | None) -> list[_Swap]:
        return [new for t in self._swaps if (new := changed if t is swap else t) is not None]


def _step_us(swaps: Sequence[_Swap], runs: Sequence[float], profile: DeviceProfile) -> float:
    """The time of a step as `result/simulate.py` predicts it, from the swaps and the time of each segment."""
    count = len(runs)
    out: dict[int, list[tuple[int, TensorId, int]]] = {}
    into: dict[int, list[tuple[int, TensorId, int]]] = {}
    seen: set[TensorId] = set()
    for swap in swaps:
        if swap.issued >= 0 and swap.tensor not in seen:
            out.setdefault(swap.issued, []).append((swap.gone, swap.tensor, swap.nbytes))
        seen.add(swap.tensor)
        if swap.back <= count:
            into.setdefault(swap.back, []).append((swap.used, swap.tensor, swap.nbytes))
    clock = lane_out = lane_in = delay_us = 0.0  # delay_us: what copies take from computation, added to the next segment
    left, come = [0.0] * (count + 1), [0.0] * (count + 1)
    for index in range(count + 1):
        for until, _, nbytes in sorted(out.get(index, ())):
            length = copy_out_us(nbytes, profile)
            lane_out = left[until] = max(lane_out, clock) + length
            delay_us += profile.copy_share * length
        clock = max(clock, left[index])
        for until, _, nbytes in sorted(into.get(index, ())):
            length = copy_in_us(nbytes, profile)
            lane_in = come[until] = max(lane_in, clock) + length
            delay_us += profile.copy_share * length
        if index < count:
            clock = max(clock, come[index]) + runs[index] + delay_us
            delay_us = 0.0
    return max(clock, lane_out, lane_in)


def _steps_us(
    swaps: Sequence[_Swap], moves: Sequence[tuple[_Swap, _Swap | None]], runs: Sequence[float], profile: DeviceProfile
) -> np.ndarray:
    """The times of a step after each of the moves alone, computed together; a copy that a move leaves out has length 0."""
    count, many = len(runs), len(moves)
    copy_us = copy_out_us, copy_in_us  # by direction
    copies: dict[tuple[int, int, int, TensorId], np.ndarray] = {}  # lengths, by (issued, direction, awaited, tensor)

    def copy_out(swap: _Swap) -> tuple[int, int, int, TensorId] | None:
        return (swap.issued, 0, swap.gone, swap.tensor) if swap.issued >= 0 else None

    def copy_in(swap: _Swap) -> tuple[int, int, int, TensorId] | None:
        return (swap.back, 1, swap.used, swap.tensor) if swap.back <= count else None

    def put(copy: tuple[int, int, int, TensorId] | None, which: int | slice, nbytes: int) -> None:
        if copy is not None:
            copies.setdefault(copy, np.zeros(many))[which] = copy_us[copy[1]](nbytes, profile)

    first: dict[TensorId, _Swap] = {}
    second: dict[TensorId, _Swap] = {}
    for swap in swaps:
        if swap.tensor not in first:
            first[swap.tensor] = swap
            put(copy_out(swap), slice(None), swap.nbytes)
        else:
            second.setdefault(swap.tensor, swap)
        put(copy_in(swap), slice(None), swap.nbytes)
    for which, (swap, changed) in enumerate(moves):
        heads = [t for t in (first[swap.tensor], second.get(swap.tensor)) if t is not None and t is not swap]
        if first[swap.tensor] is swap:
            put(copy_out(swap), which, 0)
            head = changed if changed is not None else heads[0] if heads else None
            if head is not None:
                put(copy_out(head), which, head.nbytes)
        put(copy_in(swap), which, 0)
        if changed is not None:
            put(copy_in(changed), which, changed.nbytes)

    clock, delay_us, lanes = np.zeros(many), np.zeros(many), [np.zeros(many), np.zeros(many)]
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
                delay_us = delay_us + profile.copy_share * length
                at += 1
            if direction == 0 or index < count:
                clock = np.maximum(clock, awaited[direction, index])
        if index < count:
            clock, delay_us = clock + runs[index] + delay_us, np.zeros(many)
    return np.maximum(clock, np.maximum(*lanes))
