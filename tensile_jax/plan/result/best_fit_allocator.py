"""Models XLA's allocator for GPUs: best fit with coalescing of free neighbours (BFC).

A *chunk* is a stretch of device memory that is either handed out or free. The chunks of a region lie side by side, without gaps.

    rounded  = nbytes, rounded up to 256 bytes
    chosen   = the smallest free chunk of at least `rounded` bytes, at the lowest address; if there is none, a new region
    handed   = the whole chosen chunk       if its size < 2 * rounded and its size - rounded < 128 MiB
             = its first `rounded` bytes    otherwise; the rest stays free
    in use   = sum of the sizes of the chunks that are handed out

So a caller may get up to nearly twice what it asked for, but less than 128 MiB more, and all of it counts as in use. A chunk that
is freed merges with its free neighbours in the same region.

Memory comes in regions, which never merge. By default, JAX reserves one region when it starts. Without that reservation, the
allocator takes a new region when it needs one: the first has 2 MiB, and each further one is twice as large, or more if the
request needs more. (XLA also sorts free chunks into bins by size. That makes the search faster, and does not change its result.)

The rules are those of `BFCAllocator` in `xla/tsl/framework/bfc_allocator.cc` of https://github.com/openxla/xla (`Extend`,
`AllocateRawInternal`, `FindTaggedChunkPtr`, `ShouldSplitChunk`, `TryToCoalesce`), with the options that `CreateBFCAllocator` in
`xla/pjrt/gpu/gpu_helpers.cc` gives it. `bytes_in_use` and `peak_bytes_in_use` of `jax.Device.memory_stats()` are `in_use` and
`peak` here.

Sizes and addresses in bytes.
"""

from bisect import bisect_left, insort
from typing import NamedTuple

ROUNDING = 256
MOST_WASTE = 128 * 2**20
FIRST_REGION = 2 * 2**20
_UNLIMITED = 2**62
_BETWEEN_REGIONS = 2**63  # more than any region has, so that no two regions are neighbours


class Chunk(NamedTuple):
    """A stretch of memory that was handed out: its address and its size."""

    begin: int
    nbytes: int


def rounded(nbytes: int) -> int:
    """The size, rounded up to what the allocator divides memory into."""
    return -(-nbytes // ROUNDING) * ROUNDING


class BestFit:
    """An allocator of which nothing is in use yet.

    Args:
        grows: whether regions are taken as they are needed, instead of one at the beginning.
        limit: the most bytes of all regions; None for no limit.

    Attributes:
        in_use: the sizes of all chunks that are handed out.
        peak: the most that was in use at once.
    """

    def __init__(self, *, grows: bool = False, limit: int | None = None) -> None:
        self.in_use = 0
        self.peak = 0
        self._left = (_UNLIMITED if limit is None else limit) // ROUNDING * ROUNDING  # that no region has taken
        self._next_region = FIRST_REGION if grows else self._left
        self._regions = 0
        self._free: list[tuple[int, int]] = []  # (size, address) of the free chunks, ascending
        self._begins: dict[int, int] = {}  # size of the free chunk that begins at an address
        self._ends: dict[int, int] = {}  # size of the free chunk that ends at an address

    def allocate(self, nbytes: int) -> Chunk | None:
        """A chunk of at least so many bytes; None if there is no room for it.

        Raises:
            ValueError: `nbytes` is not above zero.
        """
        if nbytes <= 0:
            raise ValueError(f"nbytes must be above zero: got {nbytes}.")
        wanted = rounded(nbytes)
        place = bisect_left(self._free, (wanted, -1))
        if place == len(self._free):
            if not self._extend(wanted):
                return None
            place = bisect_left(self._free, (wanted, -1))
        size, begin = self._free.pop(place)
        del self._begins[begin], self._ends[begin + size]
        if size >= 2 * wanted or size - wanted >= MOST_WASTE:
            self._insert(begin + wanted, size - wanted)
            size = wanted
        self.in_use += size
        self.peak = max(self.peak, self.in_use)
        return Chunk(begin, size)

    def free(self, chunk: Chunk) -> None:
        """Free a chunk that `allocate` has returned and that was not freed since."""
        begin, size = chunk
        self.in_use -= size
        after = self._begins.get(begin + size)
        if after is not None:
            self._remove(begin + size, after)
            size += after
        before = self._ends.get(begin)
        if before is not None:
            self._remove(begin - before, before)
            begin -= before
            size += before
        self._insert(begin, size)

    def free_chunks(self) -> tuple[Chunk, ...]:
        """The free chunks, by address."""
        return tuple(Chunk(begin, size) for begin, size in sorted(self._begins.items()))

    def _extend(self, wanted: int) -> bool:
        """Whether there is a new region now, of at least so many bytes."""
        if wanted > self._left:
            return False
        doubled = False
        while wanted > self._next_region:
            self._next_region *= 2
            doubled = True
        size = min(self._next_region, self._left)
        if not doubled:
            self._next_region *= 2
        self._left -= size
        self._insert(self._regions * _BETWEEN_REGIONS, size)
        self._regions += 1
        return True

    def _insert(self, begin: int, size: int) -> None:
        insort(self._free, (size, begin))
        self._begins[begin] = size
        self._ends[begin + size] = size

    def _remove(self, begin: int, size: int) -> None:
        del self._free[bisect_left(self._free, (size, begin))]
        del self._begins[begin], self._ends[begin + size]
