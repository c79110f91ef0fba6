"""Computes the time, memory and workspace of a step's segments, and remembers them, because the search asks for each many times.

A *segment* is a stretch of operators that is compiled as one executable. Its *workspace* is the memory that it needs beside its
inputs and results. The formulas are in `segment_account.py` (time and memory) and `workspace.py`.

Sizes in bytes, times in microseconds.
"""

from collections.abc import Callable
from copy import copy
from dataclasses import replace
from typing import NamedTuple, TypeVar

from tensile_jax.plan.analysis.copy_time import copy_in_us, copy_out_us
from tensile_jax.plan.analysis.device_profile import DeviceProfile
from tensile_jax.plan.latest_results import LatestResults
from tensile_jax.plan.search.condensed.condensed_step import Condensed, members
from tensile_jax.plan.search.cost.segment_account import PartialSegment, SegmentAccount, asked_account_of
from tensile_jax.plan.search.cost.timing import GRID_US
from tensile_jax.plan.search.cost.workspace import CompiledSizes, Correction, SegmentKey, correction, predicted_workspace

_COMPILING = 0.004  # of the step's time: the least cost of a segment, as each is compiled (`make bench-workloads`)
_BOUNDARY = 0.001  # the same where segments are parts of one executable (`make bench-launches`)
_SHORT = 200  # nodes that count as one more evaluated segment (`make bench-constants`)


Found = TypeVar("Found")


class Evaluated(NamedTuple):
    """A segment's account, the bytes of its results, and microseconds of writing what would not be written otherwise.

    Only the tensors `asked` matter at the beginning: whether others are on the device then does not change the account.
    """

    account: SegmentAccount
    result_bytes: int
    written_us: float
    asked: int


class BegunSegment:
    """The segments that begin at one node with the same tensors on the device, and end later and later. They are remembered.

    Args:
        begin: a node.
        there: the tensors on the device when the segments begin.
    """

    def __init__(self, step: Condensed, begin: int, there: int) -> None:
        self._step = step
        self._begin = self._ran = begin
        self._there = there
        self._segment: PartialSegment | None = None
        self._again_us: dict[int, float | None] = {}  # by end
        self._accounts: dict[tuple[int, int, int], SegmentAccount] = {}

    def _up_to(self, end: int) -> PartialSegment | None:
        """The segment up to this node, which is made anew if it has run farther; None if it cannot run."""
        if self._segment is None or self._ran > end:
            self._segment, self._ran = PartialSegment(self._step, self._begin, self._there, 0), self._begin
        ran, self._ran = self._ran, end
        if ran < end and not self._segment.run(ran, end):
            self._segment = None
        return self._segment

    def rest(self) -> None:
        """Keep only what is remembered; a segment that is asked for again and not remembered is begun anew."""
        self._segment = None

    def again_us(self, end: int) -> float | None:
        """Microseconds that the segment up to this node spends on computing again what is missing; None if it cannot run."""
        if end not in self._again_us:
            segment = self._up_to(end)
            self._again_us[end] = None if segment is None else segment.again_us
        return self._again_us[end]

    def account(self, end: int, us: float, wanted: int, aliased: int) -> SegmentAccount:
        """The account of the segment up to this node, which can run; `us` is the time of its nodes."""
        key = end, wanted, aliased
        if key not in self._accounts:
            segment = self._up_to(end)
            assert segment is not None
            self._accounts[key] = segment.account(us, wanted, aliased)
        return self._accounts[key]


class Evaluator:
    """Evaluates segments of one condensed step on one device, and remembers them.

    Args:
        host_limit: the most bytes that a schedule may have in host memory.
    """

    def __init__(self, step: Condensed, profile: DeviceProfile, host_limit: float) -> None:
        self.condensed = step
        self.profile = profile
        self.host_limit = host_limit
        self.places = tuple(step.starts[node] for node in step.boundaries)
        self.bit = {t: i for i, those in enumerate(step.tensors) for t in those}
        self.kept_at: dict[float, tuple[list[int], list[int]]] = {}  # by price, what a minimum cut keeps (`search.py`)
        self._measured = CompiledSizes()
        self._latest: Evaluator | None = None  # the same with what was measured last
        self._found = LatestResults()
        self._at_places: set[tuple[int, int]] = set()
        self._compared = self._measured.compared
        self._corrections: dict[tuple[int, int], Correction] = {}
        self.alias_of = {new: old for old, new in step.aliases.items()}
        self.old_of = {new: old for old, new in step.pairs}
        self.new_of = dict(step.pairs)
        self.required = frozenset(i + side for i in step.alone for side in (0, 1))  # boundaries that every schedule has
        self.updates = sum(1 << new for new in self.alias_of)
        self.updated = sum(1 << old for old in self.alias_of.values())
        ancestors: list[int] = []
        for i, recipe in enumerate(step.recipes):
            found = 1 << i
            if recipe is not None:
                for u in members(recipe.reads):
                    found |= ancestors[u]
            ancestors.append(found)
        self.ancestors = ancestors
        self._deep: list[int] = []
        for read in step.reads:
            found = 0
            for t in members(read):
                found |= ancestors[t]
            self._deep.append(found)
        self._relevant: dict[tuple[int, int], int] = {}
        self._made: dict[tuple[int, int], int] = {}
        self._aliased: dict[tuple[int, int], int] = {}  # by the state that leaves, and the wanted updates
        self._known: dict[tuple[int, int, int, int], dict[int, dict[int, Evaluated | None]]] = {}
        # by segment and what it leaves, by the tensors that matter and by those of them that are there
        self._begun: dict[tuple[int, int], BegunSegment] = {}
        self.evaluated = 0  # segments, a long one as often as it takes longer; and schedules that were tried
        part = _BOUNDARY if step.in_one_program else _COMPILING
        self.compiling_us = max(0.0, part * sum(step.us) - profile.launch_us)
        self.nothing = SegmentAccount(0.0, 0.0, 0, 0, 0, 0, 0)
        self.out_us = [_on_grid(copy_out_us(n, profile)) for n in step.nbytes]
        self.in_us = [_on_grid(copy_in_us(n, profile)) for n in step.nbytes]
        self.copies_us = tuple(zip(self.out_us, self.in_us, strict=True))

    def made(self, a: int, b: int) -> int:
        """The tensors that the nodes between two boundaries make."""
        found = self._made.get((a, b))
        if found is None:
            found = 0
            for made in self.condensed.makes[self.condensed.boundaries[a] : self.condensed.boundaries[b]]:
                found |= made
            self._made[a, b] = found
        return found

    def aliased(self, there: int, after: int, wanted: int) -> int:
        """The wanted results that take over the memory of state that is there before a segment and not after it."""
        leave = there & ~after & self.updated
        news = wanted & self.updates if leave else 0
        if not news:
            return 0
        found = self._aliased.get((leave, news))
        if found is None:
            those = sum(1 << new for new in members(news) if leave >> self.alias_of[new] & 1)
            found = self._aliased[leave, news] = those
        return found

    def relevant(self, a: int, b: int, wanted: int) -> int:
        """The tensors that can matter to a segment if they are there when it begins."""
        found = self._relevant.get((a, b))
        if found is None:
            found = 0
            for deep in self._deep[self.condensed.boundaries[a] : self.condensed.boundaries[b]]:
                found |= deep
            self._relevant[a, b] = found
        again = wanted & ~self.made(a, b)
        while again:
            low = again & -again
            found |= self.ancestors[low.bit_length() - 1]
            again ^= low
        return found

    def evaluate(self, a: int, b: int, there: int, wanted: int, aliased: int) -> Evaluated | None:
        """The segment between two boundaries (indices of `Condensed.boundaries`); None if it cannot run."""
        key = a, b, wanted, aliased
        several = self._known.get(key)
        if several is None:
            several = self._known[key] = {}
        for asked, known in several.items():
            if there & asked in known:
                return known[there & asked]
        found, asked = self._evaluated(a, b, there, wanted, aliased)
        several.setdefault(asked, {})[there & asked] = found
        return found

    def begun_at(self, a: int, there: int) -> BegunSegment:
        """The segments that begin at this boundary with these tensors on the device."""
        found = self._begun.get((a, there))
        if found is None:
            found = self._begun[a, there] = BegunSegment(self.condensed, self.condensed.boundaries[a], there)
        return found

    def _evaluated(self, a: int, b: int, there: int, wanted: int, aliased: int) -> tuple[Evaluated | None, int]:
        """The segment, and the tensors of which it matters whether they are there."""
        step = self.condensed
        if b - a > 1 and any(a <= i < b for i in step.alone):
            return None, 0
        self.evaluated += 1 + (step.boundaries[b] - step.boundaries[a]) // _SHORT
        found, asked = asked_account_of(step, step.boundaries[a], step.boundaries[b], there, wanted, aliased)
        if found is None:
            return None, asked
        written_us = step.crossing_bytes(wanted) / self.profile.bytes_per_us
        return Evaluated(found, step.sizes[wanted & ~aliased], written_us, asked), asked

    def count_schedule(self) -> None:
        """Count one more schedule that was tried, as one evaluated segment."""
        self.evaluated += 1

    def with_measured(self, measured: CompiledSizes) -> "Evaluator":
        """The same evaluator, in which measured workspaces replace predictions; it shares what it remembers.

        Plain jit's peak says nothing of segments.
        """
        measured = replace(measured, whole=None)
        if measured == self._measured:
            return self
        if self._latest is not None and self._latest._measured == measured:
            return self._latest
        self._latest = new = copy(self)
        new._measured, new._latest, new._found = measured, None, LatestResults()
        new._at_places = {(begin, end) for begin, end, _, _ in measured.workspaces}
        new._compared = measured.compared
        new._corrections = {}
        return new

    @property
    def measured(self) -> CompiledSizes:
        """What compiling has shown of segments."""
        return self._measured

    @property
    def is_measured(self) -> bool:
        """Whether workspaces of segments were measured."""
        return bool(self._measured.workspaces)

    def without_state_out(self) -> "Evaluator":
        """The same evaluator for schedules that keep state on the device between iterations; both share what they remember."""
        new = copy(self)
        new.condensed = replace(self.condensed, pairs=())
        new.old_of, new.new_of = {}, {}
        new._latest, new._found = None, LatestResults()
        return new

    def found(self, how: str, arguments: object, find: Callable[[], Found]) -> Found:
        """The result of `find`. If the latest search of this kind had the same arguments, its result is returned without a new
        search.
        """
        return self._found.of(how, arguments, find)

    def key(self, a: int, b: int, again: int, wanted: int) -> SegmentKey:
        """What tells a segment from others (`workspace.py`)."""
        tensors = self.condensed.tensors
        return (
            self.places[a], self.places[b],
            frozenset(t for i in members(again) for t in tensors[i]), frozenset(t for i in members(wanted) for t in tensors[i]),
        )  # fmt: skip

    def workspace(self, a: int, b: int, account: SegmentAccount, wanted: int) -> tuple[int, bool]:
        """The workspace of the segment between two boundaries, and whether it was measured."""
        places = self.places[a], self.places[b]
        predicted = predicted_workspace(account, self.profile)
        if places in self._at_places:
            known = self._measured.workspaces.get(self.key(a, b, account.again, wanted))
            if known is not None:
                return known.nbytes, True
        if not self._compared:
            return int(predicted * self._measured.prior) + self._measured.margin, False
        if places not in self._corrections:
            self._corrections[places] = correction(*places, self._measured)
        ratio, copied = self._corrections[places]
        copies = copied * self.condensed.bytes_of(wanted) if copied else 0.0
        return int(predicted * ratio + copies) + self._measured.margin, False


def _on_grid(us: float) -> float:
    """A time as a multiple of `GRID_US`, of one at least."""
    return max(1, round(us / GRID_US)) * GRID_US
