"""Groups the tensors of a very large step into bundles, so that the search decides about many tensors at once.

The search decides about *significant* tensors, those that are large enough to matter. It works on a *condensed step*, whose
operators form groups called *nodes* (`condensed_step.py`). A step with more than `MOST_TENSORS` significant tensors is
condensed once more, since the search would otherwise take too long. The operators between two places where a segment
(executable) may begin form a *stretch*, which becomes one node.

A *minimum cut* is the cheapest choice of the tensors to drop (not to keep, but to compute again). There is one for each of
several prices. A price says how many more bytes the cut may keep in device memory in order to save one byte of memory traffic
(`analysis/minimum_cut.py`). Significant tensors form one *bundle* if they agree in four things: the stretch that makes them,
the first and the last of the other stretches that need them, the minimum cuts that drop them, and some flags, such as whether
they may be swapped. All members of a bundle are on the device at the same times.

A tensor that is needed only in the stretch that makes it is in no bundle. Its bytes count as memory that the node needs while
it runs. If XLA computes a tensor u from t on the fly, t is also needed where u is read. For example, if u is a sum, all of its
terms live until u is read.

A bundle is computed again as a whole. Its *recipe*, the operators that run again for it, starts from tensors of other stretches
and from bundles of its own stretch that come before it. Within a stretch, bundles that more minimum cuts keep come first, since
they are more likely to be on the device.

The bundled step counts slightly more memory than the condensed step: all members of a bundle count from the beginning of their
stretch to the end of the last stretch that needs one of them.

Sizes in bytes, times in microseconds.
"""

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from tensile_jax.plan.search.condensed.condensed_step import Condensed, Recipe, members

MOST_TENSORS = 2000  # significant tensors searched without bundles: finer plans, but longer planning (`make bench-planning`)

_Key = tuple[int, ...]


def bundled(step: Condensed, dropped_by: Sequence[int]) -> Condensed:
    """The condensed step with bundles instead of tensors, and stretches instead of nodes.

    Args:
        step: a condensed step, each of whose tensors is decided about by itself.
        dropped_by: for each of its tensors, the set of the minimum cuts that drop it.
    """
    return _Bundling(step, dropped_by).bundled()


class _Bundling:
    """Finds the bundles of a step. Nodes and tensors have the same numbers as in `step`, stretches and bundles their own."""

    def __init__(self, step: Condensed, dropped_by: Sequence[int]) -> None:
        self._step = step
        self._stretch = (np.searchsorted(step.boundaries, range(len(step.reads)), side="right") - 1).tolist()
        self._made = [self._stretch[node] if node >= 0 else -1 for node in step.made]
        self._reads = [members(read) for read in step.reads]
        self._can_run = [recipe is not None for recipe in step.recipes]  # again
        first_use, last_reader = [-1] * len(step.tensors), list(step.made)
        for node, read in enumerate(self._reads):
            for t in read:
                last_reader[t] = node
                if first_use[t] < 0 and self._stretch[node] > self._made[t]:
                    first_use[t] = self._stretch[node]
        related = {*step.aliases.items(), *step.pairs}
        self._until = self._needed_until()
        self._inside = [
            self._can_run[t] and use < 0 and not step.at_end >> t & 1 and self._stretch[self._until[t]] <= self._made[t]
            for t, use in enumerate(first_use)
        ]
        for relation in related:
            for t in relation:
                self._inside[t] = False

        def key(t: int) -> _Key:
            use, last = first_use[t], last_reader[t]
            flags = (those >> t & 1 for those in (step.written, step.written_as_made, step.movable, step.at_end))
            return self._made[t], dropped_by[t], use, self._stretch[last] if use >= 0 else -1, self._can_run[t], *flags

        several: dict[Hashable, list[int]] = {}
        relations = _relations(related, key)
        for t in range(len(step.tensors)):
            if not self._inside[t]:
                several.setdefault((key(t), relations.get(t)), []).append(t)

        def order(those: list[int]) -> tuple[int, bool, int, int]:
            return self._made[those[0]], self._can_run[those[0]], dropped_by[those[0]].bit_count(), those[0]

        # Of the same stretch, bundles that more minimum cuts keep come first: the others are computed from them.
        self._members = sorted(several.values(), key=order)
        self._bundle_of = [-1] * len(step.tensors)
        for bundle, those in enumerate(self._members):
            for t in those:
                self._bundle_of[t] = bundle

    def _needed_until(self) -> list[int]:
        """By tensor, the last node that reads it, or something that is computed from it on the fly."""
        step, until = self._step, list(self._step.made)
        for node in reversed(range(len(step.reads))):
            last = max([node, *(until[t] for t in members(step.makes[node] & ~step.written))])
            for t in self._reads[node]:
                until[t] = max(until[t], last)
        return until

    def _sources(self) -> dict[int, int]:
        """By the bit of each bundle that XLA does not write, the bundles that it is computed from."""
        step, found = self._step, dict[int, int]()
        for bundle, those in enumerate(self._members):
            if not step.written >> those[0] & 1 and self._made[those[0]] >= 0:
                read = {self._bundle_of[u] for t in those for u in self._reads[step.made[t]]} - {-1, bundle}
                found[1 << bundle] = sum(1 << b for b in read)
        return found

    def bundled(self) -> Condensed:
        step = self._step
        edges = step.boundaries
        makes = [0] * (len(edges) - 1)
        for bundle, those in enumerate(self._members):
            if self._made[those[0]] >= 0:
                makes[self._made[those[0]]] |= 1 << bundle

        def all_of(those: int) -> int:
            return sum(1 << bundle for bundle, (t, *_) in enumerate(self._members) if those >> t & 1)

        return replace(
            step,
            tensors=tuple(tuple(u for t in those for u in step.tensors[t]) for those in self._members),
            nbytes=tuple(sum(step.nbytes[t] for t in those) for those in self._members),
            recipes=tuple(self._recipe(bundle) for bundle in range(len(self._members))),
            made=tuple(self._made[t] for t, *_ in self._members),
            written=all_of(step.written),
            written_as_made=all_of(step.written_as_made),
            starts=tuple(step.starts[node] for node in edges),
            reads=tuple(self._read_between(a, b) for a, b in pairwise(edges)),
            makes=tuple(makes),
            through=tuple(_union(step.through[a:b]) & ((1 << step.derived_before[a]) - 1) for a, b in pairwise(edges)),
            derived_before=tuple(step.derived_before[a] for a in edges[:-1]),
            us=tuple(sum(step.us[a:b]) for a, b in pairwise(edges)),
            extra=self._extra(),
            heavy=tuple(sum(step.heavy[a:b]) for a, b in pairwise(edges)),
            boundaries=tuple(range(len(edges))),
            aliases={self._bundle_of[old]: self._bundle_of[new] for old, new in step.aliases.items()},
            at_begin=all_of(step.at_begin),
            at_end=all_of(step.at_end),
            movable=all_of(step.movable),
            pairs=tuple(dict.fromkeys((self._bundle_of[old], self._bundle_of[new]) for old, new in step.pairs)),
            sources=self._sources(),
        )

    def _read_between(self, a: int, b: int) -> int:
        """The bundles that nodes `[a, b)`, a stretch, read of what other stretches make."""
        those = {t for read in self._reads[a:b] for t in read if self._made[t] < self._stretch[a]}
        return sum(1 << bundle for bundle in {self._bundle_of[t] for t in those})

    def _extra(self) -> tuple[int, ...]:
        """For each stretch, the most that a node needs beside bundles."""
        step = self._step
        change = np.zeros(len(step.reads) + 1, dtype=np.int64)
        for t, inside in enumerate(self._inside):
            if inside and step.written >> t & 1:
                change[step.made[t]] += step.nbytes[t]
                change[self._until[t] + 1] -= step.nbytes[t]
        extra = np.cumsum(change)[:-1] + step.extra
        return tuple(int(extra[a:b].max()) for a, b in pairwise(step.boundaries))

    def _recipe(self, bundle: int) -> Recipe | None:
        """How to compute all members of a bundle again; None if that is impossible."""
        step, stretch = self._step, self._made[self._members[bundle][0]]
        if stretch < 0:
            return None
        ran: dict[int, Recipe] = {}  # by the tensor for which it runs
        made, read, waiting = set[int](), set[int](), self._members[bundle][:]
        last_reader: dict[int, int] = {}
        while waiting:
            t = waiting.pop()
            recipe = step.recipes[t]
            if recipe is None:
                return None
            if t in made:
                continue
            ran[t] = recipe
            made.update(members(recipe.makes))
            for u in members(recipe.reads):
                last_reader[u] = max(last_reader.get(u, t), t)
                if self._inside[u] or (self._made[u] == stretch and self._bundle_of[u] > bundle):
                    waiting.append(u)
                elif self._bundle_of[u] != bundle:
                    read.add(self._bundle_of[u])
        whole = {b for b in {self._bundle_of[t] for t in made} if b >= 0 and made.issuperset(self._members[b])}
        return Recipe(
            reads=sum(1 << b for b in read - whole),
            makes=sum(1 << b for b in whole),
            through=_union(recipe.through for recipe in ran.values()),
            us=sum(recipe.us for recipe in ran.values()),
            extra=self._extra_of(bundle, ran, last_reader),
            heavy=sum(recipe.heavy for recipe in ran.values()),
        )

    def _extra_of(self, bundle: int, ran: dict[int, Recipe], last_reader: dict[int, int]) -> int:
        """The most that these recipes of tensors need, one after another, beside what they read and the members of the bundle."""
        step, live, most = self._step, 0, 0
        freed: Counter[int] = Counter()  # bytes, by the tensor after whose recipe nothing reads them any more
        for t, recipe in sorted(ran.items()):
            for u in members(recipe.makes & step.written):
                if self._bundle_of[u] != bundle:
                    live += step.nbytes[u]
                    freed[max(last_reader.get(u, t), t)] += step.nbytes[u]
            most = max(most, live + recipe.extra)
            live -= freed[t]
        return most


def _relations(related: Collection[tuple[int, int]], key: Callable[[int], _Key]) -> dict[int, Hashable]:
    """For each tensor that is related to others, as state to its update, what it has in common with members of the same bundle.

    A bundle is then related to one bundle only. What is related to several tensors is a bundle of its own.
    """
    count = Counter(t for relation in related for t in relation)
    found: dict[int, Hashable] = {}
    for old, new in related:
        alone = count[old] == count[new] == 1
        for t in (old, new):
            found[t] = (key(old), key(new), t == old) if alone and t not in found else t
    return found


def _union(sets: Iterable[int]) -> int:
    union = 0
    for those in sets:
        union |= those
    return union
