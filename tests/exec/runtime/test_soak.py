"""Half a minute of the soak, with a fixed seed."""

import pytest

from benchmarks.soak import soak


@pytest.mark.slow
def test_half_a_minute_of_random_deeds_loses_no_bit_and_no_byte() -> None:
    found = soak(0.5, seed=7)
    assert found["jobs"] == sum(found["ends"].values()) > 0
    assert 0 < found["equal_to_lonely_replay"] <= found["jobs"]
    assert found["most_of_budget"] <= 1
    assert found["launches"] > 0
