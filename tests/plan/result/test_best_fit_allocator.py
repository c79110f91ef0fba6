"""The allocator on paper, and under random sequences of requests."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensile_jax.plan.result.best_fit_allocator import MOST_WASTE, ROUNDING, BestFit, Chunk, rounded

MIB = 2**20


def taken(allocator: BestFit, nbytes: int) -> Chunk:
    chunk = allocator.allocate(nbytes)
    assert chunk is not None
    return chunk


def after_freeing(size: int, *, grows: bool = False) -> BestFit:
    """An allocator with a free chunk of so many bytes between two that are in use."""
    allocator = BestFit(grows=grows)
    taken(allocator, ROUNDING)
    middle = taken(allocator, size)
    taken(allocator, ROUNDING)
    allocator.free(middle)
    return allocator


def test_a_request_is_rounded_up_to_256_bytes() -> None:
    allocator = BestFit()
    assert [taken(allocator, n) for n in (1, 256, 257)] == [Chunk(0, 256), Chunk(256, 256), Chunk(512, 512)]
    assert allocator.in_use == allocator.peak == 1024


def test_a_free_chunk_of_less_than_twice_the_request_is_handed_out_whole() -> None:
    allocator = after_freeing(2048 - ROUNDING)
    assert taken(allocator, 1024) == Chunk(256, 1792)
    assert allocator.in_use == 2 * 256 + 1792


def test_a_free_chunk_of_twice_the_request_is_split() -> None:
    allocator = after_freeing(2048)
    assert taken(allocator, 1024) == Chunk(256, 1024)
    assert allocator.in_use == 2 * 256 + 1024


@pytest.mark.parametrize("waste", [MOST_WASTE - ROUNDING, MOST_WASTE])
def test_a_free_chunk_that_is_128_mib_larger_is_split(waste: int) -> None:
    request = 400 * MIB
    allocator = after_freeing(request + waste)
    assert taken(allocator, request).nbytes == (request if waste == MOST_WASTE else request + waste)


def test_the_smallest_free_chunk_that_fits_is_taken_and_of_equal_ones_the_first() -> None:
    allocator = BestFit()
    chunks = [taken(allocator, n * 256) for n in (9, 1, 5, 1, 7, 1, 5, 1)]
    for chunk in chunks[::2]:
        allocator.free(chunk)
    assert taken(allocator, 5 * 256) == chunks[2]
    assert taken(allocator, 5 * 256) == chunks[6]
    assert taken(allocator, 5 * 256) == chunks[4]


def test_free_neighbours_merge_on_both_sides() -> None:
    allocator = BestFit()
    first, second, third, _ = (taken(allocator, 256) for _ in range(4))
    allocator.free(first)
    allocator.free(third)
    allocator.free(second)
    assert allocator.free_chunks()[0] == Chunk(0, 768)


def test_the_peak_is_the_most_that_was_in_use_at_once() -> None:
    allocator = BestFit()
    allocator.free(taken(allocator, 1024))
    taken(allocator, 256)
    assert (allocator.in_use, allocator.peak) == (256, 1024)


def test_there_is_no_chunk_where_the_limit_leaves_no_room() -> None:
    allocator = BestFit(limit=1024)
    assert allocator.allocate(1025) is None
    assert allocator.allocate(1024) == Chunk(0, 1024)
    assert allocator.allocate(1) is None


def test_a_growing_allocator_begins_with_2_mib_and_doubles() -> None:
    """A request that the next region cannot hold doubles it until it can; otherwise the region after it is twice as large."""
    allocator = BestFit(grows=True)
    taken(allocator, 256)
    assert [c.nbytes for c in allocator.free_chunks()] == [2 * MIB - 256]
    taken(allocator, 3 * MIB)  # of a region of 4 MiB, which is handed out whole
    assert allocator.in_use == 256 + 4 * MIB
    taken(allocator, 20 * MIB)  # the next would have 8 MiB, and is doubled to 32
    assert allocator.in_use == 256 + 4 * MIB + 32 * MIB


def test_large_equal_requests_waste_memory_if_the_allocator_grows() -> None:
    """Three arrays of 392 MiB: the regions of 512 MiB are 120 MiB larger, and so handed out whole; that of 1 GiB is split."""
    allocator = BestFit(grows=True)
    assert [taken(allocator, 392 * MIB).nbytes // MIB for _ in range(3)] == [512, 512, 392]


def test_regions_do_not_merge() -> None:
    allocator = BestFit(grows=True)
    chunks = [taken(allocator, n * MIB) for n in (2, 4)]
    for chunk in chunks:
        allocator.free(chunk)
    assert [c.nbytes for c in allocator.free_chunks()] == [2 * MIB, 4 * MIB]


def test_a_growing_allocator_takes_no_more_than_the_limit() -> None:
    allocator = BestFit(grows=True, limit=5 * MIB)
    assert allocator.allocate(2 * MIB) is not None
    assert allocator.allocate(4 * MIB) is None
    assert taken(allocator, 3 * MIB).nbytes == 3 * MIB


@pytest.mark.parametrize("nbytes", [0, -1])
def test_a_request_for_nothing_is_refused(nbytes: int) -> None:
    with pytest.raises(ValueError, match="above zero"):
        BestFit().allocate(nbytes)


# a size is a request; a number below zero frees one of the chunks that are in use
REQUESTS = st.lists(st.one_of(st.integers(1, 4096), st.integers(100 * MIB, 600 * MIB), st.integers(-40, -1)), max_size=60)


@given(REQUESTS, st.booleans())
def test_chunks_never_overlap_free_memory_coalesces_and_in_use_is_their_sum(requests: list[int], grows: bool) -> None:
    allocator = BestFit(grows=grows)
    held: list[Chunk] = []
    for request in requests:
        if request > 0:
            chunk = taken(allocator, request)
            assert rounded(request) <= chunk.nbytes < max(2 * rounded(request), 1) and chunk.nbytes - request < MOST_WASTE + 256
            held.append(chunk)
        elif held:
            allocator.free(held.pop(request % len(held)))
        free = allocator.free_chunks()
        everything = sorted((*held, *free))
        assert all(a.begin + a.nbytes <= b.begin for a, b in zip(everything, everything[1:], strict=False))
        assert all(a.begin + a.nbytes < b.begin for a, b in zip(free, free[1:], strict=False))  # else they had merged
        assert allocator.in_use == sum(c.nbytes for c in held) <= allocator.peak
    regions = len({c.begin >> 63 for c in (*held, *allocator.free_chunks())})
    for chunk in held:
        allocator.free(chunk)
    assert allocator.in_use == 0
    assert len(allocator.free_chunks()) == regions
