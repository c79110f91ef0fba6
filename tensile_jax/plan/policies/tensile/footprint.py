"""Finds the memory peak: how much device memory is used at most, when, by which tensors, and after which access.

TENSILE section IV-B. The *footprint* is the device memory in use at a time. The module finds the same peak as Algorithm 1, but
faster: after each swap or recomputation that Algorithm 3 adds, it finds the new peak without going over the whole time axis
again. Such an event makes a tensor absent from the device during `[leave, back)`, and its bytes do not count then:

    usage(t) = sum of nbytes over lifetimes [begin, end) with begin <= t < end
             - sum of nbytes over absences [leave, back) with leave <= t < back
             = sum of the changes up to t

A *change* is a number of bytes that usage rises or falls by at one time. Each change belongs to the operator during which it
happens. The operators are the leaves of a binary tree. Each node of the tree stores the sum of the changes below the node
(`total`) and the greatest prefix sum of these changes (`best`):

    total(node) = total(left) + total(right)
    best(node)  = max(best(left), total(left) + best(right))

A new change therefore takes time proportional to the logarithm of the number of operators. The peak is `best` of the root. To
find its time, the module descends from the root to the side that has the peak, and to the left if both have it. So the result is
the first time at which usage is greatest.

Times in microseconds since the iteration began, sizes in bytes.
"""

from bisect import bisect_right, insort
from dataclasses import dataclass

from tensile_jax.ir import TensorId
from tensile_jax.plan.analysis.access import Access, AccessSequence

_NOTHING = -(2**62)  # below any footprint


@dataclass(frozen=True, slots=True)
class Recomputation:
    """`tensor` is released when operator `after` ends and generated again when operator `before` begins."""

    tensor: TensorId
    after: int
    before: int


@dataclass(frozen=True, slots=True)
class Peak:
    """The first time at which the footprint is greatest: MP, MPTensor, LUA and MPTime of Algorithm 1, in the order of the fields.

    `last_input_access` is the last use of a tensor that begins by then and after which the tensor is not released.
    """

    nbytes: int
    tensors: frozenset[TensorId]
    last_input_access: Access | None
    time_us: float


class Footprint:
    """The footprint of an access sequence in which every tensor is released after its last access; absences can be added."""

    def __init__(self, sequence: AccessSequence) -> None:
        self._sequence = sequence
        self._leaves = 1 << max(len(sequence.ends_us) - 1, 0).bit_length()
        self._total = [0] * (2 * self._leaves)
        self._best = [_NOTHING] * (2 * self._leaves)
        self._changes: list[dict[float, int]] = [{} for _ in range(self._leaves)]
        kept = sequence.results | set(sequence.updates.values())
        self._releasing = {(t, accesses[-1].operator) for t, accesses in sequence.accesses.items() if t not in kept}
        self._lifetimes = sequence.lifetimes()
        self._absences: dict[TensorId, list[tuple[float, float]]] = {}
        uses = [access for t in sequence.accesses for access in sequence.uses(t)]
        self._uses = sorted(uses, key=lambda access: (access.begin_us, access.tensor))
        touched: set[int] = set()
        for t, (begin, end) in self._lifetimes.items():
            touched |= {self._add(begin, sequence.nbytes[t]), self._add(end, -sequence.nbytes[t])}
        for leaf in sorted(touched):
            self._update(leaf)

    def take_away(self, tensor: TensorId, leave_us: float, back_us: float, *, released_by: int | None = None) -> None:
        """From now on the tensor is away during `[leave, back)`.

        Args:
            released_by: the operator after whose access the tensor is released, if it leaves by a release and not by a copy.
        """
        if released_by is not None:
            self._releasing.add((tensor, released_by))
        if leave_us < back_us:
            insort(self._absences.setdefault(tensor, []), (leave_us, back_us))
            nbytes = self._sequence.nbytes[tensor]
            for leaf in {self._add(leave_us, -nbytes), self._add(back_us, nbytes)}:
                self._update(leaf)

    def peak(self) -> Peak:
        """What Algorithm 1 finds for the sequence with these absences."""
        if self._best[1] <= 0:
            return Peak(0, self._there_at_start(), None, 0.0)
        time_us = self._peak_time()
        start = self._there_at_start()
        if time_us == 0.0 and sum(self._sequence.nbytes[t] for t in start) == self._best[1]:
            return Peak(self._best[1], start, None, 0.0)
        there = frozenset(t for t in self._lifetimes if self.is_there(t, time_us))
        return Peak(self._best[1], there, self._last_input_access(time_us), time_us)

    def is_there(self, tensor: TensorId, time_us: float) -> bool:
        """Whether the tensor is in device memory at that time."""
        begin, end = self._lifetimes[tensor]
        if not begin <= time_us < end:
            return False
        absences = self._absences.get(tensor, [])
        place = bisect_right(absences, (time_us, float("inf"))) - 1
        return place < 0 or not time_us < absences[place][1]

    def _there_at_start(self) -> frozenset[TensorId]:
        return frozenset(t for t in self._sequence.initial if self._absences.get(t, [(1.0, 1.0)])[0][0] > 0.0)

    def _last_input_access(self, time_us: float) -> Access | None:
        place = bisect_right(self._uses, time_us, key=lambda access: access.begin_us) - 1
        while place >= 0 and (self._uses[place].tensor, self._uses[place].operator) in self._releasing:
            place -= 1
        return self._uses[place] if place >= 0 else None

    def _add(self, time_us: float, change: int) -> int:
        """Record a change at its leaf and return the leaf; for the end of the iteration, that is the last operator's leaf."""
        leaf = max(min(bisect_right(self._sequence.begins_us, time_us) - 1, self._leaves - 1), 0)
        changes = self._changes[leaf]
        changes[time_us] = changes.get(time_us, 0) + change
        return leaf

    def _update(self, leaf: int) -> None:
        total, best = 0, _NOTHING
        for _, change in sorted(self._changes[leaf].items()):
            total += change
            best = max(best, total)
        node = leaf + self._leaves
        self._total[node], self._best[node] = total, best
        while node > 1:
            node //= 2
            left, right = 2 * node, 2 * node + 1
            self._total[node] = self._total[left] + self._total[right]
            self._best[node] = max(self._best[left], self._total[left] + self._best[right])

    def _peak_time(self) -> float:
        node, before = 1, 0
        while node < self._leaves:
            left, right = 2 * node, 2 * node + 1
            if self._best[left] >= self._total[left] + self._best[right]:
                node = left
            else:
                before += self._total[left]
                node = right
        usage, wanted = 0, self._best[node]
        for time_us, change in sorted(self._changes[node - self._leaves].items()):
            usage += change
            if usage == wanted:
                return time_us
        raise AssertionError("A leaf's best is one of its prefix sums.")
