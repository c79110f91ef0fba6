"""Finds the fastest plan of a small step under a limit: the time search of the oracle (`oracle.py`).

It is a label-setting search, as for shortest paths with resources. A *label* is a state of the device and the host at a boundary,
right after a segment has ended. From a label the search makes every choice:

    which tensors that the last segment used or made begin to leave, and in which order
    for which of the copies to the host the boundary waits; those that have ended by then are gone
    which tensors on the host begin to come back, and in which order
    where the next segment ends, what it leaves behind, and which of the tensors that it uses stay on the device

`build_plan` issues the copies of one boundary in the order in which they are awaited. No other order ends sooner, so the fastest
plan has the same time in both.

A label's time and a lower bound on the time that remains order the search: the first plan that is complete is the fastest. The
bound is the least over the sets of tensors that may be used again (`Oracle.rest_us`); those that are not on the device must come
over the link. Three rules prune the search, and no optimal plan is lost:

    A label is dropped if another one at the same place has the same tensors on the device and on the host, none of its times is
    later, and it may do no less with its tensors.
    An absence is idle if no segment that ran in the meantime would have exceeded the limit with the tensor, or has computed it
    again. A plan without this absence is no slower, unless it is the first of several of the tensor: then it puts a copy on the
    host sooner. So an idle absence must be the first one, and one that is not idle must follow.
    A boundary at which a copy to the device was issued is followed by a segment that runs while the copy does. Otherwise the copy
    could be issued later.

Sets of tensors are the bits of an integer. Times in microseconds.
"""

from collections.abc import Iterator
from heapq import heappop, heappush
from itertools import permutations
from typing import TYPE_CHECKING, NamedTuple

from tensile_jax.plan.result.layout import BEGINS, COPIED, MADE, Layout, Residency
from tensile_jax.plan.search.condensed.condensed_step import members
from tests.plan.subsets import subsets

if TYPE_CHECKING:
    from tests.plan.oracle import Oracle

_SLACK = 1e-3  # microseconds; `build_plan` rounds to a thousandth

Copies = tuple[tuple[int, float], ...]
"""Copies under way: tensors, and when each copy ends."""


class Trail(NamedTuple):
    """The history of a label: a boundary, the tensors there, those that are gone and those that come since the last segment."""

    place: int
    there: int
    gone: int
    coming: int
    before: "Trail | None"


class Label(NamedTuple):
    """The state at a boundary.

    Attributes:
        clock, out, into: when the last segment ended, and when each lane is free.
        device: the tensors on the device.
        host: those of which the host has a copy.
        leaving, coming: the copies under way; those of `leaving` are not in `host` yet.
        fresh: the tensors on the device that begin to leave now or not before they are used again.
        given: the tensors that were a result of a segment.
        twice: those that were one more than once, and can therefore not leave.
        away: the state that was on the host when the iteration began.
        missed: the tensors whose present absence is not idle.
        came: the tensors that have come back before; of these, `owing` are those that must be absent again.
    """

    clock: float
    out: float
    into: float
    device: int
    host: int
    leaving: Copies
    coming: Copies
    fresh: int
    given: int
    twice: int
    away: int
    missed: int
    came: int
    owing: int
    trail: Trail | None

    def key(self) -> tuple[object, ...]:
        return self.device, self.host, frozenset(t for t, _ in self.leaving), frozenset(t for t, _ in self.coming), self.away

    def times(self) -> tuple[float, ...]:
        clock = self.clock
        return (
            clock, max(self.out, clock), max(self.into, clock),
            *(max(end, clock) for _, end in sorted(self.leaving)), *(max(end, clock) for _, end in sorted(self.coming)),
        )  # fmt: skip

    def dominates(self, other: "Label") -> bool:
        """Whether whatever the other one can do, this one can do no later; the two have the same key."""
        if other.fresh & ~self.fresh or self.twice & ~other.twice or self.given & ~other.given:
            return False
        if other.missed & ~self.missed or self.came & ~other.came or self.owing & ~other.owing:
            return False
        return all(x <= y for x, y in zip(self.times(), other.times(), strict=True))


class Ready(NamedTuple):
    """The state right before a segment, with the time that copies take from that segment."""

    label: Label
    delay_us: float


class Labels:
    """The search under one limit."""

    def __init__(self, oracle: "Oracle", limit: float) -> None:
        self._oracle = oracle
        self._limit = limit
        self._evaluator = oracle.evaluator
        self._step = oracle.condensed
        self._rest = oracle.rest_us(limit)
        self._futures: dict[tuple[int, int, int, int], list[tuple[float, float]]] = {}

    def search(self, upper: float) -> tuple[float, Layout] | None:
        """The fastest plan below `upper`, its time and its layout."""
        oracle, count = self._oracle, self._oracle.count
        at: list[dict[tuple[object, ...], list[Label]]] = [{} for _ in range(count + 1)]
        waiting: list[tuple[float, int, int, Label | Ready]] = []
        pushed = 0

        def push(bound: float, place: int, label: Label) -> None:
            nonlocal pushed
            others = at[place].setdefault(label.key(), [])
            if any(o.dominates(label) for o in others):
                return
            others[:] = [o for o in others if not label.dominates(o)] + [label]
            pushed += 1
            heappush(waiting, (bound, -place, pushed, label))

        begin = self._step.at_begin
        for away in subsets(sum(1 << old for old in oracle.pairs)):
            push(0.0, 0, Label(0.0, 0.0, 0.0, begin & ~away, away, (), (), begin & ~away, begin, 0, away, away, 0, 0, None))
        while waiting:
            bound, place, _, state = heappop(waiting)
            place = -place
            if isinstance(state, Ready):
                for end, new in self._next(state, place):
                    if end < count:
                        time = self._bound(new, end)
                        if time < upper:
                            push(time, end, new)
                    else:
                        done = self._ended(new)
                        if done is not None and done.clock < upper:
                            push(done.clock, count, done)
            elif place == count:
                return bound, self._told(state)
            elif any(o is state for o in at[place].get(state.key(), ())):
                for ready in self._at_boundary(state, place):
                    time = max(bound, self._bound(ready.label, place))
                    if time < upper:
                        pushed += 1
                        heappush(waiting, (time, -place, pushed, ready))
        return None

    def _bound(self, label: Label, place: int) -> float:
        """A lower bound on the time of the step."""
        into = max(label.into, label.clock)
        futures = self._futures_of(label, place)
        return max(min((max(label.clock + rest, into + in_us) for rest, in_us in futures), default=float("inf")), label.out)

    def _futures_of(self, label: Label, place: int) -> list[tuple[float, float]]:
        """By set of tensors that are used again: the least time that remains, and the time of the copies to the device.

        What is on the device is used again, what is on the host may be.
        """
        device, host = label.device, label.host & ~label.device & self._oracle.needable[place]
        sent = sum(1 << self._oracle.pairs[old] for old in members(label.away))
        leaving = sum(1 << t for t, _ in label.leaving) & ~sent
        must_come = leaving | label.owing  # besides what is on the host and used again
        key = place, device, host, must_come
        if key not in self._futures:
            in_us, rest = self._evaluator.in_us, self._rest[place]
            found = sorted(
                (float(rest[device | some]), sum(in_us[t] for t in members((some & ~sent) | must_come))) for some in subsets(host)
            )
            best: list[tuple[float, float]] = []
            for remaining, copies in found:
                if remaining < float("inf") and (not best or copies < best[-1][1]):
                    best.append((remaining, copies))
            self._futures[key] = best
        return self._futures[key]

    def _next(self, ready: Ready, a: int) -> Iterator[tuple[int, Label]]:
        """The labels after each segment that may come next, and where these segments end."""
        for b in range(a + 1, self._oracle.count + 1):
            if (a, b) != (0, self._oracle.count) or b == 1:
                for new in self._run(ready, a, b):
                    yield b, new

    def _at_boundary(self, label: Label, a: int) -> Iterator[Ready]:
        """The states after each choice of copies to issue and to await."""
        if a == 0 and self._oracle.base[0] + self._step.bytes_of(label.device) > self._limit:
            return
        share = self._oracle.profile.copy_share
        may_come = self._oracle.needable[a]
        for going in subsets(label.fresh & ~label.host & ~label.twice & self._step.movable):
            for ordered in permutations(members(going)):
                out, leaving, delay_us = label.out, list(label.leaving), 0.0
                for t in ordered:
                    out = max(out, label.clock) + self._evaluator.out_us[t]
                    delay_us += share * self._evaluator.out_us[t]
                    leaving.append((t, out))
                for clock in sorted({label.clock, *(end for _, end in leaving if end > label.clock)}):
                    if any(end - self._evaluator.in_us[t] >= clock for t, end in label.coming):
                        continue
                    gone = sum(1 << t for t, end in leaving if end <= clock)
                    device, host = label.device & ~gone, label.host | gone
                    still = tuple(copy for copy in leaving if not gone >> copy[0] & 1)
                    room = self._limit - self._oracle.base[a] - self._step.bytes_of(device)
                    if room < 0:
                        continue
                    for coming_in in subsets(host & ~device & ~gone & may_come & (label.missed | ~label.came)):
                        if self._step.bytes_of(coming_in) > room:
                            continue
                        for order in permutations(members(coming_in)):
                            into, coming, delay_in_us = label.into, list(label.coming), delay_us
                            for t in order:
                                into = max(into, clock) + self._evaluator.in_us[t]
                                delay_in_us += share * self._evaluator.in_us[t]
                                coming.append((t, into))
                            new = label._replace(
                                clock=clock, out=out, into=into, device=device | coming_in, host=host, leaving=still,
                                coming=tuple(coming), missed=label.missed & ~coming_in,
                                came=label.came | coming_in,
                                owing=(label.owing & ~coming_in) | (coming_in & ~label.missed),
                                trail=Trail(a, device | coming_in, gone, coming_in, label.trail),
                            )  # fmt: skip
                            yield Ready(new, delay_in_us)

    def _run(self, ready: Ready, a: int, b: int) -> Iterator[Label]:
        """The labels after the segment of the places [a, b), by what it leaves behind and what stays on the device."""
        oracle, evaluator = self._oracle, self._evaluator
        label, delay_us = ready
        there, bytes_of = label.device, self._step.bytes_of
        useful = oracle.needable[b]
        leaving = sum(1 << t for t, _ in label.leaving)
        for results in subsets(useful & ~there & ~label.host):
            relevant = there & evaluator.relevant(a, b, results)
            evaluated = evaluator.evaluate(a, b, there, results, 0)
            if evaluated is None or evaluated.account.used & leaving:
                continue
            used = evaluated.account.used
            idle = there & ~used
            if idle & ~useful or label.owing & ~useful:
                continue
            idle_bytes = bytes_of(idle)
            arrived = max((end for t, end in label.coming if used >> t & 1), default=0.0)
            coming = tuple(copy for copy in label.coming if not used >> copy[0] & 1)
            given = label.given | results
            twice = label.twice | (results & label.given)
            for stays in subsets(used & useful):
                option = oracle.option(a, b, relevant, results, stays)
                assert option is not None
                if option.peak + idle_bytes > self._limit:
                    continue
                device = idle | stays | results
                room = self._limit - option.peak - idle_bytes
                absent = label.host & ~there
                missed = label.missed | (absent & evaluated.account.again)
                missed |= sum(1 << t for t in members(absent & ~missed) if self._step.nbytes[t] > room)
                yield label._replace(
                    clock=max(label.clock, arrived) + option.us + delay_us, device=device, host=label.host & (useful | device),
                    coming=coming, fresh=stays | results, given=given, twice=twice, missed=missed & useful,
                    came=label.came & useful,
                )  # fmt: skip

    def _ended(self, label: Label) -> Label | None:
        """The complete plan, its clock being the time of the step; None if a result is missing, or something is left."""
        oracle = self._oracle
        sent = sum(1 << new for old, new in oracle.pairs.items() if label.away >> old & 1)
        wanted = self._step.at_end & ~sent
        leaving = sum(1 << t for t, _ in label.leaving)
        going = label.device & sent & ~leaving
        if label.device & ~leaving & ~wanted & ~sent or leaving & ~sent or sent & ~label.device & ~label.host:
            return None
        if going & ~label.fresh or going & label.twice:
            return None
        coming = wanted & ~label.device
        if coming & ~(label.host & label.missed) or label.owing & ~coming:
            return None
        if oracle.base[oracle.count] + self._step.bytes_of(wanted) > self._limit:
            return None
        out, into, clock = label.out, label.into, label.clock
        for t in members(going):
            out = max(out, clock) + self._evaluator.out_us[t]
        if going | leaving:
            clock = max(clock, out)
        for t in members(coming):
            into = max(into, clock) + self._evaluator.in_us[t]
        trail = Trail(oracle.count, wanted, going | leaving, coming, label.trail)
        end = max(clock, out, into)
        return label._replace(clock=end, out=end, into=end, device=wanted, leaving=(), coming=(), trail=trail)

    def _told(self, label: Label) -> Layout:
        """The layout of a complete plan."""
        trails: list[Trail] = []
        trail = label.trail
        while trail is not None:
            trails.append(trail)
            trail = trail.before
        trails.reverse()
        residencies: dict[int, list[Residency]] = {}
        for t in range(len(self._step.tensors)):
            found: list[Residency] = []
            for j, (_, there, gone, coming, _) in enumerate(trails):
                if gone >> t & 1:
                    if found and found[-1].last == j - 1:
                        found[-1] = found[-1]._replace(leaves=True)
                    else:
                        found.append(Residency(j, j - 1, BEGINS if j == 0 else MADE, True))
                if there >> t & 1:
                    if coming >> t & 1:
                        if found and found[-1].arrival == COPIED:
                            found[-1] = found[-1]._replace(leaves=True)
                        found.append(Residency(j, j, COPIED, False))
                    elif found and found[-1].last == j - 1 and not found[-1].leaves:
                        found[-1] = found[-1]._replace(last=j)
                    else:
                        found.append(Residency(j, j, BEGINS if j == 0 else MADE, False))
            if found:
                residencies[t] = found
        return self._oracle.layout(
            tuple(trail.place for trail in trails), {t: tuple(several) for t, several in residencies.items()}
        )
