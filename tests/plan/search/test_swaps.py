"""The lanes of the link: windows on paper, and that none overlap."""

import itertools
import random

import pytest

from tensile_jax.plan.search.swaps import LinkDirection


def test_a_lane_gives_the_earliest_and_the_latest_free_window() -> None:
    lane = LinkDirection()
    lane.take(10.0, 20.0)
    lane.take(30.0, 40.0)
    assert lane.earliest(0.0, 10.0) == 0.0
    assert lane.earliest(5.0, 10.0) == 20.0
    assert lane.earliest(15.0, 11.0) == 40.0
    assert lane.latest(50.0, 10.0) == 40.0
    assert lane.latest(35.0, 10.0) == 20.0
    assert lane.latest(35.0, 11.0) == -1.0


@pytest.mark.parametrize("seed", range(50))
def test_windows_that_a_lane_gives_never_overlap(seed: int) -> None:
    rng = random.Random(seed)
    lane, taken = LinkDirection(), []
    for _ in range(20):
        length, when = rng.randrange(1, 10), float(rng.randrange(0, 100))
        begin = lane.earliest(when, length) if rng.random() < 0.5 else lane.latest(when, length)
        lane.take(begin, begin + length)
        taken.append((begin, begin + length))
    for a, b in itertools.pairwise(sorted(taken)):
        assert a[1] <= b[0]
