"""Averages the measured latencies of a running plan, and makes a new plan if they differ from the predicted ones.

TENSILE section IV-E, "Scheduling Plan Updating":

    average <- (1 - w) * average + w * measured     for every segment: the exponentially weighted moving average of its latency.
                                                    w is the weight of the newest measurement (`_WEIGHT`)
    s                                               the sum of the segments' predicted latencies, from which the plan was made
    s'                                              the sum of the newest averages of all segments
    drift = |s' - s| / s                            the paper's average latency rate of change

The step is planned again once two things hold: the drift has exceeded the user's threshold in several measured iterations in a
row, and the plan has run for much longer than planning takes. The new plan uses corrected latencies. The predicted latency of
an operator is multiplied by the average latency of the operator's segment, and divided by the predicted latency of that
segment. (A *segment* is a stretch of operators that is compiled as one executable.)

Differences from the paper: The paper measures every operator. Here only a segment can be measured, so all its operators are
corrected by the same factor. The paper updates the plan whenever the threshold is exceeded. Here the new plan must also be
predicted to be faster than the old one, because its segments must be compiled. Otherwise the old plan keeps its segments and
copies, and only its predicted times change.

Latencies are in microseconds.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from tensile_jax.ir import OperatorId
from tensile_jax.plan.analysis.copy_time import copy_in_us, copy_out_us
from tensile_jax.plan.analysis.corrections import Corrections
from tensile_jax.plan.planner import Choice, CompiledSizes, Goal, Planner
from tensile_jax.plan_format import Plan, Segment, unranged

WORTH = 10.0  # a plan must have run this many times as long as planning takes before the next is made; not tuned

WATCHED_FIRST = 3  # iterations measured when a plan begins: a slow first one, a measurement, and its confirmation
_WATCHED_EVERY = 50  # measuring an iteration costs up to a tenth of its time, since it waits for each segment; not tuned
_WATCHED_AFTER_UNUSUAL = 3  # as many as confirm a drift, and one more

_WEIGHT = 0.5  # of the newest measurement: less is steadier but follows later, and iterations are measured rarely
_MOST_FACTOR = 32.0  # a measurement further from its prediction is not of the same operation; not tuned
_LEAST_COPIED = 1_000_000  # bytes: the time of smaller copies says nothing of the link's rate
_CONFIRMING = 2  # consecutive measured iterations whose drift must exceed the threshold
_RENEWED_TIME = 0.95  # of the predicted time of the plan in use: a new plan must be at least this fast, since it is compiled
_SETTLING = 3  # iterations whose pace is known before one is called unusual
_REMEMBERED = 5  # iterations behind the median pace: it ignores two unusual ones, and follows three in a row


@dataclass(frozen=True, slots=True)
class Copied:
    """Copies of one iteration, in one direction: their bytes, and how long they took."""

    nbytes: int = 0
    us: float = 0.0


@dataclass(frozen=True, slots=True)
class Tracked:
    """What was measured of one plan so far. A new plan begins with an empty record.

    Attributes:
        segment_us: the moving average of each segment's latency, with its launch; empty before the first iteration.
        out, into: the latest copies that were measured.
        above: in how many of the latest measured iterations, one after another, the drift exceeded the threshold.
    """

    segment_us: tuple[float, ...] = ()
    out: Copied = Copied()
    into: Copied = Copied()
    above: int = 0

    def with_iteration(
        self, plan: Plan, segment_us: Sequence[float], *, out: Copied, into: Copied, threshold: float
    ) -> "Tracked":
        """The record after one more measured iteration; the same record if the measurement is none.

        Args:
            segment_us: the latency of each segment of `plan`. If any of them is not a positive number, nothing is recorded: a
                clock may have been set back, or may be too coarse.
        """
        if len(segment_us) != len(plan.segments) or not all(0 < us < math.inf for us in segment_us):
            return self
        average = tuple(segment_us)
        if self.segment_us:
            average = tuple((1 - _WEIGHT) * old + _WEIGHT * new for old, new in zip(self.segment_us, segment_us, strict=True))
        found = replace(
            self,
            segment_us=average,
            out=out if _is_measured(out) else self.out,
            into=into if _is_measured(into) else self.into,
        )
        above = found.drift(plan) > threshold
        return replace(found, above=self.above + 1 if above else 0)

    def drift(self, plan: Plan) -> float:
        """|s' - s| / s, as above; 0 if nothing was measured."""
        if not self.segment_us:
            return 0.0
        then, now = _sum_us(plan), sum(self.segment_us)
        return abs(now - then) / then if then > 0 else 0.0

    def is_due(self, *, run_s: float, planning_s: float) -> bool:
        """Whether a new plan is due: the drift is confirmed, and the plan in use has run for long enough to make another one.

        Args:
            run_s: for how long the plan in use has run.
            planning_s: how long it takes to make a plan.
        """
        return self.above >= _CONFIRMING and run_s >= WORTH * planning_s


def _is_measured(copied: Copied) -> bool:
    return copied.nbytes >= _LEAST_COPIED and 0 < copied.us < math.inf


def _sum_us(plan: Plan) -> float:
    return sum(s.latency_us for s in plan.segments) + plan.launch_us * len(plan.segments)


@dataclass(frozen=True, slots=True)
class Pace:
    """How long iterations take from begin to begin, which is known without measuring: the median of the latest ones.

    After an unusual iteration, the next ones are measured. Nothing else follows from the pace, because it includes the user's own
    work between iterations. The median hides one unusual iteration, so a change of load right after it is still noticed.
    """

    latest_us: tuple[float, ...] = ()

    @property
    def median_us(self) -> float:
        """The median of the latest iterations; 0 if there are none."""
        return sorted(self.latest_us)[len(self.latest_us) // 2] if self.latest_us else 0.0

    def with_iteration(self, us: float) -> "Pace":
        """The pace after one more iteration."""
        return Pace((*self.latest_us[-_REMEMBERED + 1 :], us)) if 0 < us < math.inf else self

    def is_unusual(self, us: float, threshold: float) -> bool:
        """Whether an iteration that took `us` differs from those before it by more than the threshold."""
        if len(self.latest_us) < _SETTLING or not 0 < us < math.inf:
            return False
        median_us = self.median_us
        return abs(us - median_us) > threshold * median_us


@dataclass(frozen=True, slots=True)
class Follower:
    """Follows one plan while it runs: says which iterations are measured, and when a new plan is due.

    Attributes:
        began_s: when the plan began to run, in seconds of any clock.
        threshold: the drift above which a new plan is made; None: never.
        iterations: how many iterations have begun under the plan.
        is_watched: whether the latest iteration is measured.
        watched: how many iterations were measured.
        watch_next: how many of the next iterations are measured, since one was unusual.
        tracked: the latencies of the plan's segments.
        pace: how long the plan's iterations take.
    """

    began_s: float
    threshold: float | None = None
    iterations: int = 0
    is_watched: bool = False
    watched: int = 0
    watch_next: int = 0
    tracked: Tracked = Tracked()
    pace: Pace = Pace()

    def begun(self, *, look: bool = False) -> "Follower":
        """One more iteration has begun. It is measured if it is among the first, a fiftieth, or soon after an unusual one.

        Args:
            look: whether it is measured in any case.
        """
        iterations = self.iterations + 1
        watched = look or is_watched(iterations) or self.watch_next > 0
        return replace(
            self,
            iterations=iterations,
            is_watched=watched,
            watched=self.watched + watched,
            watch_next=max(self.watch_next - 1, 0),
        )

    def paced(self, us: float) -> "Follower":
        """The follower after an iteration of `us` microseconds. If that is unusual, the next iterations are measured."""
        if self.threshold is None:
            return self
        unusual = self.pace.is_unusual(us, self.threshold) and not self.watch_next
        watch_next = _WATCHED_AFTER_UNUSUAL if unusual else self.watch_next
        return replace(self, pace=self.pace.with_iteration(us), watch_next=watch_next)

    def measured(self, plan: Plan, segment_us: Sequence[float], *, out: Copied = Copied(), into: Copied = Copied()) -> "Follower":
        """The follower after the latencies of segments were measured. The first iteration, which is slower, does not count."""
        if self.threshold is None or self.iterations <= 1:
            return self
        tracked = self.tracked.with_iteration(plan, segment_us, out=out, into=into, threshold=self.threshold)
        return replace(self, tracked=tracked)

    def drift(self, plan: Plan) -> float | None:
        """|s' - s| / s of the plan; None before anything was measured of it, and if it is not followed."""
        return self.tracked.drift(plan) if self.threshold is not None and self.tracked.segment_us else None

    def reason_to_renew(self, plan: Plan, *, now_s: float, planning_s: float) -> str | None:
        """A sentence about why a new plan is due; None if none is.

        Args:
            now_s: what the clock of `began_s` shows.
            planning_s: how long it takes to make a plan.
        """
        if self.threshold is None or not self.tracked.is_due(run_s=now_s - self.began_s, planning_s=planning_s):
            return None
        return reason_for(plan, self.tracked, iterations=self.iterations, threshold=self.threshold)

    def forgetting(self) -> "Follower":
        """The follower of the same plan, of which nothing is measured yet."""
        return replace(self, tracked=Tracked())

    def restarted(self, now_s: float) -> "Follower":
        """The follower of the next plan, which begins to run now."""
        return Follower(now_s, self.threshold)


def is_watched(iteration: int) -> bool:
    """Whether iteration number `iteration` of a plan, counted from one, is measured: the first three, and then every fiftieth."""
    return iteration <= WATCHED_FIRST or iteration % _WATCHED_EVERY == 0


def corrections_from(planner: Planner, plan: Plan, tracked: Tracked) -> Corrections:
    """The corrections with which `planner` predicts for the segments of `plan` what was measured of them.

    `plan` was made by `planner`. If that was corrected itself, the result includes its corrections. An operator that several
    segments run again gets the mean of their factors.
    """
    before, profile = planner.model.corrections, planner.model.profile
    place = {op.id: place for place, op in enumerate(planner.graph.operators)}
    first, again = list(before.first), list(before.again)
    factors = [_factor(s, us - plan.launch_us) for s, us in zip(plan.segments, tracked.segment_us, strict=True)]
    reruns: dict[OperatorId, list[float]] = {}
    for segment, factor in zip(plan.segments, factors, strict=True):
        for o in unranged(segment.operators):
            first[place[o]] *= factor
        for o in unranged(segment.recomputes):
            reruns.setdefault(o, []).append(factor)
    own = {o: factor for s, factor in zip(plan.segments, factors, strict=True) for o in unranged(s.operators)}
    for o, factor in own.items():
        several = reruns.get(o) or [factor]
        again[place[o]] *= sum(several) / len(several)
    out, into = before.out, before.into
    if tracked.out.nbytes:
        out *= _limited(tracked.out.us / copy_out_us(tracked.out.nbytes, profile))
    if tracked.into.nbytes:
        into *= _limited(tracked.into.us / copy_in_us(tracked.into.nbytes, profile))
    return Corrections(tuple(first), tuple(again), out, into)


def _factor(segment: Segment, measured_us: float) -> float:
    """The measured time of a segment, without its launch, divided by the predicted one."""
    return _limited(measured_us / segment.latency_us) if measured_us > 0 and segment.latency_us > 0 else 1.0


def _limited(factor: float) -> float:
    return min(max(factor, 1 / _MOST_FACTOR), _MOST_FACTOR)


def reason_for(plan: Plan, tracked: Tracked, *, iterations: int, threshold: float) -> str:
    """A sentence that says why `plan` is replaced after `iterations` iterations."""
    now_us = sum(tracked.segment_us)
    drift = tracked.drift(plan)
    return (
        f"After {iterations} iterations under the plan before, segments took {now_us / 1e3:.4g} ms, {drift:.0%} "
        f"{'more' if now_us > _sum_us(plan) else 'less'} than that plan was made for (threshold {threshold:.0%})."
    )


class Renewal(NamedTuple):
    """What to run from now on. If `changed` is false, it is the choice in use, and nothing must be compiled."""

    choice: Choice
    changed: bool


def choose_again(planner: Planner, corrections: Corrections, choice: Choice, goal: Goal, measured: CompiledSizes) -> Renewal:
    """The policy's choice with these corrections, if it is predicted to be clearly faster than `choice`; otherwise `choice`.

    Args:
        planner: without corrections.
        choice: the choice in use, which keeps the limit.
    """
    corrected = planner.corrected(corrections)
    found = corrected.plan(goal, measured)
    now = corrected.plan_of(choice, goal, measured)
    if found is None or now is None or found.choice.runs_whole or found.choice.key == choice.key:
        return Renewal(choice, False)
    faster = found.plan.step_us <= _RENEWED_TIME * now.step_us
    return Renewal(found.choice, True) if faster else Renewal(choice, False)
