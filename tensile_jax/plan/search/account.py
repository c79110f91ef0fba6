"""States what a segment holds, runs and needs, from what is on the device when it begins and what must be there when it ends.

This is the planner's one account of memory. A segment of nodes `[begin, end)` of a condensed step (`condensed.py`) begins with the
tensors `there` on the device, and must leave the tensors `wanted` behind in addition. Whatever it reads that is neither there nor
made by an earlier node of the segment is computed again by its recipe, right before it is first read. What a recipe reads is found
in the same way. A tensor that is wanted and not made by then is computed again at the end.

    workspace = max over steps q of (temporaries live at q + wanted results made by q + extra bytes of q) - all wanted results,
                and no less than 0

A *temporary* is a tensor that XLA writes to memory, is made inside the segment, and is not wanted. XLA holds inputs until the
segment ends, and the buffers of results from its start; it uses the buffers of results that are not made yet for temporaries. An
update that takes over the memory of the state that it replaces has no buffer of its own. Light operators whose results XLA does
not write run where their results are read, so what they read lives until then.

Sizes in bytes, times in microseconds.
"""

from typing import NamedTuple

from tensile_jax.plan.search.condensed import Condensed

_DEEPEST = 200  # recipes that need one another; a longer chain is no way to compute a tensor again


class Contents(NamedTuple):
    """What a segment runs and needs; tensors are sets (bits).

    Attributes:
        us: time of the nodes and of what is computed again.
        again_us: the part of it that is computed again.
        workspace: bytes beside inputs and wanted results.
        used: the tensors of `there` that the segment reads.
        again: the tensors computed again.
        heavy: the number of heavy operators that run.
    """

    us: float
    again_us: float
    workspace: int
    used: int
    again: int
    heavy: int


class Segment:
    """A segment while its contents are found."""

    def __init__(self, step: Condensed, there: int, wanted: int) -> None:
        self._step = step
        self._there = there
        self._wanted = wanted
        self._sequence: list[tuple[int, int, int]] = []  # what is read and made, and the extra bytes
        self._through: dict[int, int] = {}  # by the bit of a tensor that is not written: what is read where it is read
        self._have = there
        self.used = self.again = self.heavy = 0
        self.again_us = 0.0

    def _add(self, read: int, made: int, extra: int) -> None:
        fused = read & ~self._step.written & ~self._there
        while fused:
            low = fused & -fused
            read |= self._through.get(low, 0)
            fused ^= low
        if made and not made & (self._step.written | self._wanted):
            while made:
                low = made & -made
                self._through[low] = read
                made ^= low
        self._sequence.append((read, made, extra))

    def compute(self, missing: int, depth: int = 0) -> bool:
        """Compute these tensors again; False if that is impossible."""
        while missing:
            low = missing & -missing
            recipe = self._step.recipes[low.bit_length() - 1]
            if recipe is None or depth > _DEEPEST:
                return False
            need = recipe.reads & ~self._have
            if need and not self.compute(need, depth + 1):
                return False
            self.used |= recipe.reads & self._there
            new = recipe.makes & ~self._have
            self.again |= new
            self._add(recipe.reads, new, recipe.extra)
            self._have |= new
            self.again_us += recipe.us
            self.heavy += recipe.heavy
            missing &= ~self._have
        return True

    def run(self, node: int) -> bool:
        """Run a node; False if something that it reads is missing and cannot be computed again."""
        step = self._step
        read = step.reads[node]
        missing = read & ~self._have
        if missing and not self.compute(missing):
            return False
        self.used |= read & self._there
        made = step.makes[node] & ~self._have
        self._add(read, made, step.extra[node])
        self._have |= made
        self.heavy += step.heavy[node]
        return True

    def finish(self) -> bool:
        """Compute what is wanted and not made yet."""
        missing = self._wanted & ~self._have
        return not missing or self.compute(missing)

    def contents(self, us: float, wanted: int, aliased: int) -> Contents:
        """The contents so far; `us` is the time of the nodes."""
        workspace = self.workspace_for(wanted, aliased)
        return Contents(us + self.again_us, self.again_us, workspace, self.used, self.again, self.heavy)

    def workspace_for(self, wanted: int, aliased: int) -> int:
        """The workspace, by the formula above, if these tensors are wanted."""
        sequence, nbytes = self._sequence, self._step.nbytes
        own = self._have & ~self._there & self._step.written & ~wanted
        dies = [0] * len(sequence)
        unseen = own
        for at in range(len(sequence) - 1, -1, -1):
            read, made, _ = sequence[at]
            last = (read | made) & unseen
            dies[at] = last
            unseen ^= last
        results = wanted & ~aliased
        both = own | results
        live = most = 0
        for (_, made, extra), last in zip(sequence, dies, strict=True):
            made &= both
            while made:
                low = made & -made
                live += nbytes[low.bit_length() - 1]
                made ^= low
            if live + extra > most:
                most = live + extra
            while last:
                low = last & -last
                live -= nbytes[low.bit_length() - 1]
                last ^= low
        return max(0, most - self._step.bytes_of(results))


def contents_of(step: Condensed, begin: int, end: int, there: int, wanted: int, aliased: int) -> Contents | None:
    """The contents of a segment; None if it needs a tensor that is not there and that cannot be computed again.

    Args:
        begin, end: nodes.
        there, wanted: sets of tensors; `wanted` has none that is in `there`.
        aliased: the part of `wanted` that takes over the memory of inputs.
    """
    segment = Segment(step, there, wanted)
    if not all(map(segment.run, range(begin, end))) or not segment.finish():
        return None
    return segment.contents(sum(step.us[begin:end]), wanted, aliased)
