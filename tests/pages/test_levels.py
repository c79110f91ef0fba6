"""Thinning the levels of a run hides no peak."""

import random

from tensile_jax.pages.levels import reduce_levels
from tensile_jax.runtime_records import Level
from tests.cli.records import RECORD


def planned(level: Level) -> int:
    return level.planned_bytes


def test_few_levels_are_all_kept() -> None:
    assert reduce_levels(RECORD.levels, columns=1000, begin_us=0, end_us=400, height=planned) == RECORD.levels


def test_of_a_column_the_highest_stays_and_the_last_where_it_holds_on() -> None:
    levels = [Level(float(t), 99, {"a": nbytes}) for t, nbytes in ((0, 1), (1, 7), (2, 3), (25, 2), (31, 2), (32, 5))]
    kept = reduce_levels(levels, columns=4, begin_us=0, end_us=40, height=planned)
    assert [(level.time_us, level.planned_bytes) for level in kept] == [(1, 7), (2, 3), (25, 2), (32, 5)]


def test_the_level_at_the_windows_beginning_is_kept() -> None:
    kept = reduce_levels(RECORD.levels, columns=100, begin_us=120, end_us=200, height=planned)
    assert [level.time_us for level in kept] == [100.0, 150.0]


def test_every_columns_maximum_survives_in_100_000_levels() -> None:
    rng = random.Random(1)
    times = sorted(rng.uniform(0, 1e6) for _ in range(100_000))
    levels = [Level(t, 1 << 40, {"a": rng.randrange(1 << 20), "b": rng.randrange(1 << 20)}) for t in times]
    kept = reduce_levels(levels, columns=500, begin_us=0, end_us=1e6, height=planned)
    assert len(kept) <= 1000

    def maxima(some: tuple[Level, ...] | list[Level]) -> list[int]:
        most = [0] * 500
        for level in some:
            column = int(level.time_us / 2000)
            most[column] = max(most[column], level.planned_bytes)
        return most

    assert maxima(kept) == maxima(levels)
