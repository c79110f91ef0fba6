"""The subsets of a set that the bits of an integer represent."""

from collections.abc import Iterator


def subsets(those: int) -> Iterator[int]:
    """All subsets, the set itself first."""
    some = those
    while True:
        yield some
        if not some:
            return
        some = (some - 1) & those
