"""What a boundary move would make of segments, as estimated without making it, is what it makes, unless other segments change."""

import random
from collections.abc import Iterator

import pytest

from tensile_jax.plan.search.moves.boundary_moves import Parts, around, halves, merged, split
from tensile_jax.plan.search.schedule import Schedule
from tests.plan.search.schedules import model_of, odd_step, random_schedule, wander


def schedules(seed: int) -> Iterator[tuple[Schedule, random.Random]]:
    rng = random.Random(seed)
    schedule = random_schedule(model_of(odd_step(seed)), rng)
    yield schedule, rng
    for _, moved in wander(schedule, rng, 6):
        yield moved, rng


def is_as_expected(expected: Parts, new: Schedule, j: int) -> bool:
    """Whether the segments j and j + 1 are as expected. At the ends of the step, more is counted."""
    peaks = tuple(new.peaks[j : j + 2])
    at_an_end = j == 0 or j + 2 == new.count
    as_high = all(p <= q for p, q in zip(expected.peaks, peaks, strict=True)) if at_an_end else peaks == expected.peaks
    return as_high and abs(new.us_of(j, j + 2) - expected.us) < 1e-6


def is_alike_elsewhere(one: Schedule, other: Schedule, *, before: int, behind: int) -> bool:
    """Whether two schedules have the same segments, except in the middle."""
    return all(
        (of_one[:before], of_one[len(of_one) - behind :]) == (of_other[:before], of_other[len(of_other) - behind :])
        for of_one, of_other in ((one.peaks, other.peaks), (one.us, other.us))
    )


@pytest.mark.parametrize("part", range(8))
def test_a_split_gives_the_two_segments_that_were_expected(part: int) -> None:
    as_expected = others = 0
    for seed in range(part, 120, 8):
        for schedule, rng in schedules(seed):
            for j in range(schedule.count):
                inner = range(schedule.cuts[j] + 1, schedule.cuts[j + 1])
                cut = rng.choice(inner) if inner else None
                new = None if cut is None else split(schedule, j, cut)
                if cut is None or new is None:
                    continue
                expected = halves(schedule, j, cut)
                alike = is_alike_elsewhere(schedule, new, before=j, behind=schedule.count - j - 1)
                if expected is not None and alike and is_as_expected(expected, new, j):
                    as_expected += 1
                else:
                    others += 1
    assert as_expected > 8 * others


@pytest.mark.parametrize("part", range(8))
def test_a_moved_boundary_gives_the_two_segments_that_were_expected(part: int) -> None:
    as_expected = others = 0
    for seed in range(part, 120, 8):
        for schedule, rng in schedules(seed):
            for j in range(1, schedule.count):
                low, old, high = schedule.cuts[j - 1 : j + 2]
                possible = [cut for cut in range(low + 1, high) if cut != old]
                if not possible:
                    continue
                cut = rng.choice(possible)
                later = cut > old
                both = split(schedule, j if later else j - 1, cut)
                new = None if both is None else merged(both, j if later else j + 1)
                if new is None:
                    continue
                expected = around(schedule, j, cut)
                alike = is_alike_elsewhere(schedule, new, before=j - 1, behind=schedule.count - j - 1)
                if expected is not None and alike and is_as_expected(expected, new, j - 1):
                    as_expected += 1
                else:
                    others += 1
    assert as_expected > 8 * others
