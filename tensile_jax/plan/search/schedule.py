"""Represents a plan while it is searched: where a step is cut into segments, and when each tensor is on the device.

A *segment* is a stretch of operators that is compiled as one executable. The search works on a *condensed step*, the step
reduced to its large tensors and to *nodes*, groups of consecutive operators (`condensed/condensed_step.py`). A schedule cuts
the nodes into segments 0 .. k - 1. Boundary j lies before segment j, and boundary k at the end of the iteration.

The search decides when each *significant* tensor is on the device: a large tensor that XLA writes to memory, or that is
expensive to compute again. Its *residencies* are the intervals in which it is on the device (`result/layout.py`). A residency
begins when the iteration begins, when a segment makes the tensor (for the first time or again), or when the copy to the device
is issued. It ends after the last segment that needs the tensor, or later, when the tensor's copy to the host has ended. A
segment that needs the tensor outside its residencies computes it again, for itself alone (`cost/segment_account.py`).

A change has two steps. `set_residencies` replaces the residencies of one tensor, and returns the segments that this affects.
`settle` computes the time and memory of these segments again. A segment that no longer computes this tensor again also no longer
needs the tensors from which it did. So `settle` ends the residency of any tensor earlier if its last segments do not need it any
more. Since that affects further segments, `settle` repeats both until nothing changes.

The time of the step, with its copies, is simulated when it is first asked for (`cost/timing.py`).

Sizes in bytes, times in microseconds.
"""

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from itertools import accumulate
from math import sqrt

from tensile_jax.plan.result.layout import BEGINS, COPIED, MADE, Residency, is_swapped
from tensile_jax.plan.search.condensed.condensed_step import members
from tensile_jax.plan.search.cost.segment_account import SegmentAccount
from tensile_jax.plan.search.cost.segment_evaluator import Evaluator
from tensile_jax.plan.search.cost.timing import Copies, CopiesOfAll, Timing, timed

_MOST_ROUNDS = 50  # of `settle`; a change that needs more is not made (`make bench-constants`)

Several = tuple[Residency, ...]

UNSEEN = 0, 0, -1, 0, 0
"""What a segment was evaluated for that was not evaluated yet (`Schedule.seen`)."""


@dataclass(slots=True, eq=False)
class Schedule:
    """A schedule, and what follows from it.

    Attributes:
        cuts: where it is cut, as indices of `Condensed.boundaries`.
        residencies: by tensor.
        accounts: by segment, what it runs and needs. `peaks`, `us` and `written_us` are its memory, its time, and the time of
            writing results that would not be written within a longer segment.
    """

    evaluator: Evaluator
    cuts: list[int]
    residencies: list[Several]
    at: list[int]  # by boundary, the tensors on the device
    after: list[int]  # by segment, those on the device when it has ended
    copies: CopiesOfAll
    accounts: list[SegmentAccount]
    held: list[int]  # by boundary, bytes of `at`
    peaks: list[int]
    us: list[float]
    written_us: list[float]
    seen: list[tuple[int, int, int, int, int]]  # what each segment was evaluated for, and what it needs beside `held`
    _timing: Timing | None = None
    _cost: float | None = None

    def copy(self, cuts: Sequence[int] | None = None) -> "Schedule":
        """Another schedule, which may be changed; with other `cuts`, its other lists are still as those of this one."""
        return Schedule(
            self.evaluator, list(cuts or self.cuts), self.residencies[:], self.at[:], self.after[:], self.copies.copy(),
            self.accounts[:], self.held[:], self.peaks[:], self.us[:], self.written_us[:], self.seen[:],
        )  # fmt: skip

    def recount_copies(self, swapped: Iterable[int]) -> None:
        """Count the copies of these tensors anew, and those of no others."""
        self.copies = CopiesOfAll(self.evaluator.copies_us, (t for t in swapped if is_swapped(self.residencies[t])))

    @property
    def swapped(self) -> Set[int]:
        """The tensors that are swapped."""
        return self.copies.of.keys()

    @property
    def count(self) -> int:
        return len(self.after)

    @property
    def peak(self) -> int:
        return max(self.peaks)

    @property
    def timing(self) -> Timing:
        """When what happens in a step. The schedule must not be changed any more."""
        if self._timing is None:
            known = self._known_copies()
            self._timing = timed(self.us, known.out_us, known.into_us, self.evaluator.profile.copy_share)
        return self._timing

    @property
    def keeps_host_limit(self) -> bool:
        """Whether the host holds no more than it may (`result/memory_curve.py`). The schedule must not be changed any more."""
        return not self.swapped or self.evaluator.host_limit == float("inf") or self.host_peak <= self.evaluator.host_limit

    @property
    def host_peak(self) -> int:
        """The most bytes in host memory at any boundary."""
        change = [0] * (len(self.after) + 2)
        for t in self.swapped:
            begin, end = self.host_span(t)
            change[begin] += self.evaluator.condensed.nbytes[t]
            change[end + 1] -= self.evaluator.condensed.nbytes[t]
        return max(accumulate(change))

    def host_span(self, t: int) -> tuple[int, int]:
        """The first and the last boundary at which the host holds a copy of the swapped tensor t."""
        copies = self._known_copies().of[t]
        assert copies is not None
        rests = self.residencies[t][-1].leaves or not copies.into
        return 0 if copies.out is None else copies.out[0], len(self.after) if rests else copies.into[-1][1]

    def _known_copies(self) -> CopiesOfAll:
        known = self.copies
        for t, copies in known.of.items():
            if copies is None:
                known.find(t, self._copies_of(t))
        return known

    @property
    def step_us(self) -> float:
        """The time of a step."""
        return self.timing.step_us

    @property
    def cost(self) -> float:
        """The time of a step, what results that cross boundaries cost in addition, and a little for each segment."""
        if self._cost is None:
            self._cost = self._cost_at(self.step_us)
        return self._cost

    @property
    def least_cost(self) -> float:
        """A lower bound on the cost: as if no segment waited for a copy, and copies slowed nothing."""
        return self._cost_at(sum(self.us))

    def us_of(self, i: int, j: int) -> float:
        """The cost of the segments i .. j - 1 without copies."""
        return sum(self.us[i:j]) + sum(self.written_us[i:j]) + (j - i) * self.evaluator.compiling_us

    def least_cost_with(self, i: int, j: int, us: float) -> float:
        """A lower bound on the cost with others in place of the segments i .. j - 1, which cost so much without copies."""
        return self.least_cost - self.us_of(i, j) + us

    def _cost_at(self, step_us: float) -> float:
        return step_us + sum(self.written_us) + len(self.after) * self.evaluator.compiling_us

    def excess(self, limit: float) -> float:
        """The bytes by which segments exceed the limit, each weighted with the square root of the segment's number of nodes.

        Without weights, a long segment far above the limit could seem better than its two halves, each of which exceeds the limit
        by less.
        """
        cuts, bounds = self.cuts, self.evaluator.condensed.boundaries
        return sum((p - limit) * sqrt(bounds[cuts[j + 1]] - bounds[cuts[j]]) for j, p in enumerate(self.peaks) if p > limit)

    def have(self, j: int) -> int:
        """All tensors that exist at some time during segment j."""
        return self.at[j] | self.evaluator.made(self.cuts[j], self.cuts[j + 1]) | self.accounts[j].again

    def may_be_swapped(self, t: int) -> bool:
        """Whether a swap of tensor t frees memory: of what an executable would hold, only what it finds or leaves on the host."""
        step = self.evaluator.condensed
        several = self.residencies[t]
        if not step.movable >> t & 1 or not several:
            return False
        if not step.held >> t & 1:
            return True
        return several[0].arrival == COPIED if step.at_begin >> t & 1 else several[-1].leaves

    # -- changes ------------------------------------------------------------------------------------------------------------

    def set_residencies(self, t: int, residencies: Several) -> set[int]:
        """Replace the residencies of tensor t; the segments that must be evaluated again."""
        before, bit, nbytes, k = self.residencies[t], 1 << t, self.evaluator.condensed.nbytes[t], len(self.after)
        was_at, was_after = _at_and_after(before, k)
        now_at, now_after = _at_and_after(residencies, k)
        at, after, held = self.at, self.after, self.held
        moved_at, moved_after = was_at ^ now_at, was_after ^ now_after
        for j in members(moved_at):
            at[j] ^= bit
            held[j] += nbytes if now_at >> j & 1 else -nbytes
        for j in members(moved_after):
            after[j] ^= bit
        touched = set(members(moved_at | moved_after))
        seen, peaks = self.seen, self.peaks
        for j in members(moved_at & moved_after):  # what such a segment leaves behind is the same
            if 0 < j < k - 1 and not seen[j][0] >> t & 1:
                peaks[j] = held[j] + seen[j][4]
                touched.discard(j)
        if k in touched:  # the last segment counts what is there at the end
            touched.discard(k)
            touched.add(k - 1)
        if [stay for stay in before if stay.first == 0] != [stay for stay in residencies if stay.first == 0]:
            touched.add(0)  # it counts state that leaves before it, or comes
        self.residencies[t] = residencies
        if is_swapped(residencies):
            self.copies.forget(t)
        else:
            self.copies.drop(t)
        return touched

    def refresh(self, j: int) -> bool:
        """Evaluate segment j again; False if it cannot run."""
        evaluator = self.evaluator
        step = evaluator.condensed
        there, after = self.at[j], self.after[j]
        wanted = after & ~there
        aliased = evaluator.aliased(there, after, wanted)
        a, b = self.cuts[j], self.cuts[j + 1]
        asked, there_then, wanted_then, aliased_then, needs = self.seen[j]
        if there & asked != there_then or wanted != wanted_then or aliased != aliased_then:
            evaluated = evaluator.evaluate(a, b, there, wanted, aliased)
            if evaluated is None:
                return False
            found, result_bytes, self.written_us[j], asked = evaluated
            for t in members(self.accounts[j].used ^ found.used):
                if t in self.copies.of:
                    self.copies.forget(t)
            self.accounts[j] = found
            workspace, _ = evaluator.workspace(a, b, found, wanted)
            needs = step.base_bytes + int(step.small_bytes[a, b]) + result_bytes + workspace
            self.seen[j] = asked, there & asked, wanted, aliased, needs
            self.us[j] = evaluator.profile.launch_us + found.us
        self.peaks[j] = self.held[j] + needs
        if j == 0:  # state may leave before the first segment, or come
            begin = step.base_bytes + int(step.small_bytes[0, 0]) + self.held[0]
            for t in self.swapped:
                for first, last, arrival, _ in self.residencies[t]:
                    if first == 0:
                        begin += step.nbytes[t] * ((arrival == BEGINS and last < 0) - (arrival == COPIED))
            self.peaks[j] = max(self.peaks[j], begin)
        if j == len(self.after) - 1:  # nothing else is counted at the end of the iteration
            end = step.base_bytes + int(step.small_bytes[b, b]) + self.held[j + 1]
            self.peaks[j] = max(self.peaks[j], end)
        return True

    def settle(self, changed: Iterable[int], idle: Iterable[int] = ()) -> bool:
        """Evaluate changed segments, and release earlier what nothing needs any more.

        False if a segment cannot run, or if this takes too many rounds.
        """
        waiting, idle = set(changed), set(idle)
        rounds = 0
        self.evaluator.count_schedule()
        while waiting or idle:
            rounds += 1
            if rounds > _MOST_ROUNDS:
                return False
            for j in sorted(waiting):
                before = self.accounts[j].used
                if not self.refresh(j):
                    return False
                idle.update(members(before & ~self.accounts[j].used))
            waiting = set[int]()
            for t in sorted(idle):
                shorter = self._no_longer_than_needed(t)
                if shorter != self.residencies[t]:
                    waiting |= self.set_residencies(t, shorter)
            idle = set[int]()
        return True

    def first_use(self, t: int, first: int, last: int) -> int:
        """The first of these segments that needs tensor t; last + 1 if none does."""
        for j in range(first, min(last, len(self.after) - 1) + 1):
            if self.accounts[j].used >> t & 1:
                return j
        return last + 1

    def last_use(self, t: int, first: int, last: int) -> int:
        """The last of these segments that needs tensor t; first - 1 if none does."""
        for j in range(min(last, len(self.after) - 1), first - 1, -1):
            if self.accounts[j].used >> t & 1:
                return j
        return first - 1

    def _no_longer_than_needed(self, t: int) -> Several:
        k = len(self.after)
        returned = self.evaluator.condensed.at_end >> t & 1
        found: list[Residency] = []
        on_host = False
        for stay in self.residencies[t]:
            first, last, arrival, leaves = stay
            if last == k and returned:
                found.append(stay)
                continue
            need = self.last_use(t, first, last)
            if leaves and not on_host and arrival != COPIED:  # the copy to the host may take until `last`
                found.append(stay)
                on_host = True
                continue
            on_host |= arrival == COPIED
            if need < first and arrival == BEGINS:
                need = 0
            if need >= first:
                found.append(Residency(first, need, arrival, leaves and on_host))
        while found and found[-1].leaves and not self._stays_on_host(t):  # a copy to the host is for a later return only
            first, last, arrival, _ = found.pop()
            need = max(self.last_use(t, first, last), 0 if arrival == BEGINS else -1)
            if need >= first:
                found.append(Residency(first, need, arrival, False))
        return tuple(found)

    def _stays_on_host(self, t: int) -> bool:
        old = self.evaluator.old_of.get(t)
        return old is not None and bool(self.residencies[old]) and self.residencies[old][0].arrival == COPIED

    def _copies_of(self, t: int) -> Copies:
        """The copies of tensor t: one to the host at most, since it is not copied again after it came back."""
        k = len(self.after)
        out: tuple[int, int] | None = None
        into: list[tuple[int, int]] = []
        for first, last, arrival, leaves in self.residencies[t]:
            if arrival == COPIED:
                use = self.first_use(t, first, min(last, k - 1))
                into.append((first, min(use, k) if use <= last else k))
            if leaves and out is None and not into:
                out = max(self.last_use(t, first, last) + 1, first), last + 1
        return Copies(out, tuple(into))


def _at_and_after(residencies: Several, k: int) -> tuple[int, int]:
    """The boundaries at which a tensor with these residencies is on the device, and the segments after which it is, as sets."""
    at = after = 0
    for first, last, arrival, leaves in residencies:
        at |= _stretch(first, last)
        after |= _stretch(first - 1 if arrival == MADE else first, last if leaves and last < k else last - 1)
    return at, after


def _stretch(first: int, last: int) -> int:
    return (1 << last + 1) - (1 << first) if first <= last else 0
