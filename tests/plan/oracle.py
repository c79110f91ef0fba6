"""Finds, by exact search, the fastest of all plans of a small step under a limit, and the least peak of any plan.

Tests and `make bench-gap` compare the planner with this oracle. Memory and workspaces are those of the planner's own account
(`plan/search/cost/segment_account.py`), and times are those of `build_plan`. Every place between two operators is a possible
boundary.
The oracle considers every layout (`plan/result/layout.py`) of at least two segments in which

    boundaries   are any set of places
    residencies  are any set for each significant tensor (`plan/search/condensed/condensed_step.py`), with any copies of it over
                 the link
    nothing      is kept for longer than needed: a residency ends with a segment that uses the tensor, with the end of the
                 iteration if the step returns the tensor, or with a copy to the host
    absences     last for one segment at least

and the step as one executable. The last rule is that of `plan/search/schedule.py`. A tensor that is kept although nothing uses it
can only lower the peak because the workspace is an estimate: its buffer would count as a result in the place of workspace. A
tensor that leaves and is back at the same boundary has a copy on the host early, for a later absence. To consider that makes the
search for one plan take minutes instead of seconds; `auto` does it, and was faster by 0.6 % in one of 904 cases for this reason
(`make bench-gap`).

An *option* is a way to run the operators at the places [a, b) in one segment: the tensors that it uses (those that it needs and
finds on the device; it computes the other ones again) and the results that it leaves behind. What else is on the device adds its
bytes and changes nothing. If copies took no time, then every tensor would be on the host wherever no segment uses it, and a plan
would be a sequence of options in which each used tensor is *promised*: it was a result before, or an input of the step. Both
searches go through the sets of promised tensors at each place, from the end of the step to its beginning:

    least peak      the least maximum over such sequences; nothing is lost, because time does not matter
    least time      the least sum over the sequences whose options fit under the limit is a lower bound on the time of any plan;
                    `labels.py` finds the fastest plan with this bound

`unpruned.py` looks at every layout, and tests compare the two. All significant tensors of the step must be large enough to be
swapped. Sets of tensors are the bits of an integer. Sizes in bytes, times in microseconds.
"""

from dataclasses import dataclass
from functools import cache
from math import ceil
from typing import Literal, NamedTuple

import numpy as np

from tensile_jax.ir import Graph
from tensile_jax.plan import CompiledSizes, DeviceProfile
from tensile_jax.plan.result.build import build_plan
from tensile_jax.plan.result.check import check
from tensile_jax.plan.result.layout import Layout, contents_of
from tensile_jax.plan.search.choice import whole_peak, with_small_tensors, workspaces_of
from tensile_jax.plan.search.condensed.condensed_step import members
from tensile_jax.plan.search.starts.start_schedules import assemble
from tensile_jax.plan.search.step_model import StepModel
from tensile_jax.plan_format import Plan
from tests.builders import header_for
from tests.plan.labels import Labels
from tests.plan.subsets import subsets

_SLACK = 1e-3  # microseconds; `build_plan` rounds to a thousandth


class Found(NamedTuple):
    """The fastest plan under a limit: the time of its step, and its layout, which is None if the step runs as one executable."""

    step_us: float
    layout: Layout | None


@dataclass(frozen=True, slots=True)
class Option:
    """A segment: the sets of tensors that it uses and of its results, its time with its launch, and its peak.

    `aliased` are the results that take over the memory of tensors in `used`, and `replaced` are these tensors. They are released
    with the segment. The peak counts nothing else that is on the device, but what the caller owns and small tensors.
    """

    used: int
    results: int
    replaced: int
    us: float
    peak: int


class Oracle:
    """The options of every segment of one step, and the searches that use them."""

    def __init__(self, graph: Graph, profile: DeviceProfile, *, state_memory: Literal["device", "any"] = "device") -> None:
        self.graph = graph
        self.profile = profile
        self.state_memory = state_memory
        self.step = StepModel(graph, profile, state_may_stay_out=state_memory == "any")
        self.count = len(graph.operators)
        self.evaluator = self.step.evaluator_for(tuple(range(self.count + 1)))
        self.condensed = self.evaluator.condensed
        self.tensors = [t for (t,) in self.condensed.tensors]
        n = len(self.tensors)
        self.whole_peak = whole_peak(self.step, CompiledSizes())
        self.base = [
            self.condensed.base_bytes + int(self.condensed.small_bytes[b, b]) for b in range(self.count + 1)
        ]  # what is there beside significant tensors when nothing runs
        if self.condensed.movable != (1 << n) - 1:
            raise ValueError("The oracle takes steps in which every significant tensor may be swapped; make the tensors larger.")
        self.pairs = dict(self.condensed.pairs)
        end = self.condensed.at_end
        self.needable = [self.evaluator.relevant(b, self.count, end) | end for b in range(self.count)] + [end]
        """By place, the tensors that a segment which begins there or later may use, and those that the step returns."""
        made = [
            self.condensed.at_begin | self.evaluator.made(0, b) if b else self.condensed.at_begin for b in range(self.count + 1)
        ]
        self.needable = [those & there for those, there in zip(self.needable, made, strict=True)]
        self.small = {t.id for t in graph.tensors} - set(self.tensors)
        self.small -= {t for t in self.small if self.step.classes[1][t]}  # derived tensors are never stored
        self.option = cache(self._option)
        self.options = cache(self._options)

    # -- segments -----------------------------------------------------------------------------------------------------------

    def _option(self, a: int, b: int, there: int, results: int, kept: int) -> Option | None:
        """The segment of the places [a, b) that begins with the tensors `there`; None if it cannot run.

        `kept` are those of `there` that are not released with the segment.
        """
        step, evaluator = self.condensed, self.evaluator
        aliased = evaluator.aliased(there, kept, results)
        evaluated = evaluator.evaluate(a, b, there, results, aliased)
        if evaluated is None:
            return None
        account, result_bytes, _, _ = evaluated
        workspace, _ = evaluator.workspace(a, b, account, results)
        peak = step.base_bytes + int(step.small_bytes[a, b]) + step.bytes_of(account.used) + result_bytes + ceil(workspace)
        return Option(account.used, results, self._olds(aliased), self._us(a, b, account.used, results), peak)

    def _olds(self, news: int) -> int:
        """The state that these updates may replace."""
        return sum(1 << self.evaluator.alias_of[new] for new in members(news & self.evaluator.updates))

    def _us(self, a: int, b: int, used: int, results: int) -> float:
        """The time of the segment with its launch, as `build_plan` computes it."""
        liveness, tensors = self.step.liveness, self.tensors
        there = {t for t in self.small if liveness.begin[t] < a} | {tensors[t] for t in members(used)}
        contents = contents_of(liveness, a, b, there, [tensors[t] for t in members(results)])
        own = sum(self.step.latencies[a:b])
        return self.profile.launch_us + own + sum(self.step.rerun_us[p] for p in contents.again)

    def _options(self, a: int, b: int) -> tuple[Option, ...]:
        """Every segment of the places [a, b)."""
        found: list[Option] = []
        for results in subsets(self.needable[b]):
            seen: set[int] = set()
            waiting = [self.needable[a] & ~results]
            while waiting:
                there = waiting.pop()
                if there in seen:
                    continue
                seen.add(there)
                full = self.option(a, b, there, results, there)
                if full is None:
                    continue
                waiting += [there & ~(1 << t) for t in members(full.used)]
                if there & ~full.used:
                    waiting.append(full.used)
                    continue
                for kept in subsets(self._olds(results) & full.used):
                    option = self.option(a, b, there, results, kept)
                    assert option is not None
                    found.append(option)
        return tuple(found)

    # -- sequences of segments if copies took no time -----------------------------------------------------------------------

    def least_peak(self) -> int:
        """The least peak of any plan."""
        return min(
            self.whole_peak, max(self.begin_bytes(), self._end_bytes(), self._least(lambda option: option.peak, np.maximum))
        )

    def rest_us(self, limit: float) -> list[np.ndarray]:
        """By place and set of promised tensors, a lower bound on the time from there to the end under a limit."""
        return self._through(lambda option: option.us if option.peak <= limit else np.inf, np.add)

    def begin_bytes(self) -> int:
        """What is on the device when the iteration begins, if what may be is on the host."""
        away = sum(1 << old for old in self.pairs)
        return self.base[0] + self.condensed.bytes_of(self.condensed.at_begin & ~away)

    def _end_bytes(self) -> int:
        """What is on the device when the iteration ends, if what may be is on the host."""
        away = sum(1 << new for new in self.pairs.values())
        return self.base[self.count] + self.condensed.bytes_of(self.condensed.at_end & ~away)

    def _least(self, weight, together) -> int:
        return int(min(self._through(weight, together)[0][self.condensed.at_begin], 2.0**62))

    def _through(self, weight, together) -> list[np.ndarray]:
        """The least weight of the options from each place on, by the set of promised tensors there."""
        n, count = len(self.tensors), self.count
        every = np.arange(1 << n)
        best = [np.full(1 << n, np.inf) for _ in range(count + 1)]
        best[count][self.condensed.at_end] = 0.0
        for a in range(count - 1, -1, -1):
            those = every[(every & ~self.needable[a]) == 0]
            for b in range(a + 1, count + 1):
                if (a, b) == (0, count) and count > 1:
                    continue
                released: dict[tuple[int, int], np.ndarray] = {}
                for option in self.options(a, b):
                    value = weight(option)
                    if value == np.inf:
                        continue
                    free = option.used & ~self._olds(option.results)
                    key = free, option.replaced
                    if key not in released:
                        after = best[b][every & ~option.replaced] if option.replaced else best[b]
                        for t in members(free):
                            after = np.minimum(after, after[every & ~(1 << t)])
                        released[key] = after
                    before = those[((those & option.used) == option.used) & ((those & option.results) == 0)]
                    best[a][before] = np.minimum(best[a][before], together(value, released[key][before | option.results]))
        return best

    # -- the fastest plan ---------------------------------------------------------------------------------------------------

    def fastest(self, limit: float, *, upper: float = float("inf")) -> Found | None:
        """The fastest plan whose peak is at most `limit`, if it is faster than `upper`; None if there is none."""
        best: Found | None = None
        if self.whole_peak <= limit and self.step.whole_us < upper:
            best = Found(self.step.whole_us, None)
            upper = best.step_us
        found = Labels(self, limit).search(upper - _SLACK)
        return best if found is None else Found(*found)

    def layout(self, boundaries: tuple[int, ...], residencies) -> Layout:
        """The layout of these residencies of significant tensors, by bit."""
        those = {self.tensors[t]: several for t, several in residencies.items()}
        return with_small_tensors(self.step, boundaries, those)

    def plan(self, layout: Layout) -> Plan:
        """The plan of a layout, replayed, with the workspaces of the oracle's model."""
        several = [layout.residencies.get(t, ()) for t in self.tensors]
        schedule = assemble(self.evaluator, list(layout.boundaries), several, as_they_are=True)
        assert schedule is not None
        workspaces = [nbytes for nbytes, _ in workspaces_of(schedule)]
        header = header_for(self.graph, state_memory=self.state_memory)
        plan = build_plan(layout, self.step.liveness, workspaces, self.step.costs, header)
        check(plan, self.graph)
        return plan
