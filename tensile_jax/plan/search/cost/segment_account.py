"""Computes what a segment runs, and how much time and memory the segment needs, from the tensors at its beginning and its end.

A *segment* is a stretch of operators that is compiled as one executable. Here it consists of the *nodes* `[begin, end)`, groups
of consecutive operators of a condensed step, which has large tensors only (`condensed/condensed_step.py`). When the segment
begins, the set of tensors `there` is on the device. When it ends, the tensors of the set `wanted` must be on the device as
well. If a node reads a tensor that is missing, the tensor's *recipe*, the operators that make it, runs right before the node.
Missing inputs of a recipe, and wanted tensors that are still missing at the end, are computed again in the same way.

The nodes and recipes that run are the *parts* of the segment. Two numbers bound the memory that XLA needs beside the inputs and
the results of the segment, if XLA runs the parts in a given order:

    alone(order)   = max over parts q of (bytes of temporaries live at q + extra bytes of q)
    shared(order)  = max over parts q of (bytes of temporaries live at q + bytes of the results of q and of earlier parts
                                          + extra bytes of q) - bytes of all results, and no less than 0

A *temporary* is a tensor that the segment makes, that XLA writes to memory, and that is not wanted. A *result* is a wanted
tensor that needs memory of its own. (The other wanted tensors are new state, which is written into the memory of the old
state.) The *extra bytes* of a part are buffers that only this part needs, such as copies of operands in another layout. XLA
holds the inputs until the segment ends, and the buffers of results from the start of the segment. In `alone`, temporaries have
buffers of their own. In `shared`, they use the buffers of results that are not made yet. If XLA does not write the result of an
operator, it runs the operator inside of the parts that read the result. The inputs of the operator then live until the last of
these parts.

XLA chooses the order itself. In the order `late`, what is computed again runs right before it is first read; in the order
`early`, it runs at the beginning of the segment. What XLA needs lies between shared(late) and alone(early) (`workspace.py`).

Sizes in bytes, times in microseconds.
"""

from collections.abc import Mapping
from typing import NamedTuple

from tensile_jax.plan.search.condensed.condensed_step import Condensed

_Ran = tuple[int, int, int, bool, int]
"""What an operator or a recipe reads and makes, its extra bytes, whether it runs again, and what it reads where its light inputs
that XLA does not write are fused into it."""


class SegmentAccount(NamedTuple):
    """What a segment runs and needs; tensors are sets (bits).

    Attributes:
        us: time of the nodes and of what is computed again.
        again_us: the part of it that is computed again.
        late: `shared` in the order `late`, in bytes: the least that XLA could need beside inputs and wanted results.
        early: `alone` in the order `early`, in bytes.
        used: the tensors of `there` that the segment reads.
        again: the significant tensors computed again.
        heavy: the number of heavy operators that run.
    """

    us: float
    again_us: float
    late: int
    early: int
    used: int
    again: int
    heavy: int


class PartialSegment:
    """A segment whose account is being made, node by node."""

    def __init__(self, step: Condensed, begin: int, there: int, wanted: int) -> None:
        self._step = step
        self._unmade = (1 << step.derived_before[begin]) - 1  # operators of derived tensors that would run again
        self._there = there
        self._wanted = wanted
        self._kept = step.written | there | wanted  # what XLA writes
        self._through: dict[int, int] = {}  # by the bit of a tensor that is not written: what is read where it is read
        self._through_again: dict[int, int] = {}  # the same where further tensors are wanted
        self._sequence: list[_Ran] = []
        self._have: int = there
        self.used = self.again = self.heavy = 0
        self.asked = 0  # the tensors of which it matters whether they are there
        self.again_us = 0.0

    def compute(self, missing: int) -> bool:
        """Compute these tensors again; False if that is impossible."""
        waiting: list[int] = []  # what is computed once what is missing is there
        while missing or waiting:
            if not missing:
                missing = waiting.pop() & ~self._have
                continue
            low = missing & -missing
            recipe = self._step.recipes[low.bit_length() - 1]
            if recipe is None:
                return False
            self.asked |= recipe.reads | recipe.makes
            need = recipe.reads & ~self._have
            if need:
                if len(waiting) > len(self._step.recipes):  # bundles that need parts of one another
                    return False
                waiting.append(missing)
                missing = need
                continue
            self.used |= recipe.reads & self._there
            if recipe.through & self._unmade:
                self._derive(recipe.through)
            new = recipe.makes & ~self._have
            self.again |= new
            fused = _fused(recipe.reads, new, self._kept, self._through, self._step.sources)
            self._sequence.append((recipe.reads, new, recipe.extra, True, fused))
            self._have |= new
            self.again_us += recipe.us
            self.heavy += recipe.heavy
            missing &= ~self._have
        return True

    def run(self, begin: int, end: int) -> bool:
        """Run nodes; False if something that they read is missing and cannot be computed again."""
        step, kept, there, through, add = self._step, self._kept, self._there, self._through, self._sequence.append
        sources = step.sources
        unwritten = ~kept
        used = asked = 0
        for read, made, extra, derived in zip(
            step.reads[begin:end], step.makes[begin:end], step.extra[begin:end], step.through[begin:end], strict=True
        ):
            have = self._have
            asked |= read | made
            missing = read & ~have
            if missing:
                if not self.compute(missing):
                    self.asked |= asked
                    return False
                have = self._have
            used |= read
            if derived & self._unmade:
                self._derive(derived)
            made &= ~have
            plain = not read & unwritten and (made & kept or sources)  # as most nodes are
            add((read, made, extra, False, read if plain else _fused(read, made, kept, through, sources)))
            self._have = have | made
        self.used |= used & there
        self.asked |= asked
        self.heavy += sum(step.heavy[begin:end])
        return True

    def _derive(self, through: int) -> None:
        """Compute again the derived tensors of these operators that the segment has not made yet."""
        again = through & self._unmade
        self._unmade ^= again
        while again:
            low = again & -again
            self.again_us += self._step.derived_us[low.bit_length() - 1]
            again ^= low

    def finish(self) -> bool:
        """Compute what is wanted and not made yet."""
        missing = self._wanted & ~self._have
        return not missing or self.compute(missing)

    def account(self, us: float, wanted: int, aliased: int) -> SegmentAccount:
        """The account so far; `us` is the time of the nodes."""
        sequence = self._sequence if not wanted & ~self._kept else self._fused_again(wanted)
        late, early = self._most(sequence, wanted, aliased)
        if self.again:
            in_order = [ran for ran in sequence if ran[3]] + [ran for ran in sequence if not ran[3]]
            _, early = self._most(in_order, wanted, aliased)
        return SegmentAccount(us + self.again_us, self.again_us, late, early, self.used, self.again, self.heavy)

    def _fused_again(self, wanted: int) -> list[_Ran]:
        """What has run, where other light tensors are written, since they are wanted."""
        kept, sources = self._kept | wanted, self._step.sources
        unwritten = ~kept
        through: dict[int, int] = {}
        found: list[_Ran] = []
        for read, made, extra, again, _ in self._sequence:
            plain = not read & unwritten and (made & kept or sources)
            found.append((read, made, extra, again, read if plain else _fused(read, made, kept, through, sources)))
        self._through_again = through
        return found

    def ask_sources(self) -> None:
        """In a bundled step, it also matters whether the sources of bundles that XLA does not write are there."""
        for read in (*self._through.values(), *self._through_again.values()):
            self.asked |= read

    def _most(self, sequence: list[_Ran], wanted: int, aliased: int) -> tuple[int, int]:
        """`shared` and `alone`, by the formulas above, if these tensors are wanted. It goes from the last step to the first."""
        sizes = self._step.sizes
        made_here = self._have & ~self._there
        own = made_here & self._step.written & ~wanted
        results = wanted & ~aliased
        unseen = own
        live = alone = shared = 0
        out = sizes[results & made_here]
        for _, made, extra, _, read in reversed(sequence):
            if last := (read | made) & unseen:
                unseen ^= last
                live += sizes[last]
            need = live + extra
            if need > alone:
                alone = need
            if need + out > shared:
                shared = need + out
            if made:
                if temporary := made & own:
                    live -= sizes[temporary]
                if result := made & results:
                    out -= sizes[result]
        return max(0, shared - sizes[results]), alone


def _fused(read: int, made: int, kept: int, through: dict[int, int], sources: Mapping[int, int]) -> int:
    """What is read, and what is read where those of it that XLA does not write are computed.

    If XLA writes nothing of what is made (`kept`: what it writes), this is remembered in `through`. A node of a bundled step
    makes more than one result, so there `sources` says what each is computed from."""
    unwritten = read & ~kept
    while unwritten:
        low = unwritten & -unwritten
        if sources and low not in through:
            through[low] = _origins(low, kept, through, sources)
        read |= through.get(low, 0)
        unwritten ^= low
    if not sources and not made & kept:
        while made:
            low = made & -made
            through[low] = read
            made ^= low
    return read


def _origins(unwritten: int, kept: int, through: dict[int, int], sources: Mapping[int, int]) -> int:
    """What this is computed from, directly or through others that XLA does not write."""
    found, waiting = 0, sources.get(unwritten, 0)
    while waiting:
        low = waiting & -waiting
        found |= low
        if not low & kept:
            known = through.get(low)
            if known is None:
                waiting |= sources.get(low, 0)
            else:
                found |= known
        waiting &= ~found
    return found


def account_of(step: Condensed, begin: int, end: int, there: int, wanted: int, aliased: int) -> SegmentAccount | None:
    """The account of a segment; None if it needs a tensor that is not there and that cannot be computed again.

    Args:
        begin, end: nodes.
        there, wanted: sets of tensors; `wanted` has none that is in `there`.
        aliased: the part of `wanted` that takes over the memory of inputs.
    """
    return asked_account_of(step, begin, end, there, wanted, aliased)[0]


def asked_account_of(
    step: Condensed, begin: int, end: int, there: int, wanted: int, aliased: int
) -> tuple[SegmentAccount | None, int]:
    """The same, and the tensors of which it matters to the account whether they are there."""
    segment = PartialSegment(step, begin, there, wanted)
    can_run = segment.run(begin, end) and segment.finish()
    found = segment.account(sum(step.us[begin:end]), wanted, aliased) if can_run else None
    if step.sources:
        segment.ask_sources()
    return found, segment.asked
